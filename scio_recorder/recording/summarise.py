"""What is shown of the layers of a recording: measured part by part, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scio_recorder.display.figure import (
    SATURATION_BOUNDS,
    Bars,
    LayerSummary,
    Units,
    Values,
)
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import RecorderError
from scio_recorder.layer import DepthIdx
from scio_recorder.recording.readable import Readable
from scio_recorder.reductions import (
    AliveResult,
    CovarianceResult,
    HistogramResult,
    MomentsResult,
    Reduction,
)
from scio_recorder.reductions.alive import Alive, unit_dimension, with_units
from scio_recorder.reductions.base import join_means
from scio_recorder.reductions.histogram import Bins, widened
from scio_recorder.tensors.dtypes import dtype_name
from scio_recorder.tensors.structures import tensors
from scio_recorder.tensors.threads import one_thread

# Values that are looked at together: they stay in the cache.
_BLOCK = 1 << 17
_AS_THEY_ARE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# So much of a layer is kept from its statistics to its bins, instead of being read again.
_KEPT_BYTES = 1 << 27
# Bins reach no further from the mean than so many standard deviations.
_REACH = 6.0


def summarise(
    recording: Readable, labels: Sequence[DepthIdx], bins: int | None
) -> list[LayerSummary]:
    """Return what can be shown of layers; samples are read in parts, and large layers twice.

    Parameters
    ----------
    recording : Readable
        The recording.
    labels : sequence of (int, int)
        Layers of it.
    bins : int or None
        Number of bins of a histogram; None leaves histograms out.
    """
    found = []
    with one_thread(), progress_bar("reading layers", len(labels)) as advance:
        for label in labels:
            if label in recording.reductions:
                found.append(_of_reductions(recording, label))
            else:
                found.append(_of_samples(recording, label, bins, advance))
            advance(0, 0)
    return found


def _of_samples(
    recording: Readable, label: DepthIdx, bins: int | None, advance: Advance
) -> LayerSummary:
    layer = recording.architecture[label]
    samples: Tensor = recording[label]
    dimension = unit_dimension(layer.type_name, samples.ndim)
    survey = Survey(dimension, SATURATION_BOUNDS.get(layer.type_name))
    parts: Iterable[Tensor] = _read(recording, label, advance)
    is_kept = bins is not None and samples.nbytes <= _KEPT_BYTES
    if is_kept:
        parts = list(parts)
    for part in parts:
        survey.update(part)
    values, span, bars = survey.values, survey.span, None
    if span and bins is not None:
        parts = parts if is_kept else _read(recording, label, advance)
        bars = _count(parts, span, bins)
    lost = recording.relative_errors.get(label)
    notes = (
        ("complex: numbers are those of magnitudes", samples.dtype.is_complex),
        ("no values", not samples.numel()),
        ("no finite value", samples.numel() and not span),
        (f"rounded, relative error {lost or 0.0:.1e}", lost),
    )
    return LayerSummary(
        layer=layer,
        kept="",
        shape=tuple(samples.shape[1:]),
        dtype=dtype_name(samples.dtype),
        num_bytes=samples.nbytes,
        values=values,
        finite=survey.finite if values.infinities else None,
        units=survey.units,
        bars=bars,
        notes=[text for text, is_so in notes if is_so],
    )


def _read(recording: Readable, label: DepthIdx, advance: Advance) -> Iterator[Tensor]:
    """Yield the samples of a layer in parts, and say what was read: the next one meanwhile."""
    parts = recording.parts(label)
    with ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, parts, None)
            yield part
            advance(0, part.nbytes, 0)


def _count(parts: Iterable[Tensor], span: tuple[float, float], bins: int) -> Bars:
    """Count the values of all parts in bins over a range, except for NaNs."""
    found, tally = Bins(*span, bins), torch.zeros(bins + 2, dtype=torch.int64)
    for part in parts:
        for block in _blocks(part):
            tally += found.tally(block.flatten())
    below, *counts, above = tally.tolist()
    return Bars(tuple(counts), *span, below, above)


def _bars(result: HistogramResult) -> Bars:
    low, high = float(result.edges[0]), float(result.edges[-1])
    return Bars(tuple(result.counts.tolist()), low, high, result.below, result.above)


def _of_reductions(recording: Readable, label: DepthIdx) -> LayerSummary:
    given = recording.reductions[label]
    reductions: list[Reduction] = given if isinstance(given, list) else [given]
    found: dict[str, Any] = {}
    notes: list[str] = []
    warnings: list[str] = []
    units = None
    for reduction in reductions:
        kind = type(reduction).__name__
        try:
            result = reduction.compute()
        except RecorderError as error:
            notes.append(f"{kind}: {error}")
            continue
        shown: dict[str, Any] = dict(reduction.overall(result))
        if isinstance(result, HistogramResult):
            shown["bars"] = _bars(result)
        if isinstance(result, AliveResult):
            units = _units(result, 0)
        warnings += _troubles(kind, result)
        if not shown and units is None:
            notes.append(f"{kind} is not drawn")
        found = {**shown, **found}
    bars = found.pop("bars", None)
    return LayerSummary(
        layer=recording.architecture[label],
        kept=", ".join(type(reduction).__name__ for reduction in reductions),
        values=Values(**found),
        units=units,
        bars=bars,
        notes=notes,
        warnings=warnings,
    )


def _troubles(kind: str, result: Any) -> list[str]:
    """Say how many numbers of a result are not finite."""
    # The variance of one sample is nan, and rightly so.
    looked_at = result.mean if isinstance(result, MomentsResult | CovarianceResult) else result
    numbers = [one for one in tensors(looked_at) if one.is_floating_point() or one.is_complex()]
    nans = sum(int(one.isnan().sum()) for one in numbers)
    infinities = sum(int(one.isinf().sum()) for one in numbers)
    total = sum(one.numel() for one in numbers)
    kinds = ((nans, "NaN"), (infinities, "infinite"))
    return [f"{kind}: {count:,} of {total:,} numbers {word}" for count, word in kinds if count]


class Survey:
    """Running statistics, in float64; of complex values, their magnitudes are looked at.

    Parameters
    ----------
    dimension : int
        The dimension of [samples, ...] along which units lie; 0 to take everything for one unit.
    bounds : (float or None, float or None), optional
        The bounds at which the layer saturates.
    """

    def __init__(
        self,
        dimension: int,
        bounds: tuple[float | None, float | None] | None = None,
    ) -> None:
        self._dimension = dimension
        self._alive = Alive(dimension or 1, bounds)
        self._total = self._count = self._nans = self._below = self._above = self._zeros = 0
        self._samples = 0
        self._mean = self._squares = 0.0
        self._low, self._high = math.inf, -math.inf

    def update(self, part: Tensor) -> None:
        """Take in samples [some, ...]."""
        self._samples += len(part)
        for block in _blocks(part):
            if block.numel():
                self._alive.update(with_units(block, self._dimension))
                self._take(block.flatten())

    def _take(self, values: Tensor) -> None:
        low, high = map(float, values.aminmax())
        self._total += values.numel()
        # Both are finite only where everything is.
        if not (math.isfinite(low) and math.isfinite(high)):
            self._nans += int(values.isnan().sum())
            self._below += int(values.isneginf().sum())
            self._above += int(values.isposinf().sum())
            values = values[values.isfinite()]
            if not values.numel():
                return
            low, high = map(float, values.aminmax())
        self._low, self._high = min(self._low, low), max(self._high, high)
        widened_values = values.double()
        # NumPy counts several times faster.
        self._zeros += int(np.count_nonzero(widened_values.numpy() == 0))
        mean = float(widened_values.mean())
        self._mean, apart = join_means(self._count, self._mean, values.numel(), mean)
        away = widened_values - mean
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
        """Facts about units; None where fewer than two samples were seen, or no values."""
        is_known = self._samples > 1 and self._total > 0
        return _units(self._alive.compute(), self._dimension) if is_known else None

    @property
    def span(self) -> tuple[float, float] | None:
        """The range that bins should cover; None where there is no finite value."""
        if not self._count:
            return None
        std = self.finite.std
        reach = _REACH * std if std is not None and math.isfinite(std) else math.inf
        return widened(max(self._low, self._mean - reach), min(self._high, self._mean + reach))


def _units(result: AliveResult, dimension: int) -> Units:
    dead, saturated = result.dead, result.saturated
    zero = int((dead & (result.max_abs == 0)).sum())
    return Units(
        dead.numel(),
        dimension,
        zero,
        int(dead.sum()) - zero,
        None if saturated is None else int(saturated.sum()),
    )


def _blocks(part: Tensor) -> Iterator[Tensor]:
    """Yield samples a bounded number of values at a time, on the CPU."""
    rows = max(1, _BLOCK // max(1, part.shape[1:].numel()))
    for start in range(0, len(part), rows):
        block = part[start : start + rows].detach().cpu()
        block = block.abs() if block.is_complex() else block
        yield block if block.dtype in _AS_THEY_ARE else block.double()
