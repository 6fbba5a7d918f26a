"""How often values fall into each of many bins."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.labels import By, Label
from scio_recorder.reductions.samples import SampleReduction

# Values handled at once: their temporaries stay in the cache.
_PORTION = 2**16


class HistogramResult(NamedTuple):
    """Counts [bins] (int64), edges [bins + 1] (float64), and how many lay outside the range.

    Attributes
    ----------
    counts : Tensor
        Values in each bin, [bins], int64.
    edges : Tensor
        Where bins begin and end, [bins + 1], float64.
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
        Lower edge of the first bin and upper edge of the last. If not given, the smallest and the
        largest finite value of the first batch; give it where histograms are to be merged.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result, all with the
        same range.

    Notes
    -----
    Bins are half-open, the last one closed, with the edges of ``numpy.histogram`` for float64.
    Infinite values count as below or above; nan belongs nowhere and raises `CollectError`.

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
        if not isinstance(bins, int) or bins < 1:
            raise CollectError(f"Histogram(bins={bins!r}): give the number of bins, at least 1.")
        if range is not None and not -math.inf < range[0] < range[1] < math.inf:
            raise CollectError(
                f"Histogram(range={range}): give two finite numbers (low, high), low < high."
            )
        self._bins = bins
        self._range = None if range is None else (float(range[0]), float(range[1]))
        super().__init__(by=by)

    def _options(self) -> dict[str, Any]:
        return {"bins": self._bins}

    @property
    def recipe(self) -> dict[str, Any]:
        """Kind and arguments from which one like it can be made."""
        # No part of what must agree on merging, where only the ranges themselves count.
        given = {} if self._range is None else {"range": list(self._range)}
        return {**self._identity(), **given}

    def __repr__(self) -> str:
        given = "" if self._range is None else f", range={self._range}"
        return super().__repr__().replace(f"bins={self._bins}", f"bins={self._bins}{given}", 1)

    def _set_state(self, state: dict[str, Any]) -> None:
        super()._set_state(state)
        found = self._low, self._high
        if self._range is not None and None not in found and found != self._range:
            self.reset()
            raise CollectError(
                f"A histogram over {found} can't be loaded into {self!r}; give the range of then."
            )

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        return ()  # values of any shape are counted alike

    def _accept(self, samples: Tensor) -> None:
        super()._accept(samples)
        missing = int(samples.isnan().sum())
        if missing:
            raise CollectError(
                f"{self!r} was given {missing} nan among {samples.numel()} values, which fall into "
                "no bin; replace or drop them with transform=, for example torch.nan_to_num."
            )
        if self._low is None:
            self._low, self._high = self._range or _finite_range(samples)

    def _member(self, label: Label) -> Histogram:
        member = super()._member(label)
        member._low, member._high = self._low, self._high
        return member

    def _edges(self) -> Tensor:
        return torch.from_numpy(np.linspace(self._low, self._high, self._bins + 1))

    def _add(self, samples: Tensor) -> None:
        if self._tally is None:
            self._tally = torch.zeros(self._bins + 2, dtype=torch.int64, device=samples.device)
        for values in torch.split(samples.reshape(-1), _PORTION):
            places = _places_of(values.double(), self._low, self._high, self._bins)
            self._tally += torch.bincount(places.int(), minlength=self._bins + 2)

    def _join_members(self, other: Histogram) -> None:
        self._check_range(other)
        super()._join_members(other)

    def _join(self, other: Histogram) -> None:
        self._check_range(other)
        self._tally = self._tally + other._tally

    def _check_range(self, other: Histogram) -> None:
        ours, theirs = (self._low, self._high), (other._low, other._high)
        if ours != theirs:
            raise CollectError(
                f"Can't merge a histogram over {theirs} into one over {ours}; construct both with "
                "the same range=(low, high)."
            )

    def _result(self) -> HistogramResult:
        below, *_, above = self._tally.tolist()
        counts = self._tally[1:-1].clone()
        return HistogramResult(counts, self._edges().to(counts.device), below, above)


def _finite_range(samples: Tensor) -> tuple[float, float]:
    finite = samples[samples.isfinite()]
    if finite.numel() == 0:
        raise CollectError(
            "Histogram(range=None) takes the range from the first batch, which has no finite "
            "value; give range=(low, high)."
        )
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        # Half on each side as NumPy has it, more where float64 would not resolve that.
        half = max(0.5, abs(low) * 2**-20)
        return low - half, high + half
    return low, high


def _places_of(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Return for each value [n] of float64 its place: 0 below, 1 to bins inside, bins + 1 above."""
    if values.device.type != "cpu":
        return _exact_places_of(values, low, high, bins)  # nothing waits for an accelerator
    step = (high - low) / bins
    guess = values.clamp(low - step / 2, high + step / 2).sub_(low).mul_(bins / (high - low))
    places = guess.floor()
    # The guess can only be wrong as close to an edge as arithmetic is wrong, and is right on the
    # lowest edge, where all zeros of a ReLU lie.
    error = 2.0**-48 * bins * (1 + max(abs(low), abs(high)) / (high - low))
    is_doubtful = guess.sub_(places).sub_(0.5).abs_() > 0.5 - error
    places.add_(1)
    if is_doubtful.any():
        is_doubtful &= values != low
        places[is_doubtful] = _exact_places_of(values[is_doubtful], low, high, bins)
    return places


def _exact_places_of(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Compare each value with the edges of its bin, made as NumPy makes them."""
    step = (high - low) / bins
    # Misses by one bin at most.
    index = (
        values.clamp(low, high).sub_(low).mul_(bins / (high - low)).floor_().clamp_(max=bins - 1)
    )
    is_next = (values >= (index + 1) * step + low) & (index < bins - 1)
    return index + (values >= index * step + low) + is_next + (values > high)
