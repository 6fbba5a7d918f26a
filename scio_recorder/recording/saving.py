"""Writing a recording that is in memory to a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from scio_recorder.layer import TensorSpec, text_of
from scio_recorder.recording.recipes import recipes_of, states_of
from scio_recorder.stores import Disk, Job
from scio_recorder.stores.disk import CHUNK_BYTES
from scio_recorder.stores.disk_format.ids import to_ids

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.recording.readable import Readable
    from scio_recorder.stores.calls import KeptCall


def save(recording: Readable, path: str | os.PathLike[str]) -> None:
    """Write every sample, the reductions' states and the settings, as if they came just now."""
    samples = {label: recording[label] for label in recording.stored}
    job = Job(recording.architecture, tuple(samples), None, lambda: _settings(recording))
    writer = Disk(path).open(job)
    try:
        columns = {
            label: writer.column(label, TensorSpec(tuple(whole.shape[1:]), whole.dtype), whole[:0])
            for label, whole in samples.items()
        }
        sample_bytes = sum(column.spec.nbytes for column in columns.values())
        for rows, calls in _batches(recording, max(1, CHUNK_BYTES // max(1, sample_bytes))):
            for label, column in columns.items():
                column.put(samples[label][rows.start : rows.stop], writer.start, len(rows))
            is_last = rows.stop == recording.num_samples
            # States may be large, and only the last one counts.
            state = partial(_state, recording) if is_last else dict
            kept = {
                text_of(label): writer.calls.keep(recording.architecture[label], call)
                for label, call in calls.items()
            }
            writer.commit(to_ids(recording.sample_ids[rows.start : rows.stop]), state, kept)
        writer.finish(partial(_state, recording), is_complete=recording.complete)
    except BaseException:
        writer.abandon(None)
        raise


def _batches(recording: Readable, step: int) -> Iterator[tuple[range, Mapping[DepthIdx, KeptCall]]]:
    """Yield the rows of each batch, and the calls that are kept of it."""
    calls, num_samples, stop = recording.calls, recording.num_samples, 0
    if not calls.labels:
        for start in range(0, num_samples, step):
            yield range(start, min(start + step, num_samples)), {}
    for number, rows in enumerate(calls.rows):
        stop += rows
        yield range(stop - rows, stop), {label: calls.call(number, label) for label in calls.labels}


def _settings(recording: Readable) -> dict[str, Any]:
    # Those of weights, and of what was made by hand, are unknown: resuming finds that they differ.
    return {
        **recording.settings,
        "layers": [text_of(label) for label in recording],
        "reductions": {
            text_of(label): recipes_of(given) for label, given in recording.reductions.items()
        },
        "inputs": bool(recording.calls.labels),
    }


def _state(recording: Readable) -> dict[str, Any]:
    errors = recording.relative_errors
    rounding = {text_of(label): [error**2, 1.0] for label, error in errors.items()}
    return {"reductions": states_of(recording.reductions), "rounding": rounding}
