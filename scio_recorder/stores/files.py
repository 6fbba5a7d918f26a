"""Recordings in folders and buckets: the disk format, with errors of this package.

The format imports nothing else of this package and has errors of its own. What it raises becomes a
`RecordingError` or `CollectError` here and nowhere else, so other modules take everything that can
fail from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from scio_recorder.errors import CollectError, RecorderError, RecordingError, needing
from scio_recorder.stores.disk_format import description, medium, reader, writer
from scio_recorder.stores.disk_format.medium import ContentError, FormatError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _translated(error: Exception) -> RecorderError:
    """Return the error of this package for one of the format."""
    if isinstance(error, FormatError):
        recording_error = RecordingError(*error.args)
        recording_error.errno = error.errno
        return recording_error
    return CollectError(*error.args)


def translating(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function of the format that raises errors of this package."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (FormatError, ContentError) as error:
            raise _translated(error).with_traceback(error.__traceback__) from error.__cause__
        except ModuleNotFoundError as error:
            with needing("cloud", "a recording in a bucket"):
                raise error from None

    return call


def _with_translated(*names: str) -> Callable[[type[_R]], type[_R]]:
    """Let these methods of a class raise errors of this package."""

    def change(cls: type[_R]) -> type[_R]:
        for name in names:
            method: Any = inspect.getattr_static(cls, name)
            if isinstance(method, classmethod):
                setattr(cls, name, classmethod(translating(method.__func__)))
            else:
                setattr(cls, name, translating(method))
        return cls

    return change


check_empty = translating(description.check_empty)
complete_ranks = translating(description.complete_ranks)
holds_recording = translating(description.holds_recording)
medium_at = translating(description.medium_at)
place_of = translating(description.place_of)
read_description = translating(description.read_description)
scan = translating(reader.scan)


@_with_translated("__init__", "read_into", "read_state")
class RunReader(reader.RunReader):
    """Reads a recording; see the class of the format."""


@_with_translated("create", "resume", "append", "finish", "check_usable")
class RunWriter(writer.RunWriter):
    """Writes a recording; see the class of the format."""


@contextmanager
def accessing(path: str, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise an `OSError` of the block as a `RecordingError` with the same ``errno``."""
    try:
        yield
    except RecordingError:
        raise
    except FormatError as error:
        raise _translated(error) from error.__cause__
    except kinds as error:
        raise _translated(medium.explained(path, error)) from error


# Raises what a damaged or hostile file causes in the block as a `RecordingError`.
parsing = partial(accessing, kinds=medium.DAMAGE)
