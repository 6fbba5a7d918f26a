"""The description of a recording: its place, its files, and the settings that writers agree in."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import sys
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from scio_recorder.stores.disk_format.bucket import Bucket
from scio_recorder.stores.disk_format.medium import FormatError, Medium, parsing
from scio_recorder.stores.disk_format.tensor_file import (
    JSON,
    Table,
    TensorFile,
    TensorInfo,
    entries,
    table_from_json,
    table_to_json,
)

DESCRIPTION_NAME = "recording.safetensors"
FORMAT = "scio-recording"
# The formats of recordings whose rows are samples, and of those with rows of their own.
VERSION, VERSION_WITH_ROWS = 2, 3
MAX_RANKS = 100_000
# Names are searched all at once, one in each line: there may be 100,000, and workers look often.
_MANIFEST_NAMES = re.compile(r"^manifest-(\d{5})\.safetensors$", re.ASCII | re.MULTILINE)
# The name in a chunk of the values that are kept of its batches.
VALUES = "#values"
_SHOWN = 10
# Names that may exist before there is a recording, left by killed writers too.
_REMAINS = re.compile(
    r"lock-\d{5}|lease-.*|recording\.safetensors\.\d{5}-[0-9a-f]{16}\.tmp", re.ASCII
)
_URL = re.compile(r"(s3|gs|az)://", re.ASCII)
# A URL may have lost a slash on its way through a path object.
_PREFIX = re.compile(r"disk:|[a-z][a-z0-9+.-]*:/+", re.ASCII | re.IGNORECASE)


def row_column(name: str) -> str:
    """Return the name in a chunk of a column with one entry for each row."""
    return f"@{name}"


# The column that names the sample of each row.
SAMPLE = row_column("sample")
_FIRST_COLUMN = ("sample", TensorInfo((), torch.int64))


def chunk_name(rank: int, number: int) -> str:
    """Return the name of a commit of a rank."""
    return f"chunk-{rank:05d}-{number:08d}.safetensors"


def state_name(rank: int, token: str) -> str:
    """Return the name of the tensors of a state."""
    return f"state-{rank:05d}-{token}.safetensors"


def manifest_name(rank: int) -> str:
    """Return the name of the file that marks a rank as complete."""
    return f"manifest-{rank:05d}.safetensors"


def complete_ranks(medium: Medium) -> list[int]:
    """Return the complete ranks, by the names of their manifests."""
    return list(map(int, _MANIFEST_NAMES.findall("\n".join(medium.names("manifest-")))))


@dataclass(frozen=True)
class Description:
    """The description of a recording."""

    run: str
    world_size: int
    layers: Table
    header: dict[str, JSON]
    # The columns of facts about rows; None if a row is a sample.
    rows: Table | None = None

    @cached_property
    def table(self) -> Table:
        """Shape and dtype of one row of each layer and column of a chunk, in its order."""
        columns = {row_column(name): spec for name, spec in (self.rows or {}).items()}
        return {**self.layers, **columns}

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "format": FORMAT,
            "version": VERSION if self.rows is None else VERSION_WITH_ROWS,
            "run": self.run,
            "world_size": self.world_size,
            "layers": table_to_json(self.layers),
            "rows": None if self.rows is None else table_to_json(self.rows),
            "header": self.header,
        }

    @classmethod
    def from_json(cls, value: Any) -> Description:
        """Return the description that `to_json` wrote."""
        kinds = {"version": int, "run": str, "world_size": int, "header": dict}
        version, run, world_size, header = entries(value, **kinds)
        # Recordings of versions without rows don't mention them.
        rows = None if value.get("rows") is None else table_from_json(value["rows"])
        if value["format"] != FORMAT or version != (VERSION if rows is None else VERSION_WITH_ROWS):
            raise ValueError(f"not a {FORMAT} of version {VERSION}, or {VERSION_WITH_ROWS} by rows")
        if not 0 < world_size <= MAX_RANKS:
            raise ValueError(f"world_size is {world_size}; it is 1 to {MAX_RANKS}")
        layers = table_from_json(value["layers"])
        if [name for name in layers if name.startswith(("#", "@"))]:
            raise ValueError("a layer's name begins with # or @, as those of other tensors do")
        # If all layers are reduced, rows may only be counted.
        if rows is not None and (rows or layers) and list(rows.items())[:1] != [_FIRST_COLUMN]:
            raise ValueError("the first column of rows is not sample, a number of 64 bits")
        return cls(run, world_size, layers, header, rows)

    def check_rank(self, path: str, rank: int) -> None:
        """Refuse a rank for which the recording was not created."""
        if not 0 <= rank < self.world_size:
            raise FormatError(f"{path} was made for {self.world_size} ranks; there is no {rank}")

    def place(self, rank: int, number: int, samples_before: int) -> dict[str, JSON]:
        """Return the place of a chunk, as its file states it."""
        place = {"rank": rank, "number": number, "samples_before": samples_before}
        return {"run": self.run, **place}

    def state_place(self, rank: int, token: str) -> dict[str, JSON]:
        """Return the place of a state's tensors, as their file states it."""
        return {"run": self.run, "rank": rank, "state": token}


