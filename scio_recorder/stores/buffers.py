"""Memory that grows without being copied: what stores write activations into.

NOTE [Memory of a host store]

Each layer has an anonymous private mapping. Pages that were never written take no memory, so a
capacity that is too large costs nothing, and growing remaps pages instead of copying them: one
array a layer, and never two copies of it, also where the length is not known. A mapping counts the
buffers exported from it, so that it knows whether anybody still holds a tensor, a view of one, or
a NumPy array over its memory. Only memory that nobody holds is used again.

Pages that are written for the first time cost more than what is written. So a thread makes them
ready a little ahead of the samples; where it is late, they become ready when they are written.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from concurrent.futures import Executor, Future, wait
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scio_recorder.disk import TensorSpec

__all__ = ["Buffer", "Column", "DeviceBuffer", "HostBuffer", "NoRoomError"]

# Linux's MADV_POPULATE_WRITE (5.14): takes many page faults at once, at a part of their price.
_POPULATE = 23
_POPULATE_BYTES = 1 << 22
# The function of mmap objects would keep all other threads from running meanwhile.
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


class NoRoomError(MemoryError):
    """So many bytes can't be had; whoever knows what they are for says so."""

    def __init__(self, num_bytes: int, reason: object) -> None:
        super().__init__(f"{num_bytes} bytes: {reason}")
        self.num_bytes = num_bytes


class Buffer(Protocol):
    """Bytes on some device that can be asked to become more."""

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least so many bytes, beginning with those that were there.

        Tensors from earlier calls must not be used any more.
        """

    def touch(self, start: int, stop: int, thread: Executor | None) -> None:
        """Make ready to be written what lies between two bytes, in a thread; contents stay."""


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Memory(mmap.mmap):
    """A mapping that the GPU's driver forgets before it is unmapped."""

    registered = 0

    def __del__(self) -> None:
        if self.registered:
            _driver().cudaHostUnregister(self.registered)


class HostBuffer:
    """Host memory, see the NOTE; ``pinned`` registers it with the GPU's driver, in exact size."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._memory: _Memory | None = None
        self._can_populate = _madvise is not None
        self._address = 0
        self._touching: Future[None] | None = None
        # Up to here pages have been written or touched; memory that is used again is ready.
        self._ready_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Its capacity."""
        return 0 if self._memory is None else len(self._memory)

    @property
    def is_held(self) -> bool:
        """Whether anybody holds a tensor in this memory."""
        if self._memory is None:
            return False
        try:
            self._memory.resize(len(self._memory))
        except BufferError:
            return True
        except (OSError, SystemError, ValueError):
            # No remapping on this system; exports are checked before that is found out.
            return False
        return False

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least so many bytes, beginning with those that were there."""
        if num_bytes > self.num_bytes:
            self._grow(num_bytes)
        if self._memory is None:
            return torch.empty(0, dtype=torch.uint8)
        raw = torch.frombuffer(memoryview(self._memory), dtype=torch.uint8)
        self._address = raw.data_ptr()
        if self.pinned and not self._memory.registered:
            self._register(raw)
        return raw

    def touch(self, start: int, stop: int, thread: Executor | None) -> None:
        """Take the page faults of a range at once, in a thread if there is one."""
        start = max(start, self._ready_bytes)
        if self._memory is None or not self._can_populate or start >= stop:
            return
        self._ready_bytes = stop
        first = start - start % mmap.PAGESIZE
        place = self._memory, self._address + first, stop - first
        if thread is None:
            self._populate(*place)
        else:
            self._touching = thread.submit(self._populate, *place)

    def _populate(self, memory: _Memory, address: int, num_bytes: int) -> None:
        # Whoever calls this holds the mapping, so that it can't be undone meanwhile.
        assert _madvise is not None
        if _madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _POPULATE):
            self._can_populate = False

    def _grow(self, num_bytes: int) -> None:
        old = self._memory
        if old is None:
            self._memory = _map(num_bytes)
            return
        if self._touching is not None:
            # Nothing may be at work in memory that moves.
            wait([self._touching])
        self._unregister()
        try:
            old.resize(num_bytes)
        except (OSError, OverflowError, SystemError, ValueError):
            self._memory = _map(num_bytes)
            self._memory[: len(old)] = old[:]

    def _register(self, raw: Tensor) -> None:
        assert self._memory is not None
        status = _driver().cudaHostRegister(raw.data_ptr(), raw.numel(), 0)
        # Without registration copies are slower and as right: they wait for themselves.
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
        # Shared memory, the default where there are no flags, can't grow beyond its first size.
        return _Memory(-1, num_bytes, flags=_PRIVATE) if _PRIVATE else _Memory(-1, num_bytes)
    except (OSError, OverflowError, MemoryError) as error:
        raise NoRoomError(num_bytes, error) from error


class DeviceBuffer:
    """Memory of the device on which activations are. Growing copies, one layer at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._raw = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least so many bytes, beginning with those that were there."""
        if num_bytes > self._raw.numel():
            try:
                larger = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            except (RuntimeError, OverflowError, TypeError) as error:
                raise NoRoomError(num_bytes, error) from error
            larger[: self._raw.numel()].copy_(self._raw)
            self._raw = larger
        return self._raw

    def touch(self, start: int, stop: int, thread: Executor | None) -> None:
        """Do nothing: the device's allocator hands out memory that is ready."""


