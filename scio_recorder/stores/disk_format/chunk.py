"""One commit of a recording: its facts about its samples, and its file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from scio_recorder.stores.disk_format.description import VALUES, Description, chunk_name
from scio_recorder.stores.disk_format.ids import ids_from_json, ids_to_json
from scio_recorder.stores.disk_format.jsons import JSON, MAX_SIZE, expect
from scio_recorder.stores.disk_format.medium import Medium, parsing
from scio_recorder.stores.disk_format.tensor_file import TensorFile

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
        self.rank, self.samples_before = rank, samples_before
        self._medium, self._description, self._number = medium, description, number
        self._file: TensorFile | None = None
        if stated is None:
            self._file, said = self._opened()
            stated = self._file.checksum, said
        self.checksum = stated[0]
        with parsing(self.path):
            self._read(stated[1])
            if self._file is not None:
                self._check_table(self._file)

    @property
    def path(self) -> str:
        """The path of its file, for messages."""
        return self._medium.path_of(self.name)

    @property
    def said(self) -> dict[str, JSON]:
        """Its facts about its samples, as in its file."""
        rows = None if self._description.rows is None else self.num_rows
        return said_of(ids_to_json(self.ids), rows, self.batches, self.state)

    @property
    def file(self) -> TensorFile:
        """Its file, which is opened now, and compared with the manifest, if it was not yet."""
        if self._file is None:
            file, said = self._opened()
            with parsing(self.path):
                if (file.checksum, said) != (self.checksum, self.said):
                    raise ValueError("it is not the commit that the manifest lists")
                self._check_table(file)
            self._file = file
        return self._file

    def distrust(self) -> None:
        """Forget which blocks were verified: each is verified again at its next read."""
        if self._file is not None:
            self._file.distrust()

    def verify(self) -> int:
        """Check every block, even if checked before; return the length of the file."""
        return self.file.verify()

    def _opened(self) -> tuple[TensorFile, dict[str, JSON]]:
        file = TensorFile(self._medium, self.name)
        with parsing(file.path):
            place = self._description.place(self.rank, self._number, self.samples_before)
            if {key: file.content[key] for key in place} != place:
                raise ValueError("it does not belong here, or samples before it are lost")
            # Recordings of versions without rows don't mention them.
            said, file.content = {"rows": None, **file.content}, {}
            return file, {key: said[key] for key in said_of(None, None, None, None)}

    def _read(self, said: Mapping[str, Any]) -> None:
        self.ids = ids_from_json(said["ids"])
        rows = said["rows"]
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


def said_of(ids: JSON, rows: JSON, batches: JSON, state: JSON) -> dict[str, JSON]:
    """Return a commit's facts about its samples, as in its file and the manifest."""
    return {"ids": ids, "rows": rows, "batches": batches, "state": state}
