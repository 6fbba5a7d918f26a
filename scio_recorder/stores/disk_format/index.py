"""Putting the parts of a recording together, once all of them are complete."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

from scio_recorder.errors import CollectError
from scio_recorder.stores.disk_format.description import INDEX_NAME
from scio_recorder.stores.disk_format.jsons import JSON, dump
from scio_recorder.stores.disk_format.medium import Medium, WriteAt, accessing
from scio_recorder.stores.disk_format.run import MANIFESTS, Run, scan
from scio_recorder.stores.disk_format.tensor_file import prepared


def put_together(medium: Medium, before_commit: Callable[[], object]) -> None:
    """Put an index of all parts in place, with which opening reads a single file.

    Parameters
    ----------
    medium : Medium
        Where the recording is.
    before_commit : callable
        Called before the index is put; raises if another process may be about to put it.

    Raises
    ------
    CollectError
        Two samples have the same id.
    RecordingError
        A part is damaged.
    """
    run = scan(medium, looks_into_chunks=False)
    repeated = run.sample_ids().repeated()
    if repeated is not None:
        parts = [
            rank
            for rank, chunks in run.chunks.items()
            if any(repeated in chunk.ids for chunk in chunks)
        ]
        raise CollectError(
            f"{medium.path}: two samples have the id {repeated!r}, in part {parts[0]} and part "
            f"{parts[-1]}: each needs an id of its own. The data on disk stays and can be read; "
            "collect again into another folder, with other sample_ids or with parts that have no "
            "sample twice"
        )
    before_commit()
    with accessing(medium.path), suppress(FileExistsError):
        medium.put(INDEX_NAME, "index", _written(run))


def _written(run: Run) -> Callable[[WriteAt], str]:
    manifests: list[JSON] = [
        {**run.manifest(rank), "commits": [chunk.said for chunk in chunks]}
        for rank, chunks in run.chunks.items()
    ]
    text = torch.frombuffer(bytearray(dump(manifests)), dtype=torch.uint8)
    return prepared({MANIFESTS: text}, {"run": run.description.run})
