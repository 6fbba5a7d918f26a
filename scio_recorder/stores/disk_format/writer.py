"""Writing a recording: every chunk is durable when `RunWriter.append` returns."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.disk_format.checks import (
    check_joining,
    check_open,
    check_rank,
    check_same,
    check_tensors,
    describe,
    refuse_contents,
    sealed,
    split_state,
)
from scio_recorder.stores.disk_format.chunks import FileEntry, spec_of
from scio_recorder.stores.disk_format.faults import accessing
from scio_recorder.stores.disk_format.folder import Folder, make_folder
from scio_recorder.stores.disk_format.ids import SampleIds, to_ids
from scio_recorder.stores.disk_format.jsons import seal
from scio_recorder.stores.disk_format.kept import KeptBatches, kept_record, kept_tensors
from scio_recorder.stores.disk_format.lock import WriterLock
from scio_recorder.stores.disk_format.reader import load_state
from scio_recorder.stores.disk_format.records import (
    ChunkRecord,
    CloseRecord,
    KeptRecord,
    OpenRecord,
    StateRecord,
)
from scio_recorder.stores.disk_format.run import (
    CHUNK_NAME,
    CREATION_LOCK_NAME,
    DESCRIPTION_NAME,
    MANIFEST_NAME,
    Run,
    lock_name,
    read_description,
    scan,
)
from scio_recorder.stores.disk_format.shard import ShardWriter
from scio_recorder.stores.disk_format.tables import require_little_endian

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from scio_recorder.stores.disk_format.jsons import JSON
    from scio_recorder.stores.disk_format.records import Description
    from scio_recorder.stores.disk_format.tables import Table

__all__ = ["RunWriter", "holds_recording"]


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
    state : dict or None
        The state that this rank had committed last when it was resumed.
    """

    def __init__(self, root: Folder, lock: WriterLock, run: Run, rank: int) -> None:
        self._root = root
        self._lock = lock
        self._rank = rank
        self._layers = run.description.layers
        self.sample_ids = SampleIds()
        shards = run.of_rank(rank)
        for shard in shards:
            for chunk in shard.chunks:
                self.sample_ids.add(chunk.ids)
        self.state = load_state(root, run, rank)
        self._state_files: list[FileEntry | None] = []
        self._finished = False
        opening = OpenRecord(run.description.run, rank, len(shards), self.durable)
        self._shard = ShardWriter(root, opening)
        self._finalizer = weakref.finalize(self, _close, self._shard, root, lock)

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
            Settings to keep with the recording; resuming compares all of them.
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
            root = stack.enter_context(Folder.open(where))
            lock = WriterLock(root, lock_name(rank))
            stack.callback(lock.release)
            writer = cls(root, lock, _begin(root, description, rank), rank)
            stack.pop_all()
            return writer

    @classmethod
    def resume(
        cls,
        path: str | os.PathLike[str],
        *,
        layers: Table,
        header: Mapping[str, JSON],
        rank: int = 0,
    ) -> Self:
        """Continue a recording in a shard of its own; what is there is not touched.

        Parameters
        ----------
        path, layers, header
            As for `create`; layers and header must be equal to those stored.
        rank
            Whose part to write.

        Raises
        ------
        CollectError
            As for `create`.
        RecordingError
            If there is no recording, it is damaged, this rank of it is complete, it was made with
            other settings, or another writer is at work on it.
        """
        require_little_endian()
        where = os.fspath(path)
        with accessing(where), ExitStack() as stack:
            root = stack.enter_context(Folder.open(where))
            # Before the lock, lest a file appears in a folder that holds something else.
            stored = read_description(root)
            check_same(root.path, stored, describe(layers, header, 1))
            check_rank(root.path, stored, rank)
            lock = WriterLock(root, lock_name(rank))
            stack.callback(lock.release)
            run = scan(root)
            check_open(root.path, run, rank)
            writer = cls(root, lock, run, rank)
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
        state: Mapping[str, Tensor | JSON] | None = None,
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
            If the disk fails or is full. What was durable still is. Unless the journal itself was
            hit, in which case every further call says so, the chunk can be appended again.
        """
        self._check_usable()
        try:
            ids = to_ids(sample_ids)
            check_tensors(self._layers, tensors, len(ids))
            self.sample_ids.check(ids)
            values, state_tensors = split_state(state or {})
            batches = None if kept is None else kept_tensors(kept, len(ids))
            with accessing(self._shard.path):
                file = self._shard.store({name: tensors[name] for name in self._layers})
                beside = None if kept is None else self._save_kept(kept, batches or {})
                saved = self._save_state(values, state_tensors) if state is not None else None
                if file is not None or beside is not None or state_tensors:
                    self._shard.sync_names()
                self._shard.commit(ChunkRecord(ids, file, saved, beside).to_json())
        except (TypeError, ValueError) as cause:
            raise CollectError(f"a chunk can't be written: {cause}") from cause
        self.sample_ids.add(ids)
        self._shard.settle()
        if saved is not None:
            self._replace_state(saved.file)

    def finish(self) -> None:
        """Declare this rank's part complete; the last rank to do so writes the manifest.

        If this fails, it can be called again, unless the journal itself was hit.
        """
        self._check_usable(finishing=True)
        with accessing(self._root.path):
            if not self._finished:
                self._remove_leftovers()
                self._shard.commit(CloseRecord(self.durable).to_json())
                self._finished = True
                self._shard.settle()
            run = scan(self._root)
            if run.complete:
                temporary = _temporary(MANIFEST_NAME, self._rank)
                self._root.replace_file(MANIFEST_NAME, seal(run.manifest()), temporary)
        self.abort()

    def abort(self) -> None:
        """Close the files; what is durable stays and can be resumed."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def _check_usable(self, *, finishing: bool = False) -> None:
        where = self._root.path
        if not self._finalizer.alive:
            raise RecordingError(f"this writer of {where} is closed; resume the recording")
        if not self._lock.held:
            raise RecordingError(
                f"{where} is being written by the process that opened it, not this"
            )
        if self._finished and not finishing:
            raise RecordingError(f"{where} is finished; nothing can be added")

    def _save_state(self, values: dict[str, JSON], tensors: dict[str, Tensor]) -> StateRecord:
        table = {name: spec_of(tensor) for name, tensor in tensors.items()}
        return StateRecord(values, table, self._shard.store(tensors))

    def _save_kept(self, kept: KeptBatches, tensors: dict[str, Tensor]) -> KeptRecord | None:
        file = self._shard.store(tensors)
        return None if file is None else kept_record(kept, tensors, file)

    def _replace_state(self, file: FileEntry | None) -> None:
        # The one before the last stays, should the record that replaces it be lost with the disk.
        self._state_files.append(file)
        for old in filter(None, self._state_files[:-2]):
            self._shard.discard(old)
        self._state_files = self._state_files[-2:]

    def _remove_leftovers(self) -> None:
        """Remove this rank's files that never counted or no longer do.

        What a closed rank's folders hold is exactly what its journals name.
        """
        run = scan(self._root)
        for shard in run.of_rank(self._rank):
            keep = run.files_of(shard)
            with self._root.subfolder(shard.name) as folder:
                for name in folder.names():
                    if CHUNK_NAME.fullmatch(name.removesuffix(".tmp")) and name not in keep:
                        folder.unlink(name)
                folder.sync()


def _begin(root: Folder, description: Description, rank: int) -> Run:
    """Return the recording of this description: created now, or by another rank."""
    with ExitStack() as stack:
        if description.world_size > 1:
            creating = WriterLock(root, CREATION_LOCK_NAME, waits=True)
            stack.callback(creating.release)
            if DESCRIPTION_NAME in root.names():
                run = scan(root)
                check_joining(root.path, run, description, rank)
                return run
        refuse_contents(root)
        root.replace_file(DESCRIPTION_NAME, sealed(description), _temporary(DESCRIPTION_NAME))
        return Run(description)


def _close(shard: ShardWriter, root: Folder, lock: WriterLock) -> None:
    shard.close()
    root.close()
    lock.release()


def _temporary(name: str, rank: int = 0) -> str:
    return f"{name}.{rank:05d}.tmp"
