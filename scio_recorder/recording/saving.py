"""Writing a recording that is in memory to a folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from scio_recorder.disk import RunWriter, TensorSpec
from scio_recorder.disk.ids import to_ids
from scio_recorder.errors import CollectError
from scio_recorder.recording.recipes import recipes_of
from scio_recorder.stores.disk import CHUNK_BYTES, header_of
from scio_recorder.stores.state import pack

if TYPE_CHECKING:
    from scio_recorder.recording.readable import Readable

__all__ = ["save"]


def save(recording: Readable, path: str | os.PathLike[str]) -> None:
    """Write every sample, the reductions' states and the settings."""
    if recording.inputs:
        raise CollectError(
            "a recording with inputs can't be saved: collect again without inputs=True"
        )
    names = {str(recording.architecture[label].label): label for label in recording.stored}
    samples = {name: recording[label] for name, label in names.items()}
    layers = {
        name: TensorSpec(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in samples.items()
    }
    sample_bytes = sum(spec.num_bytes for spec in layers.values())
    step = max(1, CHUNK_BYTES // max(1, sample_bytes))
    header = header_of(recording.architecture, _settings(recording))
    state = pack(_state(recording))
    with RunWriter.create(path, layers=layers, header=header) as writer:
        for start in range(0, max(1, recording.num_samples), step):
            chunk = {name: tensor[start : start + step] for name, tensor in samples.items()}
            is_last = start + step >= recording.num_samples
            ids = to_ids(recording.sample_ids[start : start + step])
            writer.append(chunk, ids, state=state if is_last else None)
        if recording.complete:
            writer.finish()


def _settings(recording: Readable) -> dict[str, Any]:
    return {
        "layers": [_name(recording, label) for label in recording],
        "reductions": {
            _name(recording, label): recipes_of(given)
            for label, given in recording.reductions.items()
        },
        # Unknown here: whatever is given on resuming differs from it.
        "dtype": recording.settings.get("dtype"),
        "every": recording.settings.get("every"),
        "weights": recording.settings.get("weights"),
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
