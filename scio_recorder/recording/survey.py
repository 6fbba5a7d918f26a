"""Running statistics and histograms of all values of a layer, a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
from scio_recorder.reductions.alive import Bounds, is_at_bound, is_dead, is_saturated
from scio_recorder.reductions.base import join_means
from scio_recorder.reductions.binning import Bins, as_floats
from scio_recorder.reductions.histogram import widened

# Values that are processed together: while all is computed from them, they and their temporaries
# stay in the last cache. With smaller pieces, threads would spend their time waiting for each other
# between the calls.
_PIECE = 1 << 19
# From this length on, a dimension is not short.
_LONG = 256
# Bins reach no further from the mean than this number of standard deviations.
_REACH = 6.0
# Values that are counted in bins are taken in runs of neighbours, since reading single ones from
# memory would take as long as reading all of them.
_RUN = 64
_GOLDEN = (math.sqrt(5) - 1) / 2
# If the squares about zero exceed those about the mean by more than this factor, these are not
# taken as a difference of the former, which loses as many digits.
_MOST_LOST = 16.0


def bars_of(parts: Iterable[Tensor], span: tuple[float, float], bins: int, every: int) -> Bars:
    """Count values of all parts, one of `every` of them, in bins over a range, except for NaNs."""
    counts = _Counts(Bins(*span, bins), every)
    for part in parts:
        counts.update(part)
    bars = counts.shown(span)
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
    """

    def __init__(self, dimension: int, bounds: Bounds | None = None) -> None:
        self._dimension = dimension
        self._bounds = bounds
        self._samples = self._total = self._count = 0
        self._nans = self._below = self._above = self._zeros = 0
        self._mean = self._squares = 0.0
        self._low, self._high = math.inf, -math.inf
        # By unit.
        self._lows = torch.empty(0, device="cpu")
        self._highs = self._at_bound = self._lows
        self._counts: _Counts | None = None

    def update(self, part: Tensor) -> None:
        """Add samples [some, ...]."""
        values = _by_unit(part.detach().cpu(), self._dimension)
        if not self._samples:
            ends = torch.tensor([[math.inf], [-math.inf]], dtype=torch.float64, device="cpu")
            self._lows, self._highs = ends.repeat(1, values.shape[1])
            self._at_bound = torch.zeros(values.shape[1], dtype=torch.int64, device="cpu")
        self._samples += len(part)
        # Fresh memory for each piece would take longer than what is computed in it.
        scratch = torch.empty(min(_PIECE, part.numel()), dtype=torch.float64, device="cpu")
        for units, piece in _pieces(values):
            self._take(units, as_floats(_magnitudes(piece)), scratch)

    def _take(self, units: slice, piece: Tensor, scratch: Tensor) -> None:
        """Add values [rows, units, positions] of some units."""
        lows, highs = _of_units(torch.amin, piece), _of_units(torch.amax, piece)
        self._lows[units] = torch.minimum(self._lows[units], lows)
        self._highs[units] = torch.maximum(self._highs[units], highs)
        if self._bounds is not None:
            self._at_bound[units] += is_at_bound(piece, self._bounds).sum((0, 2))
        values = piece.flatten()
        self._total += len(values)
        low, high = float(lows.min()), float(highs.max())
        # Both are finite only if everything is.
        if not (math.isfinite(low) and math.isfinite(high)):
            self._nans += int(values.isnan().sum())
            self._below += int(values.isneginf().sum())
            self._above += int(values.isposinf().sum())
            values = values[values.isfinite()]
            if not len(values):
                return
            low, high = map(float, values.aminmax())
        self._low, self._high = min(self._low, low), max(self._high, high)
        if low <= 0 <= high:
            # NumPy counts several times faster.
            self._zeros += int(np.count_nonzero(values.numpy() == 0))
        self._join_moments(len(values), *_moments(scratch[: len(values)].copy_(values)))

    def count(self, part: Tensor, bins: Bins, every: int) -> None:
        """Count values of samples [some, ...], one of `every` of them, in bins."""
        self._counts = _Counts(bins, every)
        self._counts.update(part)

    def joined(self, other: Survey) -> Survey:
        """Add a survey of other samples of the layer, and return this one."""
        self._samples += other._samples
        self._total += other._total
        self._nans += other._nans
        self._below += other._below
        self._above += other._above
        self._zeros += other._zeros
        self._low, self._high = min(self._low, other._low), max(self._high, other._high)
        self._lows = torch.minimum(self._lows, other._lows)
        self._highs = torch.maximum(self._highs, other._highs)
        self._at_bound = self._at_bound + other._at_bound
        self._join_moments(other._count, other._mean, other._squares)
        if self._counts is not None and other._counts is not None:
            self._counts.join(other._counts)
        return self

    def _join_moments(self, count: int, mean: float, squares: float) -> None:
        self._mean, apart = join_means(self._count, self._mean, count, mean)
        self._squares += squares + apart * apart
        self._count += count

    @property
    def bins(self) -> Bins | None:
        """The bins in which values were counted, if any."""
        return self._counts.bins if self._counts else None

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
        if self._samples < 2 or not self._total:
            return None
        count = self._total // len(self._lows)
        dead = is_dead(count, self._lows, self._highs)
        max_abs = torch.maximum(self._lows.abs(), self._highs.abs())
        saturated = None
        if self._bounds is not None:
            saturated = is_saturated(self._at_bound.double() / count)
        return units_of(dead, max_abs, saturated, self._dimension)

    @property
    def bars(self) -> Bars | None:
        """The histogram; None without bins or values, and if the first part was misleading."""
        return self._counts.shown(self.span) if self._counts and self.span else None

    @property
    def span(self) -> tuple[float, float] | None:
        """The range that bins should cover; None if there is no finite value."""
        if not self._count:
            return None
        std = self.finite.std
        reach = _REACH * std if std is not None and math.isfinite(std) else math.inf
        return widened(max(self._low, self._mean - reach), min(self._high, self._mean + reach))


