"""Figures of layers: statistics, similarities of pairs, profiles over depth, effects."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from scio_recorder.display.outline import short_name, short_title, visible
from scio_recorder.errors import needing
from scio_recorder.layer import Layer, few

__all__ = [
    "draw_effects",
    "draw_matrix",
    "draw_profile",
]

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Lower and upper bound at which the slope vanishes, by the type of the layer. The zeros of ReLU6
# are sparsity, and the bounds of Hardtanh are arguments, which the type does not show.
SATURATION_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "Hardsigmoid": (0.0, 1.0),
    "ReLU6": (None, 6.0),
    "Sigmoid": (0.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "Tanh": (-1.0, 1.0),
}
# Types of layers in which a unit that is always zero has no gradient and learns nothing more.
RECTIFIERS = ("ReLU", "ReLU6")
# By the name of the function that does the same.
_TYPES = {name.lower(): name for name in (*SATURATION_BOUNDS, *RECTIFIERS)}
_COLUMNS = 5
# Blue and vermilion of Okabe and Ito, which differ for colour-blind readers and in grey.
BLUE, VERMILION = "#0072B2", "#D55E00"


def kind_of(layer: Layer) -> str:
    """Return the type of a layer, of an operation that of the module that does the same."""
    return _TYPES.get(layer.type_name.rstrip("_"), layer.type_name)


@dataclass(frozen=True)
class Bars:
    """A histogram: counts in bins of equal width from ``low`` to ``high``, and outside of these.

    ``below`` and ``above`` include infinite values; NaNs are not counted.
    """

    counts: tuple[int, ...]
    low: float
    high: float
    below: int = 0
    above: int = 0


@dataclass(frozen=True)
class ValueStatistics:
    """Statistics over all values of a layer; None if not known."""

    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    # Share of the values that are zero.
    zeros: float | None = None
    nans: int | None = None
    infinities: int | None = None


@dataclass(frozen=True)
class UnitStatistics:
    """The numbers of units of a layer that are dead, zero or saturated.

    ``dead`` units had one value for all samples, and that of ``zero`` ones was 0. ``saturated`` is
    None if the type of layer has no bounds.
    """

    count: int
    zero: int
    dead: int
    saturated: int | None
    # Which units exceed the median one by far, the largest first.
    exploding: tuple[int, ...] = ()
    # How many times the median the largest absolute value of the first of them is.
    excess: float = 0.0


@dataclass(frozen=True)
class LayerSummary:
    """A recorded layer: its specification, statistics, histogram and units."""

    layer: Layer
    kept: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    num_bytes: int | None = None
    values: ValueStatistics = ValueStatistics()
    # Statistics of the finite values alone, if there are others.
    finite: ValueStatistics | None = None
    units: UnitStatistics | None = None
    bars: Bars | None = None
    notes: Sequence[str] = ()
    # Faults in results of reductions.
    warnings: Sequence[str] = ()


def draw_histograms(layers: Sequence[LayerSummary]) -> Figure:
    """Draw a histogram of each layer."""
    drawn = [summary for summary in layers if summary.bars is not None]
    columns = max(1, min(_COLUMNS, len(drawn)))
    rows = max(1, math.ceil(len(drawn) / columns))
    figure = blank((max(4.8, 2.4 * columns), max(3.0, 1.6 * rows + 0.5)))
    for place, summary in enumerate(drawn):
        _histogram(figure.add_subplot(rows, columns, place + 1), summary.layer, summary.bars)
    figure.supxlabel("value", fontsize=9)
    figure.supylabel("share of values, square-root scale", fontsize=9)
    _name_others(figure, layers, drawn)
    return figure


def draw_depth(layers: Sequence[LayerSummary]) -> Figure:
    """Draw mean, spread and extremes of each layer over the depth of the net."""
    drawn = [summary for summary in layers if np.isfinite(_finite(summary)[0])]
    width = _width_of(len(drawn))
    figure = blank((width, 4.2))
    if drawn:
        _depth(figure.subplots(), drawn, width)
        figure.legend(loc="outside upper right", ncols=3, fontsize=8)
    _name_others(figure, layers, drawn)
    return figure


def _width_of(num_layers: int) -> float:
    """Return the inches that layers side by side take."""
    return min(14.0, max(6.0, 2.5 + 0.25 * num_layers))


def _name_others(
    figure: Figure, layers: Sequence[LayerSummary], drawn: Sequence[LayerSummary]
) -> None:
    """Name the layers that can't be drawn."""
    if not drawn:
        figure.text(0.5, 0.6, "There is nothing to draw.", ha="center", va="center")
    if len(drawn) < len(layers):
        shown = {summary.layer.label for summary in drawn}
        others = [summary.layer.label for summary in layers if summary.layer.label not in shown]
        figure.suptitle(f"Nothing to draw: {few(others, 8)}", x=0.01, ha="left", fontsize=8)


