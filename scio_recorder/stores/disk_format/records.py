"""The records of a journal and the description of a recording, as values and as JSON.

Reading them raises `ValueError`, `TypeError`, `LookupError` or `ArithmeticError` for whatever was
not written here; callers turn these into the error that names the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from scio_recorder.stores.disk_format.checksums import DIGITS, block_count
from scio_recorder.stores.disk_format.chunks import FileEntry, expected_size
from scio_recorder.stores.disk_format.ids import ids_from_json, ids_to_json
from scio_recorder.stores.disk_format.jsons import JSON, expect
from scio_recorder.stores.disk_format.tables import MAX_SIZE, Table, TensorSpec, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scio_recorder.stores.disk_format.ids import Ids

__all__ = [
    "ChunkRecord",
    "CloseRecord",
    "Description",
    "KeptRecord",
    "OpenRecord",
    "StateRecord",
    "batch_name",
    "rows_table",
]

FORMAT = "scio-recording"
VERSION = 1
MAX_RANKS = 100_000


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
            # Objects have no order for every reader of JSON, and the order places the data.
            "layers": [[name, entry] for name, entry in to_json(self.layers).items()],
            "header": self.header,
        }

    @classmethod
    def from_json(cls, value: Any) -> Description:
        """Return what `to_json` wrote."""
        if value["format"] != FORMAT or expect(value["version"], int) != VERSION:
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        world_size = expect(value["world_size"], int)
        if not 0 < world_size <= MAX_RANKS:
            raise ValueError(f"a world size of {world_size}")
        layers = {expect(name, str): entry for name, entry in expect(value["layers"], list)}
        if len(layers) != len(value["layers"]):
            raise ValueError("a layer is listed twice")
        return cls(
            expect(value["run"], str), world_size, from_json(layers), expect(value["header"], dict)
        )


@dataclass(frozen=True)
class OpenRecord:
    """The first record: whose journal this is, and what was durable before it."""

    run: str
    rank: int
    attempt: int
    samples_before: int

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "kind": "open",
            "run": self.run,
            "rank": self.rank,
            "attempt": self.attempt,
            "samples_before": self.samples_before,
        }


@dataclass(frozen=True)
class CloseRecord:
    """The last record of a rank that has finished: how many samples it has in all its shards."""

    samples: int

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {"kind": "close", "samples": self.samples}


@dataclass(frozen=True)
class StateRecord:
    """What was committed along with a chunk: JSON values here, tensors in a file of their own."""

    values: Mapping[str, JSON]
    table: Table
    file: FileEntry | None

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "values": dict(self.values),
            "tensors": [[name, entry] for name, entry in to_json(self.table).items()],
            "file": _file_to_json(self.file),
        }

    @classmethod
    def from_json(cls, value: Any) -> StateRecord:
        """Return what `to_json` wrote."""
        pairs = expect(value["tensors"], list)
        table = from_json({expect(name, str): entry for name, entry in pairs})
        file = _file_from_json(value["file"], table)
        return cls(expect(value["values"], dict), table, file)


@dataclass(frozen=True)
class KeptRecord:
    """What is kept of each batch of a chunk, in a file of its own, and never replaced."""

    batches: tuple[int, ...]
    table: Table
    file: FileEntry

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "batches": list(self.batches),
            "tensors": [[name, entry] for name, entry in to_json(self.table).items()],
            "file": _file_to_json(self.file),
        }

    @classmethod
    def from_json(cls, value: Any, rows: int) -> KeptRecord:
        """Return what `to_json` wrote."""
        batches = tuple(expect(count, int) for count in expect(value["batches"], list))
        if sum(batches) != rows or any(count < 0 for count in batches):
            raise ValueError(f"batches of {rows} samples that do not add up")
        pairs = expect(value["tensors"], list)
        table = from_json({expect(name, str): entry for name, entry in pairs})
        for number in range(len(batches)):
            spec = table[batch_name(number)]
            if spec.dtype is not torch.uint8 or len(spec.shape) != 1:
                raise ValueError(f"{batch_name(number)} is no text")
        file = _file_from_json(value["file"], table)
        if file is None:
            raise ValueError("nothing is kept")
        return cls(batches, table, file)


@dataclass(frozen=True)
class ChunkRecord:
    """One commit: some samples of every layer."""

    ids: Ids
    file: FileEntry | None
    state: StateRecord | None
    kept: KeptRecord | None = None

    @property
    def rows(self) -> int:
        """How many samples were committed."""
        return len(self.ids)

    @property
    def files(self) -> list[FileEntry]:
        """The files that the commit wrote, in the order of their numbers."""
        files = [
            self.file,
            None if self.kept is None else self.kept.file,
            None if self.state is None else self.state.file,
        ]
        return [file for file in files if file is not None]

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "kind": "chunk",
            "ids": ids_to_json(self.ids),
            "file": _file_to_json(self.file),
            "kept": None if self.kept is None else self.kept.to_json(),
            "state": None if self.state is None else self.state.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any, layers: Table) -> ChunkRecord:
        """Return what `to_json` wrote."""
        ids = ids_from_json(value["ids"])
        file = _file_from_json(value["file"], rows_table(layers, len(ids)))
        state = None if value["state"] is None else StateRecord.from_json(value["state"])
        kept = None if value["kept"] is None else KeptRecord.from_json(value["kept"], len(ids))
        return cls(ids, file, state, kept)


def batch_name(number: int) -> str:
    """Return the name of the text that says what is kept of a batch of a chunk."""
    return f"batch-{number}"


def rows_table(layers: Table, rows: int) -> dict[str, TensorSpec]:
    """Return what a chunk of ``rows`` samples holds."""
    return {name: spec.of(rows) for name, spec in layers.items()}


def _file_to_json(file: FileEntry | None) -> JSON:
    if file is None:
        return None
    return {"number": file.number, "bytes": file.num_bytes, "blocks": list(file.blocks)}


def _file_from_json(value: Any, table: Table) -> FileEntry | None:
    # Without tensors there is no file, and with them always one.
    if not table:
        return expect(value, type(None))
    file = FileEntry(
        expect(value["number"], int),
        expect(value["bytes"], int),
        tuple(expect(blocks, str) for blocks in expect(value["blocks"], list)),
    )
    lengths = [block_count(spec.num_bytes) * DIGITS for spec in table.values()]
    if [len(blocks) for blocks in file.blocks] != lengths:
        raise ValueError("checksums are missing")
    if not 0 <= file.number < 10**8 or not file.num_bytes == expected_size(table) <= MAX_SIZE:
        raise ValueError("a file of an impossible number or size")
    return file
