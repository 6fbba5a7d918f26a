"""The operating-system calls of the disk format, in one place.

Everything that touches the file system goes through these names, so that a test can make any single
one of them fail, fall short or never return.
"""

from __future__ import annotations

import ctypes
import fcntl
import os

__all__ = [
    "close",
    "flock",
    "fstat",
    "fsync",
    "ftruncate",
    "list_names",
    "mkdir",
    "open_file",
    "pread",
    "pread_into",
    "rename",
    "stat",
    "unlink",
    "write",
    "write_behind",
]

# The flag SYNC_FILE_RANGE_WRITE of <fcntl.h>.
_BEGIN_WRITING = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)

close = os.close
flock = fcntl.flock
fstat = os.fstat
fsync = os.fsync
ftruncate = os.ftruncate
list_names = os.listdir
mkdir = os.mkdir
open_file = os.open
pread = os.pread
rename = os.rename
stat = os.stat
unlink = os.unlink
write = os.write


def pread_into(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill ``out`` from ``offset`` on; return how many bytes were read, 0 at its end."""
    return os.preadv(descriptor, [out], offset)


def write_behind(descriptor: int, start: int, length: int) -> None:
    """Let the disk begin with what lies in memory, where the system can; it proves nothing.

    A sync that follows has less to wait for, and reports what went wrong meanwhile.
    """
    if _sync_file_range is not None:
        offset, count = ctypes.c_int64(start), ctypes.c_int64(length)
        _sync_file_range(descriptor, offset, count, _BEGIN_WRITING)
