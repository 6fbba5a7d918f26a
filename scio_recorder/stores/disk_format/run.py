"""A recording's folder as it is found: its description, chunks and manifests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from scio_recorder.errors import RecordingError
from scio_recorder.layer import TensorSpec
from scio_recorder.stores.disk_format.faults import accessing, parsing
from scio_recorder.stores.disk_format.ids import SampleIds, ids_from_json
from scio_recorder.stores.disk_format.jsons import JSON, MAX_FILE_BYTES, differences, expect, unseal
from scio_recorder.stores.disk_format.tables import Table, from_json, to_json
from scio_recorder.stores.disk_format.tensor_file import TensorFile

if TYPE_CHECKING:
    from scio_recorder.stores.disk_format.folder import Folder
    from scio_recorder.stores.disk_format.ids import Ids


DESCRIPTION_NAME = "recording.json"
FORMAT = "scio-recording"
VERSION = 2
MAX_RANKS = 100_000
_TOKEN = re.compile(r"[0-9a-f]{16}", re.ASCII)
_CHUNK_NAME = re.compile(r"chunk-(\d{5})-(\d{8})\.safetensors", re.ASCII)


def chunk_name(rank: int, number: int) -> str:
    """Return the name of a commit of a rank."""
    return f"chunk-{rank:05d}-{number:08d}.safetensors"


def state_name(rank: int, token: str) -> str:
    """Return the name of the tensors of a state."""
    return f"state-{rank:05d}-{token}.safetensors"


def manifest_name(rank: int) -> str:
    """Return the name of the file that says that a rank is complete."""
    return f"manifest-{rank:05d}.json"


def tensor_name(number: int) -> str:
    """Return the name in a chunk of a tensor that is kept of batches."""
    return f"#{number}"


def batch_name(number: int) -> str:
    """Return the name in a chunk of the text that says what is kept of a batch."""
    return f"#batch-{number}"


def rows_table(layers: Table, rows: int) -> dict[str, TensorSpec]:
    """Return what a chunk of ``rows`` samples holds of layers."""
    return {name: spec.of(rows) for name, spec in layers.items()}


class Packed(NamedTuple):
    """A value as JSON, and the tensors that it refers to by their numbers."""

    value: JSON
    tensors: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Description:
    """The content of ``recording.json``."""

    run: str
    world_size: int
    layers: dict[str, TensorSpec]
    header: dict[str, JSON]

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "run": self.run,
            "world_size": self.world_size,
            "layers": to_json(self.layers),
            "header": self.header,
        }

    @classmethod
    def from_json(cls, value: Any) -> Description:
        """Return what `to_json` wrote."""
        if value["format"] != FORMAT or expect(value["version"], int) != VERSION:
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        world_size = expect(value["world_size"], int)
        if not 0 < world_size <= MAX_RANKS:
            raise ValueError(f"a recording of {world_size} ranks")
        layers = from_json(value["layers"])
        if any(name.startswith("#") for name in layers):
            raise ValueError("a layer's name begins with #, as those of what is kept of batches do")
        return cls(expect(value["run"], str), world_size, layers, expect(value["header"], dict))


@dataclass(frozen=True)
class Chunk:
    """A commit, without its data.

    Parameters
    ----------
    name, checksum
        Of its file; the checksum is that of the file's header.
    ids
        The ids of its samples.
    batches
        How many samples each batch has of which something is kept; None where nothing is.
    state
        The values that were committed along, and in which file their tensors are, or None.
    kept_bytes
        What is kept of batches takes.
    """

    name: str
    checksum: str
    ids: Ids
    batches: tuple[int, ...] | None
    state: Any
    kept_bytes: int = 0

    @property
    def state_file(self) -> str | None:
        """What tells the file with the tensors of its state, if there is one."""
        return None if self.state is None else self.state["file"]


@dataclass
class Shard:
    """One rank's part: its commits in order, and whether there will be no more."""

    rank: int
    chunks: list[Chunk] = field(default_factory=list)
    is_closed: bool = False

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return sum(len(chunk.ids) for chunk in self.chunks)

    @property
    def last(self) -> Chunk | None:
        """The last commit that has a state."""
        return next((chunk for chunk in reversed(self.chunks) if chunk.state is not None), None)

    @property
    def state_file(self) -> str | None:
        """What tells the file with the tensors of the last state, if there is one."""
        return None if self.last is None else self.last.state_file

    def manifest(self, run: str) -> dict[str, JSON]:
        """Return what the manifest says when the shard is complete."""
        checksums: list[JSON] = [chunk.checksum for chunk in self.chunks]
        return {"run": run, "rank": self.rank, "samples": self.samples, "chunks": checksums}


