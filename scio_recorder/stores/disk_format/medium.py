"""The medium of a recording, which keeps files under plain names.

Names are those that the format itself makes up, never text out of a file. A missing file is a
`FileNotFoundError` everywhere, and one that is there already a `FileExistsError`.
"""

from __future__ import annotations

import abc
import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from scio_recorder.errors import RecordingError

_T = TypeVar("_T")


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


class OpenFile(Protocol):
    """A file that is read."""

    @property
    def path(self) -> str:
        """Its path, for messages."""

    @property
    def num_bytes(self) -> int:
        """How long it is."""

    @property
    def stamp(self) -> object:
        """What changes when something is written into it."""

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on, or fewer where the file ends."""

    def fill(self, out: memoryview, offset: int) -> None:
        """Read into memory from ``offset`` on."""


class NewFile(Protocol):
    """A file that is being written, and not in place yet."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write the whole of ``data`` at ``offset``; it stays as it is until the file is put."""

    def begin_writing(self, offset: int, count: int) -> None:
        """Hint that what was written there can go its way; it proves nothing."""


class Medium(abc.ABC):
    """Where files are put once, whole and durable, under names that nobody has used.

    Attributes
    ----------
    path : str
        Where it is, for messages.
    """

    path: str
    # Ends all use of it.
    close: Callable[[], object]
    # How many bytes are best read at a time, and how many reads are worth having under way at once.
    span_bytes = 1 << 20
    num_readers = 1
    # Whether `lock` keeps others out.
    has_locks = False

    def path_of(self, name: str) -> str:
        """Return the path of ``name``, for messages."""
        return f"{self.path}/{name}"

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Whether this very process can use it."""

    @abc.abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Return the names that begin so, sorted."""

    @abc.abstractmethod
    def open(self, name: str, stamp: object = None) -> AbstractContextManager[OpenFile]:
        """Open a file for reading.

        Parameters
        ----------
        name : str
            Its name. Where there is none, that can also show at the first read.
        stamp : optional
            Its stamp when it was opened before: a file that has become another one is refused.
        """

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        with accessing(self.path_of(name)):
            try:
                with self.open(name) as file:
                    return file.num_bytes >= 0
            except FileNotFoundError:
                return False

    @abc.abstractmethod
    def put(self, name: str, owner: str, write: Callable[[NewFile], _T]) -> _T:
        """Put a new file in place, whole or not at all, and make that durable.

        Parameters
        ----------
        name : str
            Its name.
        owner : str
            Whose it is, which is in the name that it has until it is whole.
        write : callable
            Writes it.

        Returns
        -------
        Any
            What ``write`` returned.

        Raises
        ------
        FileExistsError
            There is a file of this name.
        """

    @abc.abstractmethod
    def claim(self, name: str, content: bytes) -> None:
        """Put a small file in place, as `put` does, that need not outlive this process.

        Raises
        ------
        FileExistsError
            There is a file of this name.
        """

    def is_abandoned(self, name: str) -> bool:
        """Whether the process of this machine that claimed a name is known to be gone."""
        return False

    def unfinished(self, owner: str) -> list[str]:
        """Return the names of files that this owner began to put, and that are not whole."""
        return []

    @abc.abstractmethod
    def unlink(self, name: str) -> None:
        """Remove a file; where there is none, that may be a `FileNotFoundError`."""

    def lock(self, name: str) -> None:  # noqa: B027 - a medium without locks has nothing to do
        """Keep other writers out for as long as this process uses the medium, where it can.

        Raises
        ------
        RecordingError
            If another writer holds the lock.
        """

    def check_writable(self, rank: int) -> None:  # noqa: B027 - shows by itself in a folder
        """Refuse, before anything runs, a place where the files of a rank can't be put."""

    def sync(self) -> None:  # noqa: B027 - nothing to do where what is visible is durable
        """Make what is found durable: its writer may have been killed before it was."""