class _Counts:
    """The numbers of values in bins, of all values or of one among so many."""

    def __init__(self, bins: Bins, every: int) -> None:
        self.bins = bins
        self._every = every
        self._tally = torch.zeros(len(bins.edges) + 1, dtype=torch.int64, device="cpu")

    def update(self, part: Tensor) -> None:
        """Add values [some, ...]."""
        for values in torch.split(spread(part.detach().flatten(), self._every).cpu(), _PIECE):
            self._tally += self.bins.tally(_magnitudes(values))

    def join(self, other: _Counts) -> None:
        """Add the numbers in the same bins of other values."""
        self._tally += other._tally

    def shown(self, span: tuple[float, float]) -> Bars | None:
        """Return counts in bins over a range; None if fine bins can't be joined to these."""
        joined = self.bins.joined(self._tally, *span)
        if joined is None:
            return None
        tally, low, high = joined
        below, *counts, above = tally.tolist()
        return Bars(tuple(counts), low, high, below, above, self._every)


def spread(values: Tensor, every: int) -> Tensor:
    """Return one of so many values [n], evenly spread, in runs of neighbours.

    Places follow no period, so that each unit and each position has its share.

    Examples
    --------
    >>> spread(torch.arange(1280), 5)[::64]
    tensor([   0,  512,  704, 1216])
    """
    if every == 1:
        return values
    runs = values[: len(values) - len(values) % _RUN].view(-1, _RUN)
    groups = torch.arange(len(runs) // every, device="cpu")
    # The multiples of the golden ratio are spread most evenly over the fractions.
    places = groups * every + (groups.double() * _GOLDEN % 1 * every).long()
    return runs[places].flatten()


def units_of(dead: Tensor, max_abs: Tensor, saturated: Tensor | None, dimension: int) -> Units:
    """Return the number of units, and the numbers of those that do nothing.

    Parameters
    ----------
    dead : Tensor
        Whether a unit has only one value, [units].
    max_abs : Tensor
        The largest absolute value of each.
    saturated : Tensor or None
        Whether it is saturated; None if its function has no bounds.
    dimension : int
        The dimension of [samples, ...] along which they lie; 0 if there is none.
    """
    zero = int((dead & (max_abs == 0)).sum())
    exploding, excess = _exploding(dead, max_abs)
    return Units(
        dead.numel(),
        dimension,
        zero,
        int(dead.sum()) - zero,
        None if saturated is None else int(saturated.sum()),
        exploding,
        excess,
    )


def _exploding(dead: Tensor, max_abs: Tensor) -> tuple[tuple[int, ...], float]:
    """Return which units exceed the median one by far, and by which factor the first one does."""
    # Units that do nothing have no share in what is usual, nor have infinities.
    size = max_abs.double().flatten()
    usual = size[~dead.flatten() & size.isfinite() & (size > 0)]
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


def _by_unit(part: Tensor, dimension: int) -> Tensor:
    """Return samples as values [rows, units, positions]; without units all belong to one."""
    shape = part.shape
    if not dimension:
        return part.reshape(1, 1, part.numel())
    return part.reshape(shape[:dimension].numel(), shape[dimension], shape[dimension + 1 :].numel())


def _pieces(values: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces of values [rows, units, positions], and the units of each."""
    _, units, positions = values.shape
    if not values.numel():
        return
    # One row may be larger than a piece, and so may one unit of it.
    some = max(1, _PIECE // positions)
    for rows in torch.split(values, max(1, _PIECE // (units * positions))):
        for first in range(0, units, some):
            chosen = slice(first, first + some)
            for piece in torch.split(rows[:, chosen], _PIECE, 2):
                yield chosen, piece


def _of_units(extreme: Callable[[Tensor, int], Tensor], piece: Tensor) -> Tensor:
    """Return the extreme of each unit of values [rows, units, positions]."""
    # Along a short last dimension, reducing takes several times as long as along the first.
    first = 2 if piece.shape[2] >= _LONG else 0
    return extreme(extreme(piece, first), 0 if first else 1)


def _magnitudes(values: Tensor) -> Tensor:
    """Return complex values by their magnitudes; others unchanged."""
    return values.abs() if values.is_complex() else values


def _moments(values: Tensor) -> tuple[float, float]:
    """Return the mean of finite values [n] in float64, and the squares about it; change them."""
    total = float(values.sum())
    mean = total / len(values)
    squares = float(values @ values)
    around = squares - total * mean
    # Also if one of them overflows.
    if not around > squares / _MOST_LOST:
        values -= mean
        around = float(values @ values)
    return mean, around
