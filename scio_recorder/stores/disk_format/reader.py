"""Reading a recording, complete or interrupted: its commits as they are found, ids, and rows.

Ids of samples are kept compactly. Rows are read lazily, and verified.
"""

from __future__ import annotations

import abc
import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import accumulate, chain
from operator import attrgetter
from operator import index as as_integer
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, overload

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.stores.disk_format.description import (
    SAMPLE,
    VALUES,
    Description,
    chunk_name,
    for_others,
    manifest_name,
    medium_at,
    read_description,
    state_name,
)
from scio_recorder.stores.disk_format.medium import (
    FormatError,
    Medium,
    accessing,
    for_each,
    parsing,
)
from scio_recorder.stores.disk_format.tensor_file import (
    BLOCK_BYTES,
    JSON,
    MAX_SIZE,
    Table,
    TensorFile,
    TensorInfo,
    checksum,
    empty_bytes,
    entries,
    expect,
    parse,
)

_CHUNK_NAME = re.compile(r"chunk-(\d{5})-(\d{8})\.safetensors", re.ASCII)
_TOKEN = re.compile(r"[0-9a-f]{16}", re.ASCII)
T = TypeVar("T")
Ids: TypeAlias = "range | array[int] | tuple[str, ...]"


class OnDemand(Sequence[T]):
    """Entries that are found by their numbers, each when it is asked for."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self._read(number) for number in numbers]
        return self._read(numbers)

    @abc.abstractmethod
    def _read(self, number: int) -> T:
        """Return the entry of a valid number."""


class SampleIds(OnDemand[int | str]):
    """The ids of many chunks as one sequence; consecutive numbers take no memory.

    Examples
    --------
    >>> ids = SampleIds()
    >>> ids.add(range(1000))
    >>> ids.add(to_ids([7, 5]))
    >>> ids[-2:], len(ids), list(ids)[999]
    ([7, 5], 1002, 999)
    >>> ids
    SampleIds([0, 1, 2, 3, 4, 5, ...], 1002 in all)
    """

    def __init__(self) -> None:
        self._parts: list[Ids] = []
        self._ends = [0]

    def add(self, part: Ids) -> None:
        """Append the ids of one chunk; `ValueError` if `check` refuses them.

        Parameters
        ----------
        part : range, array.array or tuple
            The ids.
        """
        self.check(part)
        self._append(part)

    @classmethod
    def joined(cls, writers: Iterable[Iterable[Ids]]) -> Self:
        """Return the ids of several writers; those of each are of one type, or `ValueError`."""
        whole = cls()
        for parts in writers:
            ids_of_writer = cls()
            for part in parts:
                ids_of_writer.add(part)
            for part in ids_of_writer._parts:
                whole._append(part)
        return whole

    def check(self, part: Ids) -> None:
        """Raise `ValueError` for ids of another type than the earlier ones, or for too many.

        Parameters
        ----------
        part : range, array.array or tuple
            The ids that are about to follow.
        """
        kinds = {isinstance(ids, tuple) for ids in (*self._parts[:1], part) if len(ids)}
        if len(kinds) > 1:
            raise ValueError("integers and strings are mixed as sample ids")
        if len(self) + len(part) > MAX_SIZE:
            raise ValueError(f"more than {MAX_SIZE} samples")

    def _append(self, part: Ids) -> None:
        if len(part):
            self._parts.append(part)
            self._ends.append(self._ends[-1] + len(part))

    def __len__(self) -> int:
        return self._ends[-1]

    def _read(self, number: int) -> int | str:
        part = bisect_right(self._ends, number) - 1
        return self._parts[part][number - self._ends[part]]

    def __iter__(self) -> Iterator[int | str]:
        return chain.from_iterable(self._parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # ids can still be added

    def __repr__(self) -> str:
        few = ", ".join(map(repr, self[:6]))
        return f"SampleIds([{few}{', ...' if len(self) > 6 else ''}], {len(self)} in all)"

    def repeated(self) -> int | str | None:
        """Return an id that occurs twice; None if there is none.

        Examples
        --------
        >>> ids = SampleIds()
        >>> ids.add(range(10, 20))
        >>> ids.add(to_ids([3, 7, 30]))
        >>> ids.repeated()
        >>> ids.add(range(7, 9))
        >>> ids.repeated()
        7
        """
        seen: set[str] = set()
        for name in chain.from_iterable(part for part in self._parts if isinstance(part, tuple)):
            if name in seen:
                return name
            seen.add(name)
        ranges = [(part[0], part[-1]) for part in self._parts if isinstance(part, range)]
        others = [numpy.array(part) for part in self._parts if isinstance(part, array)]
        first = numpy.concatenate([numpy.array([low for low, _ in ranges], numpy.int64), *others])
        last = numpy.concatenate([numpy.array([high for _, high in ranges], numpy.int64), *others])
        order = first.argsort()
        first, last = first[order], last[order]
        again = numpy.flatnonzero(last[:-1] >= first[1:])
        return int(first[again[0] + 1]) if len(again) else None

    def tolist(self) -> list[int | str]:
        """Return the ids as a list."""
        return list(self)


def to_ids(ids: Sequence[Any]) -> Ids:
    """Return ids in their compact form.

    Parameters
    ----------
    ids : sequence
        Integers or strings.

    Raises
    ------
    ValueError
        If they are neither all integers of 64 bits nor all strings.
    """
    if isinstance(ids, range) and ids.step == 1:
        return ids
    if not len(ids):
        return range(0)
    if all(isinstance(value, str) for value in ids):
        return tuple(ids)
    try:
        numbers = array("q", [as_integer(value) for value in ids])
    except (TypeError, OverflowError):
        raise ValueError("sample ids must be integers of 64 bits, or strings") from None
    consecutive = range(numbers[0], numbers[0] + len(numbers))
    return consecutive if numbers.tolist() == list(consecutive) else numbers


def ids_to_json(ids: Ids) -> JSON:
    """Return ids as JSON, consecutive numbers as their range."""
    if isinstance(ids, range):
        return {"start": ids.start, "count": len(ids)}
    return list(ids)


def ids_from_json(value: Any) -> Ids:
    """Return the ids from the result of `ids_to_json`; `ValueError` for anything else."""
    if isinstance(value, dict):
        start, count = entries(value, start=int, count=int)
        if not (0 <= count <= MAX_SIZE and -(1 << 63) <= start <= (1 << 63) - count):
            raise ValueError("sample ids out of bounds")
        return range(start, start + count)
    kinds = {type(entry) for entry in expect(value, list)}
    if kinds <= {str}:
        return tuple(value)
    if kinds != {int}:
        raise ValueError("sample ids that are neither all integers nor all strings")
    return array("q", value)


@dataclass(eq=False)
class Chunk:
    """A commit. Its facts are in its file, and once its rank is complete also in the manifest.

    Parameters
    ----------
    medium : Medium
        The place of its file.
    description : Description
        The description of the recording.
    rank, number, samples_before : int
        Its rank, its number, and the number of samples in earlier ones.
    stated : tuple, optional
        The checksum of its file, and its facts, as its writer or a manifest states them. Then the
        file is opened only when data is read.

    Attributes
    ----------
    path : str
        The path of its file, for messages.
    ids : range, array.array or tuple
        The ids of its samples.
    num_rows : int
        The number of rows of each layer: that of its samples, unless rows are counted apart.
    batches : list of int or None
        The number of samples of each batch, if something is kept for batches; otherwise None.
    state : dict or None
        The committed state, and the name of the file with its tensors.
    checksum : str
        The checksum of its file's header, and so of everything.
    """

    medium: Medium
    description: Description
    rank: int
    number: int
    samples_before: int
    stated: InitVar[tuple[str, Mapping[str, JSON]] | None] = None

    def __post_init__(self, stated: tuple[str, Mapping[str, JSON]] | None) -> None:
        self.name = chunk_name(self.rank, self.number)
        self.path = self.medium.path_of(self.name)
        self._file: TensorFile | None = None
        with parsing(self.path):
            if stated is None:
                self._file = self._opened()
                stated = self._file.checksum, self._file.content
            self.checksum, said = stated
            self._read(said)
            if self._file is not None:
                self._check_table(self._file)

    @property
    def said(self) -> dict[str, JSON]:
        """Its facts about its samples, as in its file and the manifest."""
        rows = None if self.description.rows is None else self.num_rows
        ids = ids_to_json(self.ids)
        return {"ids": ids, "rows": rows, "batches": self.batches, "state": self.state}

    @property
    def file(self) -> TensorFile:
        """Its file, which is opened now, and compared with the manifest, if it was not yet."""
        if self._file is None:
            with parsing(self.path):
                file = self._opened()
                if file.checksum != self.checksum:
                    raise ValueError("it is not the commit that the manifest lists")
                self._check_table(file)
            self._file = file
        return self._file

    def reopen(self, medium: Medium) -> None:
        """Open its file anew when data is read: each block is verified again then."""
        self.medium, self._file = medium, None

    def _opened(self) -> TensorFile:
        file = TensorFile(self.medium, self.name)
        place = self.description.place(self.rank, self.number, self.samples_before)
        if {key: file.content[key] for key in place} != place:
            raise ValueError("it does not belong here, or samples before it are lost")
        return file

    def _read(self, said: Mapping[str, Any]) -> None:
        self.ids = ids_from_json(said["ids"])
        # Recordings of versions without rows don't mention them.
        rows = said.get("rows")
        if (rows is None) != (self.description.rows is None):
            raise ValueError("its rows are not counted as the recording's are")
        self.num_rows = len(self.ids) if rows is None else expect(rows, int)
        if not 0 <= self.num_rows <= MAX_SIZE:
            raise ValueError(f"{self.num_rows} rows")
        self.batches = said["batches"]
        if self.batches is not None:
            counts = [expect(count, int) for count in expect(self.batches, list)]
            if sum(counts) != len(self.ids) or min(counts, default=0) < 0:
                raise ValueError(f"batches of {len(self.ids)} samples that do not add up")
        self.state = said["state"]
        if self.state is not None:
            token = expect(self.state, dict)["file"]
            if "value" not in self.state or not (token is None or _TOKEN.fullmatch(token)):
                raise ValueError("its state is missing")

    def _check_table(self, file: TensorFile) -> None:
        rows = [(name, spec.of(self.num_rows)) for name, spec in self.description.table.items()]
        if list(file.table.items())[: len(rows)] != rows:
            raise ValueError("its tensors are not those of the recording's layers")
        names, wanted = list(file.table)[len(rows) :], list[str]()
        if self.batches is not None:
            wanted = [*(f"#{number}" for number in range(len(names) - 1)), VALUES]
        if names != wanted or (names and file.table[VALUES].dtype != torch.uint8):
            raise ValueError("a part of what is kept of batches is missing")
        # Ids take more memory as JSON than in the chunk itself.
        file.content = {}


class Extent(NamedTuple):
    """What a reader has found: the numbers of commits by rank, complete ranks, and a digest."""

    counts: Mapping[int, int]
    closed: set[int]
    fingerprint: str


@dataclass
class Run:
    """A recording at its place: its description, and the ranks that were read."""

    medium: Medium
    description: Description
    # The ranks' commits, in order, and the complete ranks.
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    def add(self, rank: int, stated: tuple[str, Mapping[str, JSON]] | None = None) -> None:
        """Add the next commit of a rank; what is not stated is read from its file, see `Chunk`."""
        chunks = self.chunks[rank]
        before = chunks[-1].samples_before + len(chunks[-1].ids) if chunks else 0
        chunks.append(Chunk(self.medium, self.description, rank, len(chunks), before, stated))

    def shorten(self, extent: Extent) -> None:
        """Leave out what a reader has not found."""
        for rank, chunks in self.chunks.items():
            del chunks[extent.counts.get(rank, 0) :]
        self.closed = extent.closed

    @property
    def is_complete(self) -> bool:
        """Whether every rank that was read has finished."""
        return self.closed == self.chunks.keys()

    @property
    def all_chunks(self) -> list[Chunk]:
        """All commits, in the order in which samples are counted."""
        return list(chain.from_iterable(self.chunks.values()))

    def sample_ids(self) -> SampleIds:
        """Return the ids of all samples."""
        return SampleIds.joined([[chunk.ids for chunk in rank] for rank in self.chunks.values()])

    def listed(self, rank: int) -> dict[str, JSON]:
        """Return the list of a rank's commits, as its manifest states it."""
        chunks = self.chunks[rank]
        return {
            "run": self.description.run,
            "rank": rank,
            "samples": sum([len(chunk.ids) for chunk in chunks]),
            "chunks": [chunk.checksum for chunk in chunks],
        }

    def last_state(self, rank: int) -> Any:
        """Return the last state that a rank committed; None if there is none."""
        return next((chunk.state for chunk in reversed(self.chunks[rank]) if chunk.state), None)

    def state_file(self, rank: int) -> str | None:
        """Return the name of the file with the tensors of that state, if any."""
        last = self.last_state(rank)
        return None if last is None or last["file"] is None else state_name(rank, last["file"])


