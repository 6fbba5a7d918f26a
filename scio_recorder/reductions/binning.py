"""Counting values in bins of equal width.

NOTE [Bins by arithmetic]

The bin of a value is computed, since a search among the edges takes several times as long. But the
computed bin is rounded, so a value right beside an edge may get to the wrong side. The bin never
falls while values rise. So it is right for all values of a dtype if it is right for two at each
edge, the nearest below and the nearest above. These are tried once. Beside the few edges at which
one of them is wrong, values are searched for. So counts are those of a search.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# Rounding moves no value further than this share of the larger end of the range.
_SLACK = 2.0**-48
# If more edges are doubtful, all values are searched for.
_MOST_DOUBTFUL = 4
# The number of fine bins over a range that is not known yet; the factor by which they exceed its
# known part; and the least number of them that make one final bin.
_FINE, _WIDER, _LEAST = 1 << 15, 4.0, 16


class Bins:
    """Bins of equal width, with NumPy's edges: half-open, the last one closed.

    Parameters
    ----------
    low, high : float
        The lower end of the first and the upper end of the last.
    count : int
        The number of bins.

    Examples
    --------
    >>> Bins(0.0, 1.0, 2).tally(torch.tensor([-1.0, 0.5, 1.0, 2.0]))
    tensor([1, 0, 2, 1])
    """

    def __init__(self, low: float, high: float, count: int) -> None:
        self._count = count
        # A range may be wider than the largest float.
        scale = 1.0 if math.isfinite(high - low) else 2.0
        self.edges = torch.from_numpy(np.linspace(low / scale, high / scale, count + 1) * scale)
        self._slack = _SLACK * max(abs(low), abs(high))
        # Bins may be narrower than float64 resolves.
        self._are_apart = bool((self.edges.diff() > 4 * self._slack).all())
        self._per_bin = count / (high - low)
        self._shift = 1.0 - low * self._per_bin
        self._doubtful: dict[torch.dtype, list[tuple[float, float, slice]] | None] = {}

    def tally(self, values: Tensor) -> Tensor:
        """Return the numbers of values [n] below, in each bin and above, [bins + 2]; no NaNs."""
        values = as_floats(values)
        if values.device.type != "cpu" or not self._are_apart:
            return self._counted(self._searched(values))
        if values.dtype not in self._doubtful:
            self._doubtful[values.dtype] = self._doubts(values.dtype)
        doubtful = self._doubtful[values.dtype]
        if doubtful is None:
            return self._counted(self._searched(values))
        tally, array = self._counted(self._computed(values)), values.numpy()
        for first, last, places in doubtful:
            # Values beside an edge are in few bins, which may be empty.
            if not tally[places].any():
                continue
            # NumPy compares several times faster.
            beside = np.flatnonzero((array >= first) & (array <= last))
            if len(beside):
                few = values[torch.from_numpy(beside)]
                tally += self._counted(self._searched(few)) - self._counted(self._computed(few))
        return tally

    def joined(self, tally: Tensor, low: float, high: float) -> tuple[Tensor, float, float] | None:
        """Return a tally over a range that is known now, and the range; None if impossible."""
        is_own = (low, high) == (float(self.edges[0]), float(self.edges[-1]))
        return (tally, low, high) if is_own else None

    def _counted(self, places: Tensor) -> Tensor:
        # NaNs are counted behind the rest and left out there, so nothing waits for an accelerator.
        return torch.bincount(places, minlength=self._count + 3)[:-1]

    def _computed(self, values: Tensor) -> Tensor:
        places = values.to(torch.float64, copy=True).mul_(self._per_bin).add_(self._shift)
        return places.clamp_(0, self._count + 1).nan_to_num_(nan=self._count + 2).int()

    def _searched(self, values: Tensor) -> Tensor:
        edges, values = self.edges.to(values.device), values.double().contiguous()
        places = torch.bucketize(values, edges, right=True) - (values == edges[-1]).long()
        return torch.where(values.isnan(), self._count + 2, places)

    def _doubts(self, dtype: torch.dtype) -> list[tuple[float, float, slice]] | None:
        """Return the first and the last value beside each doubtful edge; None for too many."""
        near = self.edges.to(dtype)
        down, up = (
            torch.nextafter(near, torch.full_like(near, end)) for end in (-math.inf, math.inf)
        )
        below, above = (
            torch.where(near < self.edges, near, down),
            torch.where(near < self.edges, up, near),
        )
        found: list[tuple[float, float]] = []
        for values, away in ((below, -self._slack), (above, self._slack)):
            wrong = self._computed(values) != self._searched(values)
            ends = values[wrong], (self.edges[wrong] + away).to(dtype)
            found += zip(torch.minimum(*ends).tolist(), torch.maximum(*ends).tolist(), strict=True)
        if len(found) > _MOST_DOUBTFUL:
            return None
        places = self._computed(torch.tensor(found, dtype=dtype, device="cpu").view(-1, 2)).tolist()
        return [(*ends, slice(a, b + 1)) for ends, (a, b) in zip(found, places, strict=True)]


class FineBins(Bins):
    """Many bins over a guessed range, which are joined to fewer once the range is known.

    Their edges are multiples of their width, which is a power of two.

    Parameters
    ----------
    low, high : float
        The known part of the range; the bins reach further.
    count : int
        The final number of bins.

    Examples
    --------
    >>> fine = FineBins(0.0, 1.0, 2)
    >>> tally, low, high = fine.joined(fine.tally(torch.tensor([0.0, 0.3, 1.2, 1.5])), 0.0, 1.5)
    >>> tally, low, high
    (tensor([0, 2, 2, 0]), 0.0, 1.5002...)
    """

    def __init__(self, low: float, high: float, count: int) -> None:
        extent = min(max(high - low, 1e-290), 1e290)
        self._width = 2.0 ** math.ceil(math.log2(_WIDER * extent / _FINE))
        self._first = math.floor((low / 2 + high / 2) / self._width) - _FINE // 2
        self._joined_count = count
        is_usual = 2.0**-100 < self._width < 2.0**100
        self._fits_float32 = is_usual and abs(self._first) + _FINE < 1 << 24
        low, high = (place * self._width for place in (self._first, self._first + _FINE))
        super().__init__(low, high, _FINE)

    def _computed(self, values: Tensor) -> Tensor:
        # Powers of two and whole numbers are exact in float32, which is twice as fast.
        values = values if self._fits_float32 else values.double()
        places = (values * (1 / self._width)).floor_().add_(1 - self._first)
        return places.clamp_(0, _FINE + 1).nan_to_num_(nan=_FINE + 2).int()

    def joined(self, tally: Tensor, low: float, high: float) -> tuple[Tensor, float, float] | None:
        """Return a tally of bins over a range and little more, and their ends."""
        begin, last = (math.floor(edge / self._width) - self._first for edge in (low, high))
        size = -(-(last + 1 - begin) // self._joined_count)
        end = begin + size * self._joined_count
        if begin < 0 or end > _FINE or size < _LEAST:
            return None
        # The first count is that of values below all bins.
        below, inside, above = tally.tensor_split((begin + 1, end + 1))
        counts = inside.view(self._joined_count, size).sum(1)
        ends = below.sum().view(1), above.sum().view(1)
        whole = torch.cat([ends[0], counts, ends[1]])
        return whole, float(self.edges[begin]), float(self.edges[end])


def as_floats(values: Tensor) -> Tensor:
    """Return real values in float32 if that represents all of their dtype, else in float64."""
    dtype = values.dtype
    is_exact = dtype == torch.bool or dtype.itemsize <= 2 or dtype == torch.float32
    return values.to(torch.float32 if is_exact else torch.float64)
