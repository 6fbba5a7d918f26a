"""The page that shows a recording: statistics, histograms, the architecture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.filesize import decimal

from scio_recorder.display import page
from scio_recorder.display.figure import (
    RECTIFIERS,
    Bars,
    LayerSummary,
    ValueStatistics,
    kind_of,
)
from scio_recorder.display.outline import Outline, address_of, asset, searched, text, tree_html
from scio_recorder.display.page import Column
from scio_recorder.layer import few

_HEIGHT = 100
# Units that a warning names.
_SHOWN = 5
# Columns that say that something is wrong.
_FAULTS = ("NaN", "Inf", "Dead")


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
    if units is not None and units.zero and kind_of(summary.layer) in RECTIFIERS:
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
    # Faults are shown only where there are any.
    columns = [one for one in _columns(layers) if one.alarms or one.name not in ("NaN", "Inf")]
    rows = [one.layer for one in layers]
    yield from page.table_html("Statistics of layers", rows, columns, _FAULTS)


def _columns(layers: Sequence[LayerSummary]) -> list[Column]:
    values, units = [one.values for one in layers], [one.units for one in layers]
    zeros = [one.zeros for one in values]
    return [
        _figures("Mean", values),
        # The spread of a single value is rightly nan.
        _figures("Std", values)._replace(alarms=()),
        _figures("Min", values, "low"),
        _figures("Max", values, "high"),
        Column("Zeros", ["" if one is None else f"{one:.1%}" for one in zeros], zeros),
        _counts("NaN", values, "nans"),
        _counts("Inf", values, "infinities"),
        _counts("Units", units, "count")._replace(alarms=()),
        _counts("Dead", units),
        _counts("Saturated", units),
        Column("Kept", list(map(_kept, layers)), [one.num_bytes for one in layers], (), "kept"),
    ]


def _figures(name: str, values: Sequence[ValueStatistics], key: str = "") -> Column:
    """Return a column of numbers that should be finite."""
    numbers = [getattr(one, key or name.lower()) for one in values]
    odd = {place for place, one in enumerate(numbers) if one and not math.isfinite(one)}
    return Column(name, list(map(page.number_text, numbers)), numbers, odd)


def _counts(name: str, of: Sequence[object], key: str = "") -> Column:
    """Return a column of counts that should be zero, of what may be unknown."""
    counts = [getattr(one, key or name.lower(), None) for one in of]
    texts = ["" if count is None else f"{count:,}" for count in counts]
    return Column(name, texts, counts, {place for place, count in enumerate(counts) if count})


def _histograms(layers: Sequence[LayerSummary]) -> Iterator[str]:
    if any(one.bars for one in layers):
        yield (
            '<p class="quiet">All values of a layer. Heights are square roots of counts, so that a '
            "peak at zero leaves the rest to be seen.</p>"
        )
    else:
        yield "<p>There are no values to draw.</p>"
    same: dict[str, list[LayerSummary]] = {}
    for one in layers:
        if one.bars is not None:
            # Layers that only hand on their input, as Identity and a container of one layer do.
            same.setdefault(repr((one.values, one.bars)), []).append(one)
    yield f'<div class="grid">{"".join(map(_figure, same.values()))}</div>'


def _figure(drawn: Sequence[LayerSummary]) -> str:
    """Return the histogram of layers that have the same values."""
    bars, layers = drawn[0].bars, [one.layer for one in drawn]
    assert bars is not None
    layer = layers[0]
    name = layer.name or layer.type_name
    said = f"Histogram of layer {layer.label}, {sum(bars.counts):,} values"
    said += f" from {page.number_text(bars.low)} to {page.number_text(bars.high)}"
    sides = ((bars.below, "below"), (bars.above, "above"))
    told = [f"{count:,} {side} this range" for count, side in sides if count]
    others = ", ".join(map(page.link_html, layers[1:]))
    return (
        f'<figure data-search="{" ".join(map(searched, layers))}"><figcaption title="{text(name)}">'
        f'<a href="{address_of(layer)}">{text(str(layer.label))}</a> '
        f'<span class="tail">{page.name_html(name, layer)}</span></figcaption>'
        + bars_svg(bars, f'role="img" aria-label="{text(said)}"')
        + f'<div class="axis"><span>{page.number_text(bars.low)}</span>'
        f"<span>{page.number_text(bars.high)}</span></div><p>{', '.join(told)}</p>"
        + (f'<p class="same">The same values: {others}</p>' if others else "")
        + "</figure>"
    )


def _kept(summary: LayerSummary) -> str:
    shape = "" if summary.shape is None else str(summary.shape)
    size = "" if summary.num_bytes is None else decimal(summary.num_bytes)
    parts = filter(None, (f"{summary.dtype} {shape}".strip(), size, summary.kept))
    return "; ".join([", ".join(parts), *summary.notes])


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