def blank(size: tuple[float, float], title: str = "") -> Figure:
    """Return an empty figure of a size in inches, which a notebook shows.

    Raises
    ------
    MissingPackageError
        matplotlib is not installed.
    """
    with needing("plot", "a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False, wrap=True)
    # A notebook shows figures that pyplot knows; this one renders itself.
    figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]  # IPython looks for it
    return figure


def _finite(summary: LayerSummary) -> NDArray[np.float64]:
    """Return mean, std, low and high of the finite values; NaN if there are none."""
    values = summary.finite or summary.values
    numbers = np.array([values.mean, values.std, values.low, values.high], dtype=np.float64)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _histogram(axis: Axes, layer: Layer, bars: Bars | None) -> None:
    assert bars is not None
    outside = bars.below + bars.above
    total = sum(bars.counts) + outside or 1
    edges = np.linspace(bars.low, bars.high, len(bars.counts) + 1)
    axis.set_yscale("function", functions=(_root, np.square))
    axis.stairs(np.array(bars.counts) / total, edges, fill=True, color=BLUE)
    axis.set_title(short_title(layer, 20), fontsize=8, parse_math=False)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.xaxis.get_offset_text().set_fontsize(7)
    axis.locator_params(nbins=4)
    if outside:
        text = f"{outside:,} outside"
        axis.text(0.98, 0.95, text, ha="right", va="top", fontsize=6, transform=axis.transAxes)


def _depth(axis: Axes, layers: Sequence[LayerSummary], width: float) -> None:
    places = np.arange(len(layers))
    mean, std, low, high = np.array([_finite(summary) for summary in layers]).T
    spread = mean - std, mean + std
    axis.fill_between(places, *spread, color=BLUE, alpha=0.25, label="mean ± std")
    # The band is invisible if there is only one layer.
    axis.vlines(places, *spread, color=BLUE, alpha=0.5, linewidth=1)
    axis.plot(places, mean, color=BLUE, marker="o", markersize=3, label="mean")
    for values, marker in ((low, "v"), (high, "^")):
        axis.plot(places, values, color=VERMILION, marker=marker, markersize=3, linestyle=":")
    axis.plot([], [], color=VERMILION, linestyle=":", marker="^", markersize=3, label="min, max")
    _scale(axis, std)
    _name_ticks(axis, "x", [short_title(summary.layer, 20) for summary in layers], width)
    axis.set_xlabel("layer, in the order in which they return")
    axis.set_ylabel("value")
    axis.grid(axis="y", alpha=0.3)


def _scale(axis: Axes, std: NDArray[np.float64]) -> None:
    """Keep far extremes from flattening everything else."""
    typical = float(np.median(std[np.isfinite(std)])) if np.isfinite(std).any() else 0.0
    bottom, top = axis.dataLim.intervaly
    if typical > 0 and max(-bottom, top) > 1000 * typical:
        # The margin that matplotlib leaves is a share of all decades, and may reach past float64.
        axis.set_ylim(2 * min(0.0, bottom), 2 * max(0.0, top))
        # Wide enough that marks around 0 don't overlap.
        decades = math.log10(max(-bottom, top) / typical)
        axis.set_yscale("symlog", linthresh=typical, linscale=max(2.0, decades / 4))
        # Exponents of three digits are high, and would touch.
        axis.yaxis.get_major_locator().set_params(numticks=12)  # type: ignore[call-arg]  # of its class


def _root(shares: Any) -> Any:
    return abs(shares) ** 0.5


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


Floats = NDArray[np.float64]
_MOST_NAMES = 60
# Inches of a cell, and the largest and smallest size of a map.
_CELL, _SMALLEST, _LARGEST = 0.24, 2.8, 12.0
_LONGEST_NAME = 28
# The factor by which the lines for values off the scale lie beyond the others.
_APART = 8.0
# The colour of cells without a number.
_GREY = "#b0b0b0"


def _short(name: str) -> str:
    return short_name(name, _LONGEST_NAME)


def _room_for(names: Sequence[str]) -> float:
    """Return the inches that the longest name takes."""
    return 0.075 * max(map(len, map(_short, names)), default=0)


def _extent_of(count: int) -> float:
    """Return the inches that a number of rows or columns takes."""
    return min(_LARGEST, max(_SMALLEST, _CELL * count))


