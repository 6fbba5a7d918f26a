"""The samples of one layer in memory, into which batches are copied."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from scio_recorder.layer import TensorSpec
from scio_recorder.stores.buffers import MOST_READY, Buffer
from scio_recorder.stores.prefaulting import Prefaulter
from scio_recorder.tensors.copies import address_of

# The number of batches for which memory is prepared at once; few at first if a thread does that,
# which starts without a lead.
_FIRST_BATCHES, _MOST_BATCHES = 8, 64
# Up to this size, torch copies on one thread, and its call takes longer than the copy.
_SMALL_BYTES = 1 << 17


class Column:
    """The samples of one layer, one after the other: ``array`` is [capacity, ...].

    Parameters
    ----------
    spec : TensorSpec
        Shape and dtype of one sample.
    buffer : Buffer
        The memory for them.
    rows : int
        Expected number of samples.
    is_exact : bool
        Whether this is a known length rather than a guess.
    prefaulter : Prefaulter, optional
        Prepares memory of known length for the next batches.
    """

    __slots__ = (
        "_address",
        "_buffer",
        "_is_exact",
        "_num_batches",
        "_num_ready",
        "_prefaulter",
        "_row_bytes",
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
        prefaulter: Prefaulter | None = None,
    ) -> None:
        self.spec = spec
        self._row_bytes = spec.nbytes
        self._prefaulter = prefaulter
        # The number of batches for which memory is prepared at once.
        self._num_batches = _MOST_BATCHES if prefaulter is None else _FIRST_BATCHES
        self._buffer = buffer
        self._is_exact = is_exact
        self._reserve(max(rows, 1))

    def place(self, start: int, rows: int, follows: bool = False) -> Tensor:
        """Return the place of a batch's rows, which count once the batch does.

        Parameters
        ----------
        start : int
            The first of them.
        rows : int
            The number of rows.
        follows : bool, default False
            Whether the batch follows the one before and has as many rows. Then the next ones most
            likely do, too.

        Returns
        -------
        torch.Tensor
            The place, [rows, ...].
        """
        if start + rows > self._num_ready:
            self._prepare(start, rows, follows)
        return self.array[start : start + rows]

    def put(self, activation: Tensor, start: int, rows: int, follows: bool = False) -> Tensor:
        """Copy the rows of a batch to their `place`, and return that.

        Parameters
        ----------
        activation : torch.Tensor
            The rows, [rows, ...].
        start : int
            The first of them.
        rows : int
            The number of rows.
        follows : bool, default False
            As for `place`.
        """
        return self.place(start, rows, follows).copy_(activation, True)  # does not wait for a GPU

    def put_if_ready(self, activation: Tensor, start: int, rows: int) -> bool:
        """Copy the rows of a batch to their place if it is prepared already; return whether it is.

        This is for batches like the one before: every layer of every batch pays for it. A small
        copy in host memory needs no tensor and no operation of torch, which take longer than it.

        Parameters
        ----------
        activation : torch.Tensor
            The rows, [rows, ...].
        start : int
            The first of them.
        rows : int
            The number of rows.
        """
        if start + rows > self._num_ready:
            return False
        num_bytes = rows * self._row_bytes
        if num_bytes <= _SMALL_BYTES and num_bytes == activation.nbytes and self._address:
            source = address_of(activation)
            if source and activation.dtype is self.spec.dtype:
                ctypes.memmove(self._address + start * self._row_bytes, source, num_bytes)
                return True
        kept = activation.detach() if activation.requires_grad else activation
        self.array[start : start + rows].copy_(kept, True)
        return True

    def turn_to(self, buffer: Buffer) -> Buffer:
        """Continue in other memory, from its beginning.

        Parameters
        ----------
        buffer : Buffer
            The memory for samples from now on.

        Returns
        -------
        Buffer
            The earlier memory with its content.
        """
        buffer, self._buffer = self._buffer, buffer
        self._reserve(self.capacity)
        return buffer

    def close(self, rows: int) -> Tensor:
        """Return the samples that count, and drop the reference to them.

        Parameters
        ----------
        rows : int
            The number of rows that count.

        Returns
        -------
        torch.Tensor
            The samples, [rows, ...].
        """
        self.let_go()
        with torch.inference_mode(False):
            return self._view(self._buffer.first(rows * self._row_bytes), rows)

    def let_go(self) -> None:
        """Drop all memory until more is requested."""
        self.array = torch.empty(0)
        self.capacity = self._num_ready = 0

    def _prepare(self, start: int, rows: int, follows: bool) -> None:
        """Prepare the memory of a batch, and of the next ones if they most likely are like it."""
        if start + rows > self.capacity:
            self._reserve(max(start + rows, 2 * self.capacity))
        self._num_ready = self.capacity
        if self._is_exact:
            fitting = (self.capacity - start) // max(1, rows)
            number = min(self._num_batches if follows else 1, fitting)
            self._num_ready = start + number * rows
            # If batches differ in size, the next places are unknown.
            self._make_ready(start, self._num_ready, rows if follows or start == 0 else 0)

    def _make_ready(self, start: int, stop: int, rows: int) -> None:
        """Prepare the next memory for writing, and have a thread prepare that of later batches."""
        row_bytes = self._row_bytes
        self._buffer.touch(start * row_bytes, stop * row_bytes)
        if self._prefaulter is not None and rows:
            fitting = MOST_READY // max(1, rows * row_bytes)
            self._num_batches = max(1, min(2 * self._num_batches, _MOST_BATCHES, fitting))
            end = (stop + self._num_batches * rows) * row_bytes
            self._buffer.touch(stop * row_bytes, end, self._prefaulter)

    def _reserve(self, rows: int) -> None:
        num_bytes = rows * self._row_bytes
        # No view may be alive while the memory moves.
        self.let_go()
        # Tensors made in inference mode could not be used outside of it.
        with torch.inference_mode(False):
            self.array = self._view(self._buffer.reserve(num_bytes)[:num_bytes], rows)
        # Only host memory is written by address.
        self._address = address_of(self.array)
        self.capacity = rows

    def _view(self, raw: Tensor, rows: int) -> Tensor:
        return raw.view(self.spec.dtype).view(rows, *self.spec.shape)
