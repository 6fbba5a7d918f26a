"""Summaries of the layers of a recording, for pages and plots."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from scio_recorder.display.progress import Advance
from scio_recorder.display.summary import Bars, LayerSummary, Values
from scio_recorder.errors import RecorderError
from scio_recorder.layer import DepthIdx
from scio_recorder.recording.readable import Readable
from scio_recorder.recording.survey import (
    Survey,
    bounds_of,
    count_bars,
    read,
    unit_dimension,
    whole_bins,
)
from scio_recorder.reductions import CovarianceResult, HistogramResult, MomentsResult, Reduction
from scio_recorder.tensors.dtypes import dtype_name
from scio_recorder.tensors.structures import tensors

# So much of a layer is kept from its statistics to its bins, instead of being read again.
_KEPT_BYTES = 1 << 28


def summarise(
    recording: Readable, label: DepthIdx, bins: int, advance: Advance = lambda *done: None
) -> LayerSummary:
    """Return what can be shown of one layer; samples are read in parts, and large layers twice."""
    if label in recording.reductions:
        return _of_reductions(recording, label)
    return _of_samples(recording, label, bins, advance)


def _of_samples(recording: Readable, label: DepthIdx, bins: int, advance: Advance) -> LayerSummary:
    layer = recording.architecture[label]
    samples: Tensor = recording[label]
    survey = Survey(unit_dimension(layer, samples.ndim), bounds_of(layer))
    parts: Iterable[Tensor] = read(recording, label, advance)
    if samples.nbytes <= _KEPT_BYTES:
        parts = list(parts)
    for part in parts:
        survey.update(part)
    if samples.nbytes > _KEPT_BYTES:
        parts = read(recording, label, advance)
    span = survey.span
    if span and not (samples.is_floating_point() or samples.dtype.is_complex):
        span, bins = whole_bins(span, bins)
    notes = []
    if samples.dtype.is_complex:
        notes.append("complex: numbers are those of magnitudes")
    if not samples.numel():
        notes.append("no values")
    elif span is None:
        notes.append("no finite value")
    lost = recording.relative_errors.get(label)
    if lost:
        notes.append(f"rounded, relative error {lost:.1e}")
    return LayerSummary(
        layer=layer,
        kept="",
        shape=str(tuple(samples.shape[1:])),
        dtype=dtype_name(samples.dtype),
        num_bytes=samples.nbytes,
        values=survey.values,
        finite=survey.finite if survey.values.infinities else None,
        units=survey.units,
        bars=count_bars(parts, span, bins, has_nan=bool(survey.values.nans)) if span else None,
        notes=notes,
    )


def _of_reductions(recording: Readable, label: DepthIdx) -> LayerSummary:
    given = recording.reductions[label]
    reductions: list[Reduction] = given if isinstance(given, list) else [given]
    found: dict[str, Any] = {}
    notes: list[str] = []
    warnings: list[str] = []
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
        warnings += _troubles(kind, result)
        if not shown:
            notes.append(f"{kind} is not drawn")
        found = {**shown, **found}
    bars = found.pop("bars", None)
    return LayerSummary(
        layer=recording.architecture[label],
        kept=", ".join(type(reduction).__name__ for reduction in reductions),
        values=Values(**found),
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


def _bars(result: HistogramResult) -> Bars:
    low, high = float(result.edges[0]), float(result.edges[-1])
    return Bars(tuple(result.counts.tolist()), low, high, result.below, result.above)
