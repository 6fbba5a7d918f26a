"""Writing a page so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from scio_recorder.errors import RecordingError


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
    name = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Whether there can be a file is known before the work, and nothing lies there during it:
        # a process that is killed leaves no half page.
        name.touch(exist_ok=False)
        name.unlink()
        text = "".join(pieces)
        with open(name, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except RecordingError:
        raise
    except OSError as error:
        raise RecordingError(f"can't write {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
    return target
