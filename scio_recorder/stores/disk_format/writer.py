"""Writing a recording: every chunk is durable when `RunWriter.append` returns."""

from __future__ import annotations

import os
import re
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.disk_format.beginning import begin, check_rank, describe, temporary_name
from scio_recorder.stores.disk_format.faults import accessing
from scio_recorder.stores.disk_format.folder import Folder, make_folder
from scio_recorder.stores.disk_format.ids import Ids, ids_to_json, to_ids
from scio_recorder.stores.disk_format.jsons import dump, parse, seal
from scio_recorder.stores.disk_format.kept import KeptBatches, kept_tensors
from scio_recorder.stores.disk_format.lock import WriterLock
from scio_recorder.stores.disk_format.run import (
    DESCRIPTION_NAME,
    Chunk,
    Packed,
    Run,
    chunk_name,
    manifest_name,
    place_of,
    read_description,
    read_state,
    scan,
    state_name,
    state_place,
)
from scio_recorder.stores.disk_format.tables import require_little_endian
from scio_recorder.stores.disk_format.tensor_file import (
    Layout,
    check_dense,
    checksum_of,
    spec_of,
    write_tensors,
)

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from scio_recorder.stores.disk_format.jsons import JSON
    from scio_recorder.stores.disk_format.tables import Table


def holds_recording(path: str | os.PathLike[str]) -> bool:
    """Whether there is something in this folder to open or to resume.

    Examples
    --------
    >>> holds_recording("/nonexistent")
    False
    """
    return os.path.lexists(os.path.join(path, DESCRIPTION_NAME))


