"""The page of a recording: statistics and histograms of its layers, and the architecture."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scio_recorder.display.figure import RECTIFIERS, Bars, LayerSummary, ValueStatistics, kind_of
from scio_recorder.display.outline import Outline
from scio_recorder.display.page import TableColumn, number_text, rendered
from scio_recorder.layer import Layer, few

# Units that a warning names.
_SHOWN = 5


def recording_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    outline: Outline,
    layers: Sequence[LayerSummary],
    notes: Sequence[str] = (),
) -> str:
    """Return the page that shows a recording: statistics, histograms, the architecture.

    Parameters
    ----------
    title : str
        Its heading.
    facts : sequence of (str, str)
        Names and values that describe the run as a whole.
    outline : Outline
        The net.
    layers : sequence of LayerSummary
        The recorded layers in the order in which they are to be listed.
    notes : sequence of str
        Warnings about the recording as a whole.

    Examples
    --------
    >>> html = recording_page("<empty>", [], Outline("no net", []), [])
    >>> "<h1>&lt;empty&gt;</h1>" in html, "://" in html
    (True, False)
    """
    worst_first = sorted(layers, key=lambda layer: (not _faults(layer), not _explosions(layer)))
    troubles = [(summary.layer, said) for summary in worst_first if (said := _troubles(summary))]
    same: dict[str, tuple[Bars, list[Layer]]] = {}
    for summary in layers:
        if summary.bars is not None:
            # Layers that only hand on their input, as Identity and a container of one layer do.
            key = repr((summary.values, summary.bars))
            same.setdefault(key, (summary.bars, []))[1].append(summary.layer)
    return rendered(
        "recording.html",
        title=title,
        facts=facts,
        notes=notes,
        troubles=troubles,
        layers=[summary.layer for summary in layers],
        columns=_columns(layers),
        histograms=list(same.values()),
        outline=outline,
    )


def _troubles(summary: LayerSummary) -> list[str]:
    units, troubles = summary.units, [*_faults(summary), *_explosions(summary), *summary.warnings]
    if units is not None and units.zero and kind_of(summary.layer) in RECTIFIERS:
        which = "all" if units.zero == units.count else f"{units.zero:,} of"
        troubles.append(f"{which} {units.count:,} units are dead: zero for all samples")
    return troubles


def _faults(summary: LayerSummary) -> list[str]:
    """Return a sentence on the values that are not finite."""
    values = summary.values
    kinds = (("NaN", values.nans), ("infinite", values.infinities))
    counts = " and ".join(f"{count:,} {kind}" for kind, count in kinds if count)
    plural = "" if (values.nans or 0) + (values.infinities or 0) == 1 else "s"
    return [f"{counts} value{plural}"] * bool(counts)


def _explosions(summary: LayerSummary) -> list[str]:
    """Return a sentence on the units that have values far beyond those of the others."""
    units = summary.units
    if units is None or not units.exploding:
        return []
    shown = few(units.exploding, _SHOWN)
    which = f"unit {shown} explodes" if len(units.exploding) == 1 else f"units {shown} explode"
    return [f"{which}: the largest value is {units.excess:,.0f} times that of the median unit"]


def _columns(layers: Sequence[LayerSummary]) -> list[TableColumn]:
    values, units = [summary.values for summary in layers], [summary.units for summary in layers]
    zeros, sizes = [every.zeros for every in values], [summary.num_bytes for summary in layers]
    faults = [_counts("NaN", values, "nans"), _counts("Inf", values, "infinities")]
    return [
        _figures("Mean", values),
        # The spread of a single value is rightly nan.
        _figures("Std", values)._replace(alarms=()),
        _figures("Min", values, "low"),
        _figures("Max", values, "high"),
        TableColumn("Zeros", ["" if share is None else f"{share:.1%}" for share in zeros], zeros),
        # Faults are shown only where there are any.
        *(column for column in faults if column.alarms),
        _counts("Units", units, "count")._replace(alarms=()),
        _counts("Dead", units),
        _counts("Saturated", units),
        TableColumn("Kept", list(map(_kept, layers)), sizes, (), "kept"),
    ]


def _figures(name: str, values: Sequence[ValueStatistics], key: str = "") -> TableColumn:
    """Return a column of numbers that should be finite."""
    numbers = [getattr(statistics, key or name.lower()) for statistics in values]
    odd = {place for place, number in enumerate(numbers) if number and not math.isfinite(number)}
    return TableColumn(name, list(map(number_text, numbers)), numbers, odd)


def _counts(name: str, of: Sequence[object], key: str = "") -> TableColumn:
    """Return a column of counts that should be zero, of what may be unknown."""
    counts = [getattr(statistics, key or name.lower(), None) for statistics in of]
    texts = ["" if count is None else f"{count:,}" for count in counts]
    return TableColumn(name, texts, counts, {place for place, count in enumerate(counts) if count})


def _kept(summary: LayerSummary) -> str:
    from rich.filesize import decimal

    shape = "" if summary.shape is None else str(summary.shape)
    size = "" if summary.num_bytes is None else decimal(summary.num_bytes)
    parts = filter(None, (f"{summary.dtype} {shape}".strip(), size, summary.kept))
    return "; ".join([", ".join(parts), *summary.notes])
