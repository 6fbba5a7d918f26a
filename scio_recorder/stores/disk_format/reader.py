"""Reading a recording, complete or interrupted: lazily, and never wrong data."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from scio_recorder.errors import LayerNotFoundError, RecordingError
from scio_recorder.stores.disk_format.faults import accessing, parsing
from scio_recorder.stores.disk_format.folder import Folder
from scio_recorder.stores.disk_format.kept import KeptReader
from scio_recorder.stores.disk_format.run import Chunk, Packed, read_state, scan, state_name
from scio_recorder.stores.disk_format.tables import require_little_endian
from scio_recorder.stores.disk_format.tensor_file import TensorFile, memory

if TYPE_CHECKING:
    from typing import Self

    from scio_recorder.layer import TensorSpec
    from scio_recorder.stores.disk_format.tables import Table


# Each open file costs a descriptor, of which a process may have a thousand.
MAX_OPEN_CHUNKS = 128


class FileReport(NamedTuple):
    """What `RunReader.verify` found: ``problem`` is None where a file is as it was written."""

    name: str
    num_bytes: int
    problem: str | None


class RunReader:
    """A recording that is open for reading.

    Opening reads the description, the manifests and the header of every chunk; data is read when it
    is asked for. No code of the recording is run, and nothing outside its folder is touched.

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
            self._folder = Folder(self.path)
        self._finalizer = weakref.finalize(self, self._folder.close)
        self._files = _OpenFiles(self._folder)
        self._run = scan(self._folder, rank)
        self.header = self._run.description.header
        self.layers: Table = self._run.description.layers
        self.complete = self._run.is_complete
        shards = self._run.shards.values()
        chunks = [chunk for shard in shards for chunk in shard.chunks]
        with parsing(self.path):
            self.sample_ids = self._run.sample_ids()
            self.kept = KeptReader(chunks, self._files.file)
        self._chunks = [chunk for chunk in chunks if len(chunk.ids)]
        # The number of samples before each chunk.
        self._starts = list(accumulate((len(chunk.ids) for chunk in self._chunks), initial=0))
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
    def is_begun(self) -> bool:
        """Whether anything has been committed."""
        return any(shard.chunks or shard.is_closed for shard in self._run.shards.values())

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
        row_bytes = spec.nbytes
        data = memory((stop - start) * row_bytes)
        out = data.numpy()
        for number, first, last in self._overlaps(start, stop) if row_bytes else ():
            begin = self._starts[number]
            part = out[(first - start) * row_bytes : (last - start) * row_bytes]
            file = self._files.file(self._chunks[number])
            file.copy_into(part, layer, (first - begin) * row_bytes)
        return data.view(spec.dtype).view(stop - start, *spec.shape)

    def read_state(self, rank: int = 0) -> Packed | None:
        """Return the state that one rank committed last, or None where it committed none."""
        return read_state(self._folder, self._run, rank)

    def verify(self) -> tuple[FileReport, ...]:
        """Read every byte of data and compare it with its checksum.

        The other files have been checked whole at opening.
        """
        return tuple(self._verified())

    def close(self) -> None:
        """Close the files; tensors that were read stay."""
        self._files.close()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RunReader, rank=self.rank), (os.path.abspath(self.path),)

    def _spec(self, layer: str) -> TensorSpec:
        if layer not in self.layers:
            known = ", ".join(map(repr, self.layers)) or "none"
            raise LayerNotFoundError(f"{self.path} has no layer {layer!r}; it has {known}")
        return self.layers[layer]

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[number + 1])
            yield number, start, end
            start, number = end, number + 1

    def _verified(self) -> Iterator[FileReport]:
        for rank, shard in self._run.shards.items():
            for chunk in shard.chunks:
                yield _report(chunk.name, partial(self._files.opened, chunk))
            if shard.state_file is not None:
                name = state_name(rank, shard.state_file)
                yield _report(name, partial(TensorFile, self._folder, name))


def _report(name: str, opened: Callable[[], TensorFile]) -> FileReport:
    try:
        file = opened()
        file.verify()
    except RecordingError as error:
        return FileReport(name, 0, str(error))
    return FileReport(name, file.num_bytes, None)


class _OpenFiles:
    """The files of chunks that were used last, and what is known of their blocks."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: OrderedDict[str, TensorFile] = OrderedDict()
        self._lock = Lock()

    def file(self, chunk: Chunk) -> TensorFile:
        """Return the file of a chunk."""
        with self._lock:
            file = self._files.get(chunk.name)
            if file is None:
                file = self._files[chunk.name] = self.opened(chunk)
            self._files.move_to_end(chunk.name)
            if len(self._files) > MAX_OPEN_CHUNKS:
                self._files.popitem(last=False)
            return file

    def opened(self, chunk: Chunk) -> TensorFile:
        """Open the file of a chunk anew."""
        file = TensorFile(self._folder, chunk.name)
        if file.checksum != chunk.checksum:
            raise RecordingError(f"{file.path} has become another one since it was opened")
        return file

    def close(self) -> None:
        """Let go of all files."""
        self._files.clear()
