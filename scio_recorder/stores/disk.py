"""Keeping activations in a folder, durable chunk by chunk."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.agreement import disagreements
from scio_recorder.stores.background import BackgroundWriter
from scio_recorder.stores.base import Held, Job, State, Store, StoreWriter
from scio_recorder.stores.buffers import Column, HostBuffer
from scio_recorder.stores.calls import Calls, KeptCalls
from scio_recorder.stores.disk_format import (
    RunReader,
    RunWriter,
    TensorSpec,
    holds_recording,
)
from scio_recorder.stores.disk_format.ids import Ids, to_ids
from scio_recorder.stores.disk_format.jsons import dump, parse
from scio_recorder.stores.disk_tensor import DiskTensor
from scio_recorder.stores.memory import wait_for
from scio_recorder.stores.nodes import pack, unpack
from scio_recorder.tensors.arguments import whole

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture


CHUNK_BYTES = 64 << 20
# A net that is slow, or whose layers are all reduced, loses no more than so much work.
_SECONDS_BETWEEN_COMMITS = 30.0


class Disk(Store):
    """Keeps samples in a folder; what is reported durable survives a crash.

    Parameters
    ----------
    path : str or path-like
        The folder: empty or not there yet, or to be resumed.
    chunk_bytes : int, default 64 MiB
        How many bytes of activations are made durable at a time, to the next whole batch. Memory
        holds two times as many: those that are being written, and those that come meanwhile.
    rank : int, default 0
        The number of this process, where several fill one recording with samples of their own.
    world_size : int, default 1
        How many processes do. The recording is complete when all of them are.

    Notes
    -----
    With several processes, each collects with the same net, layers and settings, and says by
    ``sample_ids`` which samples it has seen. What ``collect`` returns is the part of its own
    process; ``open_recording`` gives all parts, in the order of the ranks, with reductions merged.
    ``resume=True`` goes on with each part on its own, in as many processes as before.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    >>> rnet.record("0-1")
    >>> folder = tempfile.TemporaryDirectory()
    >>> recording = rnet.collect([torch.ones(3, 2)], store=Disk(folder.name + "/run"))
    >>> recording["0-1"][1:]
    tensor([[1., 1.],
            [1., 1.]])
    >>> folder.cleanup()
    """

    can_resume = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        chunk_bytes: int = CHUNK_BYTES,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.path = os.fspath(path)
        self.chunk_bytes = whole("chunk_bytes", chunk_bytes, 1)
        self.world_size = whole("world_size", world_size, 1)
        self.rank = whole("rank", rank, 0)
        if self.rank >= self.world_size:
            raise CollectError(
                f"rank={rank} of world_size={world_size}: ranks are counted from 0 to "
                f"{world_size - 1}"
            )
        self.is_shared = world_size > 1

    def open(self, job: Job) -> DiskWriter:
        """Begin a job, or go on with it.

        Parameters
        ----------
        job : Job
            The layers, and what is known of the data.

        Returns
        -------
        StoreWriter
            What takes the batches.

        Raises
        ------
        RecordingError
            The folder is in use, holds a recording already, or another than is to be resumed.
        """
        return DiskWriter(job, self)


class _TurningColumn(Column):
    """A column with a second memory: the one is filled while the other is written."""

    __slots__ = ("_is_pinned", "_resting")

    def __init__(self, spec: TensorSpec, rows: int, is_pinned: bool) -> None:
        super().__init__(spec, HostBuffer(pinned=is_pinned), rows, is_exact=False)
        self._is_pinned = is_pinned
        self._resting: Column | None = None

    def turn(self, rows: int) -> Tensor:
        """Return the samples that were put, and go on in the other memory."""
        filled, resting = self.array[:rows], self._resting
        if resting is None:
            buffer = HostBuffer(pinned=self._is_pinned)
            resting = self._resting = Column(self.spec, buffer, self.capacity, is_exact=False)
        for name in Column.__slots__:
            mine, other = getattr(self, name), getattr(resting, name)
            setattr(self, name, other)
            setattr(resting, name, mine)
        return filled


class DiskWriter(StoreWriter):
    """Buffers whole batches until there is a chunk, and has that appended."""

    def __init__(self, job: Job, store: Disk) -> None:
        super().__init__()
        self._job = job
        self._store = store
        self._path = store.path
        self._columns: dict[DepthIdx, _TurningColumn] = {}
        self._devices: set[torch.device] = set()
        self._staged: list[Ids] = []
        self.calls = KeptCalls(for_file=True)
        self._committed_at = time.monotonic()
        self._writer: BackgroundWriter | None = None
        self._found: State | None = None
        self._found_layers: dict[str, TensorSpec] | None = None
        self._is_complete = False
        # Of the net as it is now: passes in training mode change its buffers.
        self._settings = job.settings()
        if holds_recording(store.path):
            self._go_on()

    @property
    def is_complete(self) -> bool:
        """Whether the folder already holds everything."""
        return self._is_complete

    @property
    def state(self) -> State | None:
        """What was committed last."""
        return self._found

    def column(self, label: DepthIdx, spec: TensorSpec, first: Tensor) -> Column:
        """Return a buffer for the samples of the next chunk."""
        name = str(self._job.architecture[label].label)
        if self._found_layers is not None and self._found_layers.get(name) != spec:
            stored = self._found_layers.get(name)
            raise RecordingError(
                f"{self._path}: layer {self._job.architecture[label]} gives {spec}, and {stored} "
                "is stored: resume with the same data and transform"
            )
        self._devices.add(first.device)
        is_pinned = first.device.type == "cuda"
        column = self._columns[label] = _TurningColumn(spec, first.shape[0], is_pinned)
        return column

    def commit(
        self,
        ids: Ids,
        state: Callable[[], State],
        calls: Mapping[str, Any] | None = None,
    ) -> None:
        """Count a batch, and make what is buffered durable once there is enough of it."""
        if self._writer is not None:
            self._writer.check()
        super().commit(ids, state, calls)
        self._staged.append(ids)
        sample_bytes = sum(column.spec.nbytes for column in self._columns.values())
        num_bytes = self.start * sample_bytes + self.calls.num_bytes
        is_late = time.monotonic() - self._committed_at > _SECONDS_BETWEEN_COMMITS
        if num_bytes >= self._store.chunk_bytes or is_late:
            self._flush(state)

    def finish(self, state: Callable[[], State], *, is_complete: bool = True) -> Held:
        """Make the rest durable, and declare the recording complete if it is."""
        try:
            if not self._is_complete:
                if self._staged or self._writer is None:
                    self._flush(state)
                assert self._writer is not None
                self._writer.finish(is_complete)
        finally:
            self._close()
        return held_by(self._reader(), self._job.architecture)

    def abandon(self, state: Callable[[], State] | None) -> None:
        """Close the folder, having saved what counts where that is possible."""
        try:
            if state is not None and self._staged:
                # Something has failed already, and that is what must be reported.
                with contextlib.suppress(CollectError, RecordingError):
                    self._flush(state)
        finally:
            self._close()

    def _close(self) -> None:
        try:
            wait_for(self._devices)
        finally:
            if self._writer is not None:
                self._writer.close()
            self._columns.clear()

    def _flush(self, state: Callable[[], State]) -> None:
        wait_for(self._devices)
        packed = pack(state())
        writer = self._writer = self._writer or self._created()
        chunk = {
            self._name(label): column.turn(self.start) for label, column in self._columns.items()
        }
        # Returns when what the columns have turned to is not being written any more.
        writer.append(chunk, _joined(self._staged), packed, self.calls.take())
        self.start = 0
        self._staged.clear()
        self._committed_at = time.monotonic()

    def _created(self) -> BackgroundWriter:
        layers = {self._name(label): column.spec for label, column in self._columns.items()}
        header = header_of(self._job.architecture, self._settings)
        numbers = {"rank": self._store.rank, "world_size": self._store.world_size}
        created = RunWriter.create(self._path, layers=layers, header=header, **numbers)
        return BackgroundWriter(self._path, created)

    def _reader(self) -> RunReader:
        return RunReader(self._path, rank=self._store.rank if self._store.is_shared else None)

    def _name(self, label: DepthIdx) -> str:
        return str(self._job.architecture[label].label)

    def _go_on(self) -> None:
        rank = self._store.rank
        with self._reader() as reader:
            is_joining = self._store.is_shared and not reader.is_begun
            if not (self._job.resume or is_joining):
                raise RecordingError(
                    f"{self._path} already holds a recording: go on with it by resume=True, read "
                    "it with open_recording, or choose another folder"
                )
            self._check_same(reader)
            self.sample_ids = reader.sample_ids
            self._is_complete = reader.complete
            self._found_layers = dict(reader.layers)
            if is_joining:
                return
            found = reader.read_state(rank)
            self._found = None if found is None else unpack(found)
            if not reader.complete:
                # At once, so that another writer at work is noticed before any pass.
                resumed = RunWriter.resume(self._path, rank=rank)
                self._writer = BackgroundWriter(self._path, resumed)

    def _check_same(self, reader: RunReader) -> None:
        stored = dict(reader.header)
        architecture = stored.pop("architecture", None)
        theirs = architecture.get("fingerprint") if isinstance(architecture, dict) else None
        ours = self._job.architecture.fingerprint
        if theirs != ours:
            raise RecordingError(
                f"{self._path} was recorded from another architecture: its fingerprint is {theirs} "
                f"and this net's is {ours}; choose another folder"
            )
        if reader.world_size != self._store.world_size:
            raise RecordingError(
                f"{self._path} was begun by {reader.world_size} processes, and world_size is "
                f"{self._store.world_size}: resume with as many, or choose another folder"
            )
        given = parse(dump(self._settings))
        if self._store.is_shared and str(stored.get("weights")).startswith("local-"):
            # Each process holds other shards of the weights, and who began can't be told.
            stored["weights"] = given["weights"]
        found = disagreements(stored, given)
        if found:
            raise RecordingError(
                f"{self._path} was recorded with other settings: {'; '.join(found[:4])}. Resume "
                "with all as it was then, or choose another folder"
            )


def header_of(architecture: Architecture, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a recording on disk says about itself."""
    return {"architecture": architecture.to_dict(), **settings}


def held_by(reader: RunReader, architecture: Architecture) -> Held:
    """Return what a recording on disk holds; its samples are read when they are used."""
    # Tensors made in inference mode could not be used outside it.
    with torch.inference_mode(False):
        values = {architecture.resolve(name): DiskTensor(reader, name) for name in reader.layers}
    layers = reader.header.get("layers") if reader.header.get("inputs") is True else None
    names = layers if isinstance(layers, list) else []
    calls = Calls(reader, architecture, names)
    where = reader.path, "disk"
    return Held(values, reader.sample_ids, calls, reader.complete, *where, owner=reader)


def _joined(parts: Sequence[Ids]) -> Ids:
    ranges = [part for part in parts if isinstance(part, range)]
    if len(ranges) == len(parts) and all(a.stop == b.start for a, b in pairwise(ranges)):
        return range(ranges[0].start, ranges[-1].stop) if ranges else range(0)
    return to_ids([value for part in parts for value in part])
