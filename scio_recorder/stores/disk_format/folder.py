"""Folders held open, in which every file is reached by a plain name and never through a link."""

from __future__ import annotations

import os
import stat as modes
from contextlib import suppress
from typing import TYPE_CHECKING

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import system

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Folder", "close_quietly", "make_folder", "read_at", "write_all"]

# A named pipe would otherwise keep the opening waiting for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """An open folder.

    Names are those that the format itself makes up, never text out of a file, and are resolved
    relative to the descriptor, so that nothing outside the folder can be reached.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def open(cls, path: str) -> Self:
        """Open the folder that a user named; this path alone may lead through links."""
        return cls(path, system.open_file(path, _FOLDER))

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

    def subfolder(self, name: str) -> Folder:
        """Open a folder in this one."""
        descriptor = system.open_file(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor)
        return Folder(self.path_of(name), descriptor)

    def create_subfolder(self, name: str) -> Folder:
        """Create a folder in this one and make its name durable."""
        system.mkdir(name, dir_fd=self.descriptor)
        self.sync()
        return self.subfolder(name)

    def open_regular(self, name: str) -> int:
        """Return a descriptor for reading a regular file."""
        descriptor = system.open_file(name, _READ, dir_fd=self.descriptor)
        try:
            if not modes.S_ISREG(system.fstat(descriptor).st_mode):
                raise RecordingError(f"{self.path_of(name)} is not a regular file")
        except BaseException:
            close_quietly(descriptor)
            raise
        return descriptor

    def create_file(self, name: str, *, append: bool = False) -> int:
        """Return a descriptor for writing a file that must not exist yet."""
        flags = _CREATE | (os.O_APPEND if append else 0)
        return system.open_file(name, flags, 0o666, dir_fd=self.descriptor)

    def size(self, name: str) -> int:
        """Return the length of a regular file in bytes."""
        status = system.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        if not modes.S_ISREG(status.st_mode):
            raise RecordingError(f"{self.path_of(name)} is not a regular file")
        return status.st_size

    def read_small(self, name: str, limit: int) -> bytes:
        """Return a whole file, unless it is longer than ``limit`` bytes."""
        descriptor = self.open_regular(name)
        try:
            size = system.fstat(descriptor).st_size
            if size > limit:
                raise RecordingError(f"{self.path_of(name)} is longer than {limit} bytes")
            return read_at(descriptor, 0, size)
        finally:
            close_quietly(descriptor)

    def replace_file(self, name: str, data: bytes, temporary: str) -> None:
        """Put a small file in place, whole or not at all, and make that durable."""
        if temporary in self.names():
            self.unlink(temporary)
        descriptor = self.create_file(temporary)
        try:
            write_all(descriptor, data)
            system.fsync(descriptor)
        finally:
            close_quietly(descriptor)
        self.rename(temporary, name)
        self.sync()

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in this folder."""
        system.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
        with Folder.open(parent) as folder:
            folder.sync()


def read_at(descriptor: int, offset: int, count: int) -> bytes:
    """Return ``count`` bytes from ``offset`` on, or fewer where the file ends."""
    parts = []
    while count:
        part = system.pread(descriptor, count, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write the whole of ``data``; the system may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[system.write(descriptor, view) :]
