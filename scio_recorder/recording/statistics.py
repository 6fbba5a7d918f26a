"""Statistics of layers, from the library's reductions: of all values, of units, and histograms.

The layers of a recording are read part by part, in bounded memory: once for the statistics, and
once more for the histogram, whose range these have shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scio_recorder.display import figure
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import RecorderError
from scio_recorder.layer import RowIdx
from scio_recorder.recording.readable import Readable
from scio_recorder.reductions import (
    Alive,
    AliveResult,
    CovarianceResult,
    Histogram,
    HistogramResult,
    Max,
    Min,
    Moments,
    MomentsResult,
)
from scio_recorder.reductions.base import as_floats, num_true, several
from scio_recorder.reductions.distributions import widened
from scio_recorder.reductions.plain import unit_dimension
from scio_recorder.tensors.properties import dtype_name, one_thread, with_float64
from scio_recorder.tensors.structures import tensors

# A unit explodes if its largest absolute value is so many times that of the median unit, and above
# what functions such as softmax can return. Among fewer units there is no median to speak of.
EXPLOSION_FACTOR = 20.0
EXPLOSION_LEAST = 1.0
EXPLOSION_UNITS = 8
# None of the units is an exception if a larger share of them is as large.
EXPLOSION_SHARE = 0.25
# Bins reach no further from the mean than this number of standard deviations.
_REACH = 6.0
# The statistics that a reduction may give of all values together.
_OVERALL = ("mean", "std", "low", "high")
# Values that are looked at together: they and their temporaries stay in the cache.
_PIECE = 1 << 18


class RunningStatistics:
    """Statistics of what a layer returned: of all values, and of units.

    Parameters
    ----------
    type_name : str, optional
        The name of the module's class, from which it follows along which dimension units lie, and
        at which bounds they saturate. Without it, there are no statistics of units.

    Attributes
    ----------
    OF_VALUES, OF_UNITS, OF_STATES : tuple of str
        Names of scalars: of all values, of units, and those of units that mean nothing for
        gradients.
    num_finite, nans : int
        Numbers of values.

    Examples
    --------
    >>> statistics = RunningStatistics()
    >>> statistics.update([torch.tensor([0.0, 1.0]), torch.tensor([5.0, 6.0, math.inf])])
    >>> statistics.scalars()
    {'mean': 3.0, 'norm': 7.8740..., 'std': 2.9439..., 'zeros': 0.2, 'nonfinite': 1}
    """

    OF_VALUES = ("mean", "std", "norm", "zeros", "nonfinite")
    OF_UNITS = ("max_abs", "dead", "saturated", "exploding")
    OF_STATES = OF_UNITS[1:]

    def __init__(self, type_name: str | None = None) -> None:
        self._type_name = type_name
        self._moments, self._low, self._high = Moments(), Min(), Max()
        self._alive: Alive | None = None
        self.num_finite = self._zeros = self._below = self._above = 0
        self.nans = 0

    def update(self, value: Any) -> None:
        """Add an output: all values of all tensors in it, and the units of the first of them."""
        parts = list(real_tensors(value))
        for part in parts:
            self._add(part.flatten())
        if parts and parts[0].ndim and self._type_name is not None:
            self._add_units(parts[0], self._type_name)

    @staticmethod
    def finite_values(value: Any) -> Tensor:
        """Return the finite values of all tensors in an output, in float64."""
        return torch.cat([part[part.isfinite()].double() for part in real_tensors(value)])

    def _add(self, values: Tensor) -> None:
        finite, ends = values, torch.stack(values.aminmax())
        # Both extremes are finite only if everything is.
        if not ends.isfinite().all():
            finite = ends = values[values.isfinite()]
            self.nans += int(values.isnan().sum())
            self._below += int(values.isneginf().sum())
            self._above += int(values.isposinf().sum())
        self._moments.update(finite.double())
        self._low.update(ends)
        self._high.update(ends)
        self.num_finite += len(finite)
        is_zero = torch.eq(finite, 0, out=torch.empty_like(finite, dtype=torch.float32))
        self._zeros += int(num_true(is_zero))

    def _add_units(self, samples: Tensor, type_name: str) -> None:
        dimension = unit_dimension(type_name, samples.ndim)
        if self._alive is None:
            self._alive = Alive(dimension or 1, figure.SATURATION_BOUNDS.get(type_name))
        # Without units, each value is a sample of one.
        self._alive.update(samples if dimension else samples.reshape(-1, 1))

    @property
    def finite(self) -> figure.ValueStatistics:
        """Mean, spread and extremes of the finite values alone."""
        if not self.num_finite:
            return figure.ValueStatistics()
        _, mean, variance = map(float, self._moments.compute())
        low, high = float(self._low.compute()), float(self._high.compute())
        return figure.ValueStatistics(mean, math.sqrt(variance), low, high)

    @property
    def values(self) -> figure.ValueStatistics:
        """Statistics of all values but NaNs."""
        infinities, finite = self._below + self._above, self.finite
        if infinities:
            finite = figure.ValueStatistics(
                mean=(math.inf if self._above else 0.0) - (math.inf if self._below else 0.0),
                std=math.nan,
                low=-math.inf if self._below else math.inf if finite.low is None else finite.low,
                high=math.inf if self._above else -math.inf if finite.high is None else finite.high,
            )
        size = self.num_finite + infinities + self.nans
        zeros = self._zeros / size if size > self.nans else None
        return replace(finite, zeros=zeros, nans=self.nans, infinities=infinities)

    @property
    def span(self) -> tuple[float, float] | None:
        """The range of a histogram: all finite values, but not far from the mean."""
        finite = self.finite
        if finite.mean is None or finite.std is None or finite.low is None or finite.high is None:
            return None
        reach = _REACH * finite.std if math.isfinite(finite.std) else math.inf
        return widened(max(finite.low, finite.mean - reach), min(finite.high, finite.mean + reach))

    @property
    def units(self) -> AliveResult | None:
        """Statistics of units; None if there were no values."""
        return None if self._alive is None else self._alive.compute()

    def scalars(self) -> dict[str, float]:
        """Return the statistics by name; those that are not defined are left out.

        ``mean``, ``std`` (n - 1) and ``norm`` (the root of the sum of squares) are over finite
        values, ``zeros`` is a share of all values and ``nonfinite`` a number of values. ``max_abs``
        is the largest absolute value of all units; ``dead``, ``saturated`` and ``exploding`` are
        shares of units.
        """
        scalars: dict[str, float] = {}
        count, nonfinite = self.num_finite, self.nans + self._below + self._above
        if count:
            _, mean, variance = map(float, self._moments.compute())
            squares = variance * (count - 1) if count > 1 else 0.0
            scalars = {"mean": mean, "norm": math.sqrt(squares + count * mean * mean)}
        if count > 1:
            scalars["std"] = math.sqrt(variance)
        if count + nonfinite:
            scalars |= {"zeros": self._zeros / (count + nonfinite), "nonfinite": nonfinite}
        if (units := self.units) is not None:
            scalars["max_abs"] = float(units.max_abs.max())
            scalars["dead"] = float(units.dead.double().mean())
            scalars["exploding"] = (
                len(_exploding(units.dead, units.max_abs)[0]) / units.dead.numel()
            )
            if units.saturated is not None:
                scalars["saturated"] = float(units.saturated.double().mean())
        return scalars


def real_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a structure that have values, as floats, complex ones as magnitudes."""
    for tensor in tensors(value):
        if tensor.layout == torch.strided and tensor.numel():
            tensor = with_float64(tensor.detach())
            yield as_floats(tensor.abs() if tensor.is_complex() else tensor)


