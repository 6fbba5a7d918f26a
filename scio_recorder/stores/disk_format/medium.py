"""The medium of a recording, which keeps files under plain names, and what goes wrong with it.

The format itself makes all names, never from text in a file. A missing file is a
`FileNotFoundError` in every medium, and an existing one a `FileExistsError`.
"""

from __future__ import annotations

import abc
import errno
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

_T = TypeVar("_T")
# Writes data at an offset of a file that is not in place yet. The data must not change until then.
WriteAt: TypeAlias = Callable[[int, bytes | memoryview], None]


class FormatError(OSError):
    """A recording that can't be read, written or trusted: the message names the place and why."""


class ContentError(ValueError):
    """Values that the format can't hold."""


# A file may contain any type at any place, so reading it can fail in any of these ways.
DAMAGE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


@contextmanager
def accessing(path: str, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise an `OSError` of the block as a `FormatError` with the same ``errno``."""
    try:
        yield
    except FormatError:
        raise
    except kinds as cause:
        raise explained(path, cause) from cause


# Raises what a damaged or hostile file causes as a `FormatError`; the block only parses it.
parsing = partial(accessing, kinds=DAMAGE)


def explained(path: str, cause: Exception) -> FormatError:
    """Return an error that says what is wrong at a path."""
    if not isinstance(cause, OSError):
        reason = f"unknown or missing {cause}" if isinstance(cause, KeyError) else str(cause)
        return FormatError(f"{path} is damaged: {reason:.200}")
    linked = cause.errno == errno.ELOOP
    reason = "is a link, and links are not followed" if linked else str(cause.strerror or cause)
    if cause.errno == errno.ENOTDIR:
        reason = "is a file, or lies in one: name a folder"
    if cause.errno == errno.EBADF:
        reason = "has been closed; open it again"
    error = FormatError(f"{path}: {reason}")
    error.errno = cause.errno
    return error


class Stamp(NamedTuple):
    """What distinguishes a file from another that takes its place.

    Parameters
    ----------
    num_bytes : int
        Its length.
    version : object
        A value that changes when the file is written to.
    """

    num_bytes: int
    version: object


# Reads a file from an offset on into memory, up to the end of either, and returns its stamp.
ReadAt: TypeAlias = Callable[[int, memoryview], Stamp]


class Medium(abc.ABC):
    """A place where files are put once, whole and durable, under unused names.

    Attributes
    ----------
    path : str
        Its place, for messages.
    """

    path: str
    # The best number of bytes to read at a time, and of reads to run at once.
    span_bytes = 1 << 20
    num_readers = 1

    def path_of(self, name: str) -> str:
        """Return the path of ``name``, for messages."""
        return f"{self.path}/{name}"

    @abc.abstractmethod
    def close(self) -> None:
        """End all use of it."""

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Whether this very process can use it."""

    @abc.abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Return the names with a prefix, sorted."""

    @abc.abstractmethod
    def times(self, prefix: str) -> dict[str, float]:
        """Return when each file with a prefix was put, in seconds by the medium's own clock."""

    @abc.abstractmethod
    def reading(self, name: str, stamp: Stamp | None = None) -> AbstractContextManager[ReadAt]:
        """Give a function that reads a file, piece by piece.

        Parameters
        ----------
        name : str
            Its name.
        stamp : Stamp, optional
            Its stamp at an earlier reading: a file that has changed since is refused.

        Raises
        ------
        FormatError
            It is another one than before, or no regular file.
        """

    @abc.abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""

    @abc.abstractmethod
    def put(self, name: str, owner: str, write: Callable[[WriteAt], _T]) -> _T:
        """Put a new file in place, whole or not at all, and make that durable.

        Parameters
        ----------
        name : str
            Its name.
        owner : str
            Its owner, which is part of its temporary name.
        write : callable
            Writes it, by the function that it is given.

        Returns
        -------
        Any
            The result of ``write``.

        Raises
        ------
        FileExistsError
            There is a file of this name.
        """

    @abc.abstractmethod
    def claim(self, name: str, content: bytes) -> None:
        """Put a small file in place, as `put` does, that need not survive this process.

        Raises
        ------
        FileExistsError
            There is a file of this name.
        """

    def is_abandoned(self, name: str) -> bool:
        """Whether the process that claimed a name was on this machine and is gone."""
        return False

    def unfinished(self, owner: str) -> list[str]:
        """Return the names of unfinished files that this owner began to put."""
        return []

    @abc.abstractmethod
    def unlink(self, name: str) -> None:
        """Remove a file; a missing one may be a `FileNotFoundError`."""

    def lock(self, name: str) -> None:  # noqa: B027 - a medium without locks does nothing
        """Keep other writers out while this process uses the medium, if it can.

        Raises
        ------
        FormatError
            If another writer holds the lock.
        """

    def check_writable(self, rank: int) -> None:  # noqa: B027 - creating a folder shows it
        """Refuse a place where a rank can't put its files, before anything runs."""

    def sync(self) -> None:  # noqa: B027 - does nothing if visible files are durable
        """Make found files durable: their writer may have been killed before they were."""


def for_each(work: Callable[[_T], object], items: Sequence[_T], threads: int) -> None:
    """Call ``work`` with each item in this many threads at once; raise the first error.

    Examples
    --------
    >>> done = []
    >>> for_each(done.append, range(4), threads=2)
    >>> sorted(done)
    [0, 1, 2, 3]
    """
    if min(threads, len(items)) < 2:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        # After an error, work that has not begun is cancelled.
        deque(pool.map(work, items), maxlen=0)
