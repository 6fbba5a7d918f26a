"""Memory that grows without being copied: what stores write activations into.

NOTE [Memory of a host store]

Each layer has an anonymous private mapping. Pages that were never written take no memory, so a
capacity that is too large costs nothing, and growing remaps pages instead of copying them: one
array a layer, and never two copies of it, even if the length is unknown. A mapping counts the
buffers exported from it, so that it knows whether anybody still holds a tensor, a view of one, or
a NumPy array over its memory. Only memory that nobody holds is used again.

Pages that are written for the first time cost more than what is written. Where the number of
samples is known, those of the next few batches are asked for at once, which is cheaper than one by
one, and on a thread where the system can do that for all layers in one call. Large pages were
tried: they took a third of the time where the system had some at hand, and five times as long in a
virtual machine whose host had given that memory to others.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from scio_recorder.layer import TensorSpec
from scio_recorder.stores.prefaulting import POPULATE, Prefaulter

# No more than so many bytes of a layer at once: other threads wait meanwhile.
_MOST_READY = 1 << 24
# Views are made, and memory is made ready, for so many batches at once; for few at first where a
# thread does so, which nobody has been ahead of then.
_FIRST_PLACES, _MOST_PLACES = 8, 64
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


class NoRoomError(MemoryError):
    """So many bytes can't be had; whoever knows what they are for says so."""

    def __init__(self, num_bytes: int, reason: object) -> None:
        super().__init__(f"{num_bytes} bytes: {reason}")
        self.num_bytes = num_bytes


class Buffer:
    """Memory of a device that can be asked to become more. Growing copies, one layer at a time.

    Parameters
    ----------
    device : torch.device
        Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._raw = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least so many bytes, beginning with those that were there.

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
        """Return the first bytes, as a tensor that holds no more than these where that is free."""
        return self._raw[:num_bytes]

    def touch(self, start: int, stop: int, prefaulter: Prefaulter | None = None) -> None:
        """Make ready to be written what lies between two bytes, where that pays."""


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Memory(mmap.mmap):
    """A mapping that the GPU's driver forgets before it is unmapped."""

    registered = 0

    def __del__(self) -> None:
        if self.registered:
            _driver().cudaHostUnregister(self.registered)