def read_description(medium: Medium) -> Description:
    """Return the description of a recording."""
    try:
        file = TensorFile(medium, DESCRIPTION_NAME)
    except FormatError as error:
        if error.errno != errno.ENOENT:
            raise
        names = sorted(glob.glob(f"*/{DESCRIPTION_NAME}", root_dir=medium.path))
        places = [os.path.join(medium.path, os.path.dirname(name)) for name in names]
        more = f" and {len(places) - _SHOWN:,} more" if len(places) > _SHOWN else ""
        inside = ", ".join(f"open_recording({path!r})" for path in places[:_SHOWN]) + more
        advice = f", but folders in it hold recordings: {inside}" if places else ""
        raise FormatError(
            f"{medium.path} holds no recording: it has no {DESCRIPTION_NAME}"
            f"{advice or '; give the place to which one was written'}"
        ) from None
    with parsing(file.path):
        return Description.from_json(file.content)


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a text names a place in a bucket, not a folder.

    Examples
    --------
    >>> is_url("s3://bucket/run"), is_url("runs/cifar10")
    (True, False)
    """
    return _URL.match(os.fspath(path)) is not None


def place_of(path: str | os.PathLike[str]) -> str:
    """Return the name of a place; a URL of another kind must not become the name of a folder.

    Raises
    ------
    FormatError
        It names neither a folder nor a place in a bucket.

    Examples
    --------
    >>> place_of("runs/one")
    'runs/one'
    """
    place = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    prefix = _PREFIX.match(place)
    if not place or "\0" in place or (prefix is not None and not is_url(place)):
        # The rest of a URL may hold a password.
        shown = f'"{prefix[0]}..."' if prefix else repr(path)
        if place.startswith("disk:"):
            raise FormatError(f'{shown} is for store=: write the place here without "disk:"')
        raise FormatError(
            f'{shown} names no folder and no bucket: write "runs/one" for a folder, or a URL '
            'such as "s3://bucket/run" (also "gs://", "az://")'
        )
    if place.startswith("~"):
        raise FormatError(
            f"{place!r} begins with ~, which shells expand: write os.path.expanduser({place!r})"
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
    FormatError
        There is no such folder, the URL is invalid, or the system has no such folders.
    """
    place = place_of(path)
    if sys.byteorder != "little":
        raise FormatError("recordings can only be used on little-endian machines")
    if is_url(place):
        return Bucket(place)
    try:
        from scio_recorder.stores.disk_format.folder import Folder
    except ImportError as error:
        raise FormatError(
            f"{place}: a recording in a folder needs locks of files, which this system lacks "
            f'({error}): write store="host", reduce=..., or the URL of a bucket'
        ) from None
    return Folder(place, makes_it=makes_it)


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


def for_others(path: str) -> str:
    """Return the name of a place for processes with other working directories.

    Examples
    --------
    >>> for_others("s3://bucket/run")
    's3://bucket/run'
    """
    return path if is_url(path) else os.path.abspath(path)


def check_equal(path: str, stored: dict[str, Any], requested: dict[str, Any]) -> None:
    """Refuse to continue or to join a recording with other settings."""
    if differing := differences(stored, requested):
        raise FormatError(f"{path} was recorded with other settings: {first_of(differing)}")


def first_of(lines: list[str]) -> str:
    """Return the first lines in one, and the number of the others."""
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def differences(stored: Any, requested: Any, path: str = "") -> list[str]:
    """Return the places where two JSON values differ, one line for each."""
    if isinstance(stored, dict) and isinstance(requested, dict):
        lines = []
        for key in stored | requested:
            where = f"{path}.{key}" if path else key
            if key not in stored:
                lines.append(f"{where} is not stored")
            elif key not in requested:
                lines.append(f"{where} is stored and was not given")
            else:
                lines += differences(stored[key], requested[key], where)
        return lines
    if type(stored) is type(requested) and stored == requested:
        return []
    return [f"{path} is {brief(stored)} there and {brief(requested)} here"]


def brief(value: object) -> str:
    """Return a JSON text, or its beginning."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_empty(medium: Medium) -> None:
    """Refuse a place that holds anything but the beginning of a recording."""
    others = [name for name in medium.names() if not _REMAINS.fullmatch(name)]
    if others and DESCRIPTION_NAME not in others:
        raise FormatError(f"{medium.path} is not empty: it holds {others[0]!r}; choose another")