def scan(medium: Medium, rank: int | None = None) -> Run:
    """Read everything about a recording, or one rank's part, except the data.

    Parameters
    ----------
    medium : Medium
        Where it is.
    rank : int, optional
        The rank whose part to read.

    Raises
    ------
    FormatError
        If anything does not fit, naming the file.
    """
    run = Run(medium, read_description(medium))
    ranks = range(run.description.world_size) if rank is None else [rank]
    run.chunks = {owner: [] for owner in ranks}
    names, counts = None, dict[int, int]()
    if rank is None:
        # Not for one rank, since there can be hundreds of thousands of names.
        with accessing(medium.path):
            names = set(medium.names())
        counts = _counted(run, names)
    read = partial(_read_rank, run, names=names, counts=counts)
    for_each(read, ranks, medium.num_readers)
    # Manifests state facts about commits. Those of many ranks are compared when data is read.
    looked_at = [
        chunk for chunk in run.all_chunks if len(ranks) == 1 or chunk.name not in (names or ())
    ]
    for_each(attrgetter("file"), looked_at, medium.num_readers)
    return run


def _counted(run: Run, names: Set[str]) -> dict[int, int]:
    """Return the number of commits of each rank, by the highest number among the names."""
    counts: dict[int, int] = {}
    for match in filter(None, map(_CHUNK_NAME.fullmatch, names)):
        owner, number = int(match[1]), int(match[2])
        if owner >= run.description.world_size:
            raise FormatError(f"{run.medium.path_of(match[0])} is out of place: no such rank")
        counts[owner] = max(number + 1, counts.get(owner, 0))
    return counts


