"""Beginning a recording: what is refused before anything is written."""

from __future__ import annotations

import re
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.disk_format.jsons import MAX_FILE_BYTES, differences, dump, parse, seal
from scio_recorder.stores.disk_format.run import (
    DESCRIPTION_NAME,
    MAX_RANKS,
    Description,
    Run,
    scan,
)
from scio_recorder.stores.disk_format.tables import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scio_recorder.stores.disk_format.folder import Folder
    from scio_recorder.stores.disk_format.jsons import JSON
    from scio_recorder.stores.disk_format.tables import Table


# What writers that were killed while creating a recording leave, before there is one.
_REMAINS = re.compile(r"lock-\d{5}|recording\.json\.\d{5}-[0-9a-f]{16}\.tmp", re.ASCII)


def temporary_name(name: str, rank: int) -> str:
    """Return the name of a file of a rank's writer that is not whole yet; each time another."""
    return f"{name}.{rank:05d}-{uuid.uuid4().hex[:16]}.tmp"


def describe(layers: Table, header: Mapping[str, JSON], world_size: int) -> Description:
    """Return the description of a new recording; `CollectError` if it can't be written."""
    if not 0 < world_size <= MAX_RANKS:
        raise CollectError(f"world_size is {world_size}; give 1 to {MAX_RANKS}")
    try:
        description = Description(uuid.uuid4().hex, world_size, dict(layers), dict(header))
        data = dump(description.to_json())
        # What other types JSON took for its own now reads as it will be read back.
        described = Description.from_json(parse(data))
    except (TypeError, ValueError, RecursionError) as cause:
        raise CollectError(f"a recording can't be described: {cause}") from cause
    if len(data) > MAX_FILE_BYTES - 100:
        raise CollectError(f"a header of {len(data)} bytes is too long: {MAX_FILE_BYTES} at most")
    return described


def check_rank(path: str, description: Description, rank: int) -> None:
    """Refuse a rank that the recording was not created for."""
    if not 0 <= rank < description.world_size:
        ranks = description.world_size
        raise RecordingError(f"{path} was made for {ranks} ranks; there is no {rank}")


def begin(folder: Folder, description: Description, rank: int) -> Run:
    """Return the recording of this description: created now, or by another rank.

    Of several that create it at once the first one does, and the others join it.
    """
    others = [name for name in folder.names() if not _REMAINS.fullmatch(name)]
    if not others:
        data = seal(description.to_json())
        with suppress(FileExistsError):
            folder.put_bytes(DESCRIPTION_NAME, temporary_name(DESCRIPTION_NAME, rank), data)
    elif not folder.has(DESCRIPTION_NAME):
        raise RecordingError(f"{folder.path} is not empty: it holds {others[0]!r}; take another")
    run = scan(folder, rank)
    if run.description.run != description.run:
        _check_joining(folder.path, run, description, rank)
    return run


def _check_joining(path: str, run: Run, given: Description, rank: int) -> None:
    """Refuse a rank to begin in what another has created."""
    stored, shard = run.description, run.shards[rank]
    if given.world_size == stored.world_size == 1:
        raise RecordingError(f"{path} already holds a recording; resume it or take another")
    if stored.world_size != given.world_size:
        raise RecordingError(
            f"{path} was made for {stored.world_size} processes, not {given.world_size}: give all "
            "of them the same world_size, or take another folder"
        )
    found = differences(_comparable(stored), _comparable(given))
    if found:
        shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        raise RecordingError(
            f"{path} was made with other settings: {shown}; use the same ones or another folder"
        )
    if shard.chunks or shard.is_closed:
        raise RecordingError(
            f"{path} already holds samples of rank {rank}: resume it, or take another folder"
        )


def _comparable(description: Description) -> dict[str, Any]:
    layers = {name: to_json({name: spec})[0] for name, spec in description.layers.items()}
    return {"layers": layers, "header": description.header}
