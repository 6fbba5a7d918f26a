"""Memory that grows without being copied, into which stores write activations.

NOTE [Memory of a host store]

Each layer has an anonymous private mapping. Pages that were never written take no memory, so excess
capacity costs nothing, and growing remaps pages instead of copying them: each layer has one array,
and never two copies of it, even if the length is unknown. A mapping counts the buffers exported
from it, so it knows whether anybody still holds a tensor, a view of one, or a NumPy array over its
memory. Only memory that nobody holds is used again.

The first write to a page costs more than the data. If the number of samples is known, the pages of
the next few batches are requested together, which is cheaper than one by one, and on a thread if
the system can do that for all layers in one call. Large pages were tried: they took a third of the
time if the system had some available, and five times as long in a virtual machine whose host had
given that memory to others.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scio_recorder.stores.prefaulting import POPULATE, Prefaulter

# The most bytes that are prepared at once, since other threads wait meanwhile.
MOST_READY = 1 << 24
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


class NoRoomError(MemoryError):
    """Memory can't be allocated; the caller explains what it is for."""

    def __init__(self, num_bytes: int, reason: object) -> None:
        super().__init__(f"{num_bytes} bytes: {reason}")
        self.num_bytes = num_bytes


class Buffer:
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
        """
        if num_bytes > self._raw.numel():
            try:
                larger = torch.empty(num_bytes, dtype=torch.uint8, device=self._raw.device)
            except (RuntimeError, OverflowError, TypeError) as error:
                raise NoRoomError(num_bytes, error) from error
            larger[: self._raw.numel()].copy_(self._raw)
            self._raw = larger
        return self._raw

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes, in a tensor of only these if that needs no copy."""
        return self._raw[:num_bytes]

    def touch(self, start: int, stop: int, prefaulter: Prefaulter | None = None) -> None:
        """Prepare the memory between two bytes for writing, if that saves time."""


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it without types


class _Memory(mmap.mmap):
    """A mapping that the GPU's driver forgets before it is unmapped."""

    registered = 0

    def __del__(self) -> None:
        if self.registered:
            _driver().cudaHostUnregister(self.registered)


class HostBuffer(Buffer):
    """Host memory, see the NOTE; if ``pinned``, of exact size and known to the GPU's driver."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._memory: _Memory | None = None
        self._address = 0
        # The number of bytes from the beginning that are prepared for writing, or soon will be.
        self._ready = 0

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
            # This system can't remap; exports were checked before.
            return False
        return False

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least this many bytes, beginning with the earlier ones."""
        if num_bytes > self.num_bytes:
            self._grow(num_bytes)
        raw = self.first(self.num_bytes)
        self._address = raw.data_ptr()
        if self.pinned and self._memory is not None and not self._memory.registered:
            self._register(raw)
        return raw

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes; saving a tensor in them saves only these."""
        if self._memory is None or num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(memoryview(self._memory), dtype=torch.uint8, count=num_bytes)

    def touch(self, start: int, stop: int, prefaulter: Prefaulter | None = None) -> None:
        """Take the page faults of a range at once, unless that was done before."""
        start, stop = max(start, self._ready), min(stop, start + MOST_READY, self.num_bytes)
        if self._memory is None or self.pinned or stop <= start or sys.platform != "linux":
            return
        self._ready = stop
        if prefaulter is not None:
            prefaulter.ask(self._address + start, stop - start)
            return
        first = start - start % mmap.PAGESIZE
        # A system that lacks this advice refuses it, and nothing is lost.
        with contextlib.suppress(OSError, ValueError):
            self._memory.madvise(POPULATE, first, stop - first)

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
            self._ready = len(old)

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


class ReusedMemory:
    """Host memory by purpose, which is used again unless somebody still holds it."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, HostBuffer] = {}

    def buffer(self, purpose: Hashable, pinned: bool) -> HostBuffer:
        """Return memory for a purpose, `pinned` or not."""
        known = self._buffers.get(purpose)
        if known is None or known.pinned != pinned or known.is_held:
            known = self._buffers[purpose] = HostBuffer(pinned=pinned)
        return known


def _map(num_bytes: int) -> _Memory:
    try:
        # Shared memory, the default without flags, can't grow beyond its first size.
        return _Memory(-1, num_bytes, flags=_PRIVATE) if _PRIVATE else _Memory(-1, num_bytes)
    except (OSError, OverflowError, MemoryError) as error:
        raise NoRoomError(num_bytes, error) from error


def wait_for(devices: set[torch.device]) -> None:
    """Wait for every pending copy from these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
