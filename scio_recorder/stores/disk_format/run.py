"""A recording's folder as it is found: shards, journals and manifest, one checked by another."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.faults import accessing, parsing
from scio_recorder.stores.disk_format.folder import close_quietly
from scio_recorder.stores.disk_format.journal import EMPTY, Frames, read_frames
from scio_recorder.stores.disk_format.jsons import (
    JSON,
    MAX_FILE_BYTES,
    differences,
    expect,
    parse,
    unseal,
)
from scio_recorder.stores.disk_format.records import (
    ChunkRecord,
    CloseRecord,
    Description,
    OpenRecord,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scio_recorder.stores.disk_format.folder import Folder
    from scio_recorder.stores.disk_format.records import StateRecord

__all__ = [
    "CHUNK_NAME",
    "CREATION_LOCK_NAME",
    "DESCRIPTION_NAME",
    "JOURNAL_NAME",
    "MANIFEST_NAME",
    "Run",
    "Shard",
    "lock_name",
    "read_description",
    "scan",
    "shard_name",
]

DESCRIPTION_NAME = "recording.json"
MANIFEST_NAME = "manifest.json"
JOURNAL_NAME = "journal.log"
CREATION_LOCK_NAME = "lock-create"
CHUNK_NAME = re.compile(r"chunk-\d{8}\.safetensors", re.ASCII)
_SHARD_NAME = re.compile(r"shard-(\d{5})-(\d{5})", re.ASCII)


def lock_name(rank: int) -> str:
    """Return the name of the file that a rank's writer locks."""
    return f"lock-{rank:05d}"


def shard_name(rank: int, attempt: int) -> str:
    """Return the name of the folder that one attempt of a rank writes."""
    return f"shard-{rank:05d}-{attempt:05d}"


@dataclass
class Shard:
    """What one writer left: its commits, and whether it finished."""

    rank: int
    attempt: int
    samples_before: int
    journal: Frames
    chunks: list[ChunkRecord] = field(default_factory=list)
    opening: OpenRecord | None = None
    closing: CloseRecord | None = None
    next_number: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        return shard_name(self.rank, self.attempt)

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return sum(chunk.rows for chunk in self.chunks)


@dataclass
class Run:
    """A recording: its description, and its shards by rank and in the order of attempts."""

    description: Description
    ranks: dict[int, list[Shard]] = field(default_factory=dict)
    states: dict[int, tuple[Shard, StateRecord]] = field(default_factory=dict)

    @property
    def shards(self) -> Iterator[Shard]:
        """All shards, in the order in which their samples count."""
        return chain.from_iterable(self.ranks.values())

    def of_rank(self, rank: int) -> list[Shard]:
        """Return the shards of one rank."""
        return self.ranks.get(rank, [])

    def is_closed(self, rank: int) -> bool:
        """Whether this rank has written everything that it had to."""
        shards = self.of_rank(rank)
        return bool(shards) and shards[-1].closing is not None

    @property
    def complete(self) -> bool:
        """Whether every rank has."""
        return all(self.is_closed(rank) for rank in range(self.description.world_size))

    def files_of(self, shard: Shard, *, state: bool = True) -> dict[str, int]:
        """Return the chunk files that this shard must have, with their lengths in bytes."""
        files = [chunk.file for chunk in shard.chunks]
        files += [chunk.kept.file for chunk in shard.chunks if chunk.kept is not None]
        last = self.states.get(shard.rank)
        if state and last is not None and last[0] is shard:
            files.append(last[1].file)
        return {file.name: file.num_bytes for file in files if file is not None}

    def manifest(self) -> dict[str, JSON]:
        """Return what the manifest of a complete recording says."""
        shards: dict[str, JSON] = {
            shard.name: {
                "journal_bytes": shard.journal.num_bytes,
                "journal_xxh3_64": shard.journal.checksum,
                "samples": shard.samples,
                "files": dict(self.files_of(shard)),
            }
            for shard in self.shards
        }
        return {"run": self.description.run, "shards": shards}


def scan(root: Folder) -> Run:
    """Read everything about a recording but the data itself, which is only looked for.

    Raises
    ------
    RecordingError
        If anything does not fit, naming the file.
    """
    run = Run(read_description(root))
    with accessing(root.path):
        names = root.names()
    for rank, attempt in _shard_numbers(root, names, run.description.world_size):
        _add_shard(root, run, rank, attempt)
    for shard in run.shards:
        _check_files(root, run, shard)
    if MANIFEST_NAME in names:
        _check_manifest(root, run)
    return run


def read_description(root: Folder) -> Description:
    """Return what ``recording.json`` says."""
    with accessing(root.path):
        if DESCRIPTION_NAME not in root.names():
            raise RecordingError(f"{root.path} holds no recording: it has no {DESCRIPTION_NAME}")
    with parsing(root.path_of(DESCRIPTION_NAME)):
        return Description.from_json(unseal(root.read_small(DESCRIPTION_NAME, MAX_FILE_BYTES)))


