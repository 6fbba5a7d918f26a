"""What is kept of whole batches, besides samples: JSON values, and tensors that these refer to."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

import torch

from scio_recorder.stores.disk_format.checks import check_dense
from scio_recorder.stores.disk_format.chunks import ChunkFile, FileEntry, spec_of
from scio_recorder.stores.disk_format.faults import accessing, parsing
from scio_recorder.stores.disk_format.jsons import JSON, MAX_FILE_BYTES, dump, expect, parse
from scio_recorder.stores.disk_format.records import KeptRecord, batch_name
from scio_recorder.stores.disk_format.tables import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from scio_recorder.stores.disk_format.folder import Folder
    from scio_recorder.stores.disk_format.run import Shard

__all__ = ["KeptBatches", "KeptReader", "kept_record", "kept_tensors"]


class KeptBatches(NamedTuple):
    """What is kept of the batches of one chunk.

    Parameters
    ----------
    rows : sequence of int
        How many samples each batch has.
    values : sequence of JSON
        One for each batch.
    tensors : sequence of Tensor
        Those that the values refer to, by position.
    """

    rows: Sequence[int]
    values: Sequence[JSON]
    tensors: Sequence[Tensor]


def kept_tensors(kept: KeptBatches, rows: int) -> dict[str, Tensor]:
    """Return what the file of a chunk of so many samples holds; `ValueError` if it can't."""
    if len(kept.values) != len(kept.rows) or sum(kept.rows) != rows:
        raise ValueError(f"batches of {list(kept.rows)} samples are kept with {rows} samples")
    tensors = {str(number): tensor for number, tensor in enumerate(kept.tensors)}
    to_json({name: spec_of(tensor) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    for number, value in enumerate(kept.values):
        text = dump(value)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"what is kept of a batch takes {len(text)} bytes besides tensors")
        # Read at once as it will be read: what is nested too deeply is refused.
        parse(text)
        tensors[batch_name(number)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def kept_record(kept: KeptBatches, tensors: dict[str, Tensor], file: FileEntry) -> KeptRecord:
    """Return the record of a file that holds what `kept_tensors` returned."""
    table = {name: spec_of(tensor) for name, tensor in tensors.items()}
    return KeptRecord(tuple(kept.rows), table, file)


class _Place(NamedTuple):
    shard: str
    record: KeptRecord


class KeptReader:
    """Reads what is kept of each batch of a recording, one at a time.

    Parameters
    ----------
    root : Folder
        The recording's folder.
    shards : iterable of Shard
        Its shards, in order.

    Raises
    ------
    ValueError
        If something is kept of some samples only.
    """

    def __init__(self, root: Folder, shards: Iterable[Shard]) -> None:
        self._root = root
        self._places: list[_Place] = []
        # The number of batches before each place.
        self._starts: list[int] = []
        self.rows: list[int] = []
        num_samples = 0
        for shard in shards:
            for chunk in shard.chunks:
                num_samples += chunk.rows
                if chunk.kept is not None:
                    self._starts.append(len(self.rows))
                    self._places.append(_Place(shard.name, chunk.kept))
                    self.rows += chunk.kept.batches
        if self._places and sum(self.rows) != num_samples:
            raise ValueError("something is kept of some batches and not of others")
        self._open: tuple[int, ChunkFile] | None = None
        # Of one batch many layers are read.
        self._last: tuple[int, JSON] | None = None

    @property
    def num_bytes(self) -> int:
        """How long all files are together."""
        return sum(place.record.file.num_bytes for place in self._places)

    def read(self, number: int) -> tuple[JSON, Callable[[int], Tensor]]:
        """Return the value of a batch, not to be changed, and what reads tensors it refers to.

        Raises
        ------
        IndexError
            There is no such batch.
        RecordingError
            The file is damaged.
        """
        number = range(len(self.rows))[number]
        at = bisect_right(self._starts, number) - 1
        place, file = self._places[at], self._file(at)
        path = f"{self._root.path}/{place.shard}/{place.record.file.name}"

        def tensor(position: int) -> Tensor:
            with parsing(path):
                return file.read(str(expect(position, int)))

        last = self._last
        if last is None or last[0] != number:
            with parsing(path):
                text = file.read(batch_name(number - self._starts[at]))
                last = self._last = number, parse(text.numpy().tobytes())
        return last[1], tensor

    def _file(self, at: int) -> ChunkFile:
        # Other threads may replace it meanwhile.
        found = self._open
        if found is None or found[0] != at:
            shard, record = self._places[at]
            with accessing(f"{self._root.path}/{shard}"), self._root.subfolder(shard) as folder:
                found = self._open = at, ChunkFile(folder, record.file, record.table)
        return found[1]
