"""Activations as rows of features, gathered into blocks of a fixed number of rows."""

from __future__ import annotations

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
        self._buffer: Tensor | None = None
        self._used = 0

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
        """Return samples as [rows, features]; copies only where it must."""
        if self._feature_dim is None:
            return samples.reshape(len(samples), -1)
        moved = samples.movedim(self._feature_dim, -1)
        return moved.reshape(-1, moved.shape[-1])

    def _ready_buffer(self, rows: Tensor, capacity: int) -> Tensor:
        """Return the buffer; what waits in one of another dtype or device is settled first."""
        wanted = self._dtype, rows.device
        if self._buffer is None or (self._buffer.dtype, self._buffer.device) != wanted:
            self._settle()
            shape = capacity, rows.shape[1]
            self._buffer = torch.empty(shape, dtype=self._dtype, device=rows.device)
        return self._buffer

    def _fill(self, buffer: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Yield pieces of `rows`, the place of each in the buffer, and whether that is full then.

        It is filled exactly. Set `_used` back to 0 where it is full.
        """
        while len(rows):
            place = buffer[self._used : self._used + len(rows)]
            self._used += len(place)
            yield rows[: len(place)], place, self._used == len(buffer)
            rows = rows[len(place) :]