def _shard_numbers(root: Folder, names: list[str], world_size: int) -> Iterator[tuple[int, int]]:
    attempts = dict.fromkeys(range(world_size), 0)
    for match in filter(None, map(_SHARD_NAME.fullmatch, names)):
        rank, attempt = int(match[1]), int(match[2])
        if attempts.get(rank) != attempt:
            expected = shard_name(rank, attempts[rank]) if rank in attempts else "none of this rank"
            raise RecordingError(f"{root.path_of(match[0])} is out of place: expected {expected}")
        attempts[rank] += 1
        yield rank, attempt


def _add_shard(root: Folder, run: Run, rank: int, attempt: int) -> None:
    name = shard_name(rank, attempt)
    with accessing(root.path_of(name)), root.subfolder(name) as folder:
        earlier = run.of_rank(rank)
        before = earlier[-1].samples_before + earlier[-1].samples if earlier else 0
        shard = Shard(rank, attempt, before, _read_journal(folder))
        with parsing(folder.path_of(JOURNAL_NAME)):
            if run.is_closed(rank):
                raise ValueError("an earlier shard says that nothing follows it")
            for index, payload in enumerate(shard.journal.payloads):
                _add_record(run, shard, index, parse(payload))
    # The payloads would double what is kept of a long journal.
    shard.journal = shard.journal._replace(payloads=[])
    run.ranks.setdefault(rank, []).append(shard)


def _read_journal(folder: Folder) -> Frames:
    path = folder.path_of(JOURNAL_NAME)
    with parsing(path):
        try:
            descriptor = folder.open_regular(JOURNAL_NAME)
        except FileNotFoundError:
            return EMPTY
        try:
            return read_frames(descriptor)
        finally:
            close_quietly(descriptor)


def _add_record(run: Run, shard: Shard, index: int, value: Any) -> None:
    if expect(value["sequence"], int) != index:
        raise ValueError(f"record {index} is out of sequence")
    if shard.closing is not None:
        raise ValueError("a record follows the closing one")
    if index == 0:
        shard.opening = _opening(run, shard, value)
    elif value["kind"] == "chunk":
        _add_chunk(run, shard, ChunkRecord.from_json(value, run.description.layers))
    elif value["kind"] == "close":
        shard.closing = CloseRecord(expect(value["samples"], int))
        if shard.closing.samples != shard.samples_before + shard.samples:
            raise ValueError("the number of samples is not that of the closing record")
    else:
        raise ValueError(f"record {index} is of an unknown kind")


def _opening(run: Run, shard: Shard, value: Any) -> OpenRecord:
    # An earlier journal that was cut short looks like one whose writer was killed, but for this.
    opening = OpenRecord(run.description.run, shard.rank, shard.attempt, shard.samples_before)
    if value != {"sequence": 0, **opening.to_json()}:
        raise ValueError(f"it does not belong here, or samples before it are lost: {value}")
    return opening


def _add_chunk(run: Run, shard: Shard, chunk: ChunkRecord) -> None:
    for file in chunk.files:
        if file.number < shard.next_number:
            raise ValueError(f"{file.name} is named twice or out of order")
        shard.next_number = file.number + 1
    shard.chunks.append(chunk)
    if chunk.state is not None:
        run.states[shard.rank] = shard, chunk.state


def _check_files(root: Folder, run: Run, shard: Shard) -> None:
    with accessing(root.path_of(shard.name)), root.subfolder(shard.name) as folder:
        closed = run.is_closed(shard.rank)
        # A writer at work removes states that it has replaced, perhaps since the journal was read.
        expected = run.files_of(shard, state=closed)
        for name, size in expected.items():
            _check_file(folder, name, size)
        found = set(filter(CHUNK_NAME.fullmatch, folder.names()))
        if shard.opening is None and found:
            raise RecordingError(f"{folder.path_of(JOURNAL_NAME)} is missing or cut short")
        # An unfinished rank may have been stopped between writing a file and committing it.
        for name in sorted(found - set(expected)) if closed else ():
            raise RecordingError(f"{folder.path_of(name)} is not part of this recording")


def _check_file(folder: Folder, name: str, size: int) -> None:
    try:
        found = folder.size(name)
    except OSError as cause:
        if cause.errno != errno.ENOENT:
            raise
        raise RecordingError(f"{folder.path_of(name)} is missing") from cause
    if found != size:
        path = folder.path_of(name)
        raise RecordingError(f"{path} is damaged: {found} bytes long, {size} were written")


def _check_manifest(root: Folder, run: Run) -> None:
    with parsing(root.path_of(MANIFEST_NAME)):
        manifest = unseal(root.read_small(MANIFEST_NAME, MAX_FILE_BYTES))
    found = differences(manifest, run.manifest(), "manifest")
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise RecordingError(
            f"{root.path_of(MANIFEST_NAME)} does not match what it lists: {found[0]}{more}"
        )
