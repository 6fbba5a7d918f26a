"""A recording as one page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scio_recorder.display.outline import Outline
from scio_recorder.display.statistics_table import bars_svg, number_text, statistics_table
from scio_recorder.display.summary import (
    SATURATION_BOUNDS,
    SATURATION_SHARE,
    SATURATION_WIDTH,
    LayerSummary,
)
from scio_recorder.display.tree import asset, searched, text, tree_html
from scio_recorder.layer import Layer

# Nothing may be fetched from anywhere, whatever a name in the page says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


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