class Column:
    """The samples of one layer, one after the other: ``array`` is [capacity, ...].

    Parameters
    ----------
    spec : TensorSpec
        Shape and dtype of one sample.
    buffer : Buffer
        Where they go.
    rows : int
        Expected number of samples.
    is_exact : bool
        Whether that is a known length rather than a guess.
    thread : concurrent.futures.Executor, optional
        What makes memory ready ahead of the samples.
    """

    __slots__ = (
        "_buffer",
        "_is_exact",
        "_thread",
        "_touch_from",
        "_touched",
        "array",
        "capacity",
        "spec",
    )

    def __init__(
        self,
        spec: TensorSpec,
        buffer: Buffer,
        rows: int,
        is_exact: bool,
        thread: Executor | None = None,
    ) -> None:
        self.spec = spec
        self.capacity = 0
        self._buffer = buffer
        self._is_exact = is_exact
        # Memory of unknown length is made ready in small parts, for which a thread doesn't pay.
        self._thread = thread if is_exact else None
        self._touched = 0
        # More is touched when samples reach this row.
        self._touch_from = 0
        self.array = torch.empty(0)
        self._reserve(max(rows, 1))

    def put(self, activation: Tensor, start: int) -> None:
        """Copy the samples of a batch to where they begin; they count once the batch does.

        Parameters
        ----------
        activation : torch.Tensor
            The samples, [batch, ...].
        start : int
            The row of the first.
        """
        rows = activation.shape[0]
        if start + rows > self.capacity:
            self._reserve(max(start + rows, 2 * self.capacity))
        if start + rows > self._touch_from:
            self._touch(start + rows)
        self.array.narrow(0, start, rows).copy_(activation, non_blocking=True)

    def _reserve(self, rows: int) -> None:
        num_bytes = rows * self.spec.num_bytes
        # No view may be alive while the memory moves.
        self.array = torch.empty(0)
        # Tensors made in inference mode could not be used outside it.
        with torch.inference_mode(False):
            raw = self._buffer.reserve(num_bytes)
            flat = raw[:num_bytes].view(self.spec.dtype)
            self.array = flat.view(rows, *self.spec.shape)
        self.capacity = rows

    def _touch(self, stop: int) -> None:
        row_bytes = self.spec.num_bytes
        needed, known = stop * row_bytes, self._touched * row_bytes
        # Where the end is not known, no more than a small part may be taken in vain.
        ahead = _POPULATE_BYTES if self._is_exact else min(_POPULATE_BYTES, needed // 16)
        end = min(needed + ahead, self.capacity * row_bytes)
        self._buffer.touch(known, end, self._thread)
        self._touched = end // row_bytes if row_bytes else self.capacity
        is_last = self._thread is None or self._touched >= self.capacity
        self._touch_from = self._touched if is_last else (stop + self._touched) // 2

    def close(self, rows: int) -> Tensor:
        """Return the samples that count, and let go of them.

        Parameters
        ----------
        rows : int
            How many count.

        Returns
        -------
        torch.Tensor
            The samples, [rows, ...].
        """
        array, self.array = self.array, torch.empty(0)
        with torch.inference_mode(False):
            return array[:rows]