class RunWriter:
    """Writes one rank's part of a recording; made by `create` or `resume`.

    Use it from one thread at a time of the process that made it. Leaving a ``with`` block closes it
    as `abort` does, so that a recording is complete only where `finish` was called.

    Attributes
    ----------
    sample_ids : SampleIds
        The ids of this rank's durable samples, those of earlier writers included.
    state : Packed or None
        The state that this rank had committed last when it was resumed.
    """

    def __init__(self, folder: Folder, lock: WriterLock, run: Run, rank: int) -> None:
        self._folder = folder
        self._lock = lock
        self._rank = rank
        self._description = run.description
        self._shard = run.shards[rank]
        self.sample_ids = run.sample_ids()
        self.state = read_state(folder, run, rank)
        self._is_finishing = False
        self._state_files: list[str] = []
        # What was found need not be durable: its writer may have been killed before that.
        folder.sync()
        self._clear()
        self._finalizer = weakref.finalize(self, _close, folder, lock)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        layers: Table,
        header: Mapping[str, JSON],
        world_size: int = 1,
        rank: int = 0,
    ) -> Self:
        """Start a recording in a folder that is empty or not there yet, or join in one of several.

        Parameters
        ----------
        path
            The folder; missing ones above it are created.
        layers
            Shape and dtype of one sample of each layer.
        header
            Settings to keep with the recording; those who join must give the same.
        world_size
            How many ranks will write. With several, each begins like this, in any order: the first
            creates the recording, the others join it.
        rank
            Whose part to write.

        Raises
        ------
        CollectError
            If a dtype, a name or the header can't be written.
        RecordingError
            If the folder is not empty, holds samples of this rank or a recording that differs, or
            can't be written to.
        """
        require_little_endian()
        description = describe(layers, header, world_size)
        where = os.fspath(path)
        check_rank(where, description, rank)
        with accessing(where), ExitStack() as stack:
            make_folder(where)
            folder = stack.enter_context(Folder(where))
            lock = _locked(folder, rank, stack)
            writer = cls(folder, lock, begin(folder, description, rank), rank)
            stack.pop_all()
            return writer

    @classmethod
    def resume(cls, path: str | os.PathLike[str], *, rank: int = 0) -> Self:
        """Go on with a recording; what is there is not touched.

        Parameters
        ----------
        path
            The folder.
        rank
            Whose part to write.

        Raises
        ------
        RecordingError
            If there is no recording, it is damaged, this rank of it is complete, or another writer
            is at work on it.
        """
        require_little_endian()
        where = os.fspath(path)
        with accessing(where), ExitStack() as stack:
            folder = stack.enter_context(Folder(where))
            # Before the lock, lest a file appears in a folder that holds something else.
            check_rank(where, read_description(folder), rank)
            lock = _locked(folder, rank, stack)
            run = scan(folder, rank)
            if run.is_complete:
                raise RecordingError(f"{where} is complete" + (f" for rank {rank}" if rank else ""))
            writer = cls(folder, lock, run, rank)
            stack.pop_all()
            return writer

    @property
    def durable(self) -> int:
        """How many samples of this rank are durable."""
        return len(self.sample_ids)

    def append(
        self,
        tensors: Mapping[str, Tensor],
        sample_ids: Sequence[int] | Sequence[str],
        *,
        state: Packed | None = None,
        kept: KeptBatches | None = None,
    ) -> None:
        """Write one chunk: it is durable, all of it, when this returns, and else not there.

        Parameters
        ----------
        tensors
            For each layer a tensor ``[samples, ...]`` of the dtype given at creation, on any
            device; not to be changed while this runs.
        sample_ids
            One for each sample.
        state
            Committed together with the chunk; replaces the state committed before.
        kept
            Committed together with the chunk, and never replaced: something of each whole batch of
            the chunk. It has to be given with every chunk or with none.

        Raises
        ------
        CollectError
            If the tensors are not those that the recording was created for.
        RecordingError
            If the disk fails or is full. What was durable still is, and the same chunk can be
            appended again. Another one can't where it is not known whether this one is there.
        """
        self._check_usable()
        if self._is_finishing:
            raise RecordingError(f"{self._folder.path} is finished; nothing can be added")
        try:
            ids = to_ids(sample_ids)
            self.sample_ids.check(ids)
            held = self._checked(tensors, len(ids))
            if kept is not None:
                held |= kept_tensors(kept, len(ids))
            batches = None if kept is None else tuple(kept.rows)
            chunk = self._commit(ids, held, batches, state)
        except (TypeError, ValueError) as cause:
            raise CollectError(f"a chunk can't be written: {cause}") from cause
        self.sample_ids.add(ids)
        self._shard.chunks.append(chunk)
        if chunk.state_file is not None:
            # The one before stays for readers who have just come upon it.
            self._state_files.append(chunk.state_file)
            for file in self._state_files[:-2]:
                with suppress(OSError):
                    self._folder.unlink(state_name(self._rank, file))
            self._state_files = self._state_files[-2:]

    def finish(self) -> None:
        """Declare this rank's part complete; the recording is when all of them are.

        If this fails, it can be called again.
        """
        self._check_usable()
        self._is_finishing = True
        data = seal(self._shard.manifest(self._description.run))
        name = manifest_name(self._rank)
        with accessing(self._folder.path):
            self._clear()
            self._folder.put_bytes(name, temporary_name(name, self._rank), data)
        self.abort()

    def abort(self) -> None:
        """Close the files; what is durable stays and can be resumed."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.abort()

    def _check_usable(self) -> None:
        where = self._folder.path
        if not self._finalizer.alive:
            raise RecordingError(f"this writer of {where} is closed; resume the recording")
        if not self._lock.held:
            raise RecordingError(
                f"{where} is being written by the process that opened it, not this"
            )

    def _checked(self, tensors: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """Return the tensors in the order of the layers; `ValueError` unless they fit."""
        layers = self._description.layers
        if tensors.keys() != layers.keys():
            odd = sorted(tensors.keys() ^ layers.keys())
            raise ValueError(f"the layers are not those of the recording: {', '.join(odd)}")
        for name, tensor in tensors.items():
            expected, found = layers[name].of(rows), spec_of(tensor)
            if found != expected:
                raise ValueError(
                    f"layer {name} is {found.dtype} {list(found.shape)}, not {expected.dtype} "
                    f"{list(expected.shape)} ({rows} sample ids were given)"
                )
        return {name: tensors[name] for name in layers}

    def _commit(
        self,
        ids: Ids,
        tensors: dict[str, Tensor],
        batches: tuple[int, ...] | None,
        state: Packed | None,
    ) -> Chunk:
        number = len(self._shard.chunks)
        name = chunk_name(self._rank, number)
        file = uuid.uuid4().hex[:16] if state is not None and state.tensors else None
        saved: JSON = None if state is None else {"value": state.value, "file": file}
        # Read at once as it will be read: what is nested too deeply is refused.
        parse(dump({"state": saved}))
        content: dict[str, JSON] = {
            **place_of(self._description, self._rank, number, self.durable),
            "ids": ids_to_json(ids),
            "batches": None if batches is None else list(batches),
            "state": saved,
        }
        put = self._prepared(name, tensors, content)
        with accessing(self._folder.path):
            if state is not None and file is not None:
                numbered = {str(number): tensor for number, tensor in enumerate(state.tensors)}
                place = state_place(self._description, self._rank, file)
                self._prepared(state_name(self._rank, file), numbered, place)()
            return Chunk(name, put(), ids, batches, saved)

    def _prepared(
        self, name: str, tensors: Mapping[str, Tensor], content: Mapping[str, JSON]
    ) -> Callable[[], str]:
        """Return what puts a file in place and returns its checksum; `ValueError` if it can't be.

        Nothing may have been written when it turns out that something can't be.
        """
        for key, tensor in tensors.items():
            check_dense(key, tensor)
        layout = Layout({key: spec_of(tensor) for key, tensor in tensors.items()}, content)

        def put() -> str:
            try:
                return checksum_of(
                    self._folder.put(
                        name,
                        temporary_name(name, self._rank),
                        lambda descriptor: write_tensors(descriptor, tensors, layout),
                    )
                )
            except FileExistsError as cause:
                raise RecordingError(
                    f"{self._folder.path_of(name)} is there already: another writer has committed "
                    "it, or a call that was interrupted; resume the recording"
                ) from cause

        return put

    def _clear(self) -> None:
        """Remove this rank's files that never counted or no longer do."""
        last = self._shard.state_file
        kept = None if last is None else state_name(self._rank, last)
        for name in self._folder.names():
            match = _LEFTOVER.fullmatch(name)
            if match is not None and int(match[1] or match[2]) == self._rank and name != kept:
                # What can't be removed now does no harm.
                with suppress(OSError):
                    self._folder.unlink(name)


# A file that is not whole yet, or the tensors of a state.
_LEFTOVER = re.compile(
    r".+\.(\d{5})-[0-9a-f]{16}\.tmp|state-(\d{5})-[0-9a-f]{16}\.safetensors", re.ASCII
)


def _locked(folder: Folder, rank: int, stack: ExitStack) -> WriterLock:
    lock = WriterLock(folder, f"lock-{rank:05d}")
    stack.callback(lock.release)
    return lock


def _close(folder: Folder, lock: WriterLock) -> None:
    folder.close()
    lock.release()
