"""Folders held open, in which every file is reached by a plain name and never through a link.

NOTE [One atomic act]

A file is put in place once, whole and durable, under a name that nobody has used: `Folder.put`. It
is never appended to, and nothing is renamed over it. Of two who put a file of one name one fails.
That is all that the format asks of the medium, besides listing names, reading, and removing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TypeVar

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import system

_T = TypeVar("_T")

# A named pipe would otherwise keep the opening waiting for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def accessing(path: str) -> Iterator[None]:
    """Raise an `OSError` of the block as a `RecordingError` with the same ``errno``."""
    try:
        yield
    except RecordingError:
        raise
    except OSError as cause:
        linked = cause.errno == errno.ELOOP
        reason = "is a link, and links are not followed" if linked else cause.strerror or cause
        error = RecordingError(f"{path}: {reason}")
        error.errno = cause.errno
        raise error from cause


@contextmanager
def parsing(path: str) -> Iterator[None]:
    """Raise what a damaged or hostile file provokes in the block as a `RecordingError`."""
    try:
        with accessing(path):
            yield
    # The contents of a file may have any type in any place, so that reading them can fail in any
    # of these ways; nothing but the parsing of one file stands inside such a block.
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as cause:
        reason = f"unknown or missing {cause}" if isinstance(cause, KeyError) else str(cause)
        raise RecordingError(f"{path} is damaged: {reason:.200}") from cause


class File:
    """A regular file that is open for reading.

    Parameters
    ----------
    path : str
        Its path, for messages.
    descriptor : int
        What it is read through. Whoever gives it closes it.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        status = system.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RecordingError(f"{path} is not a regular file")
        self.num_bytes = status.st_size
        # What is written into a file changes one or the other.
        self.stamp = status.st_size, status.st_mtime_ns

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on, or fewer where the file ends."""
        out = bytearray(max(0, min(count, self.num_bytes - offset)))
        self.fill(memoryview(out), offset)
        return bytes(out)

    def fill(self, out: memoryview, offset: int) -> None:
        """Read into memory from ``offset`` on."""
        while out:
            done = system.pread_into(self._descriptor, out, offset)
            if not done:
                raise RecordingError(f"{self.path} is damaged: it ends at byte {offset}")
            out, offset = out[done:], offset + done


class Folder:
    """An open folder. It is closed by `close`, or when nobody refers to it any more.

    Names are those that the format itself makes up, never text out of a file, and are resolved
    relative to the descriptor, so that nothing outside the folder can be reached.
    """

    def __init__(self, path: str) -> None:
        if sys.byteorder != "little":
            raise RecordingError("recordings on disk can only be used on little-endian machines")
        # This path alone may lead through links: the user has named it.
        self.path = path
        # The folder, and the file that is locked.
        self._descriptors = [system.open_file(path, _FOLDER)]
        self.close = weakref.finalize(self, _close_all, self._descriptors)

    @property
    def descriptor(self) -> int:
        """The descriptor to resolve names against."""
        if not self._descriptors:
            raise RecordingError(f"{self.path} has been closed; open it again")
        return self._descriptors[0]

    def lock(self, name: str) -> None:
        """Keep other writers out for as long as this process has the folder open.

        Raises
        ------
        RecordingError
            If another writer holds the lock.
        """
        _LOCKED.add(self)
        self._descriptors.append(system.open_file(name, _LOCK, 0o666, dir_fd=self.descriptor))
        try:
            system.flock(self._descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            message = f"{self.path} is being written by another writer, which holds {name}"
            raise RecordingError(message) from cause

    def path_of(self, name: str) -> str:
        """Return the path of ``name``, for messages."""
        return f"{self.path}/{name}"

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(system.list_names(self.descriptor))

    @contextmanager
    def open(self, name: str) -> Iterator[File]:
        """Open a regular file for reading."""
        descriptor = system.open_file(name, _READ, dir_fd=self.descriptor)
        try:
            yield File(self.path_of(name), descriptor)
        finally:
            close_quietly(descriptor)

    def put(self, name: str, owner: str, write: Callable[[int], _T]) -> _T:
        """Put a new file in place, whole or not at all, and make that durable; see the NOTE.

        Parameters
        ----------
        name : str
            Its name.
        owner : str
            Whose it is, which is in the name that it has until it is whole.
        write : callable
            Writes to a descriptor.

        Returns
        -------
        Any
            What ``write`` returned.

        Raises
        ------
        FileExistsError
            There is a file of this name.
        """
        temporary = f"{name}.{owner}-{uuid.uuid4().hex[:16]}.tmp"
        try:
            descriptor = system.open_file(temporary, _CREATE, 0o666, dir_fd=self.descriptor)
            try:
                written = write(descriptor)
                # Linux reports a failed sync once and then takes the lost pages for written, so
                # that it is never tried again with this file.
                system.fsync(descriptor)
            finally:
                close_quietly(descriptor)
            system.rename_new(temporary, name, self.descriptor)
        except BaseException as error:
            with suppress(OSError):
                self.unlink(temporary)
            if isinstance(error, FileExistsError):
                problem = "is there already: another writer has committed it; resume the recording"
                raise FileExistsError(error.errno, f"{name} {problem}") from None
            raise
        self.sync()
        return written

    def unlink(self, name: str) -> None:
        """Remove a file."""
        system.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        system.fsync(self.descriptor)


# Folders that are written.
_LOCKED: weakref.WeakSet[Folder] = weakref.WeakSet()


def _close_inherited() -> None:
    # A forked data loader worker would keep the lock alive after its parent was killed, and
    # nothing could be resumed until the worker noticed.
    for folder in list(_LOCKED):
        folder.close()


os.register_at_fork(after_in_child=_close_inherited)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        close_quietly(descriptors.pop())


def close_quietly(descriptor: int) -> None:
    """Close a file of which nothing is waiting to be written, so that a failure means nothing."""
    with suppress(OSError):
        system.close(descriptor)


def make_folder(path: str) -> None:
    """Create a folder and those above it that are missing, and make their names durable."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(path):
        make_folder(parent)
        with suppress(FileExistsError):
            # Unless another process just has.
            system.mkdir(path)
    if parent != path:
        with closing(Folder(parent)) as folder:
            folder.sync()


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Write the whole of ``data`` at ``offset``; the system may take less at a time."""
    view = memoryview(data)
    while view:
        done = system.write(descriptor, view, offset)
        view, offset = view[done:], offset + done
