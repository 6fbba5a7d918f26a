"""Memory that grows without being copied, and the columns of layers that stores keep in it.

NOTE [Memory of a host store]

Each layer has an anonymous private mapping. Pages that were never written take no memory, so excess
capacity costs nothing, and growing remaps pages instead of copying them: each layer has one array,
and never two copies of it, even if the length is unknown. A mapping counts the buffers exported
from it, so it knows whether anybody still holds a tensor, a view of one, or a NumPy array over its
memory. Only memory that nobody holds is used again. Linux provides the pages of a batch in one
call, which takes less time than the fault of each when it is first written to.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

from scio_recorder.layer import TensorSpec

_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
# The advice to Linux, from 5.14 on, to provide pages, for which the standard library has no name.
_POPULATE_WRITE = 23


class NoRoomError(MemoryError):
    """Memory can't be allocated; the caller explains what it is for."""

    def __init__(self, num_bytes: int, reason: object) -> None:
        super().__init__(f"{num_bytes} bytes: {reason}")
        self.num_bytes = num_bytes


class DeviceBuffer:
    """Memory of a device that can grow. Growing copies, one layer at a time.

    Parameters
    ----------
    device : torch.device
        The device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._raw = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least this many bytes, beginning with the earlier ones.

        Tensors from earlier calls must not be used any more.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        if num_bytes > self._raw.numel():
            try:
                larger = torch.empty(num_bytes, dtype=torch.uint8, device=self._raw.device)
            except (RuntimeError, OverflowError, TypeError) as error:
                raise NoRoomError(num_bytes, error) from error
            larger[: self._raw.numel()].copy_(self._raw)
            self._raw = larger
        return self._raw

    def prepare(self, num_bytes: int) -> int:
        """Have at least this many bytes ready to be written to; return how many are.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        return self._raw.numel()

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes, in a tensor of only these if that needs no copy.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        return self._raw[:num_bytes]


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it without types


class _Memory(mmap.mmap):
    """A mapping that the GPU's driver forgets before it is unmapped."""

    registered = 0

    def __del__(self) -> None:
        if self.registered:
            _driver().cudaHostUnregister(self.registered)


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
        self._prepared = 0

    @property
    def num_bytes(self) -> int:
        """Its capacity."""
        return 0 if self._memory is None else len(self._memory)

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
        raw = self.first(self.num_bytes)
        if self.pinned and self._memory is not None and not self._memory.registered:
            self._register(raw)
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
        self._unregister()
        try:
            old.resize(num_bytes)
        except (OSError, OverflowError, SystemError, ValueError):
            self._memory = _map(num_bytes)
            self._memory[: len(old)] = old[:]

    def _register(self, raw: Tensor) -> None:
        assert self._memory is not None
        status = _driver().cudaHostRegister(raw.data_ptr(), raw.numel(), 0)
        # Without registration, copies are slower but right: each waits for its end.
        if int(status) == 0:
            self._memory.registered = raw.data_ptr()

    def _unregister(self) -> None:
        memory = self._memory
        if memory is not None and memory.registered:
            torch.cuda.synchronize()
            _driver().cudaHostUnregister(memory.registered)
            memory.registered = 0


def _map(num_bytes: int) -> _Memory:
    try:
        # Shared memory, the default without flags, can't grow beyond its first size.
        return _Memory(-1, num_bytes, flags=_PRIVATE) if _PRIVATE else _Memory(-1, num_bytes)
    except (OSError, OverflowError, MemoryError) as error:
        raise NoRoomError(num_bytes, error) from error


def wait_for(devices: set[torch.device]) -> None:
    """Wait for every pending copy from these devices.

    Parameters
    ----------
    devices : set of torch.device
        Those from which copies may be pending.
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Column:
    """The rows of one layer, one after the other: ``array`` is [capacity, ...].

    Parameters
    ----------
    spec : TensorSpec
        Shape and dtype of one row.
    buffer : DeviceBuffer
        The memory for them.
    rows : int
        The expected number of rows.
    """

    __slots__ = ("_buffer", "_ready", "array", "capacity", "row_bytes", "spec")

    def __init__(self, spec: TensorSpec, buffer: DeviceBuffer, rows: int) -> None:
        self.spec = spec
        self.row_bytes = spec.nbytes
        # The rows that the memory has room for, and those of which it is ready.
        self.capacity = 0
        self._ready = 0
        self._buffer = buffer
        self._reserve(max(rows, 1))

    def place(self, start: int, rows: int) -> Tensor:
        """Return the place of a batch's rows, which count once the batch does.

        Parameters
        ----------
        start : int
            The first of them.
        rows : int
            The number of rows.

        Returns
        -------
        torch.Tensor
            The place, [rows, ...].
        """
        stop = start + rows
        if stop > self._ready:
            self._prepare(stop)
        return self.array[start:stop]

    def _prepare(self, rows: int) -> None:
        if rows > self.capacity:
            self._reserve(max(rows, 2 * self.capacity))
        self._ready = self._buffer.prepare(rows * self.row_bytes) // max(self.row_bytes, 1)

    def turn_to(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """Continue in other memory, from its beginning.

        Parameters
        ----------
        buffer : DeviceBuffer
            The memory for rows from now on.

        Returns
        -------
        DeviceBuffer
            The earlier memory with its content.
        """
        buffer, self._buffer = self._buffer, buffer
        self._reserve(self.capacity)
        return buffer

    def close(self, rows: int) -> Tensor:
        """Return the rows that count, and drop the reference to them.

        Parameters
        ----------
        rows : int
            The number of rows that count.

        Returns
        -------
        torch.Tensor
            The rows, [rows, ...].
        """
        self.let_go()
        with torch.inference_mode(False):
            return self._view(self._buffer.first(rows * self.row_bytes), rows)

    def let_go(self) -> None:
        """Drop all memory until more is requested."""
        self.array = torch.empty(0)
        self.capacity = self._ready = 0

    def _reserve(self, rows: int) -> None:
        num_bytes = rows * self.row_bytes
        # No view may be alive while the memory moves.
        self.let_go()
        # Tensors made in inference mode could not be used outside of it.
        with torch.inference_mode(False):
            self.array = self._view(self._buffer.reserve(num_bytes)[:num_bytes], rows)
        self.capacity = rows

    def _view(self, raw: Tensor, rows: int) -> Tensor:
        return raw.view(self.spec.dtype).view(rows, *self.spec.shape)
