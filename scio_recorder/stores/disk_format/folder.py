"""Folders held open, in which every file is reached by a plain name and not through a link.

The one exception are links to the files of the Hugging Face Hub's cache, which are read.

NOTE [One atomic act]

A file is put in place once, whole and durable, under an unused name: `Folder.put`. It is never
appended to, and nothing is renamed over it. If two writers put a file of one name, one of them
fails. The format needs nothing else of the medium but listing names, reading, and removing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import stat
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from scio_recorder.stores.disk_format.medium import (
    FormatError,
    Medium,
    ReadAt,
    Stamp,
    WriteAt,
    accessing,
)

_T = TypeVar("_T")

# A named pipe would otherwise keep the opening waiting for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Names relative to it are refused, as the descriptor of a closed file would be.
_CLOSED = -1
# What a link in the cache of the Hugging Face Hub leads to: the file, named by its hash.
_BLOB = re.compile(r"\.\./\.\./blobs/[0-9a-f]{40,64}")

# The flag RENAME_NOREPLACE of <linux/fs.h>.
_NO_REPLACE = 1
_library = ctypes.CDLL(None, use_errno=True)
# On macOS, fsync leaves data in the memory of the disk.
_full_sync: int | None = getattr(fcntl, "F_FULLFSYNC", None)
_renameat2 = getattr(_library, "renameat2", None)
# The flag SYNC_FILE_RANGE_WRITE of <linux/fs.h>.
_BEGIN_ONLY = 2
_sync_file_range = getattr(_library, "sync_file_range", None)

# All that opens, reads or changes files goes through these names and the functions behind them, so
# that a test can make any one of them fail, fall short or never return.
close = os.close
flock = fcntl.flock
fstat = os.fstat
list_names = os.listdir
mkdir = os.mkdir
open_file = os.open
read_into = os.preadv
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


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Write the whole of ``data`` at ``offset``, while the disk takes what was written before."""
    view = memoryview(data)
    while view:
        # The system may take less at a time.
        done = write(descriptor, view, offset)
        begin_sync(descriptor, offset, done)
        view, offset = view[done:], offset + done


def read_at(descriptor: int, path: str, stamp: Stamp, offset: int, out: memoryview) -> Stamp:
    """Fill ``out`` from ``offset`` on, up to the end of the file."""
    out = out[: max(0, stamp.num_bytes - offset)]
    while out:
        done = read_into(descriptor, [out], offset)
        if not done:
            raise FormatError(f"{path} is damaged: it ends at byte {offset}")
        out, offset = out[done:], offset + done
    return stamp


