"""Keeping activations in memory, on their device or on the host, and whether there is room.

NOTE [Memory of a host store]

Each layer has an anonymous private mapping. Pages that were never written take no memory, so excess
capacity costs nothing, and growing remaps pages instead of copying them: each layer has one array,
and never two copies of it, even if the length is unknown. A mapping counts the buffers exported
from it, so it knows whether anybody still holds a tensor, a view of one, or a NumPy array over its
memory. Only memory that nobody holds is used again. Linux provides the pages of a batch in one
call, which takes less time than the fault of each when it is first written to.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import math
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.layer import RowIdx, TensorSpec, map_leaves
from scio_recorder.nets.architecture import Architecture
from scio_recorder.stores.store import (
    Column,
    DeviceBuffer,
    Held,
    Job,
    NoRoomError,
    State,
    Store,
    StoreWriter,
    wait_for,
)
from scio_recorder.tensors.arguments import booleans, whole

# The number of batches to make room for at first, if their number is not known.
_GUESSED_BATCHES = 8
# The net and other programs need memory too.
_USABLE = {"device": 0.5, "host": 0.9, "disk": 0.95}


_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
# The advice to Linux, from 5.14 on, to provide pages, for which the standard library has no name.
_POPULATE_WRITE = 23


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it without types


class _Memory(mmap.mmap):
    """A mapping that the GPU's driver forgets before it is unmapped."""

    registered = 0

    def forget(self) -> None:
        """Have the driver forget it."""
        if self.registered:
            _driver().cudaHostUnregister(self.registered)
            self.registered = 0

    __del__ = forget


