"""How often values fall into each of many bins of equal width.

NOTE [Bins by upper bits]

To find the bin of each value takes most of the time of a histogram. But of floating numbers of 16
bits there are 65,536, and the upper 20 bits of one of 32 say nearly as much: its sign, exponent and
eleven bits more. So a table tells the bin. Where values that share these bits lie on both sides of
an edge, the table says that, and these alone are looked at. Counts are the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import By, Label
from scio_recorder.reductions.samples import SampleReduction
from scio_recorder.tensors.arguments import whole

# Values handled at once: their temporaries stay in the cache.
_PORTION = 2**18
_Table: TypeAlias = NDArray[np.unsignedinteger[Any]]
_KEYED = (torch.float32, torch.float16, torch.bfloat16)
# To make a table takes as long as to go without one for so many values.
_MANY = 1 << 22
_LOWER_BITS = 12


class Bins:
    """Bins of equal width, with NumPy's edges: half-open, the last one closed.

    Parameters
    ----------
    low, high : float
        Where the first begins and the last ends.
    count : int
        How many there are.

    Examples
    --------
    >>> Bins(0.0, 1.0, 2).tally(torch.tensor([-1.0, 0.5, 1.0, 2.0]))
    tensor([1, 0, 2, 1])
    """

    def __init__(self, low: float, high: float, count: int) -> None:
        self._range, self._count = (low, high), count
        self.edges = torch.from_numpy(np.linspace(low, high, count + 1))
        # Bins may be narrower than float64 can tell apart.
        self._are_apart = bool((self.edges.diff() > 0).all())
        self._tables: dict[torch.dtype, _Table] = {}
        self._num_seen = 0

    def tally(self, values: Tensor) -> Tensor:
        """Return how many values [n] lie below, in each bin and above, [bins + 2]; no NaNs."""
        if values.device.type != "cpu":
            return self._compared(values)
        self._num_seen += len(values)
        if values.dtype not in _KEYED or self._num_seen < _MANY:
            return self._searched(values)
        unsure = self._count + 2
        found = self._table(values.dtype).take(_keys(values))
        counts = torch.from_numpy(np.bincount(found, minlength=unsure + 1))
        tally = counts[:unsure]
        if counts[unsure]:
            places = torch.from_numpy(np.flatnonzero(found == unsure))
            tally += self._searched(values[places])
        return tally

    def _table(self, dtype: torch.dtype) -> _Table:
        """Return for each key the bin of its values, or one more than there are if unsure."""
        if dtype not in self._tables:
            if dtype == torch.float32:
                bits = np.arange(1 << (32 - _LOWER_BITS), dtype=np.uint32) << _LOWER_BITS
                rests = (0, (1 << _LOWER_BITS) - 1)
                ends = [torch.from_numpy((bits | rest).view(np.float32)) for rest in rests]
            else:
                keys = np.arange(1 << 16, dtype=np.uint16)
                ends = [torch.from_numpy(keys.view(np.int16)).view(dtype)] * 2
            first, last = (self._places(end.double()).numpy() for end in ends)
            has_nan = ends[1].isnan().numpy()
            found = np.where((first == last) & ~has_nan, first, self._count + 2)
            self._tables[dtype] = found.astype(np.uint8 if self._count < 250 else np.uint32)
        return self._tables[dtype]

    def _searched(self, values: Tensor) -> Tensor:
        kept = values[~values.isnan()].double()
        if not self._are_apart:
            return torch.bincount(self._places(kept), minlength=self._count + 2)
        inside, _ = np.histogram(kept.numpy(), self._count, self._range)
        below = int(np.count_nonzero(kept.numpy() < self._range[0]))
        return torch.tensor([below, *inside, len(kept) - below - int(inside.sum())])

    def _compared(self, values: Tensor) -> Tensor:
        # Nothing waits for the accelerator: NaNs are counted behind the rest, and left out there.
        places = self._places(values.double())
        places = torch.where(values.isnan(), self._count + 2, places)
        return torch.bincount(places, minlength=self._count + 3)[:-1]

    def _places(self, values: Tensor) -> Tensor:
        edges = self.edges.to(values.device)
        return torch.bucketize(values, edges, right=True) - (values == edges[-1]).long()


def _keys(values: Tensor) -> _Table:
    values = values.contiguous()
    if values.dtype == torch.float32:
        upper: _Table = values.numpy().view(np.uint32) >> np.uint32(_LOWER_BITS)
        return upper
    halves: _Table = values.view(torch.int16).numpy().view(np.uint16)
    return halves


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
        if range is not None and not -math.inf < range[0] < range[1] < math.inf:
            raise CollectError(
                f"Histogram(range={range}): give two finite numbers (low, high), low < high."
            )
        self._bins = whole("bins", bins, 1)
        self._range = None if range is None else [float(edge) for edge in range]
        self._options = {"bins": self._bins, "range": self._range}
        super().__init__(by=by)

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        return ()  # values of any shape are counted alike

    def _accept(self, samples: Tensor) -> None:
        super()._accept(samples)
        self._refuse_nan(samples, "fall into no bin")
        if self._low is None:
            self._low, self._high = self._range or _finite_range(samples)

    def _member(self, label: Label) -> Histogram:
        member = super()._member(label)
        member._low, member._high = self._low, self._high
        return member

    def _add(self, samples: Tensor) -> None:
        if self._tally is None:
            self._tally = torch.zeros(self._bins + 2, dtype=torch.int64, device=samples.device)
        bins = self._bins_of_range()
        for values in torch.split(samples.reshape(-1), _PORTION):
            self._tally += bins.tally(values)

    @property
    def why_not_merged(self) -> str | None:
        """Why histograms of different data can't be merged, None where they can."""
        if self._range is not None:
            return None
        return f"{self!r} takes its range from the first batch that it sees; give range=(low, high)"

    def _check_mergeable(self, other: Histogram) -> None:
        super()._check_mergeable(other)
        ours, theirs = (self._low, self._high), (other._low, other._high)
        if ours != theirs and self._count:
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
    """Return a range that is not empty: half more on each side as NumPy has it, if need be."""
    if low < high:
        return low, high
    # More where float64 would not resolve a half.
    half = max(0.5, abs(low) * 2**-20)
    return low - half, high + half
