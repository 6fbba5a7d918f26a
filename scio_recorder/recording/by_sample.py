"""The rows of each sample: which they are, and a layer's values there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

# Rows of which the samples are looked at together.
_PART_ROWS = 1 << 20


class RowsOfSamples(Sequence["slice | Tensor"]):
    """Which rows each sample has, in the order in which they were collected.

    Parameters
    ----------
    samples : Tensor
        The sample of each row, from which it is read part by part.
    num_samples : int
        How many samples there are, of which some may have no rows.

    Examples
    --------
    >>> rows = RowsOfSamples(torch.tensor([0, 0, 2]), 3)
    >>> rows[0], rows[1], rows.lengths
    (slice(0, 2, None), slice(2, 2, None), tensor([2, 0, 1]))
    >>> RowsOfSamples(torch.tensor([0, 1, 0]), 2)[0]
    tensor([0, 2])
    """

    def __init__(self, samples: Tensor, num_samples: int) -> None:
        self.lengths = torch.zeros(num_samples, dtype=torch.int64, device="cpu")
        is_rising, last = True, 0
        for start in range(0, len(samples), _PART_ROWS):
            part = samples[start : start + _PART_ROWS].cpu()
            low = int(part.min())
            counts = torch.bincount(part - low)
            self.lengths[low : low + len(counts)] += counts
            is_rising = is_rising and int(part[0]) >= last and not bool((part.diff() < 0).any())
            last = int(part[-1])
        self._starts = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        # Where rows of a sample are not together, each takes a number.
        self._order = None if is_rising else samples[:].cpu().argsort(stable=True)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> slice | Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[slice | Tensor]: ...
    def __getitem__(self, index: int | slice) -> slice | Tensor | Sequence[slice | Tensor]:
        found = range(len(self))[index]
        if isinstance(found, range):
            return [self[one] for one in found]
        start, stop = self._starts[found : found + 2].tolist()
        return slice(start, stop) if self._order is None else self._order[start:stop]


class SampleValues(Sequence[Tensor]):
    """A layer's values by sample, [rows of the sample, ...] each, read when they are asked for.

    Parameters
    ----------
    values : Tensor
        Those of all rows.
    rows : sequence
        Which rows each sample has, as indices.
    """

    def __init__(self, values: Tensor, rows: Sequence[slice | Tensor]) -> None:
        self._values = values
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        rows = self._rows[index]
        if isinstance(rows, slice | Tensor):
            return self._values[rows]
        return [self._values[one] for one in rows]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self)} samples, {list(self._values.shape)} in all>"
