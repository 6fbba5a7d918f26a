"""Reading a recording, complete or interrupted: lazily, and never wrong data."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from scio_recorder.errors import LayerNotFoundError, RecordingError
from scio_recorder.stores.disk_format.chunks import ChunkFile, FileEntry, memory
from scio_recorder.stores.disk_format.faults import accessing, parsing
from scio_recorder.stores.disk_format.folder import Folder
from scio_recorder.stores.disk_format.ids import SampleIds
from scio_recorder.stores.disk_format.kept import KeptReader
from scio_recorder.stores.disk_format.records import rows_table
from scio_recorder.stores.disk_format.run import scan
from scio_recorder.stores.disk_format.tables import require_little_endian

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from scio_recorder.stores.disk_format.jsons import JSON
    from scio_recorder.stores.disk_format.run import Run, Shard
    from scio_recorder.stores.disk_format.tables import Table, TensorSpec

__all__ = ["FileReport", "RunReader", "load_state"]

# Each open file costs a descriptor, of which a process may have a thousand.
MAX_OPEN_CHUNKS = 128


class FileReport(NamedTuple):
    """What `RunReader.verify` found: ``problem`` is None where a file is as it was written."""

    name: str
    num_bytes: int
    problem: str | None


class _Piece(NamedTuple):
    shard: str
    file: FileEntry
    rows: int


class RunReader:
    """A recording that is open for reading.

    Opening reads the description, the journals and the manifest, and looks for every chunk file;
    data is read when it is asked for. No code of the recording is run, and nothing outside its
    folder is touched.

    Parameters
    ----------
    path
        The folder.
    verify
        Whether to read all data now and check it.
    rank
        Whose part to read, None for all of it.

    Attributes
    ----------
    header : dict
        The settings that the writer stored.
    layers : dict of str to TensorSpec
        Shape and dtype of one sample of each layer.
    sample_ids : SampleIds
        The ids of all samples, in the order in which `read` counts them.
    complete : bool
        Whether every rank that is read has finished.
    kept : KeptReader
        What is kept of each batch, besides samples.

    Raises
    ------
    RecordingError
        If anything does not fit together; the message names the file.

    Examples
    --------
    >>> import tempfile, torch
    >>> from scio_recorder.stores.disk_format import RunWriter, TensorSpec
    >>> folder = tempfile.TemporaryDirectory()
    >>> layers = {"1-3": TensorSpec((2,), torch.float32)}
    >>> with RunWriter.create(folder.name + "/run", layers=layers, header={}) as writer:
    ...     writer.append({"1-3": torch.arange(6.0).view(3, 2)}, range(3))
    ...     writer.finish()
    >>> with RunReader(folder.name + "/run") as reader:
    ...     reader.read("1-3", 1, 3), reader.complete
    (tensor([[2., 3.],
            [4., 5.]]), True)
    >>> folder.cleanup()
    """

    def __init__(
        self, path: str | os.PathLike[str], *, verify: bool = False, rank: int | None = None
    ) -> None:
        require_little_endian()
        self.rank = rank
        self.path = os.fspath(path)
        with accessing(self.path):
            self._root = Folder.open(self.path)
        self._finalizer = weakref.finalize(self, self._root.close)
        self._run: Run = scan(self._root)
        self.header = self._run.description.header
        self.layers: Table = self._run.description.layers
        self.complete = self._run.complete if rank is None else self._run.is_closed(rank)
        self.sample_ids = SampleIds()
        self._pieces: list[_Piece] = []
        self._starts: list[int] = []
        self._index()
        self._chunks: OrderedDict[int, ChunkFile] = OrderedDict()
        self._chunks_lock = Lock()
        if verify:
            for report in self._verified():
                if report.problem is not None:
                    raise RecordingError(report.problem)

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        return len(self.sample_ids)

    @property
    def world_size(self) -> int:
        """How many ranks write this recording."""
        return self._run.description.world_size

    @property
    def complete_ranks(self) -> frozenset[int]:
        """The ranks that have finished."""
        return frozenset(rank for rank in range(self.world_size) if self._run.is_closed(rank))

    def has_begun(self, rank: int) -> bool:
        """Whether a rank has begun to write."""
        return bool(self._run.of_rank(rank))

    def read(self, layer: str, start: int, stop: int) -> Tensor:
        """Return samples ``start`` to ``stop`` of a layer, in memory of their own.

        Raises
        ------
        LayerNotFoundError, IndexError
            If the recording has no such layer or no such samples.
        RecordingError
            If the data is not what was written.
        """
        spec = self._spec(layer)
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"samples {start} to {stop} of {self.num_samples} in {self.path}")
        row_bytes = spec.num_bytes
        data = memory((stop - start) * row_bytes)
        out = data.numpy()
        for number, first, last in self._overlaps(start, stop) if row_bytes else ():
            begin = self._starts[number]
            part = out[(first - start) * row_bytes : (last - start) * row_bytes]
            with accessing(self.path):
                self._chunk(number).copy_into(part, layer, (first - begin) * row_bytes)
        return data.view(spec.dtype).view(stop - start, *spec.shape)

    def read_state(self, rank: int = 0) -> dict[str, Tensor | JSON] | None:
        """Return the state that one rank committed last, or None where it committed none."""
        return load_state(self._root, self._run, rank)

    def verify(self) -> tuple[FileReport, ...]:
        """Read every byte of data and compare it with its checksum.

        The other files have been checked whole at opening.
        """
        return tuple(self._verified())

    def close(self) -> None:
        """Close the files; tensors that were read stay."""
        self._chunks.clear()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RunReader, rank=self.rank), (os.path.abspath(self.path),)

    def _index(self) -> None:
        with parsing(self.path):
            for shard in self._shards:
                for chunk in shard.chunks:
                    if chunk.file is not None and chunk.rows:
                        self._pieces.append(_Piece(shard.name, chunk.file, chunk.rows))
                        self._starts.append(self.num_samples)
                    self.sample_ids.add(chunk.ids)
            self.kept = KeptReader(self._root, self._shards)

    def _spec(self, layer: str) -> TensorSpec:
        if layer not in self.layers:
            known = ", ".join(map(repr, self.layers)) or "none"
            raise LayerNotFoundError(f"{self.path} has no layer {layer!r}; it has {known}")
        return self.layers[layer]

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[number] + self._pieces[number].rows)
            yield number, start, end
            start, number = end, number + 1

    def _chunk(self, number: int) -> ChunkFile:
        with self._chunks_lock:
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = self._open_chunk(number)
            self._chunks.move_to_end(number)
            if len(self._chunks) > MAX_OPEN_CHUNKS:
                self._chunks.popitem(last=False)
            return chunk

    def _open_chunk(self, number: int) -> ChunkFile:
        piece = self._pieces[number]
        with self._root.subfolder(piece.shard) as folder:
            return ChunkFile(folder, piece.file, rows_table(self.layers, piece.rows))

    @property
    def _shards(self) -> Iterable[Shard]:
        return self._run.shards if self.rank is None else self._run.of_rank(self.rank)

    def _verified(self) -> Iterator[FileReport]:
        for shard in self._shards:
            for chunk in shard.chunks:
                if chunk.file is not None:
                    table = rows_table(self.layers, chunk.rows)
                    yield self._report(shard.name, chunk.file, table)
                if chunk.kept is not None:
                    yield self._report(shard.name, chunk.kept.file, chunk.kept.table)
            last = self._run.states.get(shard.rank)
            if last is not None and last[0] is shard and last[1].file is not None:
                yield self._report(shard.name, last[1].file, last[1].table)

    def _report(self, shard: str, file: FileEntry, table: Mapping[str, TensorSpec]) -> FileReport:
        problem = None
        try:
            with accessing(f"{self.path}/{shard}"), self._root.subfolder(shard) as folder:
                ChunkFile(folder, file, table).verify()
        except RecordingError as error:
            problem = str(error)
        return FileReport(f"{shard}/{file.name}", file.num_bytes, problem)


def load_state(root: Folder, run: Run, rank: int) -> dict[str, Tensor | JSON] | None:
    """Return the state that a rank committed last, read and verified."""
    last = run.states.get(rank)
    if last is None:
        return None
    shard, record = last
    state: dict[str, Tensor | JSON] = dict(record.values)
    if record.file is not None:
        with accessing(root.path_of(shard.name)), root.subfolder(shard.name) as folder:
            file = ChunkFile(folder, record.file, record.table)
            state.update({name: file.read(name) for name in record.table})
    return state
