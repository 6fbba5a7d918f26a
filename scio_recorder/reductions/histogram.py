"""Counts of values by bin."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import By, Label, SampleReduction
from scio_recorder.tensors.arguments import whole

# Values handled at once: their temporaries stay in the cache, and in memory that is not given back.
_PORTION = 2**15


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
        self._count, self._low = count, low
        # A range may be wider than the largest float.
        self._scale = 1.0 if math.isfinite(high - low) else 2.0
        ends = low / self._scale, high / self._scale
        self.edges = torch.from_numpy(np.linspace(*ends, count + 1) * self._scale)
        self._per_unit = count / (high - low)

    def tally(self, values: Tensor) -> Tensor:
        """Return the numbers of values [n] below, in each bin and above, [bins + 2]; no NaNs."""
        is_single = values.dtype == torch.float32 and self._is_resolved_in(values.dtype)
        dtype = torch.float32 if is_single else torch.float64
        begins = self._begins_in(dtype).to(values.device)
        is_resolved = is_single or self._is_resolved_in(dtype)
        found = torch.zeros(self._count + 2, dtype=torch.int64, device=values.device)
        for portion in torch.split(values, _PORTION):
            if is_resolved:
                places = self._places(portion.to(dtype), begins)
            else:
                places = torch.bucketize(portion.to(dtype), begins, right=True)
            found += torch.bincount(places, minlength=self._count + 2)
        return found

    def _places(self, values: Tensor, begins: Tensor) -> Tensor:
        """Return the number of the bin of each value, counted from 1.

        A value is in one of the bins on either side of the edge that is nearest to it, as nearly as
        its dtype tells. That takes a fraction of the time of a search.
        """
        nearest = (values - self._low).mul_(self._per_unit).clamp_(0, self._count)
        places = nearest.round_().int()
        places += values >= begins.index_select(0, places)
        return places

    def _is_resolved_in(self, dtype: torch.dtype) -> bool:
        """Whether bins are so much wider than the steps of a dtype that none is mistaken."""
        limits, most = torch.finfo(dtype), float(self.edges.abs().max())
        narrowest = 2.0**6 * limits.eps * most
        is_in_range = self._scale == 1.0 and max(2 * most, self._per_unit) < limits.max
        # NumPy refuses bins that are narrower than float64 resolves.
        return is_in_range and bool((self.edges.diff() > narrowest).all())

    def _begins_in(self, dtype: torch.dtype) -> Tensor:
        """Return where bins, and what is above them, begin: each the least number that is there."""
        infinity = torch.tensor(math.inf, dtype=torch.float64, device=self.edges.device)
        begins = self.edges.clone()
        # The last bin is closed.
        begins[-1] = torch.nextafter(begins[-1], infinity)
        rounded = begins.to(dtype)
        return torch.where(rounded < begins, rounded.nextafter(infinity.to(dtype)), rounded)


class HistogramResult(NamedTuple):
    """Counts [bins] (int64), edges [bins + 1] (float64), and the numbers of values outside.

    Attributes
    ----------
    counts : Tensor
        Values in each bin, [bins], int64.
    edges : Tensor
        The edges of bins, [bins + 1], float64.
    below : int
        Values under the first edge.
    above : int
        Values over the last edge.
    """

    counts: Tensor
    edges: Tensor
    below: int
    above: int


class Histogram(SampleReduction):
    """Counts of all values of a layer in bins of equal width.

    Parameters
    ----------
    bins : int
        Number of bins.
    range : (float, float), optional
        Lower edge of the first bin and upper edge of the last. By default, the smallest and the
        largest finite value of the first batch. Give the range if you merge histograms.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result, all with the
        same range.

    Notes
    -----
    Bins are half-open, the last one closed, with the edges of ``numpy.histogram`` for float64.
    Infinite values count as below or above; a NaN belongs to no bin and raises `CollectError`.

    Examples
    --------
    >>> import torch
    >>> histogram = Histogram(2, range=(0.0, 1.0))
    >>> histogram.update(torch.tensor([[0.1, 0.2], [0.9, 7.0]]))
    >>> counts, edges, below, above = histogram.compute()
    >>> counts, edges.tolist(), below, above
    (tensor([2, 1]), [0.0, 0.5, 1.0], 0, 1)
    """

    # Below, bin by bin, above: in one tensor, so that nothing waits for an accelerator.
    _state_names = ("_tally", "_low", "_high")
    _takes_any_shape = True
    _tally: Tensor
    _low: float
    _high: float

    def __init__(
        self,
        bins: int,
        range: tuple[float, float] | None = None,  # noqa: A002 - the word that NumPy and torch use
        *,
        by: By | None = None,
    ) -> None:
        self._bins = whole("bins", bins, 1)
        self._range = None if range is None else _edges(range)
        self._options = {"bins": self._bins, "range": self._range}
        self._state_kinds = (f"tensor int64 {self._bins + 2}", "finite", "finite")
        super().__init__(by=by)

    def _accept(self, samples: Tensor) -> None:
        super()._accept(samples)
        self._refuse_nan(samples, "fall into no bin")
        if None in (self._low, self._high):
            self._low, self._high = self._range or _finite_range(samples)

    def _member(self, label: Label) -> Histogram:
        member = super()._member(label)
        member._low, member._high = self._low, self._high
        return member

    def _add(self, samples: Tensor) -> None:
        if self._tally is None:
            self._tally = torch.zeros(self._bins + 2, dtype=torch.int64, device=samples.device)
        self._tally += self._bins_of_range().tally(samples.reshape(-1))

    @property
    def why_not_merged(self) -> str | None:
        """Why histograms of different data can't be merged; None if they can."""
        if self._range is not None:
            return None
        return f"{self!r} takes its range from the first batch that it sees; give range=(low, high)"

    def _check_mergeable(self, other: Histogram) -> None:
        super()._check_mergeable(other)
        ours, theirs = (self._low, self._high), (other._low, other._high)
        if ours != theirs:
            raise CollectError(
                f"Can't merge a histogram over {theirs} into one over {ours}; construct both with "
                "the same range=(low, high)."
            )

    def _join(self, other: Histogram) -> None:
        self._tally = self._tally + other._tally

    def _bins_of_range(self) -> Bins:
        return Bins(self._low, self._high, self._bins)

    def _result(self) -> HistogramResult:
        below, *_, above = self._tally.tolist()
        counts = self._tally[1:-1].clone()
        return HistogramResult(counts, self._bins_of_range().edges.to(counts.device), below, above)


def _finite_range(samples: Tensor) -> tuple[float, float]:
    finite = samples[samples.isfinite()]
    if finite.numel() == 0:
        raise CollectError(
            "Histogram(range=None) takes the range from the first batch, which has no finite "
            "value; give range=(low, high)."
        )
    return widened(float(finite.min()), float(finite.max()))


def widened(low: float, high: float) -> tuple[float, float]:
    """Return a nonempty range: like NumPy, widen an empty one by a half on each side."""
    if low < high:
        return low, high
    # More if float64 would not resolve a half.
    half = max(0.5, abs(low) * 2**-20)
    return low - half, high + half


def _edges(given: object) -> list[float]:
    try:
        low, high = map(float, given)  # type: ignore[call-overload]  # a value of any type
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise CollectError(
            f"Histogram(range={given!r}): give two finite numbers (low, high), low < high."
        )
    return [low, high]
