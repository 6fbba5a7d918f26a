"""Activations as rows of features, gathered into blocks of a fixed number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from scio_recorder.errors import CollectError


def feature_shape(shape: torch.Size, feature_dim: int | None) -> tuple[int, ...]:
    """Return what must stay the same from batch to batch: the features of one row.

    Raises
    ------
    CollectError
        If `feature_dim` is no dimension of `shape` or the one of the samples.
    """
    if feature_dim is None:
        return tuple(shape[1:])
    if not (0 < feature_dim < len(shape) or -len(shape) < feature_dim < 0):
        raise CollectError(
            f"feature_dim={feature_dim} is no dimension of features of an activation of shape "
            f"{tuple(shape)}; dimension 0 holds the samples, so choose one from 1 to "
            f"{len(shape) - 1}, or feature_dim=None to flatten all of them."
        )
    return (shape[feature_dim],)


def as_samples(activation: Tensor, feature_dim: int | None) -> Tensor:
    """View an activation as [samples, positions, features]; copies only where it must."""
    count = len(activation)
    if feature_dim is None:
        return activation.reshape(count, 1, activation[0].numel())
    moved = activation.movedim(feature_dim, -1)
    return moved.reshape(count, math.prod(moved.shape[1:-1]), moved.shape[-1])


class RowBuffer:
    """A block of `capacity` rows of `width` features, filled piece by piece.

    `feature_major` lays the values of one feature side by side in memory. Writing is then fast for
    convolution maps, whose features are strided, and a row of `columns` can be sorted in place.
    """

    def __init__(
        self,
        capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        feature_major: bool = False,
    ) -> None:
        shape = (width, capacity) if feature_major else (capacity, width)
        memory = torch.empty(shape, dtype=dtype, device=device)
        self.rows = memory.T if feature_major else memory
        self.capacity = capacity
        self.used = 0

    @property
    def columns(self) -> Tensor:
        """The buffer as [features, rows]."""
        return self.rows.T

    @property
    def filled(self) -> Tensor:
        """The rows that were written, [used, features]."""
        return self.rows[: self.used]

    @property
    def full(self) -> bool:
        """Whether no row is left; the user of the buffer then sets `used` back to 0."""
        return self.used == self.capacity

    def fill(self, samples: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield pieces of `samples` [n, positions, features], and where to write them.

        Each comes as ``(piece, place, first)``, `first` being the index of its first sample.
        Blocks are filled exactly, also through the middle of a sample. Empty the buffer between
        two pieces when it is full.
        """
        positions = samples.shape[1]
        row, total = 0, samples.shape[0] * positions
        while row < total:
            sample, position = divmod(row, positions)
            free = self.capacity - self.used
            if position == 0 and free >= positions:
                source = samples[sample : sample + free // positions]
            else:
                source = samples[sample : sample + 1, position : position + free]
            size = source.shape[0] * source.shape[1]
            target = self.rows[self.used : self.used + size].view(source.shape)
            self.used += size
            row += size
            yield source, target, sample