class Folder(Medium):
    """An open folder. It is closed by `close`, or when the last reference is gone.

    Names are resolved relative to the descriptor, so that nothing outside the folder can be
    reached, but for what the cache of the Hugging Face Hub keeps beside it.
    """

    # What has just been read is still in the processor's cache when its checksum is compared.
    span_bytes = 4 << 20

    def __init__(self, path: str, *, makes_it: bool = False) -> None:
        # Only this path may lead through links: the user has named it.
        self.path = path
        with accessing(path):
            if makes_it:
                make_folder(path)
            elif not os.path.lexists(path):
                advice = 'give the folder that collect(store="disk:PATH") or save(PATH) wrote'
                raise FileNotFoundError(errno.ENOENT, f"No such file or directory: {advice}")
            self.descriptor = open_file(path, _FOLDER)
        # The folder, and the locked files by name.
        self._descriptors = {"": self.descriptor}
        self._closing = weakref.finalize(self, _close_all, self._descriptors)

    def close(self) -> None:
        """Close the folder, and the locked files."""
        self._closing()
        self.descriptor = _CLOSED

    @property
    def is_open(self) -> bool:
        """Whether this very process can use it; a forked one can't."""
        return self._closing.alive

    def lock(self, name: str) -> None:
        """Keep other writers out while this process has the folder open.

        Raises
        ------
        FormatError
            If another writer holds the lock.
        """
        _LOCKED.add(self)
        descriptor = open_file(name, _LOCK, 0o666, dir_fd=self.descriptor)
        self._descriptors[name] = descriptor
        try:
            flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            message = f"{self.path} is being written by another writer, which holds {name}"
            raise FormatError(message) from cause

    def names(self, prefix: str = "") -> list[str]:
        """Return the names in the folder with a prefix, sorted."""
        names = list_names(self.descriptor)
        return sorted(name for name in names if name.startswith(prefix))

    def times(self, prefix: str) -> dict[str, float]:
        """Return when each file with a prefix was put, by the clock of the file system."""
        times = {}
        for name in self.names(prefix):
            with suppress(FileNotFoundError):
                times[name] = float(self._status(name).st_mtime)
        return times

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        with accessing(self.path_of(name)), suppress(FileNotFoundError):
            return bool(self._status(name))
        return False

    def _status(self, name: str) -> os.stat_result:
        return status_of(name, dir_fd=self.descriptor, follow_symlinks=False)

    @contextmanager
    def reading(self, name: str, stamp: Stamp | None = None) -> Iterator[ReadAt]:
        """Give a function that reads a regular file, which is open meanwhile."""
        descriptor = self._open_to_read(name)
        try:
            status = fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{self.path_of(name)} is not a regular file")
            # Writing into a file changes one or the other.
            current = Stamp(status.st_size, status.st_mtime_ns)
            if stamp not in (None, current):
                raise FormatError(f"{self.path_of(name)} was replaced since it was opened")
            yield partial(read_at, descriptor, self.path_of(name), current)
        finally:
            close_quietly(descriptor)

    def _open_to_read(self, name: str) -> int:
        try:
            return open_file(name, _READ, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            target = os.readlink(name, dir_fd=self.descriptor)
            if _BLOB.fullmatch(target) is None:
                raise
        return open_file(target, _READ, dir_fd=self.descriptor)

    def put(self, name: str, owner: str, write: Callable[[WriteAt], _T]) -> _T:
        """Put a new file in place, whole or not at all, and make that durable; see the NOTE."""
        with self._put_in_place(name, owner) as descriptor:
            try:
                written = write(partial(write_at, descriptor))
                # Linux reports a failed sync once and then treats the lost pages as written, so
                # this file is never synced again.
                fsync(descriptor)
            finally:
                close_quietly(descriptor)
        self.sync()
        return written

    def claim(self, name: str, content: bytes) -> None:
        """Put a small file in place, and hold a lock on it, which shows others that we live."""
        descriptor = -1
        try:
            with self._put_in_place(name, "claim") as descriptor:
                # On a file system without locks, others rely on renewals.
                with suppress(OSError):
                    flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_at(descriptor, 0, content)
        except BaseException:
            close_quietly(descriptor)
            raise
        _LOCKED.add(self)
        self._descriptors[name] = descriptor

    def is_abandoned(self, name: str) -> bool:
        """Whether nobody on this machine holds the lock on a claim."""
        try:
            descriptor = open_file(name, _READ, dir_fd=self.descriptor)
        except OSError:
            return False
        try:
            flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            close_quietly(descriptor)
        return True

    @contextmanager
    def _put_in_place(self, name: str, owner: str) -> Iterator[int]:
        """Create a file for the block to write, and give it its name after the block."""
        temporary = f"{name}.{owner}-{uuid.uuid4().hex[:16]}.tmp"
        try:
            yield open_file(temporary, _CREATE, 0o666, dir_fd=self.descriptor)
            rename_new(temporary, name, self.descriptor)
        except BaseException as error:
            with suppress(OSError):
                unlink(temporary, dir_fd=self.descriptor)
            if isinstance(error, FileExistsError):
                problem = "is there already: another writer has committed it; continue after it"
                raise FileExistsError(error.errno, f"{name} {problem}") from None
            raise

    def unfinished(self, owner: str) -> list[str]:
        """Return the files of an owner that were begun and have no final name yet."""
        written = re.compile(rf".+\.{re.escape(owner)}-[0-9a-f]{{16}}\.tmp", re.ASCII)
        return list(filter(written.fullmatch, self.names()))

    def unlink(self, name: str) -> None:
        """Remove a file, and the lock on it."""
        unlink(name, dir_fd=self.descriptor)
        descriptor = self._descriptors.pop(name, None)
        if descriptor is not None:
            close_quietly(descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        fsync(self.descriptor)


# Folders that are being written.
_LOCKED: weakref.WeakSet[Folder] = weakref.WeakSet()


def _close_inherited() -> None:
    # Otherwise a forked data loader worker would keep the lock after its parent was killed, and
    # nothing could be resumed until the worker noticed.
    for folder in list(_LOCKED):
        folder.close()


os.register_at_fork(after_in_child=_close_inherited)


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        close_quietly(descriptors.popitem()[1])


def close_quietly(descriptor: int) -> None:
    """Close a file without pending data, so that a failure means nothing."""
    with suppress(OSError):
        close(descriptor)


def make_folder(path: str) -> None:
    """Create a folder and missing ones above it, and make their names durable."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(path):
        make_folder(parent)
        with suppress(FileExistsError):
            # Another process may just have created it.
            mkdir(path)
    if parent != path:
        descriptor = open_file(parent, _FOLDER)
        try:
            fsync(descriptor)
        finally:
            close_quietly(descriptor)
