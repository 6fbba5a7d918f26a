"""The table of statistics in a page: sorted by clicks, readable without a script."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.filesize import decimal

from scio_recorder.display.outline import call_text
from scio_recorder.display.summary import LayerSummary, Units
from scio_recorder.display.svg import bars_path, number_text
from scio_recorder.display.tree import searched, text

# Heading, and whether it sorts as numbers; None: it does not sort.
_COLUMNS: tuple[tuple[str, bool | None], ...] = (
    ("Layer", True),
    ("Name", False),
    ("Type", False),
    ("Values", None),
    ("Mean", True),
    ("Std", True),
    ("Min", True),
    ("Max", True),
    ("Zeros", True),
    ("NaN", True),
    ("Inf", True),
    ("Units", True),
    ("Dead", True),
    ("Saturated", True),
    ("Kept", True),
)

_AT_ONCE = 200
_FROM_THE_LEFT = {"Layer", "Kept"}


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
    for place, (name, is_number) in enumerate(_COLUMNS):
        yield _heading(name, is_number, is_first=place == 0)
    # Rows beyond what the style sheet names are shown once the page has been.
    yield f"</tr></thead><tbody{' class=short' * (len(layers) > _AT_ONCE)}>\n"
    for place, summary in enumerate(layers):
        yield "".join(_cells(place, summary)) + "</tr>\n"
    yield "</tbody></table></div>"


def _heading(name: str, is_number: bool | None, is_first: bool) -> str:
    if is_number is None:
        return f'<th scope="col"><span>{name}</span></th>'
    kind = ' class="number"' if is_number and name not in _FROM_THE_LEFT else ""
    kind += ' data-sort="number"' if is_number else ""
    order = "ascending" if is_first else "none"
    return f'<th scope="col"{kind} aria-sort="{order}"><button type="button">{name}</button></th>'


def _cells(place: int, summary: LayerSummary) -> Iterator[str]:
    layer, values, units = summary.layer, summary.values, summary.units
    label, name = text(str(layer.label)), text(layer.name)
    call = f" ({call_text(layer)})" if layer.call else ""
    yield f'<tr id="layer-{label}" data-search="{searched(layer)}">'
    yield f'<th scope="row" data-value="{place}">{label}</th>'
    yield f'<td class="name" title="{name}"><bdi>{name}</bdi>{call}</td>'
    yield f"<td><bdi>{text(layer.type_name)}</bdi></td>"
    yield f"<td>{_spark(summary)}</td>"
    yield _statistic(values.mean)
    # The spread of a single value is nan, and rightly so.
    yield _statistic(values.std, is_alarm=not _is_finite(values.mean))
    yield _statistic(values.low)
    yield _statistic(values.high)
    yield _number(values.zeros, "" if values.zeros is None else f"{values.zeros:.1%}")
    yield _count(values.nans, is_alarm=True)
    yield _count(values.infinities, is_alarm=True)
    yield from _unit_cells(units)
    yield _kept(summary)


def _kept(summary: LayerSummary) -> str:
    size = "" if summary.num_bytes is None else decimal(summary.num_bytes)
    parts = (
        " ".join((summary.dtype, "" if summary.shape is None else str(summary.shape))).strip(),
        size,
        summary.kept,
    )
    notes = f'<div class="quiet">{text("; ".join(summary.notes))}</div>' if summary.notes else ""
    key = "" if summary.num_bytes is None else summary.num_bytes
    return f'<td class="kept" data-value="{key}">{text(", ".join(filter(None, parts)))}{notes}</td>'


def _spark(summary: LayerSummary) -> str:
    if summary.bars is None:
        return ""
    # The path again, since a reference to the large picture's costs more time than it saves space.
    return (
        f'<svg class="spark" viewBox="0 0 {len(summary.bars.counts)} 100" aria-hidden="true" '
        f'preserveAspectRatio="none"><path d="{bars_path(summary.bars)}"/></svg>'
    )


def _unit_cells(units: Units | None) -> Iterator[str]:
    if units is None:
        yield _count(None) * 3
        return
    where = f"{units.count:,} (dim {units.dimension})" if units.dimension else f"{units.count:,}"
    yield _number(units.count, where)
    parts = ((units.zero, "zero"), (units.constant, "constant"))
    kinds = " ".join(_alarm(f"{count:,} {kind}") for count, kind in parts if count)
    yield _number(units.dead, kinds or "0", "number dead")
    yield _count(units.saturated, is_alarm=True)


def _statistic(value: float | None, is_alarm: bool = True) -> str:
    shown = number_text(value)
    return _number(value, _alarm(shown) if is_alarm and not _is_finite(value) else shown)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _count(count: int | None, is_alarm: bool = False) -> str:
    shown = "" if count is None else f"{count:,}"
    return _number(count, _alarm(shown) if count and is_alarm else shown)


def _alarm(shown: str) -> str:
    return f'<span class="alarm">{shown}</span>'


def _number(value: float | None, shown: str, kind: str = "number") -> str:
    # NaN has no place in an order: it sorts as missing, which is last.
    key = "" if value is None or math.isnan(value) else repr(float(value))
    return f'<td class="{kind}" data-value="{key.replace("inf", "Infinity")}">{shown}</td>'
