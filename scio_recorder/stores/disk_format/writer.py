"""Writing a recording: every chunk is durable when `RunWriter.append` returns."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scio_recorder.stores.disk_format.description import (
    DESCRIPTION_NAME,
    SAMPLE,
    VALUES,
    Description,
    check_empty,
    check_equal,
    chunk_name,
    manifest_name,
    medium_at,
    read_description,
    state_name,
)
from scio_recorder.stores.disk_format.medium import (
    ContentError,
    FormatError,
    Medium,
    WriteAt,
    accessing,
)
from scio_recorder.stores.disk_format.reader import (
    KeptBatches,
    Packed,
    Run,
    ids_to_json,
    scan,
    to_ids,
)
from scio_recorder.stores.disk_format.tensor_file import (
    JSON,
    Table,
    as_read,
    dump,
    file_writer,
    table_of,
    table_to_json,
)

_STATE = re.compile(r"state-\d{5}-[0-9a-f]{16}\.safetensors", re.ASCII)


class WriteRight(NamedTuple):
    """The right to write a rank without locking it, which somebody else grants and may withdraw.

    Parameters
    ----------
    check : callable
        Called before and after each file is put in place. It raises an error once the right is
        lost: then nothing is written, and nothing that was is reported as durable.
    is_inherited : bool, default False
        Whether an earlier holder may have left files.
    """

    check: Callable[[], object]
    is_inherited: bool = False


class _NewRun(NamedTuple):
    """A recording to create, or to join if another rank has created it with the same settings."""

    description: Description
    write: Callable[[WriteAt], str]
    check_equal: Callable[[str, dict[str, Any], dict[str, Any]], object]


class RunWriter:
    """Writes one rank's part of a recording; made by `create` or `resume`.

    Use it from one thread at a time, in the process that made it. Leaving a ``with`` block closes
    it as `abort` does, so a recording is complete only if `finish` was called.

    Attributes
    ----------
    run : Run
        What is durable of this rank, commits of earlier writers included.
    sample_ids : SampleIds
        The ids of its samples.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        right: WriteRight | None,
        new: _NewRun | None = None,
    ) -> None:
        self._rank, self._right = rank, right
        self._check_right = right.check if right is not None else lambda: None
        self._medium = medium_at(path, makes_it=new is not None and right is None)
        try:
            with accessing(path):
                self._open(new)
            if new is not None and self.run.description.run != new.description.run:
                _check_joining(path, self.run, new, rank)
        except BaseException as error:
            self.abort()
            if isinstance(error, Exception):
                # Samples of another writer are in the way of one that has lost its right.
                self._check_right()
            raise

    def _open(self, new: _NewRun | None) -> None:
        """Find out what is durable, of a new recording or one to resume."""
        medium, rank = self._medium, self._rank
        if new is None:
            # Before the lock, so that no file appears in a folder that holds something else.
            read_description(medium).check_rank(medium.path, rank)
        if self._right is None:
            medium.lock(f"lock-{rank:05d}")
        self.run = scan(medium, rank) if new is None else begun(medium, new, rank)
        if new is None and self.run.is_complete:
            raise FormatError(f"{medium.path} is complete" + (f" for rank {rank}" * (rank > 0)))
        self.sample_ids = self.run.sample_ids()
        self._is_finishing = False
        # The files with the tensors of the last states that this writer has put.
        self._states: list[str] = []
        # Whether others may have left files of this rank that don't count.
        self._has_leftovers = (
            self._right is None or self._right.is_inherited or bool(self.run.chunks[rank])
        )
        if self.run.chunks[rank]:
            # Found commits need not be durable: their writer may have been killed before that.
            medium.sync()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        layers: Table,
        header: Mapping[str, JSON],
        rows: Table | None = None,
        world_size: int = 1,
        rank: int = 0,
        right: WriteRight | None = None,
        check_equal: Callable[[str, dict[str, Any], dict[str, Any]], object] = check_equal,
    ) -> Self:
        """Start a recording in an empty or missing folder, or join one of several ranks.

        Parameters
        ----------
        path
            The folder, which is created if it is missing, with those above it; or the URL of a
            place in a bucket.
        layers
            Shape and dtype of one row of each layer.
        header
            Settings to keep with the recording; ranks that join must give the same.
        rows
            If rows are not samples: the columns of facts about each, "sample" first.
        world_size
            The number of ranks that will write. Each calls this, in any order: the first creates
            the recording, the others join it.
        rank
            The rank whose part to write.
        right
            Grants writing it, in place of a lock.
        check_equal
            ``path, stored settings, given settings``: raises an error if they differ too much for a
            rank to join.

        Raises
        ------
        ContentError
            A dtype, a name or the header can't be written.
        FormatError
            The folder is not empty, holds samples of this rank or a different recording, or is not
            writable.
        """
        columns = None if rows is None else dict(rows)
        run = uuid.uuid4().hex
        described = Description(run, world_size, dict(layers), dict(header), columns)
        try:
            said = described.to_json()
            description, write = Description.from_json(as_read(said)), file_writer({}, said)
        except (TypeError, ValueError) as cause:
            raise ContentError(f"a recording can't be described: {cause}") from cause
        description.check_rank(os.fspath(path), rank)
        return cls(os.fspath(path), rank, right, _NewRun(description, write, check_equal))

    @classmethod
    def resume(
        cls, path: str | os.PathLike[str], *, rank: int = 0, right: WriteRight | None = None
    ) -> Self:
        """Continue a recording; its files are not changed.

        Parameters
        ----------
        path
            The folder.
        rank
            The rank whose part to write.
        right
            Grants writing it, in place of a lock.

        Raises
        ------
        FormatError
            There is no recording, it is damaged, this rank of it is complete, or another writer is
            active.
        """
        return cls(os.fspath(path), rank, right)

    @property
    def durable(self) -> int:
        """The number of this rank's durable samples."""
        return len(self.sample_ids)

    def append(
        self,
        tensors: Mapping[str, Tensor],
        sample_ids: Sequence[int] | Sequence[str],
        *,
        rows: int | None = None,
        state: Packed | None = None,
        kept: KeptBatches | None = None,
    ) -> None:
        """Write one chunk, which is durable as a whole when this returns, and otherwise absent.

        Parameters
        ----------
        tensors
            For each layer a tensor ``[rows, ...]`` of the dtype given at creation, on any device,
            and the columns of rows by the names from `row_column`; not to be changed while this
            runs.
        sample_ids
            One for each new sample.
        rows
            The number of rows, if they are not samples. They may belong to samples of earlier
            chunks.
        state
            Committed together with the chunk; replaces the state committed before.
        kept
            Committed together with the chunk, and never replaced: values of each whole batch of the
            chunk. They must be given with every chunk or with none.

        Raises
        ------
        ContentError
            The tensors are not those for which the recording was created.
        FormatError
            The disk fails or is full. Durable chunks stay, and the same chunk can be appended
            again, unless it is unknown whether it was written.
        """
        self.check_usable()
        if self._is_finishing:
            raise FormatError(f"{self._medium.path} is finished; nothing can be added")
        try:
            ids = to_ids(sample_ids)
            self.sample_ids.check(ids)
            held = self._checked(tensors, len(ids), rows)
            if kept is not None:
                held |= _kept_tensors(kept, len(ids))
            token = uuid.uuid4().hex[:16] if state is not None and state.tensors else None
            number = len(self.run.chunks[self._rank])
            content: dict[str, JSON] = {
                **self.run.description.place(self._rank, number, self.durable),
                "ids": ids_to_json(ids),
                "rows": rows,
                "batches": None if kept is None else list(kept.rows),
                "state": None if state is None else {"value": state.value, "file": token},
            }
            files = [(chunk_name(self._rank, number), file_writer(held, content))]
            if state is not None and token is not None:
                named = {str(number): tensor for number, tensor in enumerate(state.tensors)}
                place = self.run.description.state_place(self._rank, token)
                files.insert(0, (state_name(self._rank, token), file_writer(named, place)))
        except (TypeError, ValueError) as cause:
            raise ContentError(f"a chunk can't be written: {cause}") from cause
        for name, write in files:
            stated = self._put(name, write), content
        self.run.add(self._rank, stated)
        self.sample_ids.add(ids)
        if token is not None:
            # The last but one stays for readers that have just found it.
            self._remove(self._states[:-1])
            self._states = [*self._states[-1:], state_name(self._rank, token)]

    def finish(self) -> None:
        """Declare this rank's part complete; the recording is complete when all parts are.

        If this fails, it can be called again, or the recording resumed.
        """
        self.check_usable()
        self._is_finishing = True
        listed, chunks = self.run.listed(self._rank), self.run.chunks[self._rank]
        try:
            write = file_writer({}, {**listed, "commits": [chunk.said for chunk in chunks]})
        except ValueError:
            # This is too large for a header, so readers open the commits.
            write = file_writer({}, {**listed, "commits": None})
        self._put(manifest_name(self._rank), write)
        self.run.closed.add(self._rank)
        self._remove_what_does_not_count()
        self.abort()

    def _put(self, name: str, write: Callable[[WriteAt], str]) -> str:
        """Put a file in place, unless the right to do so is lost by then."""
        self._check_right()
        try:
            with accessing(self._medium.path):
                written = self._medium.put(name, f"{self._rank:05d}", write)
        except FormatError:
            # It can leave a state to which no commit refers.
            self._has_leftovers = True
            # The writer that has the right now may have removed the unfinished file.
            self._check_right()
            raise
        self._check_right()
        return written

    def abort(self) -> None:
        """Close the files; durable chunks stay, and the recording can be resumed."""
        self._medium.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.abort()

    @property
    def is_open(self) -> bool:
        """Whether this very process can write with it; a forked one can't."""
        return self._medium.is_open

    def check_usable(self) -> None:
        """Raise `FormatError` unless it `is_open`."""
        if not self.is_open:
            raise FormatError(
                f"this writer of {self._medium.path} is closed, or another process opened it: "
                "resume the recording"
            )

    def _checked(
        self, tensors: Mapping[str, Tensor], samples: int, rows: int | None
    ) -> dict[str, Tensor]:
        """Return the tensors in the order of the layers; `ValueError` if they don't fit."""
        if (rows is None) != (self.run.description.rows is None):
            raise ValueError(
                f"rows={rows}, but the recording was created with other rows or without"
            )
        number = samples if rows is None else rows
        wanted = {name: spec.of(number) for name, spec in self.run.description.table.items()}
        given_table = table_of(tensors)
        for name in wanted | given_table:
            if wanted.get(name) != given_table.get(name):
                raise ValueError(
                    f"layer {name} is {given_table.get(name, 'missing')}, not "
                    f"{wanted.get(name, 'one of the recording')} ({samples} sample ids were given)"
                )
        total = self.durable + samples
        if rows and SAMPLE in tensors:
            first, last = map(int, tensors[SAMPLE].aminmax())
            if not 0 <= first <= last < total:
                raise ValueError(f"there are rows of samples other than the {total} samples here")
        return {name: tensors[name] for name in wanted}

    def _remove_what_does_not_count(self) -> None:
        """Remove this rank's files that don't count, whoever put them.

        Only now that the manifest stands: another writer may be active that has lost its right, or
        never had any, and be about to commit and to refer to a state. It can't behind a manifest.
        """
        names, current = self._states, self.run.state_file(self._rank)
        if self._has_leftovers:
            with suppress(OSError):
                listed = self._medium.names(state_name(self._rank, "").partition(".")[0])
                names = list(filter(_STATE.fullmatch, listed))
                names += self._medium.unfinished(f"{self._rank:05d}")
        self._remove(name for name in names if name != current)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            # A file that can't be removed now does no harm.
            with suppress(OSError):
                self._medium.unlink(name)