class HostBuffer(DeviceBuffer):
    """Host memory, see the NOTE; if ``pinned``, of exact size and known to the GPU's driver.

    Parameters
    ----------
    pinned : bool, default False
        Whether a GPU copies from and to it.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._memory: _Memory | None = None
        # The capacity, and how much of it the system has provided.
        self.num_bytes = self._prepared = 0

    @property
    def is_held(self) -> bool:
        """Whether anybody holds a tensor in this memory."""
        if self._memory is not None:
            # A system that can't remap has checked exports before.
            try:
                with contextlib.suppress(OSError, SystemError, ValueError):
                    self._memory.resize(len(self._memory))
            except BufferError:
                return True
        return False

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least this many bytes, beginning with the earlier ones.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        if num_bytes > self.num_bytes:
            self._grow(num_bytes)
            self.num_bytes = num_bytes
        raw, memory = self.first(self.num_bytes), self._memory
        if self.pinned and memory is not None and not memory.registered:
            status = _driver().cudaHostRegister(raw.data_ptr(), raw.numel(), 0)
            # Without registration, copies are slower but right: each waits for its end.
            memory.registered = 0 if int(status) else raw.data_ptr()
        return raw

    def prepare(self, num_bytes: int) -> int:
        """Have the system provide the pages of at least this many bytes; return of how many.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        if self._memory is not None and num_bytes > self._prepared:
            first = self._prepared // mmap.PAGESIZE
            # Somewhat more, so that not every batch asks, but little beside what is used.
            last = max(num_bytes // mmap.PAGESIZE, first + first // 16) + 1
            first, last = first * mmap.PAGESIZE, last * mmap.PAGESIZE
            self._prepared = min(last, self.num_bytes)
            # A page that was not asked for is provided when it is first written to.
            with contextlib.suppress(OSError):
                if sys.platform == "linux":
                    self._memory.madvise(_POPULATE_WRITE, first, self._prepared - first)
        return self._prepared

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes; saving a tensor in them saves only these.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        if self._memory is None or num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(memoryview(self._memory), dtype=torch.uint8, count=num_bytes)

    def _grow(self, num_bytes: int) -> None:
        old = self._memory
        if old is None:
            self._memory = _map(num_bytes)
            return
        if old.registered:
            torch.cuda.synchronize()
            old.forget()
        try:
            old.resize(num_bytes)
        except (OSError, OverflowError, SystemError, ValueError):
            self._memory = _map(num_bytes)
            self._memory[: len(old)] = old[:]


def _map(num_bytes: int) -> _Memory:
    try:
        # Shared memory, the default without flags, can't grow beyond its first size.
        return _Memory(-1, num_bytes, flags=_PRIVATE) if _PRIVATE else _Memory(-1, num_bytes)
    except (OSError, OverflowError, MemoryError) as error:
        raise NoRoomError(num_bytes, error) from error


class MemoryStore(Store):
    """Keeps every layer in one array."""

    def open(self, job: Job) -> MemoryWriter:
        """Begin a job.

        Parameters
        ----------
        job : Job
            The layers, and the known facts about the data.

        Returns
        -------
        StoreWriter
            The writer that takes the batches.
        """
        return MemoryWriter(job, self)

    @abc.abstractmethod
    def buffer(self, key: RowIdx | str, device: torch.device) -> DeviceBuffer:
        """Return the memory for a layer.

        Parameters
        ----------
        key : (int, int) or str
            The layer, or the name of a column of rows.
        device : torch.device
            The device on which the net computes it.

        Returns
        -------
        DeviceBuffer
            Memory that nobody uses.
        """


class Device(MemoryStore):
    """Keeps every layer on the device on which the net computes it.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    >>> rnet.record("0-1")
    >>> rnet.collect([torch.ones(3, 2)], store=Device())["0-1"].device
    device(type='cpu')
    """

    def buffer(self, key: RowIdx | str, device: torch.device) -> DeviceBuffer:
        """Return the memory for a layer.

        Parameters
        ----------
        key : (int, int) or str
            The layer, or the name of a column of rows.
        device : torch.device
            The device on which the net computes it.

        Returns
        -------
        DeviceBuffer
            Memory that nobody uses.
        """
        return HostBuffer() if device.type == "cpu" else DeviceBuffer(device)


class Host(MemoryStore):
    """Keeps every layer in one array in host memory.

    Parameters
    ----------
    pin_memory : bool, optional
        Whether to register the memory with the GPU's driver, which makes copies from the GPU
        asynchronous. None (default) does so if activations are on a GPU.

    Notes
    -----
    An object that is given to ``collect`` again uses the memory of its earlier recordings again,
    once nothing refers to them or to a tensor or array of theirs.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    >>> rnet.record("0-1")
    >>> host = Host()
    >>> for epoch in range(2):
    ...     recording = rnet.collect([torch.ones(3, 2), torch.ones(1, 2)], store=host)
    >>> recording["0-1"].shape
    torch.Size([4, 2])
    """

    def __init__(self, pin_memory: bool | None = None) -> None:
        if isinstance(pin_memory, str):
            raise CollectError(f'Host({pin_memory!r}) is no place: write store="disk:{pin_memory}"')
        if pin_memory is not None:
            booleans(CollectError, pin_memory=pin_memory)
        self._pin_memory = pin_memory
        self._buffers: dict[RowIdx | str, HostBuffer] = {}

    def buffer(self, key: RowIdx | str, device: torch.device) -> HostBuffer:
        """Return the memory for a layer.

        Parameters
        ----------
        key : (int, int) or str
            The layer, or the name of a column of rows.
        device : torch.device
            The device on which the net computes it.

        Returns
        -------
        HostBuffer
            The memory of a recording that nobody holds any more, if there is any.
        """
        pinned = device.type == "cuda" if self._pin_memory is None else self._pin_memory
        pinned = pinned and torch.cuda.is_available()
        known = self._buffers.get(key)
        if known is None or known.pinned != pinned or known.is_held:
            known = self._buffers[key] = HostBuffer(pinned=pinned)
        return known


class Auto(Store):
    """Keeps everything on the GPU if half of its free memory is enough, otherwise in host memory.

    If host memory is not enough either, it raises `CollectError` with the plan in the first batch,
    before it takes that memory. A loader of unknown length goes to host memory, unchecked.
    """

    def open(self, job: Job) -> AutoWriter:
        """Begin a job.

        Parameters
        ----------
        job : Job
            The layers, and the known facts about the data.

        Returns
        -------
        StoreWriter
            The writer that takes the batches.
        """
        return AutoWriter(job)


class MemoryWriter(StoreWriter):
    """Fills one column for each layer, in memory from the store."""

    def __init__(self, job: Job, store: MemoryStore) -> None:
        super().__init__()
        self._job = job
        self._store = store

    def column(self, key: RowIdx | str, spec: TensorSpec, first: Tensor) -> Column:
        """Make room for the expected number of batches like the first."""
        rows = first.shape[0] * (self._job.num_batches or _GUESSED_BATCHES)
        buffer = self._store.buffer(key, first.device)
        column = self.columns[key] = Column(spec, buffer, rows)
        self.devices.add(first.device)
        return column

    def finish(self, state: Callable[[], State], *, is_complete: bool = True) -> Held:
        """Return the arrays, narrowed to what was committed."""
        wait_for(self.devices)
        arrays = {key: column.close(self.start) for key, column in self.columns.items()}
        return self.held(arrays, self._job.architecture, is_complete=is_complete)

    def abandon(self, state: Callable[[], State] | None) -> None:
        """Drop the memory, once all copies into it have ended."""
        wait_for(self.devices)
        self.columns.clear()


class AutoWriter(MemoryWriter):
    """Chooses the device when the first layer returns, and checks with each."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, Host())
        self._guess: Plan | None = None
        # Bytes of all samples, for the layers seen so far.
        self._known: dict[RowIdx, int] = {}

    def column(self, key: RowIdx | str, spec: TensorSpec, first: Tensor) -> Column:
        """Make room for a layer, after checking that there is some."""
        if self._job.num_batches is not None and not isinstance(key, str):
            num_samples = first.shape[0] * self._job.num_batches
            self._known[key] = num_samples * spec.nbytes
            if self._guess is None:
                architecture, stored = self._job.architecture, self._job.stored
                dims = self._row_dims(architecture[key].output_spec, spec)
                self._guess = make_plan(architecture, stored, num_samples, first.device, dims)
                if "device" in self._guess.stores:
                    self._store = Device()
            if isinstance(self._store, Host):
                self._check(self._guess)
        return super().column(key, spec, first)

    def _row_dims(self, labelled: Any, spec: TensorSpec) -> int | None:
        """Return the number of a layer's dimensions that count rows; columns come before layers."""
        if not any(isinstance(key, str) for key in self.columns):
            return None
        ndim = len(labelled.shape) if isinstance(labelled, TensorSpec) else 0
        return max(1, ndim - len(spec.shape))

    def _check(self, guess: Plan) -> None:
        """Raise if even the layers seen so far don't fit."""
        if "host" not in replace(guess, num_bytes=self._known).stores:
            # Other layers are known only by their shapes at labelling.
            plan = replace(guess, num_bytes={**guess.num_bytes, **self._known})
            raise CollectError(
                'there is no room in memory: write store="disk:PATH", record fewer layers, or '
                f"reduce them (reduce=, every=, dtype=, transform=)\n{plan}"
            )


@dataclass(frozen=True)
class Plan:
    """Bytes by layer, and free bytes by store.

    Parameters
    ----------
    num_samples : int
        The expected number of samples.
    num_bytes : mapping of (int, int) to int
        The bytes of all samples of each layer.
    free_bytes : mapping of str to int
        The free bytes on the "device" (if it is a GPU), in "host" memory and on the "disk".
    names : mapping of (int, int) to str
        The names under which layers are shown.
    unit : str, default "samples"
        The word for the counted rows.

    Examples
    --------
    >>> plan = Plan(10, {(1, 1): 4000}, {"host": 5000, "disk": 0}, {(1, 1): "1-1 fc (Linear)"})
    >>> plan.total_bytes, plan.stores
    (4000, ('host',))
    >>> print(plan)
    10 samples take 4.0 kB
      1-1 fc (Linear): 4.0 kB
    host: 5.0 kB free, enough
    disk: 0 bytes free, not enough
    """

    num_samples: int
    num_bytes: Mapping[RowIdx, int]
    free_bytes: Mapping[str, int]
    names: Mapping[RowIdx, str]
    unit: str = "samples"

    @property
    def total_bytes(self) -> int:
        """The bytes of all layers together."""
        return sum(self.num_bytes.values())

    @property
    def stores(self) -> tuple[str, ...]:
        """The stores with enough room, the fastest first."""
        return tuple(
            store
            for store, free in self.free_bytes.items()
            if self.total_bytes <= _USABLE[store] * free
        )

    def __str__(self) -> str:
        lines = [f"{self.num_samples} {self.unit} take {decimal(self.total_bytes)}"]
        lines += [f"  {self.names[k]}: {decimal(n)}" for k, n in self.num_bytes.items()]
        for store, free in self.free_bytes.items():
            verdict = "enough" if store in self.stores else "not enough"
            lines.append(f"{store}: {decimal(free)} free, {verdict}")
        return "\n".join(lines)


def make_plan(
    architecture: Architecture,
    labels: Sequence[RowIdx],
    num_samples: int,
    device: torch.device,
    row_dims: int | None = None,
) -> Plan:
    """Return the plan for layers, from the shapes at labelling.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    labels : sequence of (int, int)
        The requested layers.
    num_samples : int
        The expected number of samples.
    device : torch.device
        The net's device, whose free memory counts.
    row_dims : int, optional
        If rows are not samples: the number of leading dimensions that count rows.

    Returns
    -------
    Plan
        Bytes by layer, and free bytes by store.

    Raises
    ------
    CollectError
        ``num_samples`` is not a whole number from 0 on.
    """
    num_samples = whole("num_samples", num_samples, 0)
    free: dict[str, int] = {}
    if device.type == "cuda":
        free["device"] = torch.cuda.mem_get_info(device)[0]
    free["host"] = _free_host_bytes()
    # The working directory has a disk also if it has been deleted and has no path.
    free["disk"] = shutil.disk_usage(os.curdir).free
    num_bytes = dict.fromkeys(labels, 0)

    def add(label: RowIdx, spec: TensorSpec | None) -> None:
        if spec is not None:
            rows = math.prod(spec.shape[: 1 if row_dims is None else row_dims])
            num_bytes[label] += spec.nbytes // max(1, rows) * num_samples

    for label in labels:
        map_leaves(partial(add, label), architecture[label].output_spec)
    names = {label: str(architecture[label]) for label in labels}
    unit = "samples" if row_dims is None else "rows"
    return Plan(num_samples, num_bytes, free, names, unit)


def _free_host_bytes() -> int:
    """Return the bytes that can be allocated without swapping, also inside a container."""
    lines = [line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    if lines:
        free = int(lines[0].split()[1]) * 1024
    else:
        # Systems without such a file are those where it is installed.
        free = importlib.import_module("psutil").virtual_memory().available
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdecimal():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []
