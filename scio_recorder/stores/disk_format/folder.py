"""Folders held open, in which every file is reached by a plain name and never through a link.

NOTE [One atomic act]

A file is put in place once, whole and durable, under a name that nobody has used: `Folder.put`. It
is never appended to, and nothing is renamed over it. Of two who put a file of one name one fails.
That is all that the format asks of the medium, besides listing names, reading, and removing.
"""

from __future__ import annotations

import os
import stat as modes
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import system

if TYPE_CHECKING:
    from typing import Self


# A named pipe would otherwise keep the opening waiting for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class _SyncFailedError(OSError):
    """A file whose sync failed: what of it has reached the disk can't be known."""


class File:
    """A file that is open for reading, until it is closed or nobody refers to it any more."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.close = weakref.finalize(self, close_quietly, descriptor)
        try:
            status = system.fstat(descriptor)
            if not modes.S_ISREG(status.st_mode):
                raise RecordingError(f"{path} is not a regular file")
        except BaseException:
            # What is raised refers to this.
            self.close()
            raise
        self.num_bytes = status.st_size

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
    """An open folder.

    Names are those that the format itself makes up, never text out of a file, and are resolved
    relative to the descriptor, so that nothing outside the folder can be reached.
    """

    def __init__(self, path: str) -> None:
        # This path alone may lead through links: the user has named it.
        self.path = path
        self._descriptor: int | None = system.open_file(path, _FOLDER)

    @property
    def descriptor(self) -> int:
        """The descriptor to resolve names against."""
        if self._descriptor is None:
            raise RecordingError(f"{self.path} has been closed; open it again")
        return self._descriptor

    def path_of(self, name: str) -> str:
        """Return the path of ``name``, for messages."""
        return f"{self.path}/{name}"

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(system.list_names(self.descriptor))

    def has(self, name: str) -> bool:
        """Whether there is something of this name."""
        try:
            system.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> File:
        """Open a regular file for reading."""
        return File(self.path_of(name), system.open_file(name, _READ, dir_fd=self.descriptor))

    def read_small(self, name: str, limit: int) -> bytes:
        """Return a whole file; `ValueError` if it is longer than ``limit`` bytes."""
        with closing(self.open(name)) as file:
            if file.num_bytes > limit:
                raise ValueError(f"longer than {limit} bytes")
            return file.read(0, file.num_bytes)

    def put(self, name: str, temporary: str, write: Callable[[int], bytes]) -> bytes:
        """Put a new file in place, whole or not at all, and make that durable; see the NOTE.

        Parameters
        ----------
        name : str
            Its name.
        temporary : str
            The name that it has until it is whole, which must be unique.
        write : callable
            Writes to a descriptor, and returns the bytes at the beginning by which files of this
            name differ.

        Returns
        -------
        bytes
            What ``write`` returned.

        Raises
        ------
        FileExistsError
            There is another file of this name. The same file is taken for what an interrupted call
            has put there.
        """
        try:
            try:
                head = self._write(temporary, write)
            except _SyncFailedError:
                # Linux reports a failed sync once and then takes the lost pages for written, so
                # that syncing again would succeed and prove nothing. A new file is written in full.
                self.unlink(temporary)
                head = self._write(temporary, write)
            try:
                system.rename_new(temporary, name, self.descriptor)
            except FileExistsError:
                with closing(self.open(name)) as file:
                    if file.read(0, len(head)) != head:
                        raise
                self.unlink(temporary)
        except BaseException:
            with suppress(OSError):
                self.unlink(temporary)
            raise
        self.sync()
        return head

    def put_bytes(self, name: str, temporary: str, data: bytes) -> None:
        """Put a small file in place, as `put` does."""

        def write(descriptor: int) -> bytes:
            write_at(descriptor, 0, data)
            return data

        self.put(name, temporary, write)

    def unlink(self, name: str) -> None:
        """Remove a file."""
        system.unlink(name, dir_fd=self.descriptor)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        system.fsync(self.descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            close_quietly(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _write(self, temporary: str, write: Callable[[int], bytes]) -> bytes:
        descriptor = system.open_file(temporary, _CREATE, 0o666, dir_fd=self.descriptor)
        try:
            head = write(descriptor)
            try:
                system.fsync(descriptor)
            except OSError as cause:
                raise _SyncFailedError(cause.errno, cause.strerror) from cause
            return head
        finally:
            close_quietly(descriptor)


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
        with Folder(parent) as folder:
            folder.sync()


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Write the whole of ``data`` at ``offset``; the system may take less at a time."""
    view = memoryview(data)
    while view:
        done = system.write(descriptor, view, offset)
        view, offset = view[done:], offset + done
