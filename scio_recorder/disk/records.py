"""The records of a journal and the description of a recording, as values and as JSON.

Reading them raises `ValueError`, `TypeError`, `LookupError` or `ArithmeticError` for whatever was
not written here; callers turn these into the error that names the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scio_recorder.disk.checksums import DIGITS, block_count
from scio_recorder.disk.chunks import FileEntry, expected_size
from scio_recorder.disk.ids import ids_from_json, ids_to_json
from scio_recorder.disk.jsons import JSON, expect
from scio_recorder.disk.tables import MAX_SIZE, Table, TensorSpec, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scio_recorder.disk.ids import Ids

__all__ = ["ChunkRecord", "CloseRecord", "Description", "OpenRecord", "StateRecord", "rows_table"]

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
class ChunkRecord:
    """One commit: some samples of every layer."""

    ids: Ids
    file: FileEntry | None
    state: StateRecord | None

    @property
    def rows(self) -> int:
        """How many samples were committed."""
        return len(self.ids)

    @property
    def files(self) -> list[FileEntry]:
        """The files that the commit wrote, in the order of their numbers."""
        files = [self.file, None if self.state is None else self.state.file]
        return [file for file in files if file is not None]

    def to_json(self) -> dict[str, JSON]:
        """Return this as JSON."""
        return {
            "kind": "chunk",
            "ids": ids_to_json(self.ids),
            "file": _file_to_json(self.file),
            "state": None if self.state is None else self.state.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any, layers: Table) -> ChunkRecord:
        """Return what `to_json` wrote."""
        ids = ids_from_json(value["ids"])
        file = _file_from_json(value["file"], rows_table(layers, len(ids)))
        state = None if value["state"] is None else StateRecord.from_json(value["state"])
        return cls(ids, file, state)


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
