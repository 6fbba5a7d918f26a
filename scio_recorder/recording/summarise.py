"""Statistics of a recording's layers, measured part by part, in bounded memory."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch import Tensor

from scio_recorder.display.figure import (
    LEAST_COUNTED,
    SATURATION_BOUNDS,
    Bars,
    LayerSummary,
    Values,
)
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import RecorderError
from scio_recorder.layer import DepthIdx
from scio_recorder.recording.readable import Readable
from scio_recorder.recording.survey import Survey, bars_of, units_of
from scio_recorder.reductions import (
    AliveResult,
    CovarianceResult,
    HistogramResult,
    MomentsResult,
)
from scio_recorder.reductions.alive import unit_dimension
from scio_recorder.reductions.base import several
from scio_recorder.reductions.binning import Bins, FineBins
from scio_recorder.tensors.dtypes import dtype_name
from scio_recorder.tensors.structures import tensors
from scio_recorder.tensors.threads import one_thread

# Threads that look at parts, while another one reads.
_THREADS = 2
# The statistics that a reduction may give of all values together.
_OVERALL = ("mean", "std", "low", "high")


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
    stored = [label for label in labels if label not in recording.reductions]
    surveys: dict[DepthIdx, Survey] = {}
    with one_thread(), progress_bar("reading layers", len(stored)) as advance:
        for label, parts in groupby(_surveyed(recording, stored, bins, advance), itemgetter(0)):
            surveys[label] = functools.reduce(Survey.joined, (survey for _, survey in parts))
            advance(0, 0)
        return [
            _of_reductions(recording, label)
            if label in recording.reductions
            # Without samples there are no parts.
            else _of_samples(recording, label, surveys.get(label, Survey(0)), bins)
            for label in labels
        ]


def _surveyed(
    recording: Readable, labels: Sequence[DepthIdx], bins: int | None, advance: Advance
) -> Iterator[tuple[DepthIdx, Survey]]:
    """Yield surveys of all parts in order; later ones are read and looked at meanwhile."""
    waiting: deque[tuple[DepthIdx, int, Future[Survey]]] = deque()

    def ended() -> tuple[DepthIdx, Survey]:
        label, num_bytes, task = waiting.popleft()
        survey = task.result()
        advance(0, num_bytes, 0)
        return label, survey

    with ThreadPoolExecutor(_THREADS) as pool:
        for label in labels:
            look, first = _Look(recording, label, bins), None
            for part in recording.parts(label):
                task = pool.submit(look, part, first)
                waiting.append((label, part.nbytes, task))
                first = first or task
                if len(waiting) > _THREADS:
                    yield ended()
        while waiting:
            yield ended()


class _Look:
    """Looks at parts of a layer, several at once."""

    def __init__(self, recording: Readable, label: DepthIdx, num_bins: int | None) -> None:
        kind, samples = recording.architecture[label].type_name, recording[label]
        self._num_bins = num_bins
        self._num_samples = len(samples)
        self._every = _every(samples)
        self._dimension = unit_dimension(kind, samples.ndim)
        self._bounds = SATURATION_BOUNDS.get(kind)

    def __call__(self, part: Tensor, first: Future[Survey] | None) -> Survey:
        """Return the survey of a part; ``first`` is the task that looks at the first one."""
        survey = Survey(self._dimension, self._bounds)
        survey.update(part)
        # The task of the first part began before.
        bins = self._bins(survey, len(part)) if first is None else first.result().bins
        if bins is not None:
            survey.count(part, bins, self._every)
        return survey

    def _bins(self, first: Survey, num_samples: int) -> Bins | None:
        """Return bins for all samples, of which those of the first part are known."""
        if not (self._num_bins and first.span):
            return None
        # If others follow, their range can only be guessed.
        kind = Bins if num_samples == self._num_samples else FineBins
        return kind(*first.span, self._num_bins)


def _of_samples(
    recording: Readable, label: DepthIdx, survey: Survey, bins: int | None
) -> LayerSummary:
    samples: Tensor = recording[label]
    values, span, bars = survey.values, survey.span, survey.bars
    if span and bins and bars is None:
        # The first part was misleading.
        bars = bars_of(recording.parts(label), span, bins, _every(samples))
    lost = recording.relative_errors.get(label)
    notes = (
        ("complex: numbers are those of magnitudes", samples.dtype.is_complex),
        ("no values", not samples.numel()),
        ("no finite value", samples.numel() and not span),
        (f"rounded, relative error {lost or 0.0:.1e}", lost),
    )
    return LayerSummary(
        layer=recording.architecture[label],
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


def _every(samples: Tensor) -> int:
    """Return of how many values one is counted in bins."""
    return max(1, samples.numel() // LEAST_COUNTED)


def _bars(result: HistogramResult) -> Bars:
    low, high = float(result.edges[0]), float(result.edges[-1])
    return Bars(tuple(result.counts.tolist()), low, high, result.below, result.above)


def _of_reductions(recording: Readable, label: DepthIdx) -> LayerSummary:
    reductions = several(recording.reductions[label])
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
        overall = reduction.overall(result)
        shown: dict[str, Any] = {name: overall[name] for name in _OVERALL if name in overall}
        if len(shown) < len(overall):
            others = ", ".join(map(str, overall.keys() - shown.keys()))
            notes.append(f"{kind}.overall() also returned {others}, which nothing shows")
        if isinstance(result, HistogramResult):
            shown["bars"] = _bars(result)
        if isinstance(result, AliveResult):
            units = units_of(result.dead, result.max_abs, result.saturated, 0)
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
