"""The table of statistics in a page: sorted by clicks, readable without a script."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.filesize import decimal

from scio_recorder.display.outline import call_text
from scio_recorder.display.summary import Bars, LayerSummary
from scio_recorder.display.tree import searched, text

# What a column sorts by. Where it sorts as numbers, its cells bring theirs along.
_NOTHING, _TEXT, _NUMBER = "", "text", "number"
_COLUMNS = {
    "Layer": _NUMBER,
    "Name": _TEXT,
    "Type": _TEXT,
    "Values": _NOTHING,
    **dict.fromkeys(("Mean", "Std", "Min", "Max", "Zeros", "NaN", "Inf"), _NUMBER),
    **dict.fromkeys(("Units", "Dead", "Saturated", "Kept"), _NUMBER),
}
_FROM_THE_LEFT = {"Layer", "Kept"}
_AT_ONCE = 200
_HEIGHT = 100


def statistics_table(layers: Sequence[LayerSummary]) -> Iterator[str]:
    """Yield a table with a row for each layer.

    Parameters
    ----------
    layers : sequence of LayerSummary
        The rows.

    Returns
    -------
    iterator of str
        Nothing where there are no layers.
    """
    if not layers:
        return
    # Focusable, so that it can be scrolled by keyboard.
    yield '<div class="table" tabindex="0" role="region" aria-label="Statistics of layers"><table>'
    yield "<thead><tr>"
    for name, sorts_by in _COLUMNS.items():
        yield _heading(name, sorts_by)
    # Rows beyond what the style sheet names are shown once the page has been.
    yield f"</tr></thead><tbody{' class=short' * (len(layers) > _AT_ONCE)}>\n"
    for place, summary in enumerate(layers):
        yield "".join(_cells(place, summary)) + "</tr>\n"
    yield "</tbody></table></div>"


def _heading(name: str, sorts_by: str) -> str:
    if not sorts_by:
        return f'<th scope="col"><span>{name}</span></th>'
    kind = ' class="number"' if sorts_by == _NUMBER and name not in _FROM_THE_LEFT else ""
    kind += ' data-sort="number"' if sorts_by == _NUMBER else ""
    order = "ascending" if name == "Layer" else "none"
    return f'<th scope="col"{kind} aria-sort="{order}"><button type="button">{name}</button></th>'


def _cells(place: int, summary: LayerSummary) -> Iterator[str]:
    layer, values, units = summary.layer, summary.values, summary.units
    label, name = text(str(layer.label)), text(layer.name)
    call = f" ({call_text(layer)})" if layer.call else ""
    yield f'<tr id="layer-{label}" data-search="{searched(layer)}">'
    yield f'<th scope="row" data-value="{place}">{label}</th>'
    yield f'<td class="name" title="{name}"><bdi>{name}</bdi>{call}</td>'
    yield f"<td><bdi>{text(layer.type_name)}</bdi></td>"
    spark = bars_svg(summary.bars, 'class="spark" aria-hidden="true"') if summary.bars else ""
    yield f"<td>{spark}</td>"
    # The spread of a single value is nan, and rightly so.
    std_may_alarm = not _is_finite(values.mean)
    figures = (values.mean, True), (values.std, std_may_alarm), (values.low, True)
    for value, may_alarm in (*figures, (values.high, True)):
        yield _number(value, number_text(value), is_alarm=may_alarm and not _is_finite(value))
    yield _number(values.zeros, "" if values.zeros is None else f"{values.zeros:.1%}")
    yield _count(values.nans)
    yield _count(values.infinities)
    if units is None:
        yield _count(None) * 3
    else:
        where = f" (dim {units.dimension})" if units.dimension else ""
        yield _number(units.count, f"{units.count:,}{where}")
        parts = ((units.zero, "zero"), (units.constant, "constant"))
        dead = " ".join(_alarm(f"{count:,} {kind}") for count, kind in parts if count)
        yield _number(units.dead, dead or "0", "number dead")
        yield _count(units.saturated)
    yield _kept(summary)


def _kept(summary: LayerSummary) -> str:
    shape = "" if summary.shape is None else str(summary.shape)
    size = "" if summary.num_bytes is None else decimal(summary.num_bytes)
    parts = filter(None, (f"{summary.dtype} {shape}".strip(), size, summary.kept))
    notes = f'<div class="quiet">{text("; ".join(summary.notes))}</div>' if summary.notes else ""
    key = "" if summary.num_bytes is None else summary.num_bytes
    return f'<td class="kept" data-value="{key}">{text(", ".join(parts))}{notes}</td>'


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _count(count: int | None) -> str:
    return _number(count, "" if count is None else f"{count:,}", is_alarm=bool(count))


def _alarm(shown: str) -> str:
    return f'<span class="alarm">{shown}</span>'


def _number(
    value: float | None, shown: str, kind: str = "number", *, is_alarm: bool = False
) -> str:
    # NaN has no place in an order: it sorts as missing, which is last.
    key = "" if value is None or math.isnan(value) else repr(float(value))
    shown = _alarm(shown) if is_alarm else shown
    return f'<td class="{kind}" data-value="{key.replace("inf", "Infinity")}">{shown}</td>'


def number_text(value: float | None) -> str:
    """Return a number in four digits, as short as it goes; nothing for one that is not known.

    Examples
    --------
    >>> [number_text(x) for x in (0.0, 1234567.0, -0.00001234, math.inf, None)]
    ['0', '1.235e+06', '-1.234e-05', 'inf', '']
    """
    return "" if value is None else f"{value:.4g}"


def bars_svg(bars: Bars, attributes: str) -> str:
    """Return a histogram as a picture, which its box may stretch.

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
