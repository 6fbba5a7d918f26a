"""Statistics over all values of a layer and for each of its units, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from scio_recorder.display.summary import (
    SATURATION_BOUNDS,
    SATURATION_SHARE,
    SATURATION_WIDTH,
    Bars,
    Units,
    Values,
)
from scio_recorder.layer import Layer
from scio_recorder.reductions import Histogram

__all__ = ["Survey", "count_bars", "unit_dimension"]

# Values that are widened to float64 together: they stay in the cache.
_BLOCK = 1 << 17
# Bins reach no further from the mean than so many standard deviations.
_REACH = 6.0


class Survey:
    """Running statistics, in float64; of complex values, their magnitudes are looked at.

    Parameters
    ----------
    dimension : int, optional
        The dimension of [samples, ...] along which units lie; None to leave units out, 0 to take
        everything for one unit.
    bounds : (float or None, float or None), optional
        Where the layer saturates.
    """

    def __init__(
        self,
        dimension: int | None = None,
        bounds: tuple[float | None, float | None] | None = None,
    ) -> None:
        self._dimension = dimension
        self._bounds = bounds
        self._total = self._count = self._nans = self._below = self._above = self._zeros = 0
        self._samples = 0
        self._mean = self._squares = 0.0
        self._low, self._high = math.inf, -math.inf
        self._unit_low: Tensor | None = None
        self._unit_high: Tensor | None = None
        self._unit_saturated: Tensor | None = None

    def update(self, part: Tensor) -> None:
        """Take in samples [some, ...]."""
        self._samples += len(part)
        for block in _blocks(part):
            self._take(block)
            if self._dimension is not None and block.numel():
                self._take_units(block, self._dimension)

    def _take(self, block: Tensor) -> None:
        self._total += block.numel()
        if not block.numel():
            return
        present = block.flatten()
        low, high = map(float, present.aminmax())
        # Both are finite only where everything is.
        if not (math.isfinite(low) and math.isfinite(high)):
            self._nans += int(present.isnan().sum())
            self._below += int(present.isneginf().sum())
            self._above += int(present.isposinf().sum())
            present = present[present.isfinite()]
            if not present.numel():
                return
            low, high = map(float, present.aminmax())
        size = present.numel()
        # Chan, Golub and LeVeque (1983): joins the sums of squares about two means.
        own = float(present.mean())
        delta, total = own - self._mean, self._count + size
        self._squares += float((present - own).square_().sum())
        # Zero times an infinite square would be nan.
        self._squares += delta * delta * self._count * size / total if self._count else 0.0
        self._mean, self._count = self._mean + delta * size / total, total
        self._low, self._high = min(self._low, low), max(self._high, high)
        self._zeros += size - int(present.count_nonzero())

    def _take_units(self, block: Tensor, dimension: int) -> None:
        others = tuple(dim for dim in range(block.ndim) if dim != dimension or not dimension)
        low, high = block.amin(others), block.amax(others)
        if self._unit_low is None or self._unit_high is None:
            self._unit_low, self._unit_high = low, high
        else:
            self._unit_low = torch.minimum(self._unit_low, low)
            self._unit_high = torch.maximum(self._unit_high, high)
        if self._bounds is not None:
            found = _at_bound(block, self._bounds).sum(others)
            before = self._unit_saturated
            self._unit_saturated = found if before is None else before + found

    @property
    def values(self) -> Values:
        """Statistics of all values but NaNs."""
        if self._count + self._below + self._above == 0:
            return Values(nans=self._nans, infinities=0)
        mean, std = self._mean, self._std
        low, high = self._low, self._high
        if self._below or self._above:
            mean = (math.inf if self._above else 0.0) - (math.inf if self._below else 0.0)
            std = math.nan
            low = -math.inf if self._below else min(low, math.inf)
            high = math.inf if self._above else high
        return Values(
            mean=mean,
            std=std,
            low=low,
            high=high,
            zeros=self._zeros / self._total,
            nans=self._nans,
            infinities=self._below + self._above,
        )

    @property
    def units(self) -> Units | None:
        """What can be said of units: nothing, where fewer than two samples were seen."""
        if self._unit_low is None or self._unit_high is None or self._samples < 2:
            return None
        assert self._dimension is not None
        # A comparison with NaN is false: a unit with one is not dead.
        same = (self._unit_low == self._unit_high) & self._unit_low.isfinite()
        zero = int((same & (self._unit_low == 0)).sum())
        saturated = None
        if self._unit_saturated is not None:
            needed = SATURATION_SHARE * self._total / same.numel()
            saturated = int((self._unit_saturated >= needed).sum())
        return Units(same.numel(), self._dimension, zero, int(same.sum()) - zero, saturated)

    @property
    def span(self) -> tuple[float, float] | None:
        """The range that bins should cover; None where there is no finite value."""
        if not self._count:
            return None
        std = self._std
        reach = _REACH * std if math.isfinite(std) else math.inf
        low, high = max(self._low, self._mean - reach), min(self._high, self._mean + reach)
        if not low < high:
            half = max(0.5, abs(low) * 2**-20)
            return low - half, high + half
        return low, high

    @property
    def _std(self) -> float:
        return math.sqrt(self._squares / (self._count - 1)) if self._count > 1 else math.nan


def count_bars(parts: Iterable[Tensor], span: tuple[float, float], bins: int) -> Bars:
    """Count the values of all parts in bins over a range."""
    histogram = Histogram(bins, range=span)
    for part in parts:
        for block in _blocks(part):
            values = block.flatten()
            missing = values.isnan()
            histogram.update(values[~missing] if missing.any() else values)
    counts, _, below, above = histogram.compute()
    return Bars(tuple(counts.tolist()), *span, below, above)


def unit_dimension(layer: Layer, ndim: int) -> int:
    """Return along which dimension of [samples, ...] the units of a layer lie.

    Channels come first in images and behind one-dimensional convolutions, features last in
    sequences and wherever a module works on the last dimension. 0: there is one value a sample.
    """
    if layer.type_name.startswith(("Linear", "LayerNorm", "RMSNorm", "Embedding")):
        return ndim - 1
    if ndim == 3 and not layer.type_name.endswith("1d"):
        return 2
    return min(1, ndim - 1)


def bounds_of(layer: Layer) -> tuple[float | None, float | None] | None:
    """Return where a layer saturates, None where its type has no bounds."""
    return SATURATION_BOUNDS.get(layer.type_name)


def _at_bound(block: Tensor, bounds: tuple[float | None, float | None]) -> Tensor:
    low, high = bounds
    width = SATURATION_WIDTH * ((high or 0.0) - (low or 0.0))
    found = torch.zeros_like(block, dtype=torch.bool)
    if low is not None:
        found |= block <= low + width
    if high is not None:
        found |= block >= high - width
    return found


def _blocks(part: Tensor) -> Iterator[Tensor]:
    """Yield samples in float64, a bounded number of values at a time."""
    rows = max(1, _BLOCK // max(1, part.shape[1:].numel()))
    for start in range(0, len(part), rows):
        block = part[start : start + rows].detach()
        yield (block.abs() if block.is_complex() else block).double()
