"""Which of how many processes this is, as ``torch.distributed`` has been told."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed


class Place(NamedTuple):
    """The number of a process among so many, counted from 0."""

    rank: int
    world_size: int


def this_process() -> Place:
    """Return the place of this process, the only one where nothing has been initialised.

    Examples
    --------
    >>> this_process()
    Place(rank=0, world_size=1)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return Place(0, 1)
    return Place(torch.distributed.get_rank(), torch.distributed.get_world_size())