def _name_ticks(axis: Axes, side: str, names: Sequence[str], extent: float) -> None:
    """Write names along an axis, as large and as many as there is room for."""
    most = min(_MOST_NAMES, 9 * extent)
    places = range(0, len(names), max(1, math.ceil(len(names) / most)))
    # As large as the distance of two neighbours allows.
    size = min(8.0, 0.8 * 72 * extent / max(1, len(names)) * places.step)
    shown = [_short(names[place]) for place in places]
    if side == "x":
        axis.set_xticks(places, shown, rotation=90, fontsize=size, parse_math=False)
    else:
        axis.set_yticks(places, shown, fontsize=size, parse_math=False)


def draw_matrix(
    title: str,
    values: Floats,
    names: tuple[Sequence[str], Sequence[str]],
    axes: tuple[str, str],
    colours: str = "viridis",
    limits: tuple[float, float] = (0.0, 1.0),
) -> Figure:
    """Draw numbers as a heat map, the first row at the bottom.

    Parameters
    ----------
    title : str
        The meaning of the numbers.
    values : array of float
        [rows, columns]; NaN if there is no number.
    names : (sequence of str, sequence of str)
        Names of rows and columns.
    axes : (str, str)
        Titles of the axes of rows and columns.
    colours : str, default "viridis"
        A colour map of matplotlib.
    limits : (float, float), default (0, 1)
        The numbers at the ends of the colour map.
    """
    rows, columns = names
    height, width = (_extent_of(len(side)) for side in names)
    margin = 0.5 + _room_for((*rows, *columns))
    figure = blank((width + margin + 0.3, height + margin + 1.4), title)
    axis = figure.subplots()
    axis.set_facecolor(_GREY)
    image = axis.imshow(values, colours, aspect="auto", origin="lower", clim=limits)
    # Below the map, so that the figure is narrow enough for a phone.
    bar: dict[str, Any] = {"location": "bottom", "pad": 0.02, "aspect": 30}
    # The ends may lie close together and far from zero.
    shared = np.nan_to_num(np.log10(np.abs(limits).max() / np.ptp(limits)))
    bar |= {"ticks": np.linspace(*limits, 5), "format": f"%.{4 + int(shared.clip(0, 12))}g"}
    figure.colorbar(image, ax=axis, **bar)
    _name_ticks(axis, "x", columns, width)
    _name_ticks(axis, "y", rows, height)
    axis.set(ylabel=axes[0], xlabel=axes[1])
    return figure


def draw_profile(
    title: str,
    measure: str,
    names: Sequence[str],
    values: Floats,
    differs: NDArray[np.bool_],
    marked: Sequence[int],
    *,
    beside: tuple[str, Floats] | None = None,
) -> Figure:
    """Draw numbers on a logarithmic scale, with zeros on a line below and infinities on one above.

    Parameters
    ----------
    title : str
        A sentence about the whole.
    measure : str
        The meaning of the numbers.
    names : sequence of str
        The layers.
    values : array of float
        A number from 0 to infinity for each layer; NaN if there is none.
    differs : array of bool
        Whether the number counts as a difference.
    marked : sequence of int
        The layers that stand out.
    beside : (str, array of float), optional
        Other numbers of the layers, and what they mean.
    """
    width = _width_of(len(names))
    figure = blank((width, 4.8))
    axis = figure.subplots()
    axis.set_yscale("log")
    known = values if beside is None else np.append(values, beside[1])
    known = known[np.isfinite(known) & (known > 0)]
    low, high = (known.min() / _APART, known.max() * _APART) if len(known) else (0.1, 10.0)
    axis.set_ylim(low / 2, high * 2)
    _line(axis, low, "equal")
    if not np.isfinite(values).all():
        _line(axis, high, "no finite number")
    heights = np.where(np.isfinite(values), np.clip(values, low, high), high)
    places = np.arange(len(heights))
    style: dict[str, Any] = {"color": BLUE, "markersize": 5, "linewidth": 1}
    axis.plot(places, heights, "o-", markerfacecolor="white", label="no difference", **style)
    axis.plot(places[differs], heights[differs], "o", label="difference", **style)
    if beside is not None:
        known = np.clip(beside[1], low, high)
        axis.plot(places, known, "--", color="0.5", linewidth=1, label=beside[0])
    if len(marked):
        for place in marked:
            axis.axvline(place, color=VERMILION, linewidth=0.8, alpha=0.6)
        label = "first difference" if beside is None else "fault"
        chosen = [heights[place] for place in marked]
        axis.plot(marked, chosen, "D", color=VERMILION, markersize=9, label=label)
    _name_ticks(axis, "x", names, width)
    axis.set(xlim=(-0.6, len(names) - 0.4), ylabel=measure)
    axis.grid(axis="y", alpha=0.3)
    axis.set_title(visible(title), fontsize=9, loc="left", parse_math=False, wrap=True)
    figure.legend(loc="outside lower right", ncols=5, fontsize=8)
    return figure


