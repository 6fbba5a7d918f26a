"""Activations as rows of features, gathered into blocks of a fixed number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.samples import By, SampleReduction


class RowReduction(SampleReduction):
    """A reduction over rows of features, which gathers them into blocks.

    Parameters
    ----------
    feature_dim : int or None
        The dimension that holds the features; every other position is a row. None flattens all but
        dimension 0.
    by : callable, optional
        ``batch -> labels [batch]``.
    **options
        The other arguments.
    """

    def __init__(self, feature_dim: int | None, *, by: By | None = None, **options: Any) -> None:
        self._feature_dim = feature_dim
        self._options = {"feature_dim": feature_dim, **options}
        super().__init__(by=by)

    def reset(self) -> None:
        """Forget all that was seen."""
        super().reset()
        self._buffer: RowBuffer | None = None

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        shape, dim = samples.shape, self._feature_dim
        if dim is None:
            return tuple(shape[1:])
        if not (0 < dim < len(shape) or -len(shape) < dim < 0):
            raise CollectError(
                f"feature_dim={dim} is no dimension of features of an activation of shape "
                f"{tuple(shape)}; dimension 0 holds the samples, so choose one from 1 to "
                f"{len(shape) - 1}, or feature_dim=None to flatten all of them."
            )
        return (shape[dim],)

    def _rows_of(self, samples: Tensor) -> Tensor:
        """View samples as [samples, positions, features]; copies only where it must."""
        if self._feature_dim is None:
            return samples.reshape(len(samples), 1, samples[0].numel())
        moved = samples.movedim(self._feature_dim, -1)
        return moved.reshape(len(samples), math.prod(moved.shape[1:-1]), moved.shape[-1])

    def _buffer_for(self, rows: Tensor, capacity: int, *, feature_major: bool) -> RowBuffer:
        """Return the buffer; what waits in one of another dtype or device is settled first."""
        assert self._dtype is not None
        wanted = self._dtype, rows.device
        if self._buffer is None or (self._buffer.rows.dtype, self._buffer.rows.device) != wanted:
            self._settle()
            shape = (rows.shape[-1], capacity) if feature_major else (capacity, rows.shape[-1])
            memory = torch.empty(shape, dtype=self._dtype, device=rows.device)
            self._buffer = RowBuffer(memory.T if feature_major else memory)
        return self._buffer


class RowBuffer:
    """A block of rows of features, filled piece by piece.

    Parameters
    ----------
    rows : Tensor
        Memory, [rows, features]. Where the values of one feature lie side by side in it, writing is
        fast for convolution maps, whose features are strided, and each feature can be sorted in
        place.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.used = 0

    @property
    def filled(self) -> Tensor:
        """The rows that were written, [used, features]."""
        return self.rows[: self.used]

    @property
    def full(self) -> bool:
        """Whether no row is left; the user of the buffer then sets `used` back to 0."""
        return self.used == len(self.rows)

    def fill(self, samples: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """Yield pieces of `samples` [n, positions, features], and where to write them.

        Each comes as ``(piece, place, rows)``, the last saying which of n * positions rows it is.
        Blocks are filled exactly, also through the middle of a sample. Empty the buffer between
        two pieces when it is full.
        """
        positions = samples.shape[1]
        row, total = 0, samples.shape[0] * positions
        while row < total:
            sample, position = divmod(row, positions)
            free = len(self.rows) - self.used
            if position == 0 and free >= positions:
                source = samples[sample : sample + free // positions]
            else:
                source = samples[sample : sample + 1, position : position + free]
            size = source.shape[0] * source.shape[1]
            target = self.rows[self.used : self.used + size].view(source.shape)
            self.used += size
            row += size
            yield source, target, slice(row - size, row)
