"""Writing a recording that is in memory to a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scio_recorder.recording.recipes import recipes_of
from scio_recorder.stores.calls import CallsToDisk
from scio_recorder.stores.disk import CHUNK_BYTES, header_of
from scio_recorder.stores.disk_format import KeptBatches, RunWriter, TensorSpec
from scio_recorder.stores.disk_format.ids import to_ids
from scio_recorder.stores.nodes import pack

if TYPE_CHECKING:
    from scio_recorder.recording.readable import Readable

__all__ = ["save"]

_SETTINGS = (
    "dtype",
    "every",
    "transforms",
    "postprocessors",
    "to_inputs",
    "sample_ids",
    "mode",
    "autocast",
    "weights",
)


def save(recording: Readable, path: str | os.PathLike[str]) -> None:
    """Write every sample, the reductions' states and the settings."""
    names = {str(recording.architecture[label].label): label for label in recording.stored}
    samples = {name: recording[label] for name, label in names.items()}
    layers = {
        name: TensorSpec(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in samples.items()
    }
    header = header_of(recording.architecture, _settings(recording))
    state = pack(_state(recording))
    with RunWriter.create(path, layers=layers, header=header) as writer:
        sample_bytes = sum(spec.num_bytes for spec in layers.values())
        for rows, kept in _chunks(recording, sample_bytes):
            chunk = {name: tensor[rows.start : rows.stop] for name, tensor in samples.items()}
            is_last = rows.stop == recording.num_samples
            ids = to_ids(recording.sample_ids[rows.start : rows.stop])
            writer.append(chunk, ids, state=state if is_last else None, kept=kept)
        if recording.complete:
            writer.finish()


def _chunks(recording: Readable, sample_bytes: int) -> Iterator[tuple[range, KeptBatches | None]]:
    """Yield the samples of each chunk, and what is kept of their batches, which stay whole."""
    calls, num_samples = recording.calls, recording.num_samples
    if not calls.labels:
        step = max(1, CHUNK_BYTES // max(1, sample_bytes))
        for start in range(0, max(1, num_samples), step):
            yield range(start, min(start + step, num_samples)), None
        return
    kept = CallsToDisk(recording.architecture)
    start = stop = 0
    for number, rows in enumerate(calls.rows):
        kept.add(rows, {label: calls.call(number, label) for label in calls.labels})
        stop += rows
        is_full = (stop - start) * sample_bytes + kept.num_bytes >= CHUNK_BYTES
        if is_full or number == len(calls.rows) - 1:
            yield range(start, stop), kept.take()
            start = stop


def _settings(recording: Readable) -> dict[str, Any]:
    return {
        "layers": [_name(recording, label) for label in recording],
        "reductions": {
            _name(recording, label): recipes_of(given)
            for label, given in recording.reductions.items()
        },
        # Unknown here: whatever is given on resuming differs from it.
        **dict.fromkeys(_SETTINGS),
        **{key: recording.settings[key] for key in _SETTINGS if key in recording.settings},
        "inputs": bool(recording.calls.labels),
    }


def _state(recording: Readable) -> dict[str, Any]:
    states = {
        _name(recording, label): [one.state_dict() for one in given]
        if isinstance(given, list)
        else given.state_dict()
        for label, given in recording.reductions.items()
    }
    errors = recording.relative_errors
    rounding = {_name(recording, label): [error**2, 1.0] for label, error in errors.items()}
    return {"reductions": states, "rounding": rounding}


def _name(recording: Readable, label: Any) -> str:
    return str(recording.architecture[label].label)