def summarise(
    recording: Readable, labels: Sequence[RowIdx], bins: int | None
) -> list[figure.LayerSummary]:
    """Return the summaries of layers.

    Parameters
    ----------
    recording : Readable
        The recording.
    labels : sequence of (int, int)
        Layers of it.
    bins : int or None
        Number of bins of a histogram; None leaves histograms out.
    """
    num_stored = sum(label not in recording.reductions for label in labels)
    with one_thread(), progress_bar("reading layers", num_stored) as advance:
        return [
            _of_reductions(recording, label)
            if label in recording.reductions
            else _of_samples(recording, label, bins, advance)
            for label in labels
        ]


def _of_samples(
    recording: Readable, label: RowIdx, bins: int | None, advance: Advance
) -> figure.LayerSummary:
    samples, layer = recording[label], recording.architecture[label]
    statistics, histogram = RunningStatistics(figure.kind_of(layer)), None
    for part in _parts(recording, label, advance):
        for piece in torch.split(part, max(1, _PIECE // max(1, part[0].numel()))):
            statistics.update(piece)
    values, units = statistics.values, statistics.units
    if bins is not None and statistics.span is not None:
        histogram = Histogram(bins, range=statistics.span)
        for part in _parts(recording, label, advance):
            for numbers in real_tensors(part):
                histogram.update(numbers[~numbers.isnan()] if statistics.nans else numbers)
    advance(0, 0)
    lost = recording.relative_errors.get(label)
    notes = (
        ("complex: numbers are those of magnitudes", samples.dtype.is_complex),
        ("no values", not samples.numel()),
        ("no finite value", samples.numel() and not statistics.num_finite),
        (f"rounded, relative error {lost or 0.0:.1e}", lost),
    )
    return figure.LayerSummary(
        layer=layer,
        kept="",
        shape=tuple(samples.shape[1:]),
        dtype=dtype_name(samples.dtype),
        num_bytes=samples.nbytes,
        values=values,
        finite=statistics.finite if values.infinities else None,
        # A single sample does not show whether a unit is dead.
        units=units and _units(units) if len(samples) > 1 else None,
        bars=None if histogram is None else _bars(histogram.compute()),
        notes=[text for text, is_so in notes if is_so],
    )


def _parts(recording: Readable, label: RowIdx, advance: Advance) -> Iterator[Tensor]:
    for part in recording.parts(label):
        yield part
        advance(0, part.nbytes, 0)


def _bars(result: HistogramResult) -> figure.Bars:
    low, high = float(result.edges[0]), float(result.edges[-1])
    return figure.Bars(tuple(result.counts.tolist()), low, high, result.below, result.above)


def _units(result: AliveResult) -> figure.UnitStatistics:
    """Count the units that do nothing, and name those that exceed the others by far."""
    return figure.UnitStatistics(
        result.dead.numel(),
        int((result.dead & (result.max_abs == 0)).sum()),
        int(result.dead.sum()),
        None if result.saturated is None else int(result.saturated.sum()),
        *_exploding(result.dead, result.max_abs),
    )


def _exploding(dead: Tensor, max_abs: Tensor) -> tuple[tuple[int, ...], float]:
    """Return which units exceed the median one by far, and by which factor the first one does."""
    # Units that do nothing have no share in what is usual, nor have infinities.
    size = max_abs.double().flatten()
    usual = size[~dead.flatten() & size.isfinite() & (size > 0)]
    if len(usual) < EXPLOSION_UNITS:
        return (), 0.0
    median = float(usual.median())
    least = max(EXPLOSION_FACTOR * median, EXPLOSION_LEAST)
    is_beyond = (size > least) & size.isfinite()
    places = is_beyond.nonzero().flatten()
    if len(places) > max(1, EXPLOSION_SHARE * len(usual)):
        # So many are no exceptions: the others are small, as behind a GELU of large inputs.
        return (), 0.0
    places = places[size[places].argsort(descending=True, stable=True)]
    return tuple(places.tolist()), float(size[places[0]]) / median if len(places) else 0.0


def _of_reductions(recording: Readable, label: RowIdx) -> figure.LayerSummary:
    reductions = several(recording.reductions[label])
    values: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    notes: list[str] = []
    warnings: list[str] = []
    for reduction in reductions:
        kind = type(reduction).__name__
        try:
            result = reduction.compute()
        except RecorderError as error:
            notes.append(f"{kind}: {error}")
            continue
        warnings += _troubles(kind, result)
        overall, parts = reduction.overall(result), _drawn(result)
        overall = {name: overall[name] for name in _OVERALL if name in overall}
        if not (overall or parts):
            notes.append(f"{kind} is not drawn")
        # The first that knows something says it.
        values, drawn = overall | values, parts | drawn
    return figure.LayerSummary(
        layer=recording.architecture[label],
        kept=", ".join(type(reduction).__name__ for reduction in reductions),
        values=figure.ValueStatistics(**values),
        notes=notes,
        warnings=warnings,
        **drawn,
    )


def _drawn(result: Any) -> dict[str, Any]:
    """Return the fields of a summary that the result of a reduction fills."""
    if isinstance(result, HistogramResult):
        return {"bars": _bars(result)}
    return {"units": _units(result)} if isinstance(result, AliveResult) else {}


def _troubles(kind: str, result: Any) -> list[str]:
    """Return sentences on the numbers of a result that are not finite."""
    # The variance of one sample is rightly nan.
    looked_at = result.mean if isinstance(result, MomentsResult | CovarianceResult) else result
    numbers = [
        as_floats(values)  # torch finds no infinities in float8
        for values in tensors(looked_at)
        if values.is_floating_point() or values.is_complex()
    ]
    nans = sum(int(values.isnan().sum()) for values in numbers)
    infinities = sum(int(values.isinf().sum()) for values in numbers)
    total = sum(values.numel() for values in numbers)
    kinds = ((nans, "NaN"), (infinities, "infinite"))
    return [f"{kind}: {count:,} of {total:,} numbers {word}" for count, word in kinds if count]
