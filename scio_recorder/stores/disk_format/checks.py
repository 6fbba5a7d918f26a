"""What a writer refuses, before it writes anything."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.disk_format.chunks import spec_of
from scio_recorder.stores.disk_format.jsons import MAX_FILE_BYTES, differences, dump, parse, seal
from scio_recorder.stores.disk_format.records import MAX_RANKS, Description
from scio_recorder.stores.disk_format.run import DESCRIPTION_NAME
from scio_recorder.stores.disk_format.tables import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scio_recorder.stores.disk_format.folder import Folder
    from scio_recorder.stores.disk_format.jsons import JSON
    from scio_recorder.stores.disk_format.run import Run
    from scio_recorder.stores.disk_format.tables import Table

__all__ = [
    "check_dense",
    "check_joining",
    "check_open",
    "check_rank",
    "check_same",
    "check_tensors",
    "describe",
    "refuse_contents",
    "sealed",
    "split_state",
]

# What a writer that was killed while creating a recording leaves, before there is one.
_REMAINS = re.compile(r"lock-(\d{5}|create)|recording\.json\.\d{5}\.tmp", re.ASCII)


def describe(layers: Table, header: Mapping[str, JSON], world_size: int) -> Description:
    """Return the description of a new recording; `CollectError` if it can't be written."""
    if not 0 < world_size <= MAX_RANKS:
        raise CollectError(f"world_size is {world_size}; give 1 to {MAX_RANKS}")
    try:
        description = Description(uuid.uuid4().hex, world_size, dict(layers), dict(header))
        # What other types JSON took for its own now reads as it will be read back.
        return Description.from_json(parse(dump(description.to_json())))
    except (TypeError, ValueError, RecursionError) as cause:
        raise CollectError(f"a recording can't be described: {cause}") from cause


def sealed(description: Description) -> bytes:
    """Return the content of ``recording.json``."""
    data = seal(description.to_json())
    if len(data) > MAX_FILE_BYTES:
        raise CollectError(f"a header of {len(data)} bytes is too long: {MAX_FILE_BYTES} at most")
    return data


def refuse_contents(root: Folder) -> None:
    """Refuse a folder that a recording can't begin in."""
    names = root.names()
    if DESCRIPTION_NAME in names:
        raise RecordingError(f"{root.path} already holds a recording; resume it or take another")
    others = [name for name in names if not _REMAINS.fullmatch(name)]
    if others:
        raise RecordingError(f"{root.path} is not empty: it holds {others[0]!r}; take another")


def check_same(path: str, stored: Description, given: Description) -> None:
    """Refuse to continue with other layers or settings, naming the first that differ."""
    found = differences(_comparable(stored), _comparable(given))
    if found:
        shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        raise RecordingError(
            f"{path} was made with other settings: {shown}; use the same ones or another folder"
        )


def _comparable(description: Description) -> dict[str, Any]:
    return {"layers": to_json(description.layers), "header": description.header}


def check_joining(path: str, run: Run, given: Description, rank: int) -> None:
    """Refuse a rank to begin in what another rank has created."""
    stored = run.description
    if stored.world_size != given.world_size:
        raise RecordingError(
            f"{path} was made for {stored.world_size} processes, not {given.world_size}: give all "
            "of them the same world_size, or take another folder"
        )
    check_same(path, stored, given)
    if run.of_rank(rank):
        raise RecordingError(
            f"{path} already holds samples of rank {rank}: resume it, or take another folder"
        )


def check_rank(path: str, stored: Description, rank: int) -> None:
    """Refuse a rank that the recording was not created for."""
    if not 0 <= rank < stored.world_size:
        raise RecordingError(f"{path} was made for {stored.world_size} ranks; there is no {rank}")


def check_open(path: str, run: Run, rank: int) -> None:
    """Refuse to continue what is complete."""
    if run.is_closed(rank):
        raise RecordingError(f"{path} is complete" + (f" for rank {rank}" if rank else ""))


def check_tensors(layers: Table, tensors: Mapping[str, Tensor], rows: int) -> None:
    """Raise `ValueError` unless there is a fitting tensor for each layer."""
    if tensors.keys() != layers.keys():
        odd = sorted(tensors.keys() ^ layers.keys())
        raise ValueError(f"the layers are not those of the recording: {', '.join(odd)}")
    for name, tensor in tensors.items():
        expected, found = layers[name].of(rows), spec_of(tensor)
        if found != expected:
            raise ValueError(
                f"layer {name} is {found.dtype} {list(found.shape)}, not {expected.dtype} "
                f"{list(expected.shape)} ({rows} sample ids were given)"
            )
        check_dense(name, tensor)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` for a tensor that is not simply numbers in memory."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise ValueError(f"{name} has no plain memory to write; make it an ordinary tensor")


def split_state(
    state: Mapping[str, Tensor | JSON],
) -> tuple[dict[str, JSON], dict[str, Tensor]]:
    """Return the values and the tensors of a state apart; `ValueError` for what can't be kept."""
    values: dict[str, JSON] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            values[name] = value
    dump(values)
    to_json({name: spec_of(tensor) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    return values, tensors
