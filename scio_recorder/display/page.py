"""A recording as one page of HTML that needs nothing but itself."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.filesize import decimal

from scio_recorder.display.figure import (
    SATURATION_BOUNDS,
    SATURATION_SHARE,
    SATURATION_WIDTH,
    Bars,
    LayerSummary,
)
from scio_recorder.display.outline import Outline, asset, call_text, searched, text, tree_html
from scio_recorder.errors import RecordingError
from scio_recorder.layer import Layer

# Nothing may be fetched from anywhere, whatever a name in the page says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
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


def page_html(
    title: str,
    facts: Sequence[tuple[str, str]],
    outline: Outline,
    layers: Sequence[LayerSummary],
    notes: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the pieces of the page.

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

    Returns
    -------
    iterator of str
        HTML, to be joined and written in UTF-8.

    Examples
    --------
    >>> html = "".join(page_html("<empty>", [], Outline("no net", []), []))
    >>> "<h1>&lt;empty&gt;</h1>" in html, "://" in html
    (True, False)
    """
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{text(title)}</title>"
    yield f"<style>\n{asset('page.css')}{asset('tree.css')}</style></head>\n<body><main>"
    yield f"<header><h1>{text(title)}</h1>{_contents()}</header>"
    yield from _facts(facts)
    yield from _warnings(notes, layers)
    yield '<section id="statistics" aria-labelledby="h-statistics">'
    yield '<h2 id="h-statistics">Statistics</h2>'
    yield _search_box(layers)
    yield from statistics_table(layers)
    yield "</section>\n"
    yield from _histograms(layers)
    yield '<section aria-labelledby="h-architecture"><h2 id="h-architecture">Architecture</h2>'
    yield from tree_html(outline, _address)
    yield f"</section>\n{_definitions()}</main>\n"
    yield f"<script>\n{asset('tree.js')}</script>\n<script>\n{asset('page.js')}</script>"
    yield "</body></html>\n"


def _contents() -> str:
    names = ("Statistics", "Histograms", "Architecture", "Definitions")
    links = "".join(f'<li><a href="#h-{name.lower()}">{name}</a></li>' for name in names)
    return f'<nav aria-label="Sections"><ul>{links}</ul></nav>'


def _facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield '<dl class="facts">'
    for name, value in facts:
        yield f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>"
    yield "</dl>\n"


def _warnings(notes: Sequence[str], layers: Sequence[LayerSummary]) -> Iterator[str]:
    found = [f"<li>{text(note)}</li>" for note in notes]
    found += [_warning(one) for one in layers if _troubles(one)]
    if found:
        yield '<section class="warning" aria-labelledby="h-warnings">'
        yield f'<h2 id="h-warnings">Look at this first</h2><ul>{"".join(found)}</ul></section>\n'


def _warning(summary: LayerSummary) -> str:
    layer = summary.layer
    name = f"<bdi>{text(layer.name or layer.type_name)}</bdi>"
    link = f'<a href="{_address(layer)}">{text(str(layer.label))} {name}</a>'
    return f"<li>{link}: {text('; '.join(_troubles(summary)))}</li>"


def _troubles(summary: LayerSummary) -> list[str]:
    values = summary.values
    kinds = (("NaN", values.nans), ("infinite", values.infinities))
    counts = " and ".join(f"{count:,} {kind}" for kind, count in kinds if count)
    plural = "" if (values.nans or 0) + (values.infinities or 0) == 1 else "s"
    return [f"{counts} value{plural}"] * bool(counts) + list(summary.warnings)


def _search_box(layers: Sequence[LayerSummary]) -> str:
    if not layers:
        return "<p>No layer was recorded.</p>"
    return (
        '<div class="tools" hidden><input type="search" id="search" placeholder="Search layers" '
        'aria-label="Search statistics and histograms by label, name or type">'
        '<output id="found" aria-live="polite"></output></div>'
    )


def _histograms(layers: Sequence[LayerSummary]) -> Iterator[str]:
    yield '<section aria-labelledby="h-histograms"><h2 id="h-histograms">Histograms</h2>'
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
    yield "</div></section>\n"


def _figure(summary: LayerSummary) -> str:
    bars, layer = summary.bars, summary.layer
    assert bars is not None
    name = text(layer.name or layer.type_name)
    said = f"Histogram of layer {layer.label}, {sum(bars.counts):,} values"
    said += f" from {number_text(bars.low)} to {number_text(bars.high)}"
    sides = ((bars.below, "below"), (bars.above, "above"))
    outside = ", ".join(f"{count:,} {side} this range" for count, side in sides if count)
    return (
        f'<figure data-search="{searched(layer)}"><figcaption title="{name}">'
        f'<a href="{_address(layer)}">{layer.label}</a> <bdi>{name}</bdi></figcaption>'
        + bars_svg(bars, f'role="img" aria-label="{text(said)}"')
        + f'<div class="axis"><span>{number_text(bars.low)}</span>'
        f"<span>{number_text(bars.high)}</span></div><p>{outside}</p></figure>"
    )


def _address(layer: Layer) -> str:
    return f"#layer-{layer.label}"


def _definitions() -> str:
    bounded = ", ".join(_bounds_text(kind, *bounds) for kind, bounds in SATURATION_BOUNDS.items())
    words = {
        "Mean, std, min, max": "Over all values of a layer, all samples and positions together, in "
        "float64 and without NaNs. std is the unbiased standard deviation (n - 1).",
        "Zeros": "The share of values that are exactly zero.",
        "Unit": "A channel or feature. It lies along dimension 1 of [samples, ...], and along the "
        "last one where a sample is [positions, features] and behind Linear, LayerNorm, RMSNorm "
        "and Embedding, unless the type ends in 1d, 2d or 3d. The column Units says which it was.",
        "Dead": "A unit that had one and the same finite value for all samples and positions, zero "
        "or another. It needs two samples at least.",
        "Saturated": f"A unit of which at least {SATURATION_SHARE:.0%} of the values lie within "
        f"{SATURATION_WIDTH:.0%} of the function's range from a bound. Only for layers of a type "
        f"whose bounds are known: {bounded}.",
        "Histogram": "Bins of equal width from the smallest to the largest finite value, but no "
        "further than 6 standard deviations from the mean. Values outside are counted below it.",
    }
    listed = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in words.items())
    return (
        '<section aria-labelledby="h-definitions"><h2 id="h-definitions">Definitions</h2>'
        f'<dl class="words">{listed}</dl></section>'
    )


def _bounds_text(kind: str, low: float | None, high: float | None) -> str:
    numbers = " and ".join(number_text(bound) for bound in (low, high) if bound is not None)
    return f"{kind} ({numbers})"


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


def write_page(path: str | os.PathLike[str], pieces: Iterable[str]) -> Path:
    """Write a text in UTF-8, in place of what the file held.

    Parameters
    ----------
    path : str or path-like
        The file. Its folder must exist.
    pieces : iterable of str
        The text.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    RecordingError
        It can't be written; what was there before is still there.
    """
    target = Path(path)
    name = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Whether there can be a file is known before the work, and nothing lies there during it:
        # a process that is killed leaves no half page.
        name.touch(exist_ok=False)
        name.unlink()
        text = "".join(pieces)
        with open(name, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except RecordingError:
        raise
    except OSError as error:
        raise RecordingError(f"can't write {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
    return target
