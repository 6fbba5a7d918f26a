"""The place of this process among several, according to ``torch.distributed``."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch.distributed

from scio_recorder.errors import RecorderError
from scio_recorder.tensors.arguments import whole


class Place(NamedTuple):
    """The number of a process, counted from 0, and the number of processes."""

    rank: int
    world_size: int

    @classmethod
    def checked(cls, rank: Any, world_size: Any, error: type[RecorderError]) -> Self:
        """Return the place that arguments name; raise an error for an impossible one."""
        place = cls(whole("rank", rank, 0, error), whole("world_size", world_size, 1, error))
        if place.rank >= place.world_size:
            raise error(
                f"rank={rank} of world_size={world_size}: ranks are counted from 0 to "
                f"{place.world_size - 1}"
            )
        return place


def this_process() -> Place:
    """Return the place of this process, which is the only one if nothing was initialised.

    Examples
    --------
    >>> this_process()
    Place(rank=0, world_size=1)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Place(0, 1)
    return Place(torch.distributed.get_rank(), torch.distributed.get_world_size())
