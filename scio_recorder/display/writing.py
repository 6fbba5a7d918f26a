"""Writing a page so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from scio_recorder.errors import RecordingError

__all__ = ["write_page"]


def write_page(path: str | os.PathLike[str], pieces: Iterable[str]) -> Path:
    """Write a text in UTF-8, in place of what the file held.

    Parameters
    ----------
    path : str or path-like
        The file. Its folder must exist.
    pieces : iterable of str
        The text.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    RecordingError
        It can't be written; what was there before is still there.
    """
    target = Path(path)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise RecordingError(f"can't write {target}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        # What mkstemp makes is for its owner alone; a page is like any other file.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError) and not isinstance(error, RecordingError):
            raise RecordingError(f"can't write {target}: {error.strerror}") from error
        raise
    return target


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
