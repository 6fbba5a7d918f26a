"""Running statistics and histograms of all values of a layer, a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from scio_recorder.display.figure import (
    EXPLOSION_FACTOR,
    EXPLOSION_LEAST,
    EXPLOSION_SHARE,
    EXPLOSION_UNITS,
    Bars,
    Units,
    Values,
)
from scio_recorder.reductions.alive import Alive, AliveResult, with_units
from scio_recorder.reductions.base import join_means
from scio_recorder.reductions.binning import Bins, FineBins, is_exact_in_float32
from scio_recorder.reductions.histogram import widened
from scio_recorder.tensors.threads import for_each

# Values that are processed together, so that they stay in the cache.
_BLOCK = 1 << 17
# Bins reach no further from the mean than this number of standard deviations.
_REACH = 6.0


def counted(parts: Iterable[Tensor], span: tuple[float, float], bins: int) -> Bars:
    """Count the values of all parts in bins over a range, except for NaNs."""
    counts = _Counts(Bins(*span, bins))
    for part in parts:
        counts.update(part)
    bars = counts.bars(span)
    assert bars is not None
    return bars


class Survey:
    """Running statistics, in float64; complex values count by their magnitudes.

    Parameters
    ----------
    dimension : int
        The dimension of [samples, ...] along which units lie; 0 to treat everything as one unit.
    bounds : (float or None, float or None), optional
        The bounds at which the layer saturates.
    num_bins : int, optional
        Number of bins of a histogram.
    """

    def __init__(
        self,
        dimension: int,
        bounds: tuple[float | None, float | None] | None = None,
        num_bins: int | None = None,
    ) -> None:
        self._dimension = dimension
        self._alive = Alive(dimension or 1, bounds)
        self._total = self._count = self._nans = self._below = self._above = self._zeros = 0
        self._samples = 0
        self._mean = self._squares = 0.0
        self._low, self._high = math.inf, -math.inf
        self._num_bins = num_bins
        self._counts: _Counts | None = None

    def update(self, part: Tensor, *, is_all: bool = False) -> None:
        """Add samples [some, ...]; ``is_all`` says that there are no others."""
        is_first = not self._samples
        self._samples += len(part)
        looks = [self._look_at] if self._counts is None else [self._look_at, self._counts.update]
        for_each(lambda look: look(part), looks, threads=2)
        if is_first and self._num_bins and self.span:
            # Others follow, whose range can only be guessed.
            kind = Bins if is_all else FineBins
            self._counts = _Counts(kind(*self.span, self._num_bins))
            self._counts.update(part)

    def _look_at(self, part: Tensor) -> None:
        for block in _blocks(part):
            if block.numel():
                self._alive.update(with_units(block, self._dimension))
                # One sample may be larger than the cache.
                for values in torch.split(block.flatten(), _BLOCK):
                    self._take(values)

    def _take(self, values: Tensor) -> None:
        low, high = map(float, values.aminmax())
        self._total += values.numel()
        # Both are finite only if everything is.
        if not (math.isfinite(low) and math.isfinite(high)):
            self._nans += int(values.isnan().sum())
            self._below += int(values.isneginf().sum())
            self._above += int(values.isposinf().sum())
            values = values[values.isfinite()]
            if not values.numel():
                return
            low, high = map(float, values.aminmax())
        self._low, self._high = min(self._low, low), max(self._high, high)
        # NumPy counts several times faster.
        self._zeros += int(np.count_nonzero(values.numpy() == 0))
        away = values.to(torch.float64, copy=True)
        mean = float(away.mean())
        self._mean, apart = join_means(self._count, self._mean, values.numel(), mean)
        away -= mean
        self._squares += float(away @ away) + apart * apart
        self._count += values.numel()

    @property
    def values(self) -> Values:
        """Statistics of all values but NaNs."""
        infinities = self._below + self._above
        if self._count + infinities == 0:
            return Values(nans=self._nans, infinities=0)
        found = self.finite
        if infinities:
            found = Values(
                mean=(math.inf if self._above else 0.0) - (math.inf if self._below else 0.0),
                std=math.nan,
                low=-math.inf if self._below else self._low,
                high=math.inf if self._above else self._high,
            )
        zeros = self._zeros / self._total
        return replace(found, zeros=zeros, nans=self._nans, infinities=infinities)

    @property
    def finite(self) -> Values:
        """Mean, spread and extremes of the finite values alone."""
        if not self._count:
            return Values()
        std = math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else math.nan
        return Values(self._mean, std, self._low, self._high)

    @property
    def units(self) -> Units | None:
        """Facts about units; None if there were fewer than two samples, or no values."""
        is_known = self._samples > 1 and self._total > 0
        return units_of(self._alive.compute(), self._dimension) if is_known else None

    @property
    def bars(self) -> Bars | None:
        """The histogram; None without bins or values, and if the first part was misleading."""
        return self._counts.bars(self.span) if self._counts and self.span else None

    @property
    def span(self) -> tuple[float, float] | None:
        """The range that bins should cover; None if there is no finite value."""
        if not self._count:
            return None
        std = self.finite.std
        reach = _REACH * std if std is not None and math.isfinite(std) else math.inf
        return widened(max(self._low, self._mean - reach), min(self._high, self._mean + reach))


class _Counts:
    """The numbers of values in bins."""

    def __init__(self, bins: Bins) -> None:
        self._bins = bins
        self._tally = torch.zeros(len(bins.edges) + 1, dtype=torch.int64, device="cpu")

    def update(self, part: Tensor) -> None:
        """Add values [some, ...]."""
        for block in _blocks(part):
            for values in torch.split(block.flatten(), _BLOCK):
                self._tally += self._bins.tally(values)

    def bars(self, span: tuple[float, float]) -> Bars | None:
        """Return counts in bins over a range; None if fine bins can't be joined to these."""
        joined = self._bins.joined(self._tally, *span)
        if joined is None:
            return None
        tally, low, high = joined
        below, *counts, above = tally.tolist()
        return Bars(tuple(counts), low, high, below, above)