class HostBuffer(Buffer):
    """Host memory, see the NOTE; ``pinned`` registers it with the GPU's driver, in exact size."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._memory: _Memory | None = None
        self._address = 0
        # So many bytes from the beginning on are ready to be written, or soon will be.
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
            # No remapping on this system; exports are checked before that is found out.
            return False
        return False

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least so many bytes, beginning with those that were there."""
        if num_bytes > self.num_bytes:
            self._grow(num_bytes)
        raw = self.first(self.num_bytes)
        self._address = raw.data_ptr()
        if self.pinned and self._memory is not None and not self._memory.registered:
            self._register(raw)
        return raw

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes: saving a tensor of theirs saves no more than them."""
        if self._memory is None or num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(memoryview(self._memory), dtype=torch.uint8, count=num_bytes)

    def touch(self, start: int, stop: int, prefaulter: Prefaulter | None = None) -> None:
        """Take the page faults of a range at once, unless they were taken before."""
        start, stop = max(start, self._ready), min(stop, start + _MOST_READY, self.num_bytes)
        if self._memory is None or self.pinned or stop <= start or sys.platform != "linux":
            return
        self._ready = stop
        if prefaulter is not None:
            prefaulter.ask(self._address + start, stop - start)
            return
        first = start - start % mmap.PAGESIZE
        # Where the system knows no such advice, it refuses, and nothing is lost.
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
        # Without registration copies are slower and as right: they wait for themselves.
        if int(status) == 0:
            self._memory.registered = raw.data_ptr()

    def _unregister(self) -> None:
        memory = self._memory
        if memory is not None and memory.registered:
            torch.cuda.synchronize()
            _driver().cudaHostUnregister(memory.registered)
            memory.registered = 0


class ReusedMemory:
    """Host memory by what it is for: the same is used again, unless somebody still holds it."""

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
        # Shared memory, the default where there are no flags, can't grow beyond its first size.
        return _Memory(-1, num_bytes, flags=_PRIVATE) if _PRIVATE else _Memory(-1, num_bytes)
    except (OSError, OverflowError, MemoryError) as error:
        raise NoRoomError(num_bytes, error) from error


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
    prefaulter : Prefaulter, optional
        What makes memory of known length ready for the batches that come next.
    """

    __slots__ = (
        "_buffer",
        "_is_exact",
        "_most",
        "_prefaulter",
        "array",
        "capacity",
        "places",
        "spec",
    )

    def __init__(
        self,
        spec: TensorSpec,
        buffer: Buffer,
        rows: int,
        is_exact: bool,
        prefaulter: Prefaulter | None = None,
    ) -> None:
        self.spec = spec
        self._prefaulter = prefaulter
        # Places that are made at once.
        self._most = _MOST_PLACES if prefaulter is None else _FIRST_PLACES
        self.capacity = 0
        self._buffer = buffer
        self._is_exact = is_exact
        # Views for the batches that come next, the last one first: many made at once cost a third
        # of what they cost one by one.
        self.places: list[Tensor] = []
        self.array = torch.empty(0)
        self._reserve(max(rows, 1))

    def place(self, start: int, rows: int, follows: bool = False) -> Tensor:
        """Return where the rows of a batch go; they count once the batch does.

        Parameters
        ----------
        start : int
            The first of them.
        rows : int
            How many there are.
        follows : bool, default False
            Whether the batch follows the one before and has as many rows. Then what is in
            `places` is right for it, and for those that come next.

        Returns
        -------
        torch.Tensor
            The place, [rows, ...].
        """
        if not (follows and self.places):
            self._make_places(start, rows, follows)
        return self.places.pop()

    def put(self, activation: Tensor, start: int, rows: int, follows: bool = False) -> Tensor:
        """Copy the rows of a batch to their `place`, and return that.

        Parameters
        ----------
        activation : torch.Tensor
            The rows, [rows, ...].
        start : int
            The first of them.
        rows : int
            How many there are.
        follows : bool, default False
            As for `place`.
        """
        return self.place(start, rows, follows).copy_(activation, True)  # does not wait for a GPU

    def turn_to(self, buffer: Buffer) -> Buffer:
        """Go on in other memory, from its beginning.

        Parameters
        ----------
        buffer : Buffer
            Where samples go from now on.

        Returns
        -------
        Buffer
            Where they went before, with what is in it.
        """
        buffer, self._buffer = self._buffer, buffer
        self._reserve(self.capacity)
        return buffer

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
        self.let_go()
        with torch.inference_mode(False):
            return self._view(self._buffer.first(rows * self.spec.nbytes), rows)

    def let_go(self) -> None:
        """Refer to no memory any more, until more is asked for."""
        self.places = []
        self.array = torch.empty(0)

    def _make_places(self, start: int, rows: int, follows: bool) -> None:
        if start + rows > self.capacity:
            self._reserve(max(start + rows, 2 * self.capacity))
        number = min(self._most if follows else 1, (self.capacity - start) // max(1, rows))
        stop = start + number * rows
        if self._is_exact:
            # Of batches of all sizes, nobody knows what comes next.
            self._make_ready(start, stop, rows if follows or start == 0 else 0)
        self.places = list(torch.split(self.array[start:stop], rows))
        self.places.reverse()

    def _make_ready(self, start: int, stop: int, rows: int) -> None:
        """Make ready what is written next, and have a thread do so for batches that come then."""
        num_bytes = self.spec.nbytes
        self._buffer.touch(start * num_bytes, stop * num_bytes)
        if self._prefaulter is not None and rows:
            fitting = _MOST_READY // max(1, rows * num_bytes)
            self._most = max(1, min(2 * self._most, _MOST_PLACES, fitting))
            end = (stop + self._most * rows) * num_bytes
            self._buffer.touch(stop * num_bytes, end, self._prefaulter)

    def _reserve(self, rows: int) -> None:
        num_bytes = rows * self.spec.nbytes
        # No view may be alive while the memory moves.
        self.let_go()
        # Tensors made in inference mode could not be used outside it.
        with torch.inference_mode(False):
            self.array = self._view(self._buffer.reserve(num_bytes)[:num_bytes], rows)
        self.capacity = rows

    def _view(self, raw: Tensor, rows: int) -> Tensor:
        return raw.view(self.spec.dtype).view(rows, *self.spec.shape)


def wait_for(devices: set[torch.device]) -> None:
    """Wait for every copy that is under way from these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