@dataclass
class Run:
    """A recording: its description, and the shards that were looked at."""

    description: Description
    shards: dict[int, Shard] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every rank that was looked at has finished."""
        return all(shard.is_closed for shard in self.shards.values())

    def sample_ids(self) -> SampleIds:
        """Return the ids of all samples."""
        ids = SampleIds()
        for shard in self.shards.values():
            for chunk in shard.chunks:
                ids.add(chunk.ids)
        return ids


def scan(folder: Folder, rank: int | None = None) -> Run:
    """Read all about a recording, or one rank's part, but the data itself.

    Raises
    ------
    RecordingError
        If anything does not fit, naming the file.
    """
    description = read_description(folder)
    with accessing(folder.path):
        names = set(folder.names())
    lasts: dict[int, int] = {}
    for match in filter(None, map(_CHUNK_NAME.fullmatch, names)):
        owner, number = int(match[1]), int(match[2])
        if owner >= description.world_size:
            raise RecordingError(f"{folder.path_of(match[0])} is out of place: no such rank")
        lasts[owner] = max(number, lasts.get(owner, -1))
    run = Run(description)
    for owner in range(description.world_size) if rank is None else (rank,):
        is_closed = manifest_name(owner) in names
        shard = _read_shard(folder, description, owner, lasts.get(owner, -1) + 1, is_closed)
        run.shards[owner] = shard
    return run


def read_description(folder: Folder) -> Description:
    """Return what ``recording.json`` says."""
    with accessing(folder.path):
        if not folder.has(DESCRIPTION_NAME):
            raise RecordingError(f"{folder.path} holds no recording: it has no {DESCRIPTION_NAME}")
    with parsing(folder.path_of(DESCRIPTION_NAME)):
        return Description.from_json(unseal(folder.read_small(DESCRIPTION_NAME, MAX_FILE_BYTES)))


def _read_shard(
    folder: Folder, description: Description, rank: int, count: int, is_closed: bool
) -> Shard:
    shard = Shard(rank, is_closed=is_closed)
    name, listed = manifest_name(rank), []
    if is_closed:
        with parsing(folder.path_of(name)):
            manifest = unseal(folder.read_small(name, MAX_FILE_BYTES))
            listed = expect(manifest["chunks"], list)
    # A writer may have gone on while names were listed, so that they need not be those of one
    # instant: files are looked for by their numbers.
    count = max(count, len(listed))
    before = 0
    for number in range(count):
        chunk = _read_chunk(folder, description, rank, number, before)
        shard.chunks.append(chunk)
        before += len(chunk.ids)
    if is_closed:
        found = differences(manifest, shard.manifest(description.run), "manifest")
        if found:
            raise RecordingError(f"{folder.path_of(name)} does not match the chunks: {found[0]}")
    return shard


def _read_chunk(
    folder: Folder, description: Description, rank: int, number: int, before: int
) -> Chunk:
    name = chunk_name(rank, number)
    path = folder.path_of(name)
    try:
        file = TensorFile(folder, name)
    except RecordingError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise RecordingError(f"{path} is missing, and others follow it") from error
        raise
    try:
        with parsing(path):
            return _chunk_of(name, file, description, place_of(description, rank, number, before))
    finally:
        file.close()


def place_of(description: Description, rank: int, number: int, before: int) -> dict[str, JSON]:
    """Return what a chunk says of where it belongs."""
    return {"run": description.run, "rank": rank, "number": number, "samples_before": before}


def state_place(description: Description, rank: int, token: str) -> dict[str, JSON]:
    """Return what the tensors of a state say of where they belong."""
    return {"run": description.run, "rank": rank, "state": token}


def _chunk_of(
    name: str, file: TensorFile, description: Description, place: Mapping[str, JSON]
) -> Chunk:
    content = file.content
    if {key: content[key] for key in place} != place:
        raise ValueError("it does not belong here, or samples before it are lost")
    ids = ids_from_json(content["ids"])
    own = list(rows_table(description.layers, len(ids)).items())
    table = list(file.table.items())
    if table[: len(own)] != own:
        raise ValueError("its tensors are not those of the recording's layers")
    kept, batches = dict(table[len(own) :]), content["batches"]
    if batches is not None:
        batches = tuple(expect(count, int) for count in expect(batches, list))
    _check_kept(kept, batches, len(ids))
    state = content["state"]
    if state is not None and not _TOKEN.fullmatch(expect(state, dict)["file"] or "0" * 16):
        raise ValueError("its state is nowhere")
    kept_bytes = sum(spec.nbytes for spec in kept.values())
    return Chunk(name, file.checksum, ids, batches, state, kept_bytes)


def _check_kept(kept: Table, batches: tuple[int, ...] | None, rows: int) -> None:
    texts = [batch_name(number) for number in range(len(batches or ()))]
    names = [tensor_name(number) for number in range(len(kept) - len(texts))]
    if list(kept) != names + texts:
        raise ValueError("what is kept of batches is not all there")
    if any(kept[text].dtype != torch.uint8 or len(kept[text].shape) != 1 for text in texts):
        raise ValueError("what is kept of a batch is no text")
    if batches is not None and (sum(batches) != rows or min(batches, default=0) < 0):
        raise ValueError(f"batches of {rows} samples that do not add up")


def read_state(folder: Folder, run: Run, rank: int) -> Packed | None:
    """Return what a rank committed last besides samples, verified."""
    last = run.shards[rank].last
    if last is None:
        return None
    if last.state_file is None:
        return Packed(last.state["value"], [])
    file = TensorFile(folder, state_name(rank, last.state_file))
    try:
        with parsing(file.path):
            if file.content != state_place(run.description, rank, last.state_file):
                raise ValueError("it does not belong here")
            return Packed(last.state["value"], [file.read(name) for name in file.table])
    finally:
        file.close()
