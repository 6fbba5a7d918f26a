"""Beginning a recording, alone or together with others: the first one creates it."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from scio_recorder.errors import RecordingError
from scio_recorder.layer import counted
from scio_recorder.stores.disk_format.description import (
    DESCRIPTION_NAME,
    Description,
    read_description,
)
from scio_recorder.stores.disk_format.jsons import JSON, differences, dump, expect, parse
from scio_recorder.stores.disk_format.medium import Medium, accessing, parsing
from scio_recorder.stores.disk_format.run import Run, scan
from scio_recorder.stores.disk_format.tensor_file import TensorFile, prepared, table_to_json

PARTS_NAME = "parts.safetensors"
# Names that may exist before there is a recording, left by killed writers too.
_REMAINS = re.compile(r"lock-\d{5}|recording\.safetensors\.\d{5}-[0-9a-f]{16}\.tmp", re.ASCII)
_REMAINS_OF_PARTS = re.compile(r"lease-.*|parts\.safetensors(\..*\.tmp)?", re.ASCII)


def agree(medium: Medium, num_parts: int, header: dict[str, JSON]) -> None:
    """Begin a recording in parts before anything has run, or join the processes that have.

    Raises
    ------
    RecordingError
        They have another number of parts or other settings, or there is something else.
    """
    given = parse(dump({"parts": num_parts, "header": header}))
    stored = agreed(medium)
    if stored is None:
        _check_empty(medium, is_in_parts=True)
        with accessing(medium.path), suppress(FileExistsError):
            medium.put(PARTS_NAME, "parts", prepared({}, given))
        stored = agreed(medium)
    if stored is None or stored["parts"] != num_parts:
        found = 0 if stored is None else stored["parts"]
        raise RecordingError(
            f"{medium.path} is a recording in {counted(found, 'part')}, and num_parts is "
            f"{num_parts} here: give the same number, or choose another folder"
        )
    check_settings(medium.path, stored["header"], given["header"])


def agreed(medium: Medium) -> dict[str, Any] | None:
    """Return the settings of a recording in parts, even if only ranks have begun it."""
    if medium.has(PARTS_NAME):
        with parsing(medium.path_of(PARTS_NAME)):
            said = TensorFile(medium, PARTS_NAME).content
            return {"parts": expect(said["parts"], int), "header": expect(said["header"], dict)}
    if medium.has(DESCRIPTION_NAME):
        found = read_description(medium)
        return {"parts": found.world_size, "header": found.header}
    return None


def check_settings(path: str, stored: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse to continue or to join a recording with other settings."""
    there, here = _briefly(stored), _briefly(given)
    if there["architecture"] != here["architecture"]:
        raise RecordingError(
            f"{path} was recorded from another network, whose layers differ: give that network, or "
            "choose another folder"
        )
    # Digests tell nothing to a reader.
    has_other_weights = there.pop("weights", None) != here.pop("weights", None)
    found = differences(there, here)
    if has_other_weights and not found:
        raise RecordingError(
            f"{path} was recorded with other weights: give the network with the weights that it "
            "had, or choose another folder"
        )
    if found:
        way = ""
        if stored.get("world_size") != given.get("world_size"):
            way = "; collect_parts goes on with any number of processes"
        elif stored.get("process") != given.get("process"):
            way = "; for processes that share a dataset, give a DistributedSampler or sample_ids="
        shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        raise RecordingError(
            f"{path} was recorded with other {'weights, and other ' * has_other_weights}settings: "
            f"{shown}. Give the same settings, or choose another folder{way}"
        )


def _briefly(header: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that must agree, with the fingerprint in place of the architecture."""
    architecture = header.get("architecture")
    fingerprint = architecture.get("fingerprint") if isinstance(architecture, dict) else None
    return {**header, "architecture": fingerprint}


def _check_empty(medium: Medium, *, is_in_parts: bool) -> None:
    """Refuse a place that holds anything but the beginning of a recording."""
    with accessing(medium.path):
        others = [name for name in medium.names() if not _REMAINS.fullmatch(name)]
    if is_in_parts:
        others = [name for name in others if not _REMAINS_OF_PARTS.fullmatch(name)]
    if others and DESCRIPTION_NAME not in others:
        raise RecordingError(f"{medium.path} is not empty: it holds {others[0]!r}; choose another")


def begun(folder: Medium, description: Description, rank: int, *, is_in_parts: bool = False) -> Run:
    """Return the recording of this description, created now or by another rank.

    If several create it at once, the first one does, and the others join it.
    """
    if not folder.has(DESCRIPTION_NAME):
        _check_empty(folder, is_in_parts=is_in_parts)
        with suppress(FileExistsError):
            folder.put(DESCRIPTION_NAME, f"{rank:05d}", prepared({}, description.to_json()))
    run = scan(folder, rank)
    if run.description.run != description.run:
        _check_joining(folder.path, run, description, rank)
    return run


def _check_joining(path: str, run: Run, given: Description, rank: int) -> None:
    """Refuse a rank that can't join the recording that another has created."""
    if given.world_size == run.description.world_size == 1:
        raise RecordingError(
            f"{path} already holds a recording; resume it or choose another folder"
        )
    check_settings(path, _settings(run.description), _settings(given))
    if run.chunks[rank] or run.closed:
        raise RecordingError(
            f"{path} already holds samples of rank {rank}: resume it, or choose another folder"
        )


def _settings(description: Description) -> dict[str, Any]:
    """Return what ranks must agree in: the settings, and shapes and dtypes, in any order."""
    return {
        **description.header,
        "world_size": description.world_size,
        "values": dict(table_to_json(description.table)),  # type: ignore[arg-type]  # a table is pairs
    }
