"""Statistics of a recording's layers, measured part by part, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from scio_recorder.display.figure import SATURATION_BOUNDS, Bars, LayerSummary, Values
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import RecorderError
from scio_recorder.layer import DepthIdx
from scio_recorder.recording.readable import Readable
from scio_recorder.recording.survey import Survey, counted, units_of
from scio_recorder.reductions import (
    AliveResult,
    CovarianceResult,
    HistogramResult,
    MomentsResult,
    Reduction,
)
from scio_recorder.reductions.alive import unit_dimension
from scio_recorder.tensors.dtypes import dtype_name
from scio_recorder.tensors.structures import tensors
from scio_recorder.tensors.threads import one_thread


def summarise(
    recording: Readable, labels: Sequence[DepthIdx], bins: int | None
) -> list[LayerSummary]:
    """Return the summaries of layers; samples are read once, in parts.

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
    survey = Survey(dimension, SATURATION_BOUNDS.get(layer.type_name), bins)
    for part in _read(recording, label, advance):
        survey.update(part, is_all=len(part) == len(samples))
    values, span, bars = survey.values, survey.span, survey.bars
    if span and bins and bars is None:
        bars = counted(_read(recording, label, advance), span, bins)
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
    """Yield the samples of a layer in parts, and report them; the next is read meanwhile."""
    parts = recording.parts(label)
    with ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, parts, None)
            yield part
            advance(0, part.nbytes, 0)


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
            units = units_of(result, 0)
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
    """Return sentences on the numbers of a result that are not finite."""
    # The variance of one sample is rightly nan.
    looked_at = result.mean if isinstance(result, MomentsResult | CovarianceResult) else result
    numbers = [one for one in tensors(looked_at) if one.is_floating_point() or one.is_complex()]
    nans = sum(int(one.isnan().sum()) for one in numbers)
    infinities = sum(int(one.isinf().sum()) for one in numbers)
    total = sum(one.numel() for one in numbers)
    kinds = ((nans, "NaN"), (infinities, "infinite"))
    return [f"{kind}: {count:,} of {total:,} numbers {word}" for count, word in kinds if count]
