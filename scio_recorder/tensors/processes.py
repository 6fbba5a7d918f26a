"""The rank of this process among several, and the threads with which it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
import torch.distributed

from scio_recorder.errors import RecorderError
from scio_recorder.tensors.arguments import whole


class ProcessRank(NamedTuple):
    """The number of a process, counted from 0, and the number of processes."""

    rank: int
    world_size: int

    @classmethod
    def checked(cls, rank: Any, world_size: Any, error: type[RecorderError]) -> Self:
        """Return the rank that arguments name; raise an error for an impossible one."""
        process = cls(whole("rank", rank, 0, error), whole("world_size", world_size, 1, error))
        if process.rank >= process.world_size:
            raise error(
                f"rank={rank} of world_size={world_size}: ranks are counted from 0 to "
                f"{process.world_size - 1}"
            )
        return process


def this_process() -> ProcessRank:
    """Return the rank of this process, which is the only one if nothing was initialised.

    Examples
    --------
    >>> this_process()
    ProcessRank(rank=0, world_size=1)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ProcessRank(0, 1)
    return ProcessRank(torch.distributed.get_rank(), torch.distributed.get_world_size())


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread inside the block.

    On small tensors, threads spend their time waiting for one another. If other processes want the
    same cores, they wait a hundred times longer than they compute.

    Examples
    --------
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
