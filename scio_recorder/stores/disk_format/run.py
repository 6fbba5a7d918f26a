"""A recording's folder as it is found: its description, commits and manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from scio_recorder.errors import RecordingError
from scio_recorder.layer import TensorSpec
from scio_recorder.stores.disk_format.folder import Folder, accessing, parsing
from scio_recorder.stores.disk_format.ids import SampleIds, ids_from_json
from scio_recorder.stores.disk_format.jsons import JSON, MAX_SIZE, Packed, differences, expect
from scio_recorder.stores.disk_format.tensor_file import (
    TensorFile,
    table_from_json,
    table_to_json,
)

DESCRIPTION_NAME = "recording.safetensors"
FORMAT = "scio-recording"
# That of recordings whose rows are samples, and that of those which have rows of their own.
VERSION, VERSION_WITH_ROWS = 2, 3
MAX_RANKS = 100_000
# What a chunk calls the values that are kept of its batches.
VALUES = "#values"
_TOKEN = re.compile(r"[0-9a-f]{16}", re.ASCII)
_CHUNK_NAME = re.compile(r"chunk-(\d{5})-(\d{8})\.safetensors", re.ASCII)


def row_column(name: str) -> str:
    """Return what a chunk calls a column that has one entry a row."""
    return f"@{name}"


# The column that says of which sample a row is.
SAMPLE = row_column("sample")
_FIRST_COLUMN = ("sample", TensorSpec((), torch.int64))


def chunk_name(rank: int, number: int) -> str:
    """Return the name of a commit of a rank."""
    return f"chunk-{rank:05d}-{number:08d}.safetensors"


def state_name(rank: int, token: str) -> str:
    """Return the name of the tensors of a state."""
    return f"state-{rank:05d}-{token}.safetensors"


def manifest_name(rank: int) -> str:
    """Return the name of the file that says that a rank is complete."""
    return f"manifest-{rank:05d}.safetensors"


def manifest(run: str, rank: int, samples: int, checksums: Sequence[str]) -> dict[str, JSON]:
    """Return what that file says."""
    return {"run": run, "rank": rank, "samples": samples, "chunks": list(checksums)}


@dataclass(frozen=True)
class Description:
    """What a recording says about itself."""

    run: str
    world_size: int
    layers: dict[str, TensorSpec]
    header: dict[str, JSON]
    # The columns that say what a row is; None where it is a sample.
    rows: dict[str, TensorSpec] | None = None

    @property
    def table(self) -> dict[str, TensorSpec]:
        """Shape and dtype of one row of all that a chunk holds of rows, in its order."""
        return self.layers | {row_column(name): spec for name, spec in (self.rows or {}).items()}

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "format": FORMAT,
            "version": VERSION if self.rows is None else VERSION_WITH_ROWS,
            "run": self.run,
            "world_size": self.world_size,
            "layers": table_to_json(self.layers),
            "rows": None if self.rows is None else table_to_json(self.rows),
            "header": self.header,
        }

    @classmethod
    def from_json(cls, value: Any) -> Description:
        """Return what `to_json` wrote."""
        # Recordings made before there were rows don't mention them.
        rows = None if value.get("rows") is None else table_from_json(value["rows"])
        version = VERSION if rows is None else VERSION_WITH_ROWS
        if value["format"] != FORMAT or expect(value["version"], int) != version:
            raise ValueError(f"not a {FORMAT} of version {VERSION}, or {VERSION_WITH_ROWS} by rows")
        world_size = expect(value["world_size"], int)
        if not 0 < world_size <= MAX_RANKS:
            raise ValueError(f"world_size is {world_size}; it is 1 to {MAX_RANKS}")
        layers = table_from_json(value["layers"])
        if any(name.startswith(("#", "@")) for name in layers):
            raise ValueError("a layer's name begins with # or @, as those of other tensors do")
        # Where all layers are reduced, rows may be counted alone.
        first = next(iter(rows.items()), None) if rows is not None else None
        if rows is not None and (rows or layers) and first != _FIRST_COLUMN:
            raise ValueError("the first column of rows is not sample, a number of 64 bits")
        return cls(
            expect(value["run"], str), world_size, layers, expect(value["header"], dict), rows
        )

    def check_rank(self, path: str, rank: int) -> None:
        """Refuse a rank that the recording was not created for."""
        if not 0 <= rank < self.world_size:
            raise RecordingError(f"{path} was made for {self.world_size} ranks; there is no {rank}")

    def place(self, rank: int, number: int, samples_before: int) -> dict[str, JSON]:
        """Return what a chunk says of where it belongs."""
        place = {"rank": rank, "number": number, "samples_before": samples_before}
        return {"run": self.run, **place}

    def state_place(self, rank: int, token: str) -> dict[str, JSON]:
        """Return what the tensors of a state say of where they belong."""
        return {"run": self.run, "rank": rank, "state": token}


class Chunk(TensorFile):
    """A commit.

    Attributes
    ----------
    ids : range, array.array or tuple
        The ids of its samples.
    num_rows : int
        How many rows each of its layers has: those of its samples, unless rows are counted apart.
    rank, samples_before : int
        Whose it is, and how many samples the earlier commits of that rank hold.
    batches : list of int or None
        How many samples each batch has of which something is kept; None where nothing is.
    state : dict or None
        The value that was committed along, and in which file its tensors are.
    """

    def __init__(self, folder: Folder, description: Description, place: dict[str, Any]) -> None:
        super().__init__(folder, chunk_name(place["rank"], place["number"]))
        with parsing(self.path):
            content = self.content
            if {key: content[key] for key in place} != place:
                raise ValueError("it does not belong here, or samples before it are lost")
            self.ids = ids_from_json(content.pop("ids"))
            self.rank: int = place["rank"]
            self.samples_before: int = place["samples_before"]
            self.num_rows = self._counted(description)
            own = [(name, spec.of(self.num_rows)) for name, spec in description.table.items()]
            if list(self.table.items())[: len(own)] != own:
                raise ValueError("its tensors are not those of the recording's layers")
            self.batches = content["batches"]
            self._check_kept(list(self.table)[len(own) :])
            self.state = content["state"]
            if self.state is not None:
                token = expect(self.state, dict)["file"]
                if token is not None and not _TOKEN.fullmatch(token):
                    raise ValueError("its state is nowhere")

    def _counted(self, description: Description) -> int:
        rows = self.content.get("rows")
        if (rows is None) != (description.rows is None):
            raise ValueError("its rows are not counted as the recording's are")
        if not 0 <= (number := len(self.ids) if rows is None else expect(rows, int)) <= MAX_SIZE:
            raise ValueError(f"{number} rows")
        return number

    def _check_kept(self, names: list[str]) -> None:
        wanted: list[str] = []
        if self.batches is not None:
            wanted = [*(f"#{number}" for number in range(len(names) - 1)), VALUES]
            counts = [expect(count, int) for count in expect(self.batches, list)]
            if sum(counts) != len(self.ids) or min(counts, default=0) < 0:
                raise ValueError(f"batches of {len(self.ids)} samples that do not add up")
        if names != wanted or (names and self.table[VALUES].dtype != torch.uint8):
            raise ValueError("what is kept of batches is not all there")


@dataclass
class Run:
    """A recording: its description, and the ranks that were looked at."""

    description: Description
    # Their commits, in order, and who of them is complete.
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether every rank that was looked at has finished."""
        return self.closed == self.chunks.keys()

    def all_chunks(self) -> Iterator[Chunk]:
        """Yield all commits, in the order in which samples are counted."""
        for chunks in self.chunks.values():
            yield from chunks

    def sample_ids(self) -> SampleIds:
        """Return the ids of all samples."""
        ids = SampleIds()
        for chunk in self.all_chunks():
            ids.add(chunk.ids)
        return ids

    def first_samples(self) -> dict[int, int]:
        """Return for each rank how many samples come before its own."""
        counts = [sum(len(chunk.ids) for chunk in chunks) for chunks in self.chunks.values()]
        return dict(zip(self.chunks, accumulate(counts, initial=0), strict=False))

    def last_state(self, rank: int) -> Any:
        """Return what a rank committed last besides samples, or None."""
        return next((one.state for one in reversed(self.chunks[rank]) if one.state), None)

    def state_file(self, rank: int) -> str | None:
        """Return the name of the file with the tensors of that, if there is one."""
        last = self.last_state(rank)
        return None if last is None or last["file"] is None else state_name(rank, last["file"])


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
    counts: dict[int, int] = {}
    for match in filter(None, map(_CHUNK_NAME.fullmatch, names)):
        owner, number = int(match[1]), int(match[2])
        if owner >= description.world_size:
            raise RecordingError(f"{folder.path_of(match[0])} is out of place: no such rank")
        counts[owner] = max(number + 1, counts.get(owner, 0))
    run = Run(description)
    for owner in range(description.world_size) if rank is None else (rank,):
        _read_rank(folder, run, owner, counts.get(owner, 0), manifest_name(owner) in names)
    return run


