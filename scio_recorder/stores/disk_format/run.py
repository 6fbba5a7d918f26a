"""A recording as it is found: its description, and the commits of each rank."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.chunk import Chunk
from scio_recorder.stores.disk_format.description import (
    INDEX_NAME,
    Description,
    chunk_name,
    manifest_name,
    read_description,
    state_name,
)
from scio_recorder.stores.disk_format.ids import SampleIds
from scio_recorder.stores.disk_format.jsons import JSON, differences, expect, parse
from scio_recorder.stores.disk_format.medium import Medium, accessing, parsing
from scio_recorder.stores.disk_format.tensor_file import TensorFile
from scio_recorder.tensors.threads import for_each

_CHUNK_NAME = re.compile(r"chunk-(\d{5})-(\d{8})\.safetensors", re.ASCII)
# The name in an index of the contents of all manifests.
MANIFESTS = "manifests"


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
        """Return the list of commits for the manifest of a rank."""
        chunks = self.chunks[rank]
        samples = sum(len(chunk.ids) for chunk in chunks)
        return self.description.manifest(rank, samples, [chunk.checksum for chunk in chunks])

    def first_samples(self) -> dict[int, int]:
        """Return the number of samples before those of each rank."""
        counts = [sum(len(chunk.ids) for chunk in chunks) for chunks in self.chunks.values()]
        return dict(zip(self.chunks, accumulate(counts, initial=0), strict=False))

    def last_state(self, rank: int) -> Any:
        """Return the last state that a rank committed; None if there is none."""
        return next((one.state for one in reversed(self.chunks[rank]) if one.state), None)

    def state_file(self, rank: int) -> str | None:
        """Return the name of the file with the tensors of that state, if any."""
        last = self.last_state(rank)
        return None if last is None or last["file"] is None else state_name(rank, last["file"])


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Suspend garbage collection inside the block, which makes many objects that stay.

    With 100,000 parts, examining them again and again would take as long as the rest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_garbage_left()
def scan(medium: Medium, rank: int | None = None, *, looks_into_chunks: bool = True) -> Run:
    """Read everything about a recording, or one rank's part, except the data.

    Parameters
    ----------
    medium : Medium
        Where it is.
    rank : int, optional
        The rank whose part to read.
    looks_into_chunks : bool, default True
        Whether to compare manifests with the chunks now, if there is no index, rather than when
        data is read.

    Raises
    ------
    RecordingError
        If anything does not fit, naming the file.
    """
    run = Run(read_description(medium))
    has_index = rank is None and medium.has(INDEX_NAME)
    if rank is not None:
        # Without listing names, since there can be hundreds of thousands.
        _read_rank(medium, run, rank, None)
    elif has_index:
        _read_index(medium, run)
    else:
        with accessing(medium.path):
            names = set(medium.names())
        counts = _counted(medium, run.description, names)
        for owner in range(run.description.world_size):
            _read_rank(medium, run, owner, names, counts.get(owner, 0))
    if looks_into_chunks and not has_index:
        for_each(attrgetter("file"), list(run.all_chunks()), medium.num_readers)
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


def _read_rank(medium: Medium, run: Run, rank: int, names: Set[str] | None, count: int = 0) -> None:
    """Read a rank's commits: those in its manifest, or those that exist."""
    name = manifest_name(rank)
    # A writer may continue while names are listed, so the list need not be of one instant: commits
    # are looked for by their numbers.
    if medium.has(name) if names is None else name in names:
        with parsing(medium.path_of(name)):
            _read_manifest(medium, run, rank, TensorFile(medium, name).content)
        return
    chunks = run.chunks[rank] = []
    before = 0
    while len(chunks) < count if names is not None else medium.has(chunk_name(rank, len(chunks))):
        chunks.append(Chunk(medium, run.description, rank, len(chunks), before))
        before += len(chunks[-1].ids)


def _read_manifest(medium: Medium, run: Run, rank: int, said: Any) -> None:
    """Read the manifest of a complete rank, or its commits if the manifest lacks their facts.

    Commits behind the listed ones never counted: their writer had lost the right to write.
    """
    checksums, commits = expect(said["chunks"], list), said.get("commits")
    stated = [None] * len(checksums) if commits is None else zip(checksums, commits, strict=True)
    chunks = run.chunks[rank] = []
    run.closed.add(rank)
    before = 0
    for number, one in enumerate(stated):
        chunks.append(Chunk(medium, run.description, rank, number, before, one))
        before += len(chunks[-1].ids)
    found = run.manifest(rank)
    lines = differences({key: said[key] for key in found}, found, "manifest")
    if lines:
        raise ValueError(f"it does not match the chunks: {lines[0]}")


def _read_index(medium: Medium, run: Run) -> None:
    """Read the contents of all ranks' manifests from the index."""
    with parsing(medium.path_of(INDEX_NAME)):
        file = TensorFile(medium, INDEX_NAME)
        manifests = expect(parse(file.read(MANIFESTS).numpy().tobytes()), list)
        if file.content != {"run": run.description.run}:
            raise ValueError("it does not belong here")
        if len(manifests) != run.description.world_size:
            raise ValueError(f"it lists {len(manifests)} of {run.description.world_size} ranks")
        for rank, said in enumerate(manifests):
            _read_manifest(medium, run, rank, said)
