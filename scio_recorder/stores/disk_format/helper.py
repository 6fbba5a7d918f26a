"""A second thread for the length of a block."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue


@contextmanager
def helped_by(work: Callable[[], None]) -> Iterator[None]:
    """Do ``work`` in a thread beside the block, which ends when both have; raise what it raises.

    Where no thread can be had, it is done behind the block. One of the threading module would be
    waited for until it has begun, which is a tenth of what reading 16 MiB takes.
    """
    done: SimpleQueue[BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)

    if not _is_started(run):
        yield
        work()
        return
    try:
        yield
    finally:
        problem = done.get()
    try:
        if problem is not None:
            raise problem
    finally:
        # A frame that holds what was raised in it would live on, and all that it refers to.
        del problem


def _is_started(run: Callable[[], None]) -> bool:
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        return False
    return True
