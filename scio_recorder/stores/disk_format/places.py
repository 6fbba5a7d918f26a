"""The medium that a path or a URL names: a folder or a bucket."""

from __future__ import annotations

import os
import re
import sys
from contextlib import closing

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.bucket import Bucket, is_url
from scio_recorder.stores.disk_format.description import DESCRIPTION_NAME
from scio_recorder.stores.disk_format.medium import Medium, accessing

# A URL may have lost a slash on its way through a path object.
_PREFIX = re.compile(r"disk:|[a-z][a-z0-9+.-]*:/+", re.ASCII | re.IGNORECASE)


def place_of(path: str | os.PathLike[str]) -> str:
    """Return the name of a place; a URL of another kind must not become the name of a folder.

    Raises
    ------
    RecordingError
        It names neither a folder nor a place in a bucket.

    Examples
    --------
    >>> place_of("runs/one")
    'runs/one'
    """
    place = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    prefix = _PREFIX.match(place)
    if not place or (prefix is not None and not is_url(place)):
        # The rest of a URL may hold a password.
        given = f'"{prefix[0]}..."' if prefix else repr(path)
        raise RecordingError(
            f'{given} names no folder and no bucket: write "runs/one" for a folder, or a URL '
            'such as "s3://bucket/run" (also "gs://", "az://")'
        )
    return place


def medium_at(path: str | os.PathLike[str], *, makes_it: bool = False) -> Medium:
    """Return the open medium at a place.

    Parameters
    ----------
    path : str or path-like
        A folder, or a URL such as ``"s3://bucket/run"``.
    makes_it : bool, default False
        Whether to create missing folders.

    Raises
    ------
    RecordingError
        There is no such folder, the URL is invalid, or the system has no such folders.
    """
    place = place_of(path)
    if sys.byteorder != "little":
        raise RecordingError("recordings can only be used on little-endian machines")
    if is_url(place):
        return Bucket(place)
    try:
        from scio_recorder.stores.disk_format.folder import Folder, make_folder
    except ImportError as error:
        raise RecordingError(
            f"{place}: a recording in a folder needs locks of files, which this system lacks "
            f'({error}): write store="host", reduce=..., or the URL of a bucket'
        ) from None
    with accessing(place):
        if makes_it:
            make_folder(place)
        return Folder(place)


def holds_recording(path: str | os.PathLike[str]) -> bool:
    """Whether there is something at this place to open or to resume.

    Examples
    --------
    >>> holds_recording("/nonexistent")
    False
    """
    if not is_url(path):
        return os.path.lexists(os.path.join(path, DESCRIPTION_NAME))
    with closing(medium_at(path)) as medium:
        return medium.has(DESCRIPTION_NAME)


def check_writable(path: str, rank: int) -> None:
    """Refuse a bucket that is not writable; creating a folder shows whether it is."""
    if is_url(path):
        with closing(medium_at(path)) as medium:
            medium.check_writable(rank)


def for_others(path: str) -> str:
    """Return the name of a place for processes with other working directories.

    Examples
    --------
    >>> for_others("s3://bucket/run")
    's3://bucket/run'
    """
    return path if is_url(path) else os.path.abspath(path)