def units_of(result: AliveResult, dimension: int) -> Units:
    """Return the number of units, and the numbers of those that do nothing.

    Parameters
    ----------
    result : AliveResult
        The activity of each unit.
    dimension : int
        The dimension of [samples, ...] along which they lie; 0 if there is none.
    """
    dead, saturated = result.dead, result.saturated
    zero = int((dead & (result.max_abs == 0)).sum())
    exploding, excess = _exploding(result)
    return Units(
        dead.numel(),
        dimension,
        zero,
        int(dead.sum()) - zero,
        None if saturated is None else int(saturated.sum()),
        exploding,
        excess,
    )


def _exploding(result: AliveResult) -> tuple[tuple[int, ...], float]:
    """Return which units exceed the median one by far, and by which factor the first one does."""
    # Units that do nothing have no share in what is usual, nor have infinities.
    size = result.max_abs.double().flatten()
    usual = size[~result.dead.flatten() & size.isfinite() & (size > 0)]
    if len(usual) < EXPLOSION_UNITS:
        return (), 0.0
    median = float(usual.median())
    is_beyond = (size > max(EXPLOSION_FACTOR * median, EXPLOSION_LEAST)) & size.isfinite()
    found = is_beyond.nonzero().flatten()
    if len(found) > max(1, EXPLOSION_SHARE * len(usual)):
        # So many are no exceptions: the others are small, as behind a GELU of large inputs.
        return (), 0.0
    found = found[size[found].argsort(descending=True, stable=True)]
    return tuple(found.tolist()), float(size[found[0]]) / median if len(found) else 0.0


def _blocks(part: Tensor) -> Iterator[Tensor]:
    """Yield samples a bounded number of values at a time, on the CPU, in float32 or float64."""
    rows = max(1, _BLOCK // max(1, part.shape[1:].numel()))
    for start in range(0, len(part), rows):
        block = part[start : start + rows].detach().cpu()
        block = block.abs() if block.is_complex() else block
        yield block.to(torch.float32 if is_exact_in_float32(block.dtype) else torch.float64)
