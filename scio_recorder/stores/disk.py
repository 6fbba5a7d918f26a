"""Keeping activations in a folder, durable chunk by chunk.

NOTE [One chunk behind]

Filling a chunk waits for the net and for memory, and making a chunk durable waits for the disk. So
a full chunk goes to a thread, which has one block written while it computes the checksum of the
next, and the loop fills another chunk in the meantime. The next chunk is handed over only when the
last one is durable. So there are never more than two, and a disk that is slower than the net slows
the loop down.

Samples and state that were handed over must not change until they are durable. After a failure
nothing more is written: a chunk after a missing one would leave a gap, and durable samples must be
the first ones.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError, caught_as
from scio_recorder.layer import Operation, RowIdx, TensorSpec, few, text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.stores.disk_format.description import (
    is_url,
    row_column,
)
from scio_recorder.stores.disk_format.reader import Ids, Run
from scio_recorder.stores.disk_format.tensor_file import TensorInfo, as_read, expect
from scio_recorder.stores.disk_format.writer import WriteRight
from scio_recorder.stores.files import (
    DiskTensor,
    EmptyPartError,
    RunReader,
    RunWriter,
    accessing,
    check_settings,
    complete_ranks,
    holds_recording,
    medium_at,
    place_of,
    refuse_repeated_ids,
    scan,
)
from scio_recorder.stores.kept_inputs import Calls, pack, unpack
from scio_recorder.stores.memory import HostBuffer
from scio_recorder.stores.store import (
    Column,
    DeviceBuffer,
    Held,
    Job,
    State,
    Store,
    StoreWriter,
    wait_for,
)
from scio_recorder.tensors.arguments import ProcessRank, this_process, whole

CHUNK_BYTES = 64 << 20
# The most seconds of work that a slow net, or one with only reduced layers, can lose.
_SECONDS_BETWEEN_COMMITS = 30.0
# The seconds for which a process without samples waits for others to begin a recording.
_SECONDS_OF_WAITING = 600.0


class Disk(Store):
    """Keeps samples in a folder or a bucket; samples that are reported durable survive a crash.

    Parameters
    ----------
    path : str or path-like
        The folder, or the URL of a place in a bucket such as ``"s3://bucket/run"``. It is empty,
        does not exist yet, or holds a recording to resume.
    chunk_bytes : int, default 64 MiB
        The bytes of activations that are made durable at a time, up to the next whole batch. Memory
        holds twice as many: those that are being written, and those that arrive meanwhile.
    rank : int, optional
        The number of this process, if several fill one recording with samples of their own. By
        default it comes from a sampler that splits the dataset among processes; without such a
        sampler there is one process.
    world_size : int, optional
        The number of these processes. The recording is complete when all of them are done.

    Notes
    -----
    With several processes, each collects with the same net, layers and settings. A sampler that
    splits, such as ``DistributedSampler``, or ``sample_ids`` says which samples a process has.
    ``collect`` returns the part of its own process; ``open_recording`` gives all parts, in
    the order of the ranks, with reductions merged. ``resume=True`` continues each part by itself,
    in as many processes as before.

    Examples
    --------
    >>> import tempfile, torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    >>> rnet.record("0-1")
    >>> folder = tempfile.TemporaryDirectory()
    >>> recording = rnet.collect([torch.ones(3, 2)], store=Disk(folder.name + "/run"))
    >>> recording["0-1"][2]
    tensor([1., 1.])
    >>> folder.cleanup()
    """

    can_resume = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        chunk_bytes: int = CHUNK_BYTES,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.path = place_of(path)
        self.chunk_bytes = whole("chunk_bytes", chunk_bytes, 1)
        self._is_placed = world_size is not None
        process = (0 if rank is None else rank), (1 if world_size is None else world_size)
        self.rank, self.world_size = ProcessRank.checked(*process, CollectError)
        self.is_shared = self.world_size > 1
        # Whether processes take parts of a recording, and their right to write this one.
        self.is_part = False
        self.right: WriteRight | None = None

    def placed(self, place: ProcessRank, problem: str | None) -> Disk | None:
        """Return the store of one of several processes, unless rank and world size were given.

        Parameters
        ----------
        place : ProcessRank
            The place of this process.
        problem : str or None
            Why its samples are not known.

        Returns
        -------
        Disk or None
            The same folder; None if rank and world size were given.
        """
        if self._is_placed:
            is_same = (self.rank, self.world_size) == place and problem is None
            return self if is_same else None
        if problem is not None:
            raise CollectError(problem)
        made = copy.copy(self)
        (made.rank, made.world_size), made.is_shared = place, True
        return made

    def advice(self) -> str:
        """Return advice, as the end of a message, for processes that collect into one place."""
        number = this_process().world_size
        if self.is_shared or number == 1:
            return ""
        return (
            f". If all {number} processes collect into it: give the loader a sampler that splits "
            "the data between them, such as DistributedSampler, or call collect_parts, or write "
            "sample_ids= and Disk(PATH, rank=, world_size=)"
        )

    def part(self, number: int, num_parts: int, right: WriteRight | None = None) -> Disk:
        """Return the store of one part of such a recording: the first, or the next one.

        Parameters
        ----------
        number, num_parts : int
            The number of the part, and of all parts.
        right : WriteRight, optional
            The right to write it, unless it is complete.

        Returns
        -------
        Disk
            The same folder.
        """
        made = Disk(self.path, self.chunk_bytes, rank=number, world_size=num_parts)
        made.is_part, made.right, made.is_shared = True, right, True
        return made

    def open(self, job: Job) -> DiskWriter:
        """Begin a job, or resume it.

        Parameters
        ----------
        job : Job
            The layers, and the known facts about the data.

        Raises
        ------
        RecordingError
            The folder is in use, holds a recording already, or holds another recording than the
            one to resume.
        """
        return DiskWriter(job, self)


class DiskWriter(StoreWriter):
    """Buffers whole batches until they make a chunk, and has the chunk written; see the NOTE."""

    def __init__(self, job: Job, store: Disk) -> None:
        super().__init__(for_file=True)
        self._architecture = job.architecture
        self._store = store
        self._path = store.path
        # The net's present digest: passes in training mode change its buffers.
        self._settings = job.shared_settings() if store.is_shared else job.settings()
        # The memory of each column that is being written while the other is filled.
        self._resting: dict[RowIdx | str, DeviceBuffer] = {}
        self._staged: list[Ids] = []
        self._committed_at = 0.0
        self._writer: RunWriter | None = None
        # It begins with the first chunk, after the forks of loaders.
        self._thread = ThreadPoolExecutor(1, "scio-disk")
        self._pending: Future[None] | None = None
        self._stored_table: Mapping[str, TensorInfo] | None = None
        check_copies(self._architecture, self._settings["layers"], store)
        if holds_recording(store.path):
            self._go_on(job.resume)
        elif is_url(store.path) and not store.is_part:
            with closing(medium_at(store.path)) as medium, accessing(store.path):
                medium.check_writable(store.rank)

    def column(self, key: RowIdx | str, spec: TensorSpec, first: Tensor) -> Column:
        """Return a buffer for the rows of the next chunk."""
        if self._stored_table is not None:
            stored = self._stored_table.get(_name_in_chunk(key))
            if stored != (spec.shape, spec.dtype):
                named = key if isinstance(key, str) else f"layer {self._architecture[key]}"
                text = (
                    f"{self._path}: {named} gives samples of {spec}, but samples of {stored} are "
                    "stored: give the same data and transform as before, or convert by transform="
                )
                raise caught_as(CollectError, RecordingError(text), text)
        self.devices.add(first.device)
        pinned = first.device.type == "cuda"
        self._resting[key] = HostBuffer(pinned=pinned)
        self.columns[key] = Column(spec, HostBuffer(pinned=pinned), first.shape[0])
        return self.columns[key]

    def on_commit(self, ids: Ids, state: Callable[[], State]) -> None:
        """Make the buffer durable once it holds enough."""
        if self._pending is not None and self._pending.done():
            self._wait()
        if not self._committed_at:
            check_copies(self._architecture, self._settings["layers"], self._store)
            self._committed_at = time.monotonic()
        self._staged.append(ids)
        num_bytes = self.start * self.row_bytes + self.calls.num_bytes
        is_late = time.monotonic() - self._committed_at > _SECONDS_BETWEEN_COMMITS
        if num_bytes >= self._store.chunk_bytes or is_late:
            self._flush(state)
            for key, column in self.columns.items():
                self._resting[key] = column.turn_to(self._resting[key])

    def finish(self, state: Callable[[], State], *, is_complete: bool = True) -> Held:
        """Make the rest durable, and declare the recording complete if it is."""
        try:
            if not self.is_complete:
                if self._writer is None and not self._staged and self._store.is_shared:
                    self._writer = self._begun_without_samples()
                elif self._staged or self._writer is None:
                    self._flush(state)
                self._wait()
                if is_complete and self._writer is not None:
                    self._thread.submit(self._writer.finish).result()
        finally:
            self._close()
        if self._store.is_shared and not self._store.is_part:
            self._compare_ids()
        run = None if self._writer is None else self._writer.run
        return held_by(self._reader(run), self._architecture)

    def _compare_ids(self) -> None:
        """Refuse ids that two ranks have: the last one to end sees the samples of all."""
        with closing(medium_at(self._path)) as medium:
            if len(complete_ranks(medium)) == self._store.world_size:
                refuse_repeated_ids(self._path, scan(medium))

    def abandon(self, state: Callable[[], State] | None) -> None:
        """Save what counts if possible, and close the folder."""
        try:
            if state is not None and self._staged:
                # The earlier failure must be the one that is reported.
                with suppress(CollectError, RecordingError):
                    self._flush(state)
        finally:
            self._close()

    def _close(self) -> None:
        """End the thread after a commit in progress, and release the lock."""
        try:
            wait_for(self.devices)
        finally:
            if self._writer is not None and self._writer.is_open:
                self._thread.submit(self._writer.abort)
            self._thread.shutdown()
            for column in self.columns.values():
                column.let_go()
            self.columns.clear()

    def _wait(self) -> None:
        """Wait until every chunk handed over is durable; after a failure, every call raises."""
        if self._writer is not None:
            # A forked process would wait for a thread that it lacks.
            self._writer.check_usable()
        if self._pending is not None:
            self._pending.result()

    def _flush(self, state: Callable[[], State]) -> None:
        """Hand over one chunk once the one before is durable."""
        wait_for(self.devices)
        packed = pack(state())
        self._wait()
        writer = self._writer = self._writer or self._created()
        # Not before: the traceback of a failure would refer to it.
        chunk = {
            _name_in_chunk(key): column.array[: self.start] for key, column in self.columns.items()
        }
        ids: list[Any] = list(chain.from_iterable(self._staged))
        kept = self.calls.take()
        rows = self.start if self.counts_rows else None

        def append() -> None:
            try:
                writer.append(chunk, ids, rows=rows, state=packed, kept=kept)
            finally:
                # Memory can't grow while anything refers to it.
                chunk.clear()

        self._pending = self._thread.submit(append)
        self.start = 0
        self._staged.clear()
        self._committed_at = time.monotonic()

    def _created(self) -> RunWriter:
        store = self._store
        specs = [
            (key, TensorInfo(column.spec.shape, column.spec.dtype))
            for key, column in self.columns.items()
        ]
        rows = {key: spec for key, spec in specs if isinstance(key, str)}
        try:
            return RunWriter.create(
                self._path,
                layers={text_of(key): spec for key, spec in specs if not isinstance(key, str)},
                header={"architecture": self._architecture.to_dict(), **self._settings},
                rows=rows if self.counts_rows else None,
                rank=store.rank,
                world_size=store.world_size,
                right=store.right,
                check_equal=check_settings,
            )
        except RecordingError as error:
            error.args = (f"{error}{self._store.advice()}",)
            raise

    def _begun_without_samples(self) -> RunWriter:
        if self._stored_table is None:
            # A worker can look for another part meanwhile.
            until = time.monotonic() + (0 if self._store.is_part else _SECONDS_OF_WAITING)
            while not holds_recording(self._path):
                if time.monotonic() >= until:
                    raise EmptyPartError(
                        "there are no samples here, and no other process has recorded a batch yet, "
                        "which would show the shapes of layers"
                    )
                time.sleep(0.5)
            self._go_on(resume=True)
        return self._writer or self._resumed()

    def _resumed(self) -> RunWriter:
        return RunWriter.resume(self._path, rank=self._store.rank, right=self._store.right)

    def _reader(self, run: Run | None = None) -> RunReader:
        rank = self._store.rank if self._store.is_shared else None
        return RunReader(self._path, rank=rank, run=run)

    def _go_on(self, resume: bool) -> None:
        with self._reader() as reader:
            is_joining = self._store.is_shared and not reader.is_begun
            if not (resume or is_joining):
                raise RecordingError(
                    f"{self._path} already holds a recording: resume it with resume=True, read it "
                    "with open_recording, or choose another folder" + self._store.advice()
                )
            stored = {**reader.header, "world_size": reader.world_size}
            requested = {
                "architecture": {"fingerprint": self._architecture.fingerprint},
                **as_read(self._settings),
                "world_size": self._store.world_size,
            }
            check_settings(self._path, stored, requested)
            self.sample_ids = reader.sample_ids
            self.is_complete = reader.complete
            self.num_found_rows = 0 if reader.rows is None else reader.num_rows
            self._stored_table = reader.table
            if is_joining:
                return
            packed = reader.read_state(self._store.rank)
            self.state = None if packed is None else unpack(packed)
            if not reader.complete:
                # Opened at once, so that another active writer is noticed before any pass.
                self._writer = self._resumed()


def _name_in_chunk(key: RowIdx | str) -> str:
    return row_column(key) if isinstance(key, str) else text_of(key)


def check_copies(architecture: Architecture, layers: Iterable[RowIdx | str], store: Any) -> None:
    """Refuse to write what several processes have, or may have, into a store that they share.

    Call it before all passes, and once the first pass has shown which processes see the same
    samples. The first chunk would be too late: processes write it at different times, so one would
    leave others in a pass.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    layers : iterable
        The recorded layers.
    store : Disk
        Knows the number of ranks.

    Raises
    ------
    CollectError
        As many ranks write as there are processes, and some of these see the same samples. Or an
        operation is recorded there, whose output may be a shard.
    """
    count = architecture.num_sharing
    if not store.is_shared or count == 1:
        return
    for layer in map(architecture.__getitem__, layers):
        if isinstance(layer, Operation):
            raise CollectError(
                f"{layer} is inside a net whose layers are spread over processes, so it can't be "
                "known which part of its output this one has: record layers"
            )
    if store.world_size * count > torch.distributed.get_world_size():
        raise CollectError(
            f"{count} processes of this net see the same samples and have all of these layers, so "
            f"that there would be {count} of each row: let one of them write, as in "
            'store=Disk(path) if rank == 0 else "host"'
        )


def held_by(reader: RunReader, architecture: Architecture) -> Held:
    """Return the content of a recording on disk; its samples are read when they are used."""
    _refuse_shards(reader, architecture)
    values = {architecture.resolve(name): DiskTensor(reader, name) for name in reader.layers}
    rows = {name: DiskTensor(reader, row_column(name)) for name in reader.rows or ()}
    layers = reader.header.get("layers") if reader.header.get("inputs") is True else None
    calls = Calls(reader, architecture, layers if isinstance(layers, list) else [])
    return Held(
        values,
        reader.sample_ids,
        calls,
        reader.complete,
        reader.path,
        rows,
        None if reader.rows is None else reader.num_rows,
        # Recordings of earlier versions don't know it.
        expect(reader.header.get("made_with", {}), dict),
    )


def _refuse_shards(reader: RunReader, architecture: Architecture) -> None:
    """Refuse a recording of all shards of layers, which versions before 0.4 put side by side."""
    # A process by itself keeps what it has.
    if reader.rank is not None or reader.world_size == 1:
        return
    sharded = [layer for name in reader.layers if (layer := architecture[name]).shard is not None]
    if sharded:
        raise RecordingError(
            f"{reader.path}: each rank holds a shard of {few(sharded, 4)}, and this version does "
            "not put shards together: open the recording with scio-recorder 0.3, and save() it"
        )
