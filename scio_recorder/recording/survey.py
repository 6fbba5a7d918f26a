"""Statistics over all values of a layer and for each of its units, part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.display.summary import (
    SATURATION_BOUNDS,
    SATURATION_SHARE,
    SATURATION_WIDTH,
    Bars,
    Units,
    Values,
)
from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.recording.readable import Readable
from scio_recorder.reductions import Histogram
from scio_recorder.tensors.threads import one_thread

T = TypeVar("T")

# Values that are widened to float64 together: they stay in the cache.
_BLOCK = 1 << 17
# Bins reach no further from the mean than so many standard deviations.
_REACH = 6.0
# Squares of values beyond the first are taken in units of the second, or they would overflow.
_LARGE, _LARGE_UNIT = 2.0**400, 2.0**600
# Up to here float64 has every integer and every half between two of them.
_EXACT = 2.0**52


class Survey:
    """Running statistics, in float64; of complex values, their magnitudes are looked at.

    Parameters
    ----------
    dimension : int, optional
        The dimension of [samples, ...] along which units lie; None to leave units out, 0 to take
        everything for one unit.
    bounds : (float or None, float or None), optional
        The bounds at which the layer saturates.
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
        # In units: the mean, and the sum of squares about it.
        self._mean = self._squares = 0.0
        self._unit = 1.0
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
        self._low, self._high = min(self._low, low), max(self._high, high)
        # Several times faster than count_nonzero, whose branches guess wrong on what a ReLU gives.
        self._zeros += int((present == 0).sum())
        self._join(present)

    def _join(self, present: Tensor) -> None:
        """Join moments as Chan, Golub and LeVeque (1983) do."""
        if self._unit == 1.0 and max(-self._low, self._high) > _LARGE:
            self._unit = _LARGE_UNIT
            self._mean /= _LARGE_UNIT
            self._squares = self._squares / _LARGE_UNIT / _LARGE_UNIT
        if self._unit != 1.0:
            present = present / self._unit
        size = present.numel()
        own = float(present.mean())
        delta, total = own - self._mean, self._count + size
        self._squares += float((present - own).square_().sum())
        self._squares += delta * delta * self._count * size / total
        self._mean, self._count = self._mean + delta * size / total, total

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
        found = self.finite
        if self._below or self._above:
            found = replace(
                found,
                mean=(math.inf if self._above else 0.0) - (math.inf if self._below else 0.0),
                std=math.nan,
                low=-math.inf if self._below else self._low,
                high=math.inf if self._above else self._high,
            )
        return replace(
            found,
            zeros=self._zeros / self._total,
            nans=self._nans,
            infinities=self._below + self._above,
        )

    @property
    def finite(self) -> Values:
        """Mean, spread and extremes of the finite values alone."""
        if not self._count:
            return Values()
        return Values(self._mean * self._unit, self._std, self._low, self._high)

    @property
    def units(self) -> Units | None:
        """Facts about units; None where fewer than two samples were seen."""
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
        mean, std = self._mean * self._unit, self._std
        reach = _REACH * std if math.isfinite(std) else math.inf
        low, high = max(self._low, mean - reach), min(self._high, mean + reach)
        if not low < high:
            half = max(0.5, abs(low) * 2**-20)
            return low - half, high + half
        return low, high

    @property
    def _std(self) -> float:
        if self._count < 2:
            return math.nan
        return math.sqrt(self._squares / (self._count - 1)) * self._unit


def count_bars(
    parts: Iterable[Tensor], span: tuple[float, float], bins: int, *, has_nan: bool = True
) -> Bars:
    """Count the values of all parts in bins over a range, except for NaNs."""
    histogram = Histogram(bins, range=span)
    for part in parts:
        for block in _blocks(part):
            values = block.flatten()
            histogram.update(values[~values.isnan()] if has_nan else values)
    counts, _, below, above = histogram.compute()
    return Bars(tuple(counts.tolist()), *span, below, above)


def for_each_layer(labels: Sequence[DepthIdx], look: Callable[[DepthIdx, Advance], T]) -> list[T]:
    """Return what a function says of each layer, and show how far it has come."""
    found = []
    with one_thread(), progress_bar("reading layers", len(labels)) as advance:
        for label in labels:
            found.append(look(label, advance))
            advance(0, 0)
    return found


def read(recording: Readable, label: DepthIdx, advance: Advance) -> Iterator[Tensor]:
    """Yield the samples of a layer in parts, and say what was read."""
    for part in recording.parts(label):
        yield part
        advance(0, part.nbytes, 0)


def whole_bins(span: tuple[float, float], bins: int) -> tuple[tuple[float, float], int]:
    """Return a range and a number of bins in which all bins hold equally many integers.

    Edges lie half between integers. Others would leave bins empty or doubly filled by themselves.

    Examples
    --------
    >>> whole_bins((0.0, 9.0), 4)
    ((-0.5, 11.5), 4)
    >>> whole_bins((0.0, 1.0), 50)
    ((-0.5, 1.5), 2)
    """
    low, high = math.ceil(span[0]), math.floor(span[1])
    if max(-low, high) >= _EXACT:
        return span, bins
    width = -(-(high - low + 1) // bins)
    count = -(-(high - low + 1) // width)
    return (low - 0.5, low - 0.5 + width * count), count


def unit_dimension(layer: Layer, ndim: int) -> int:
    """Return along which dimension of [samples, ...] the units of a layer lie.

    Channels come first in images and behind one-dimensional convolutions, features last in
    sequences and wherever a module works on the last dimension. 0: there is one value a sample.
    """
    # LayerNorm2d of many vision models takes [samples, channels, height, width].
    if layer.type_name.endswith(("1d", "2d", "3d")):
        return min(1, ndim - 1)
    if layer.type_name.startswith(("Linear", "LayerNorm", "RMSNorm", "Embedding")):
        return ndim - 1
    return 2 if ndim == 3 else min(1, ndim - 1)


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
