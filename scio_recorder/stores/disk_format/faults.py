"""Turning whatever goes wrong in a recording into a `RecordingError` that names the file."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scio_recorder.errors import RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
