"""The page that shows a recording: statistics, histograms, the architecture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.filesize import decimal

from scio_recorder.display import page
from scio_recorder.display.figure import Bars, LayerSummary, UnitStatistics
from scio_recorder.display.outline import Outline, address_of, asset, searched, text, tree_html
from scio_recorder.layer import few

_FIRST = {"Layer": page.PLACE, "Name": page.TEXT, "Type": page.TEXT}
_OTHERS = {
    **dict.fromkeys(("Mean", "Std", "Min", "Max", "Zeros", "NaN", "Inf"), page.NUMBER),
    **dict.fromkeys(("Units", "Dead", "Saturated"), page.NUMBER),
    "Kept": page.PLACE,
}
# Types of layers in which a unit that is always zero has no gradient and learns nothing more.
_RECTIFIERS = ("ReLU", "ReLU6")
_HEIGHT = 100
# Units that a warning names.
_SHOWN = 5


def recording_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    outline: Outline,
    layers: Sequence[LayerSummary],
    notes: Sequence[str] = (),
) -> str:
    """Return the page, to be written in UTF-8.

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
    """
    spoilt = sorted(layers, key=lambda one: (not _faults(one), not _explosions(one)))
    warnings = [*map(text, notes), *(_warning(one) for one in spoilt if _troubles(one))]
    sections = {
        "Statistics": _statistics(layers),
        "Histograms": _histograms(layers),
        "Architecture": tree_html(outline, links=True),
        "Definitions": [asset("recording-words.html")],
    }
    return page.page_html(title, facts, warnings, sections)


def _warning(summary: LayerSummary) -> str:
    return f"{page.link_html(summary.layer)}: {text('; '.join(_troubles(summary)))}"


def _troubles(summary: LayerSummary) -> list[str]:
    units, found = summary.units, [*_faults(summary), *_explosions(summary), *summary.warnings]
    if units is not None and units.zero and summary.layer.type_name in _RECTIFIERS:
        which = "all" if units.zero == units.count else f"{units.zero:,} of"
        found.append(f"{which} {units.count:,} units are dead: zero for all samples")
    return found


def _faults(summary: LayerSummary) -> list[str]:
    """Return a sentence on the values that are not finite."""
    values = summary.values
    kinds = (("NaN", values.nans), ("infinite", values.infinities))
    counts = " and ".join(f"{count:,} {kind}" for kind, count in kinds if count)
    plural = "" if (values.nans or 0) + (values.infinities or 0) == 1 else "s"
    return [f"{counts} value{plural}"] * bool(counts)


def _explosions(summary: LayerSummary) -> list[str]:
    """Say which units have values far beyond those of the others."""
    units = summary.units
    if units is None or not units.exploding:
        return []
    shown = few(units.exploding, _SHOWN)
    which = f"unit {shown} explodes" if len(units.exploding) == 1 else f"units {shown} explode"
    return [f"{which}: the largest value is {units.excess:,.0f} times that of the median unit"]


def _statistics(layers: Sequence[LayerSummary]) -> Iterator[str]:
    if not layers:
        yield "<p>No layer was recorded.</p>"
        return
    yield page.search_box("statistics and histograms")
    cells = [_cells(summary) for summary in layers]
    # A narrow screen shows only the first columns.
    alarming = {
        "NaN": any(one.values.nans for one in layers),
        "Inf": any(one.values.infinities for one in layers),
        "Dead": any(one.units and one.units.dead for one in layers),
    }
    order = sorted(_OTHERS, key=lambda name: not alarming.get(name))
    rows = [
        [*page.layer_cells(place, summary.layer), *(own[name] for name in order)]
        for place, (summary, own) in enumerate(zip(layers, cells, strict=True))
    ]
    columns = {**_FIRST, **{name: _OTHERS[name] for name in order}}
    yield from page.table_html("Statistics of layers", columns, rows)


def _histograms(layers: Sequence[LayerSummary]) -> Iterator[str]:
    if any(one.bars for one in layers):
        yield (
            '<p class="quiet">All values of a layer. Heights are square roots of counts, so that a '
            "peak at zero leaves the rest to be seen.</p>"
        )
    else:
        yield "<p>There are no values to draw.</p>"
    yield '<div class="grid">'
    for summary in layers:
        if summary.bars is not None:
            yield _figure(summary)
    yield "</div>"


def _figure(summary: LayerSummary) -> str:
    bars, layer = summary.bars, summary.layer
    assert bars is not None
    name = layer.name or layer.type_name
    said = f"Histogram of layer {layer.label}, {sum(bars.counts):,} values"
    said += f" from {page.number_text(bars.low)} to {page.number_text(bars.high)}"
    sides = ((bars.below, "below"), (bars.above, "above"))
    told = [f"{count:,} {side} this range" for count, side in sides if count]
    return (
        f'<figure data-search="{searched(layer)}"><figcaption title="{text(name)}">'
        f'<a href="{address_of(layer)}">{layer.label}</a> '
        f'<span class="tail">{page.name_html(name, layer)}</span></figcaption>'
        + bars_svg(bars, f'role="img" aria-label="{text(said)}"')
        + f'<div class="axis"><span>{page.number_text(bars.low)}</span>'
        f"<span>{page.number_text(bars.high)}</span></div><p>{', '.join(told)}</p></figure>"
    )


def _cells(summary: LayerSummary) -> dict[str, str]:
    """Return the cells of a row behind the first ones, by column."""
    values, units = summary.values, summary.units
    found: dict[str, str] = {}
    # The spread of a single value is rightly nan.
    std_may_alarm = not _is_finite(values.mean)
    figures = {"Mean": values.mean, "Std": values.std, "Min": values.low, "Max": values.high}
    for name, value in figures.items():
        is_alarm = not _is_finite(value) and (name != "Std" or std_may_alarm)
        found[name] = page.number_cell(value, page.number_text(value), is_alarm=is_alarm)
    found["Zeros"] = page.number_cell(
        values.zeros, "" if values.zeros is None else f"{values.zeros:.1%}"
    )
    found |= {"NaN": page.count_cell(values.nans), "Inf": page.count_cell(values.infinities)}
    return {**found, **_unit_cells(units), "Kept": _kept(summary)}


def _unit_cells(units: UnitStatistics | None) -> dict[str, str]:
    if units is None:
        return dict.fromkeys(("Units", "Dead", "Saturated"), page.count_cell(None))
    where = f" (dim {units.dimension})" if units.dimension else ""
    parts = ((units.zero, "zero"), (units.constant, "constant"))
    dead = " ".join(page.alarm(f"{count:,} {kind}") for count, kind in parts if count)
    return {
        "Units": page.number_cell(units.count, f"{units.count:,}{where}"),
        "Dead": page.number_cell(units.dead, dead or "0", "number dead"),
        "Saturated": page.count_cell(units.saturated),
    }


def _kept(summary: LayerSummary) -> str:
    shape = "" if summary.shape is None else str(summary.shape)
    size = "" if summary.num_bytes is None else decimal(summary.num_bytes)
    parts = filter(None, (f"{summary.dtype} {shape}".strip(), size, summary.kept))
    notes = f'<div class="quiet">{text("; ".join(summary.notes))}</div>' if summary.notes else ""
    key = "" if summary.num_bytes is None else summary.num_bytes
    return f'<td class="kept" data-value="{key}">{text(", ".join(parts))}{notes}</td>'


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def bars_svg(bars: Bars, attributes: str) -> str:
    """Return a histogram as a picture that its box may stretch.

    A bin is 1 wide, the tallest is 100 high. Heights are square roots of counts, so that a peak at
    zero leaves the rest to be seen.

    Examples
    --------
    >>> bars_svg(Bars((4, 0, 16), 0.0, 3.0), "role=img")
    '<svg viewBox="0 0 3 100" ... role=img><path d="M0 100V50h1V100h1V0h1V100z"/></svg>'
    """
    top = max(bars.counts, default=0) or 1
    heights = [round(_HEIGHT * (1 - math.sqrt(count / top)), 1) for count in bars.counts]
    steps = "".join(f"V{height:g}h1" for height in heights)
    box = f'viewBox="0 0 {len(bars.counts)} {_HEIGHT}" preserveAspectRatio="none"'
    return f'<svg {box} {attributes}><path d="M0 {_HEIGHT}{steps}V{_HEIGHT}z"/></svg>'