def _kept_tensors(kept: KeptBatches, rows: int) -> dict[str, Tensor]:
    """Return the kept tensors for a chunk's file; `ValueError` if they don't fit its samples."""
    if len(kept.values) != len(kept.rows) or sum(kept.rows) != rows:
        raise ValueError(f"batches of {list(kept.rows)} samples are kept with {rows} samples")
    text = dump(list(kept.values))
    tensors = {f"#{number}": tensor for number, tensor in enumerate(kept.tensors)}
    return tensors | {VALUES: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def begun(medium: Medium, new: _NewRun, rank: int) -> Run:
    """Return a new recording, whose description is written now, or that of another rank.

    If several create it at once, the first one does, and the others join it.
    """
    if not medium.has(DESCRIPTION_NAME):
        check_empty(medium)
        with suppress(FileExistsError):
            medium.put(DESCRIPTION_NAME, f"{rank:05d}", new.write)
            return Run(medium, new.description, {rank: []})
    return scan(medium, rank)


def _check_joining(path: str, run: Run, new: _NewRun, rank: int) -> None:
    """Refuse a rank that can't join the recording that another has created."""
    if new.description.world_size == run.description.world_size == 1:
        raise FormatError(f"{path} already holds a recording; resume it or choose another folder")
    new.check_equal(path, _settings(run.description), _settings(new.description))
    if run.chunks[rank] or run.closed:
        raise FormatError(
            f"{path} already holds samples of rank {rank}: resume it, or choose another folder"
        )


def _settings(description: Description) -> dict[str, Any]:
    """Return what ranks must agree in: the settings, and shapes and dtypes, in any order."""
    return {
        **description.header,
        "world_size": description.world_size,
        "values": dict(table_to_json(description.table)),  # type: ignore[arg-type]  # a table is pairs
    }
