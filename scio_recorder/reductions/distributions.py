"""How values are distributed: counts by bin, and quantiles from a mergeable summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import By, Label, RowReduction, SampleReduction, working_dtype
from scio_recorder.tensors.arguments import whole

# Values handled at once: on a CPU, temporaries stay in the cache, and in memory that is not given
# back. An accelerator takes about as long for few values as for many.
_PORTION = {"cpu": 2**15}
_OTHER_PORTION = 2**22
# Counters of each bin on an accelerator, whose threads wait for each other at a single one.
_LANES = 2**10


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
    >>> Bins(0.0, 1.0, 2).tally(torch.tensor([-1.0, 0.5, 1.0, 2.0, torch.nan]))
    tensor([1, 0, 2, 1, 1])
    """

    def __init__(self, low: float, high: float, count: int) -> None:
        self.range, self._count = (low, high), count
        # A range may be wider than the largest float.
        self._scale = 1.0 if math.isfinite(high - low) else 2.0
        ends = low / self._scale, high / self._scale
        self.edges = np.linspace(*ends, count + 1) * self._scale
        self._narrowest = float(np.diff(self.edges / self._scale).min()) * self._scale
        self._per_unit = count / (high - low)
        # By dtype and device, so that nothing goes to an accelerator twice.
        self._tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def tally(self, values: Tensor) -> Tensor:
        """Return the numbers of values [n] below, in each bin, above, and of NaNs, [bins + 3]."""
        counters = self.counters(values.device)
        self.count(values, counters)
        return counters.sum(1)

    def counters(self, device: torch.device) -> Tensor:
        """Return counters for `count`; their sums over dimension 1 are a tally."""
        lanes = 1 if device.type == "cpu" else max(1, min(_LANES, 2**21 // (self._count + 3)))
        return torch.zeros(self._count + 3, lanes, dtype=torch.int64, device=device)

    def count(self, values: Tensor, counters: Tensor) -> None:
        """Count values [n]; nothing waits for an accelerator."""
        is_single = working_dtype(values.dtype) == torch.float32
        is_single = is_single and self._is_resolved_in(torch.float32)
        once, lanes = counters.new_ones(1), counters.shape[1]
        for portion in torch.split(values, _PORTION.get(values.device.type, _OTHER_PORTION)):
            places = self._places(portion.to(torch.float32 if is_single else torch.float64))
            if lanes > 1:
                used = math.gcd(len(places), lanes)
                lane = torch.arange(used, dtype=places.dtype, device=places.device)
                places = torch.add(lane, places.view(-1, used), alpha=lanes).view(-1)
            counters.view(-1).index_add_(0, places, once.expand(len(places)))

    def _places(self, values: Tensor) -> Tensor:
        """Return the number of the bin of each value, counted from 1; the last one is for NaNs.

        A value is in one of the bins on either side of the edge that is nearest to it, as nearly as
        its dtype tells. That takes a fraction of the time of a search.
        """
        begins, offset = self._table(values.dtype, values.device)
        if not self._is_resolved_in(values.dtype):
            places = torch.bucketize(values, begins[:-2], right=True, out_int32=True)
            return places.add_(values.isnan())
        nearest = torch.add(offset, values, alpha=self._per_unit).clamp_(0, self._count)
        places = nearest.nan_to_num_(self._count + 2.0).round_().int()
        places += values >= begins.index_select(0, places)
        return places

    def _is_resolved_in(self, dtype: torch.dtype) -> bool:
        """Whether bins are so much wider than the steps of a dtype that none is mistaken."""
        limits, most = torch.finfo(dtype), float(np.abs(self.edges).max())
        is_in_range = self._scale == 1.0 and max(2 * most, self._per_unit) < limits.max
        # NumPy refuses bins that are narrower than float64 resolves.
        return is_in_range and self._narrowest > 2.0**6 * limits.eps * most

    def _table(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where each bin, and what is above them, begins, and where zero lies, in bins.

        Each is the least number that is there. Two entries follow, for the places of what is above
        and of NaNs, where nothing begins.
        """
        if (dtype, device) not in self._tables:
            begins = np.append(self.edges, [0.0, 0.0])
            # The last bin is closed.
            begins[-3] = np.nextafter(begins[-3], math.inf)
            rounded = begins.astype(np.float32 if dtype == torch.float32 else np.float64)
            above = np.nextafter(rounded, np.array(math.inf, rounded.dtype))
            offset = rounded.dtype.type(-self.range[0] * self._per_unit)
            table = np.append(np.where(rounded < begins, above, rounded), offset)
            parts = torch.split(torch.from_numpy(table).to(device), [len(begins), 1])
            self._tables[dtype, device] = parts[0], parts[1]
        return self._tables[dtype, device]


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
    Infinite values count as below or above; a NaN belongs to no bin. So that nothing waits for an
    accelerator, NaNs are counted, and `compute` raises `CollectError` if there were any. Only the
    first batch is waited for, and only without ``range``: edges are computed on the host, as NumPy
    does, and all devices count with them.

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
    _state_names = ("_tally", "_low", "_high", "_nans")
    _takes_any_shape = True
    _tally: Tensor
    _low: float
    _high: float
    _nans: Tensor  # [1]

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
        self._state_kinds = (f"tensor int64 {self._bins + 2}", *["finite"] * 2, "tensor int64 1")
        self._grid: Bins | None = None
        super().__init__(by=by)

    def reset(self) -> None:
        """Forget all that was seen."""
        super().reset()
        self._counters: Tensor | None = None

    def _accept(self, samples: Tensor) -> None:
        super()._accept(samples)
        if None in (self._low, self._high):
            self._low, self._high = self._range or _finite_range(samples)

    def _member(self, label: Label) -> Histogram:
        member = super()._member(label)
        member._low, member._high = self._low, self._high
        return member

    def _add(self, samples: Tensor) -> None:
        if self._counters is None:
            self._counters = self._bins_of_range().counters(samples.device)
        self._bins_of_range().count(samples.reshape(-1), self._counters)

    def _add_waiting(self) -> None:
        if self._counters is not None:
            counted, self._counters = self._counters.sum(1), None
            self._take(counted[:-1], self._low, self._high, counted[-1:])

    def _device(self) -> torch.device | None:
        return super()._device() if self._counters is None else self._counters.device

    def _set_state(self, state: dict[str, Any]) -> None:
        # States of earlier versions say nothing of NaNs: there were none.
        tally = state.get("_tally")
        super()._set_state(state if tally is None else {"_nans": tally.new_zeros(1), **state})

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

    def _join(self, tally: Tensor, low: float, high: float, nans: Tensor) -> None:
        self._tally, self._nans = self._tally + tally, self._nans + nans

    def _bins_of_range(self) -> Bins:
        if self._grid is None or self._grid.range != (self._low, self._high):
            self._grid = Bins(self._low, self._high, self._bins)
        return self._grid

    def _result(self) -> HistogramResult:
        below, *within, above = self._tally.tolist()
        if nans := int(self._nans):
            total = below + sum(within) + above + nans
            self._refuse_nan(f"{nans} nan among {total} values, which fall into no bin")
        edges = torch.from_numpy(self._bins_of_range().edges.copy()).to(self._tally.device)
        return HistogramResult(self._tally[1:-1].clone(), edges, below, above)


def _finite_range(samples: Tensor) -> tuple[float, float]:
    """Return the range of the finite values, for which an accelerator is asked once."""
    low, high = math.inf, -math.inf
    if samples.numel():
        values = samples.double()
        is_finite = values.isfinite()
        ends = values.where(is_finite, math.inf).amin(), values.where(is_finite, -math.inf).amax()
        low, high = torch.stack(ends).tolist()
    if low > high:
        raise CollectError(
            "Histogram(range=None) takes the range from the first batch, which has no finite "
            "value; give range=(low, high)."
        )
    return widened(low, high)


def widened(low: float, high: float) -> tuple[float, float]:
    """Return a nonempty range: like NumPy, widen an empty one by a half on each side."""
    if low < high:
        return low, high
    # More if float64 would not resolve a half.
    half = max(0.5, abs(low) * 2**-20)
    return low - half, high + half


def _edges(bounds: object) -> list[float]:
    try:
        low, high = map(float, bounds)  # type: ignore[call-overload]  # a value of any type
    except (TypeError, ValueError):
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise CollectError(
            f"Histogram(range={bounds!r}): give two finite numbers (low, high), low < high."
        )
    return [low, high]


class Quantiles(RowReduction):
    """Approximate quantiles, over all values of a layer or for each feature.

    Parameters
    ----------
    q : float or sequence of float
        The quantiles to return, from 0 (the minimum) to 1 (the maximum).
    feature_dim : int, optional
        The dimension that holds the features; every other position counts as a sample. None takes
        all values together.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    NOTE 1. A full block of raw values is sorted and thinned to `s` of them, evenly spaced in rank;
    two summaries of the same weight are merged, sorted and thinned to every second value. This is
    the deterministic scheme of Munro and Paterson (1980) as analysed by Manku, Rajagopalan and
    Lindsay, "Approximate medians and other quantiles in one pass and with limited memory" (1998).
    A thinning shifts ranks by at most half the weight of a value that it leaves. For all N values
    that is N / 2 s a level, for any split and any order of merging. Reading adds the same amount.

    The error in rank is therefore at most ``(2 + log2(N / block)) / (2 s)`` of N, with s = 4096 and
    blocks of 65,536 over all values (0.32 % at 10^12 values), s = 2048 and blocks of 4,096 for each
    feature (0.49 % at 10^9 values a feature); in practice it is several times smaller. Minimum
    and maximum are exact, and up to one block everything is, with the linear interpolation of
    ``torch.quantile``. Memory, in values of 4 bytes (8 for float64) for each feature: one block
    and s for each doubling of it, so 0.4 MB over 10^8 values, and 56 kB a feature over 10^5.

    nan has no rank: after one, `compute` raises `CollectError`. Infinite values are ordered as
    usual. Values have equal quantiles on every device; what a network computes differs by rounding
    from one to another, and its quantiles do. The result,
    [len(q)] or [len(q), features], has the dtype that `Mean` would give.

    Examples
    --------
    >>> import torch
    >>> quantiles = Quantiles([0.0, 0.5, 1.0])
    >>> quantiles.update(torch.arange(11.0).reshape(11, 1))
    >>> quantiles.compute()
    tensor([ 0.,  5., 10.])
    """

    _state_names = ("_ends", "_summaries", "_odd", "_waiting")
    _state_kinds = (
        *("(tensor float.. {units} 2)?", r"(\[(tensor float.. {units} \d+(, )?)+\])?"),
        *("(whole)?", r"(tensor float.. \d+ {units})?"),
    )
    _ends: Tensor  # [features, 2], smallest and largest value of the blocks that were thinned
    # Each [features, s] and sorted, or [features, 0]. One at level i has 2 ** i times the weight of
    # one at level 0.
    _summaries: list[Tensor]
    _odd: int
    _waiting: Tensor | None  # [rows, features], raw; None if none wait

    def __init__(
        self,
        q: float | Sequence[float],
        feature_dim: int | None = None,
        *,
        by: By | None = None,
    ) -> None:
        try:
            self._q = [float(q)] if isinstance(q, int | float) else [float(value) for value in q]
        except (TypeError, ValueError):
            self._q = []
        if not self._q or not all(0 <= value <= 1 for value in self._q):
            raise CollectError(f"Quantiles(q={q!r}): give one or more numbers from 0 to 1.")
        self._size, self._block = (4096, 2**16) if feature_dim is None else (2048, 4096)
        super().__init__(feature_dim, by=by, q=self._q)

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        # Without a feature dimension, values of any shape count alike.
        return () if self._feature_dim is None else super()._sample_shape(samples)

    def _add(self, samples: Tensor) -> None:
        alone = self._feature_dim is None
        self._add_again(samples.reshape(-1, 1) if alone else self._rows_of(samples))

    def _add_again(self, rows: Tensor) -> None:
        """Add rows, after those that wait."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._add_rows(waiting, self._block)
        self._add_rows(rows, self._block)

    def _add_block(self, rows: Tensor) -> None:
        ordered = _sort_rows(rows.T.contiguous())
        # A nan is sorted to the end, and the ends that it makes nan remain so.
        self._widen(torch.stack([ordered[:, 0], ordered[:, -1]], dim=1))
        self._carry(0, self._thin(ordered, self._block // self._size))

    def _add_rest(self, rows: Tensor) -> None:
        # Not thinned: others may follow.
        self._waiting = rows.clone()

    def _widen(self, ends: Tensor) -> None:
        both = ends if self._ends is None else torch.cat([self._ends, ends], dim=1)
        self._ends = torch.stack(both.aminmax(dim=1), dim=1)

    def _carry(self, level: int, summary: Tensor) -> None:
        """Add a summary as one adds a binary digit: two of a level make one of the next."""
        levels, nothing = self._summaries or [], summary[:, :0]
        while level < len(levels) and levels[level].shape[1]:
            both = torch.cat([levels[level], summary], dim=1)
            levels[level], summary = nothing, self._thin(_sort_rows(both), 2)
            level += 1
        levels += [nothing] * (level + 1 - len(levels))
        levels[level] = summary
        self._summaries = levels

    def _thin(self, ordered: Tensor, step: int) -> Tensor:
        """Keep every `step`-th of the sorted values [features, n], from the middle of each group.

        An even group has two middles; taking the lower and the upper one in turn lets the errors of
        successive calls cancel.
        """
        self._odd = 1 - (self._odd or 0)
        return ordered[:, step // 2 - 1 + self._odd :: step].contiguous()

    def _join(self, *state: Any) -> None:
        ends, summaries, _, waiting = state
        for level, summary in enumerate(summaries or []):
            if summary.shape[1]:
                self._carry(level, summary)
        if ends is not None:
            self._widen(ends)
        if waiting is not None:
            self._add_again(waiting)

    def _is_consistent(self) -> bool:
        is_short = self._summaries is None and self._waiting is not None and len(self._waiting) > 0
        return self._ends is not None or is_short

    def _result(self) -> Tensor:
        parts, weights = list(self._summaries or []), []
        for level, summary in enumerate(parts):
            weights += [float(self._block // self._size * 2**level)] * summary.shape[1]
        if self._waiting is not None:
            parts.append(self._waiting.T)
            weights += [1.0] * len(self._waiting)
        known = torch.cat(parts if self._ends is None else [*parts, self._ends], dim=1)
        ends = torch.stack(known.aminmax(dim=1), dim=1)
        if ends.isnan().any():
            self._refuse_nan("nan, which has no rank")
        values, q = torch.cat([*parts, ends], dim=1).cpu().numpy(), np.array(self._q)
        read = np.array([_read(feature, np.array(weights), q) for feature in values])
        result = torch.from_numpy(read.T.copy()).to(known.device, self._dtype)
        return result.squeeze(1) if self._feature_dim is None else result


def _sort_rows(values: Tensor) -> Tensor:
    """Sort each row of `values` [features, n]; may do so in place."""
    if values.device.type == "cpu" and values.is_contiguous():
        # NumPy sorts with vector instructions and without indices, ten times faster than torch.
        values.numpy().sort(axis=1)
        return values
    return values.sort(dim=1).values


def _read(values: NDArray[Any], weights: NDArray[Any], q: NDArray[Any]) -> NDArray[Any]:
    """Interpolate quantiles `q` [k] of weighted values.

    A value of `weights` [n] stands for that many neighbours in rank and sits in their middle. The
    last two of `values` [n + 2] are the exact ends. With weights of one this is the linear
    interpolation of ``torch.quantile``.
    """
    order = np.argsort(values[:-2])
    weight = weights[order]
    last = weight.sum() - 1
    ranks = np.concatenate([[0.0], weight.cumsum() - weight / 2 - 0.5, [last]])
    known = np.concatenate([values[-2:-1], values[order], values[-1:]]).astype(np.float64)
    quantiles: NDArray[Any] = np.interp(q * last, ranks, known)
    # If single values are kept beside thinned ones, the first of them has rank 0 as well.
    quantiles[q == 0], quantiles[q == 1] = known[0], known[-1]
    return quantiles
