"""The number of threads with which torch computes, and work that several threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

_T = TypeVar("_T")


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


def for_each(work: Callable[[_T], object], items: Sequence[_T], threads: int) -> None:
    """Call ``work`` with each item in this many threads at once; raise the first error.

    Examples
    --------
    >>> found = []
    >>> for_each(found.append, range(4), threads=2)
    >>> sorted(found)
    [0, 1, 2, 3]
    """
    if min(threads, len(items)) < 2:
        for item in items:
            work(item)
        return
    # Each thread takes the next item, so that none waits for a slow one.
    left = iter(items)

    def work_on() -> None:
        try:
            for item in left:
                work(item)
        except BaseException:
            for _ in left:
                # The remaining items would be useless.
                pass
            raise

    others = []
    with ThreadPoolExecutor(min(threads, len(items)) - 1) as pool:
        # If no thread can be started, all of the work is left for this one.
        with suppress(RuntimeError):
            others += [pool.submit(work_on) for _ in range(min(threads, len(items)) - 1)]
        work_on()
    for other in others:
        other.result()