def _read_rank(run: Run, rank: int, names: Set[str] | None, counts: Mapping[int, int]) -> None:
    """Read a rank's commits: those in its manifest, or those that exist."""
    medium, name = run.medium, manifest_name(rank)
    # A writer may continue while names are listed, so the list need not be of one instant: commits
    # are looked for by their numbers.
    if medium.has(name) if names is None else name in names:
        with parsing(medium.path_of(name)):
            _read_manifest(run, rank, TensorFile(medium, name).content)
        return
    chunks, count = run.chunks[rank], counts.get(rank, 0)
    while len(chunks) < count if names is not None else medium.has(chunk_name(rank, len(chunks))):
        run.add(rank)


def _read_manifest(run: Run, rank: int, said: Any) -> None:
    """Read the manifest of a complete rank, or its commits if the manifest lacks their facts.

    Commits behind the listed ones never counted: their writer had lost the right to write.
    """
    checksums, commits = expect(said["chunks"], list), said.get("commits")
    stated = [None] * len(checksums) if commits is None else zip(checksums, commits, strict=True)
    run.closed.add(rank)
    for facts in stated:
        run.add(rank, facts)
    listed = run.listed(rank)
    if {key: said[key] for key in listed} != listed:
        raise ValueError("it does not match the chunks")