def _line(axis: Axes, height: float, name: str) -> None:
    """Draw a line for values off the scale."""
    axis.axhline(height, color="0.6", linewidth=0.8, linestyle="--")
    across = axis.get_yaxis_transform()
    axis.text(0.99, height, name, fontsize=7, ha="right", va="bottom", transform=across)


def draw_effects(
    title: str,
    values: Floats,
    layers: Sequence[str],
    positions: Sequence[str],
    clean: float,
    corrupted: float,
) -> Figure:
    """Draw the metric of patched runs: as bars, or as a map in which the corrupted run is white.

    Parameters
    ----------
    title : str
        The meaning of the numbers.
    values : array of float
        [layers], or [layers, positions].
    layers, positions : sequence of str
        Names; no positions if layers were patched as a whole.
    clean, corrupted : float
        The metric of both runs.
    """
    if positions:
        away = np.abs(np.append(values, clean) - corrupted)
        reach = float(np.max(away, initial=0.0, where=np.isfinite(away))) or 1.0
        # Blue points to the clean run.
        colours = "RdBu" if clean >= corrupted else "RdBu_r"
        limits, names = (corrupted - reach, corrupted + reach), (layers, positions)
        title = f"{title} (white; blue towards clean)"
        return draw_matrix(title, values, names, ("", "position"), colours, limits)
    width = _extent_of(len(layers))
    figure = blank((width + 1.3, 3.5 + _room_for(layers)), title)
    axis = figure.subplots()
    axis.bar(range(len(layers)), values - corrupted, bottom=corrupted, color=BLUE)
    axis.axhline(clean, color=VERMILION, linewidth=1.5, label="clean")
    axis.axhline(corrupted, color="black", linewidth=1, label="corrupted")
    _name_ticks(axis, "x", layers, width)
    axis.set(xlim=(-0.6, len(layers) - 0.4), ylabel="metric")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def draw_attention(
    title: str, weights: Floats, heads: Sequence[str], names: tuple[Sequence[str], Sequence[str]]
) -> Figure:
    """Draw weights of attention: a map for each head, the first query at the top.

    Colours are on a square-root scale.

    Parameters
    ----------
    title : str
        The meaning of the weights.
    weights : array of float
        [heads, queries, keys]
    heads : sequence of str
        Names of the heads.
    names : (sequence of str, sequence of str)
        Names of queries and keys.
    """
    columns, rows = _grid_of(len(heads))
    height, width = _extents_of_maps(len(heads), [len(side) for side in names])
    margin = 0.5 + _room_for((*names[0], *names[1]))
    size = columns * (width + 0.15) + margin + 1.0, rows * (height + 0.3) + margin + 0.5
    figure = blank((max(3.5, size[0]), size[1]), title)
    from matplotlib.colors import PowerNorm

    # Square roots, or a few large weights would leave nothing else to see.
    norm = PowerNorm(0.5, 0.0, float(np.nanmax(weights, initial=0.0)) or 1.0)
    # Cells are squares, unless a map would be too narrow.
    aspect: Literal["auto", "equal"] = "equal" if 0.25 < width / height < 4 else "auto"
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(len(heads))]
    for place, axis in enumerate(axes):
        axis.set_facecolor(_GREY)
        axis.imshow(weights[place], "Blues", norm, aspect=aspect)
        axis.set_title(heads[place], fontsize=8, parse_math=False, pad=3)
        _name_ticks(axis, "x", names[1] if place + columns >= len(heads) else [], width)
        _name_ticks(axis, "y", names[0] if place % columns == 0 else [], height)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    if axes:
        whole = rows * height
        length = min(4.0, whole)
        shape: dict[str, Any] = {"shrink": length / whole, "aspect": 8 * length, "pad": 0.02}
        bar = figure.colorbar(axes[0].images[0], ax=axes, **shape)
        bar.ax.tick_params(labelsize=7)
    return figure


def _grid_of(count: int) -> tuple[int, int]:
    """Return numbers of columns and rows for several maps, if possible without a gap."""
    least = max(1, min(8, math.ceil(math.sqrt(count))))
    columns = next((number for number in range(least, 9) if count % number == 0), least)
    return columns, max(1, math.ceil(count / columns))


def _extents_of_maps(count: int, sizes: Sequence[int]) -> list[float]:
    """Return height and width in inches of each of several maps with cells that are squares."""
    longest = max(1, *sizes)
    extent = 1.8 if count > 1 else min(9.0, max(2.8, 0.3 * longest))
    return [max(0.4, extent * size / longest) for size in sizes]
