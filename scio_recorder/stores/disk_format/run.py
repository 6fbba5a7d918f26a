"""A recording as it is found: its description, and the commits of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.disk_format.description import (
    VALUES,
    Description,
    chunk_name,
    manifest_name,
    read_description,
    state_name,
)
from scio_recorder.stores.disk_format.ids import SampleIds, ids_from_json, ids_to_json
from scio_recorder.stores.disk_format.medium import Medium, accessing, parsing
from scio_recorder.stores.disk_format.tensor_file import (
    JSON,
    MAX_SIZE,
    TensorFile,
    expect,
)
from scio_recorder.tensors.processes import for_each

_CHUNK_NAME = re.compile(r"chunk-(\d{5})-(\d{8})\.safetensors", re.ASCII)
_TOKEN = re.compile(r"[0-9a-f]{16}", re.ASCII)


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
        The checksum of its file, and its facts according to the manifest. Then the file is opened
        only when data is read.

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

    def __init__(
        self,
        medium: Medium,
        description: Description,
        rank: int,
        number: int,
        samples_before: int,
        stated: tuple[str, Mapping[str, JSON]] | None = None,
    ) -> None:
        self.name = chunk_name(rank, number)
        self.path = medium.path_of(self.name)
        self.rank, self.samples_before = rank, samples_before
        self._medium, self._description, self._number = medium, description, number
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
        rows = None if self._description.rows is None else self.num_rows
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
        self._medium, self._file = medium, None

    def _opened(self) -> TensorFile:
        file = TensorFile(self._medium, self.name)
        place = self._description.place(self.rank, self._number, self.samples_before)
        if {key: file.content[key] for key in place} != place:
            raise ValueError("it does not belong here, or samples before it are lost")
        return file

    def _read(self, said: Mapping[str, Any]) -> None:
        self.ids = ids_from_json(said["ids"])
        # Recordings of versions without rows don't mention them.
        rows = said.get("rows")
        if (rows is None) != (self._description.rows is None):
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
            if token is not None and not _TOKEN.fullmatch(token):
                raise ValueError("its state is missing")

    def _check_table(self, file: TensorFile) -> None:
        own = [(name, spec.of(self.num_rows)) for name, spec in self._description.table.items()]
        if list(file.table.items())[: len(own)] != own:
            raise ValueError("its tensors are not those of the recording's layers")
        names, wanted = list(file.table)[len(own) :], list[str]()
        if self.batches is not None:
            wanted = [*(f"#{number}" for number in range(len(names) - 1)), VALUES]
        if names != wanted or (names and file.table[VALUES].dtype != torch.uint8):
            raise ValueError("a part of what is kept of batches is missing")
        # Ids take more memory as JSON than in the chunk itself.
        file.content = {}


@dataclass
class Run:
    """A recording: its description, and the ranks that were read."""

    description: Description
    # The ranks' commits, in order, and the complete ranks.
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether every rank that was read has finished."""
        return self.closed == self.chunks.keys()

    def all_chunks(self) -> Iterator[Chunk]:
        """Yield all commits, in the order in which samples are counted."""
        for chunks in self.chunks.values():
            yield from chunks

    def sample_ids(self) -> SampleIds:
        """Return the ids of all samples."""
        ids = SampleIds()
        for chunks in self.chunks.values():
            own = SampleIds()
            for chunk in chunks:
                own.add(chunk.ids)
            ids.join(own)
        return ids

    def manifest(self, rank: int) -> dict[str, JSON]:
        """Return the content of the manifest of a rank."""
        chunks = self.chunks[rank]
        samples = sum([len(chunk.ids) for chunk in chunks])
        manifest = self.description.manifest(rank, samples, [chunk.checksum for chunk in chunks])
        return {**manifest, "commits": [chunk.said for chunk in chunks]}

    def last_state(self, rank: int) -> Any:
        """Return the last state that a rank committed; None if there is none."""
        return next((one.state for one in reversed(self.chunks[rank]) if one.state), None)

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
    RecordingError
        If anything does not fit, naming the file.
    """
    run = Run(read_description(medium))
    ranks = range(run.description.world_size) if rank is None else [rank]
    run.chunks = {one: [] for one in ranks}
    names, counts = None, dict[int, int]()
    if rank is None:
        # Not for one rank, since there can be hundreds of thousands of names.
        with accessing(medium.path):
            names = set(medium.names())
        counts = _counted(medium, run.description, names)
    read = partial(_read_rank, medium, run, names=names, counts=counts)
    for_each(read, ranks, medium.num_readers)
    # Manifests state facts about commits. Those of many ranks are compared when data is read.
    looked_at = [
        one for one in run.all_chunks() if len(ranks) == 1 or one.name not in (names or ())
    ]
    for_each(attrgetter("file"), looked_at, medium.num_readers)
    return run


def _counted(medium: Medium, description: Description, names: Set[str]) -> dict[int, int]:
    """Return the number of commits of each rank, by the highest number among the names."""
    counts: dict[int, int] = {}
    for match in filter(None, map(_CHUNK_NAME.fullmatch, names)):
        owner, number = int(match[1]), int(match[2])
        if owner >= description.world_size:
            raise RecordingError(f"{medium.path_of(match[0])} is out of place: no such rank")
        counts[owner] = max(number + 1, counts.get(owner, 0))
    return counts


def _read_rank(
    medium: Medium, run: Run, rank: int, names: Set[str] | None, counts: Mapping[int, int]
) -> None:
    """Read a rank's commits: those in its manifest, or those that exist."""
    name = manifest_name(rank)
    # A writer may continue while names are listed, so the list need not be of one instant: commits
    # are looked for by their numbers.
    if medium.has(name) if names is None else name in names:
        with parsing(medium.path_of(name)):
            _read_manifest(medium, run, rank, TensorFile(medium, name).content)
        return
    chunks, before, count = run.chunks[rank], 0, counts.get(rank, 0)
    while len(chunks) < count if names is not None else medium.has(chunk_name(rank, len(chunks))):
        chunks.append(Chunk(medium, run.description, rank, len(chunks), before))
        before += len(chunks[-1].ids)


def _read_manifest(medium: Medium, run: Run, rank: int, said: Any) -> None:
    """Read the manifest of a complete rank, or its commits if the manifest lacks their facts.

    Commits behind the listed ones never counted: their writer had lost the right to write.
    """
    checksums, commits = expect(said["chunks"], list), said.get("commits")
    stated = [None] * len(checksums) if commits is None else zip(checksums, commits, strict=True)
    chunks, before = run.chunks[rank], 0
    run.closed.add(rank)
    for number, one in enumerate(stated):
        chunks.append(Chunk(medium, run.description, rank, number, before, one))
        before += len(chunks[-1].ids)
    found = run.description.manifest(rank, before, [chunk.checksum for chunk in chunks])
    if {key: said[key] for key in found} != found:
        raise ValueError("it does not match the chunks")


def refuse_repeated_ids(path: str, run: Run) -> None:
    """Raise `CollectError` if two samples have the same id."""
    repeated = run.sample_ids().repeated()
    if repeated is not None:
        chunks = [chunk for chunk in run.all_chunks() if repeated in chunk.ids]
        raise CollectError(
            f"{path}: two samples have the id {repeated!r}, in part {chunks[0].rank} and part "
            f"{chunks[-1].rank}: each needs an id of its own. The data on disk stays and can be "
            "read; collect again into another folder, with other sample_ids, or with parts that "
            "have no sample twice, as by a sampler that repeats none (drop_last=True)"
        )