def read_description(folder: Folder) -> Description:
    """Return what a recording says about itself."""
    with accessing(folder.path):
        if DESCRIPTION_NAME not in folder.names():
            raise RecordingError(f"{folder.path} holds no recording: it has no {DESCRIPTION_NAME}")
    with parsing(folder.path_of(DESCRIPTION_NAME)):
        return Description.from_json(TensorFile(folder, DESCRIPTION_NAME).content)


def _read_rank(folder: Folder, run: Run, rank: int, count: int, is_closed: bool) -> None:
    name, said = manifest_name(rank), None
    if is_closed:
        run.closed.add(rank)
        with parsing(folder.path_of(name)):
            said = TensorFile(folder, name).content
            # A writer may have gone on while names were listed, so that they need not be those of
            # one instant: files are looked for by their numbers.
            count = max(count, len(expect(said["chunks"], list)))
    chunks = run.chunks[rank] = []
    before = 0
    for number in range(count):
        chunks.append(Chunk(folder, run.description, run.description.place(rank, number, before)))
        before += len(chunks[-1].ids)
    if is_closed:
        found = manifest(run.description.run, rank, before, [one.checksum for one in chunks])
        lines = differences(said, found, "manifest")
        if lines:
            raise RecordingError(f"{folder.path_of(name)} does not match the chunks: {lines[0]}")


def read_state(folder: Folder, run: Run, rank: int) -> Packed | None:
    """Return what a rank committed last besides samples, verified."""
    last, name = run.last_state(rank), run.state_file(rank)
    if last is None or name is None:
        return None if last is None else Packed(last["value"], [])
    file = TensorFile(folder, name)
    with parsing(file.path):
        if file.content != run.description.state_place(rank, last["file"]):
            raise ValueError("it does not belong here")
        return Packed(last["value"], [file.read(key) for key in file.table])
