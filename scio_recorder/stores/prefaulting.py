"""Taking the page faults of new memory on a thread, before it is written to."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache

# Linux's MADV_POPULATE_WRITE, which takes many page faults at once at a part of their cost.
POPULATE = 23
# The most bytes, and ranges, in one call to the system; a thread can end between two calls.
_MOST_BYTES, _MOST_RANGES = 1 << 26, 1024


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


class Prefaulter:
    """Prepares memory on a thread, ahead of the writes.

    Each return from the system takes the interpreter's lock, for which the computing thread may
    have to wait. So many ranges go in one call. The content of memory does not change, so a range
    that has been reused meanwhile does no harm.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._pool = ThreadPoolExecutor(1, "scio-prefault")
        self._is_over = False

    def ask(self, address: int, num_bytes: int) -> None:
        """Request a range, to be prepared with all others up to the next `begin`."""
        self._ranges.append((address, num_bytes))

    def begin(self) -> None:
        """Begin to prepare the requested ranges."""
        if self._ranges:
            self._pool.submit(self._prepare, self._ranges)
            self._ranges = []

    def close(self) -> None:
        """Stop; ranges that are not ready yet stay so."""
        self._is_over = True
        self._pool.shutdown()

    def _prepare(self, ranges: list[tuple[int, int]]) -> None:
        # A layer requests no more than some MiB.
        largest = max(num_bytes for _, num_bytes in ranges)
        step = max(1, min(_MOST_RANGES, _MOST_BYTES // largest))
        for start in range(0, len(ranges), step):
            # If the system refuses, the writes take the faults.
            with contextlib.suppress(OSError):
                if not self._is_over:
                    _populate(ranges[start : start + step])


def _populate(ranges: list[tuple[int, int]]) -> int:
    """Take the page faults of ranges; return the number of bytes that were done."""
    whole = []
    for address, num_bytes in ranges:
        first = address - address % mmap.PAGESIZE
        whole.append(_Range(first, address + num_bytes - first))
    process = os.pidfd_open(os.getpid())
    try:
        found: int = ctypes.CDLL(None).process_madvise(
            process, (_Range * len(whole))(*whole), ctypes.c_size_t(len(whole)), POPULATE, 0
        )
    finally:
        os.close(process)
    return found


@cache
def can_prefault() -> bool:
    """Whether the system takes page faults of several ranges at once, and has a core to spare.

    Linux does so for a process's own memory from 6.13 on.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) == 1:
        return False
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            return _populate([(address, mmap.PAGESIZE)]) == mmap.PAGESIZE
        except (AttributeError, OSError):
            # The C library or the system has no such call, or a sandbox refuses it.
            return False
