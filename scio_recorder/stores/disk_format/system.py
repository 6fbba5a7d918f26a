"""The operating-system calls of the disk format, in one place.

Every call that opens, reads or changes files in a recording goes through these names, so that a
test can make any one of them fail, fall short or never return.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

# The flag RENAME_NOREPLACE of <linux/fs.h>.
_NO_REPLACE = 1
_library = ctypes.CDLL(None, use_errno=True)
# On macOS, fsync leaves data in the memory of the disk.
_full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_renameat2 = getattr(_library, "renameat2", None)
# The flag SYNC_FILE_RANGE_WRITE of <linux/fs.h>.
_BEGIN_ONLY = 2
_sync_file_range = getattr(_library, "sync_file_range", None)

close = os.close
flock = fcntl.flock
fstat = os.fstat
list_names = os.listdir
mkdir = os.mkdir
open_file = os.open
status_of = os.stat
unlink = os.unlink
write = os.pwrite


def fsync(descriptor: int) -> None:
    """Wait until a file is on the disk itself."""
    if _full_sync is not None:
        try:
            fcntl.fcntl(descriptor, _full_sync)
        except OSError as error:
            # Not every file system has it.
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(descriptor)


def begin_sync(descriptor: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin with a part of a file, so that `fsync`, which tells of errors, waits less.

    Systems other than Linux decide by themselves when to begin.
    """
    if _sync_file_range is not None:
        where = ctypes.c_int64(offset), ctypes.c_int64(num_bytes)
        _sync_file_range(descriptor, *where, _BEGIN_ONLY)


def pread_into(descriptor: int, out: memoryview, offset: int) -> int:
    """Fill ``out`` from ``offset`` on; return the number of bytes read, 0 at the end."""
    return os.preadv(descriptor, [out], offset)


def rename_new(old: str, new: str, folder: int) -> None:
    """Rename a file in a folder; `FileExistsError` if there is one of the new name."""
    if _renameat2 is not None:
        if not _renameat2(folder, old.encode(), folder, new.encode(), _NO_REPLACE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
    # The file system can't do that in one step: for a moment the file has both names.
    os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder)
    os.unlink(old, dir_fd=folder)