class RowReader(abc.ABC):
    """Rows that lie in several files, one after the other.

    Attributes
    ----------
    path : str
        The folder.
    table : dict of str to TensorInfo
        Shape and dtype of one row of everything that can be read.
    starts : sequence of int
        The number of rows before each file, and of all rows.
    """

    path: str
    table: Table
    starts: Sequence[int]
    # The best number of bytes to read at a time, and of files at once.
    span_bytes = BLOCK_BYTES
    num_readers = 1

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.starts[-1]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` in new memory.

        Raises
        ------
        LookupError
            If there is no such name or there are no such rows.
        FormatError
            If the data differs from the written data.
        """
        spec = self._spec(name)
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows} in {self.path}")
        data = empty_bytes((stop - start) * spec.nbytes)
        self.read_into(data.numpy(), name, start)
        return data.view(spec.dtype).view(stop - start, *spec.shape)

    def read_into(self, out: NDArray[numpy.uint8], name: str, start: int) -> None:
        """Fill memory with the bytes of rows from ``start`` on; see `read`."""
        row_bytes = self._spec(name).nbytes
        stop = start + len(out) // max(1, row_bytes)
        if start == stop:
            return
        numbers = range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))

        def fill(number: int) -> None:
            first, last = max(start, self.starts[number]), min(stop, self.starts[number + 1])
            part = out[(first - start) * row_bytes : (last - start) * row_bytes]
            self._fill(part, number, name, first - self.starts[number])

        for_each(fill, numbers, self.num_readers)

    @abc.abstractmethod
    def _fill(self, out: NDArray[numpy.uint8], number: int, name: str, start: int) -> None:
        """Fill memory with the bytes of rows of one file, counted from its first."""

    def forget_verified(self) -> None:  # noqa: B027 - without checksums there is nothing to forget
        """Forget which data was verified: it is verified again at its next read."""

    def fingerprint(self) -> str:
        """Return a digest that distinguishes these rows, in their present state, from others.

        It is empty if only the values of rows show that, as without checksums.
        """
        return ""

    def _spec(self, name: str) -> TensorInfo:
        if name not in self.table:
            known = ", ".join(map(repr, self.table)) or "none"
            raise LookupError(f"{self.path} has no layer {name!r}; it has {known}")
        return self.table[name]


class KeptBatches(NamedTuple):
    """The kept parts of the batches of one chunk.

    Parameters
    ----------
    rows : sequence of int
        The number of samples of each batch.
    values : sequence of JSON
        One for each batch.
    tensors : sequence of Tensor
        The tensors that values refer to by position.
    """

    rows: Sequence[int]
    values: Sequence[JSON]
    tensors: Sequence[Tensor]


class Packed(NamedTuple):
    """A value as JSON, and the tensors that it refers to by their numbers."""

    value: JSON
    tensors: Sequence[Tensor]


class KeptReader:
    """Reads the kept values of batches of a recording, one at a time.

    Parameters
    ----------
    chunks : sequence of Chunk
        The commits of the recording, in order.

    Raises
    ------
    ValueError
        If values are kept for only some of the samples.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = [chunk for chunk in chunks if chunk.batches is not None]
        self.rows: list[int] = [rows for chunk in self._chunks for rows in chunk.batches]
        # The number of batches before each chunk.
        self._starts = list(accumulate([len(chunk.batches) for chunk in self._chunks], initial=0))
        if self._chunks and sum(self.rows) != sum(len(chunk.ids) for chunk in chunks):
            raise ValueError("something is kept of some batches and not of others")
        # Cache: batches are usually read in order.
        self._last: tuple[Chunk, list[JSON]] | None = None

    def read(self, number: int) -> tuple[JSON, Callable[[int], Tensor]]:
        """Return the value of a batch, not to be changed, and a function that reads its tensors.

        Raises
        ------
        IndexError
            There is no such batch.
        FormatError
            The file is damaged.
        """
        number = range(len(self.rows))[number]
        at = bisect_right(self._starts, number) - 1
        chunk = self._chunks[at]

        def tensor(position: int) -> Tensor:
            with parsing(chunk.path):
                return chunk.file.read(f"#{expect(position, int)}")

        # Other threads may replace it meanwhile.
        last = self._last
        with parsing(chunk.path):
            if last is None or last[0] is not chunk:
                text = chunk.file.read(VALUES).numpy().tobytes()
                last = self._last = chunk, expect(parse(text), list)
            return last[1][number - self._starts[at]], tensor


class FileReport(NamedTuple):
    """The result of `RunReader.verify` for a file; ``problem`` is None if the file is intact."""

    name: str
    num_bytes: int
    problem: str | None


class RunReader(RowReader):
    """A recording that is open for reading.

    Opening reads the description, the manifests and the header of every chunk; data is read when it
    is requested. No code of the recording is run, and nothing outside of its folder is touched.

    Parameters
    ----------
    path
        The folder, or the URL of a place in a bucket.
    verify
        Whether to read all data now and check it.
    rank
        The rank whose part to read; None for the whole recording.
    run
        What is there to read, as its writer knows it: it is looked for otherwise.
    extent
        What another reader has found: what has been added since is not read.

    Attributes
    ----------
    header : dict
        The settings that the writer stored.
    layers : dict of str to TensorInfo
        Shape and dtype of one row of each layer.
    rows : dict of str to TensorInfo, or None
        The columns of facts about rows, such as their samples; None if a row is a sample.
    table : dict of str to TensorInfo
        Everything that can be read of rows: layers, and columns by their names in chunks.
    sample_ids : SampleIds
        The ids of all samples, in order.
    num_rows : int
        The number of rows, which is that of samples unless rows are counted apart.
    world_size : int
        The number of ranks that write the recording.
    complete : bool
        Whether every rank that is read has finished.
    kept : KeptReader
        The kept values of each batch, besides samples.
    starts : list of int
        The number of rows before each chunk, and of all rows.

    Raises
    ------
    FormatError
        If anything does not fit together; the message names the file.

    Examples
    --------
    >>> import tempfile, torch
    >>> from scio_recorder.stores.disk_format.tensor_file import TensorInfo
    >>> from scio_recorder.stores.disk_format.writer import RunWriter
    >>> folder = tempfile.TemporaryDirectory()
    >>> layers = {"1-3": TensorInfo((2,), torch.float32)}
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
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = False,
        rank: int | None = None,
        run: Run | None = None,
        extent: Extent | None = None,
    ) -> None:
        self.rank, medium = rank, medium_at(path)
        self.path, self._place = medium.path, for_others(medium.path)
        self.span_bytes, self.num_readers = medium.span_bytes, medium.num_readers
        self.run = run or scan(medium, rank)
        if extent is not None:
            self.run.shorten(extent)
        self.header = self.run.description.header
        self.layers: Table = self.run.description.layers
        self.rows: Table | None = self.run.description.rows
        self.table: Table = self.run.description.table
        self.world_size = self.run.description.world_size
        self.complete = self.run.is_complete
        chunks = self.run.all_chunks
        with parsing(self.path):
            self.sample_ids = self.run.sample_ids()
            self.kept = KeptReader(chunks)
        self._chunks = [chunk for chunk in chunks if chunk.num_rows]
        if run is not None:
            # That of its writer is closed.
            run.medium = medium
            self.forget_verified()
        self.starts = list(accumulate([chunk.num_rows for chunk in self._chunks], initial=0))
        # The number of samples before those of each rank.
        counts = [sum([len(chunk.ids) for chunk in rank]) for rank in self.run.chunks.values()]
        befores = accumulate(counts, initial=0)
        self._first_samples = dict(zip(self.run.chunks, befores, strict=False))
        if extent is not None and self.fingerprint() != extent.fingerprint:
            raise FormatError(f"{self.path} holds another recording by now: open it again")
        if verify:
            for report in self.verify():
                if report.problem is not None:
                    raise FormatError(report.problem)

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.sample_ids)

    @property
    def is_begun(self) -> bool:
        """Whether anything has been committed."""
        return any(self.run.chunks.values()) or bool(self.run.closed)

    def _fill(self, out: NDArray[numpy.uint8], number: int, name: str, start: int) -> None:
        chunk = self._chunks[number]
        chunk.file.copy_into(out, name, start * self.table[name].nbytes)
        if name == SAMPLE:
            self._count_on(out.view(numpy.int64), chunk)

    def forget_verified(self) -> None:
        """Forget which blocks were verified: each is verified again at its next read."""
        for chunk in self.run.all_chunks:
            chunk.reopen(self.run.medium)

    def fingerprint(self) -> str:
        """Return a digest that distinguishes this recording, at its present length, from others."""
        return checksum("".join(chunk.checksum for chunk in self._chunks).encode())

    def read_state(self, rank: int = 0) -> Packed | None:
        """Return the last state that a rank committed, verified; None if it committed none."""
        last, name = self.run.last_state(rank), self.run.state_file(rank)
        if last is None or name is None:
            return None if last is None else Packed(last["value"], [])
        file = TensorFile(self.run.medium, name)
        with parsing(file.path):
            if file.content != self.run.description.state_place(rank, last["file"]):
                raise ValueError("it does not belong here")
            return Packed(last["value"], [file.read(key) for key in file.table])

    def verify(self) -> Iterator[FileReport]:
        """Read every byte of data and compare it with its checksum, file by file.

        The other files were fully checked at opening.
        """
        for rank, chunks in self.run.chunks.items():
            for chunk in chunks:
                yield _report(chunk.name, partial(getattr, chunk, "file"))
            name = self.run.state_file(rank)
            if name is not None:
                yield _report(name, partial(TensorFile, self.run.medium, name))

    def close(self) -> None:
        """Close the medium; tensors that were read stay."""
        self.run.medium.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        counts = {rank: len(chunks) for rank, chunks in self.run.chunks.items()}
        extent = Extent(counts, self.run.closed, self.fingerprint())
        return partial(type(self), rank=self.rank, extent=extent), (self._place,)

    def _count_on(self, samples: NDArray[numpy.int64], chunk: Chunk) -> None:
        """Count samples over all ranks; a chunk counts those of its own rank."""
        if samples.min() < 0 or samples.max() >= chunk.samples_before + len(chunk.ids):
            raise FormatError(
                f"{chunk.path} is damaged: it has rows of samples that don't exist yet"
            )
        samples += self._first_samples[chunk.rank]


def _report(name: str, opened: Callable[[], TensorFile]) -> FileReport:
    try:
        return FileReport(name, opened().verify(), None)
    except FormatError as error:
        return FileReport(name, 0, str(error))
