"""The numbers by which a page or a plot shows a layer, and figures of them."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scio_recorder.display.outline import short_title
from scio_recorder.errors import needing
from scio_recorder.layer import Layer, few

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# A value is saturated if it lies within this share of the range from a bound, and a unit if this
# share of its values is.
SATURATION_WIDTH = 0.01
SATURATION_SHARE = 0.95
# A unit explodes if its largest absolute value is so many times that of the median unit, and above
# what functions such as softmax can return. Among fewer units there is no median to speak of.
EXPLOSION_FACTOR = 20.0
EXPLOSION_LEAST = 1.0
EXPLOSION_UNITS = 8
# None of the units is an exception if a larger share of them is as large.
EXPLOSION_SHARE = 0.25
# Lower and upper bound at which the slope vanishes, by the type of the layer. The zeros of ReLU6
# are sparsity, and the bounds of Hardtanh are arguments, which the type does not show.
SATURATION_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "Hardsigmoid": (0.0, 1.0),
    "ReLU6": (None, 6.0),
    "Sigmoid": (0.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "Tanh": (-1.0, 1.0),
}
_COLUMNS = 5
# Blue and vermilion of Okabe and Ito, which differ for colour-blind readers and in grey.
BLUE, VERMILION = "#0072B2", "#D55E00"
_MOST_TICKS = 40
_MOST_DECADES = 8
# Inches around a grid of histograms (left, right, bottom, top) and between them.
_MARGINS = (0.75, 0.2, 0.5, 0.55, 0.65, 0.6)


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
    zeros: float | None = None
    """Share of the values that are zero."""
    nans: int | None = None
    infinities: int | None = None


@dataclass(frozen=True)
class UnitStatistics:
    """The numbers of units of a layer that are zero, constant or saturated.

    A unit is a position along ``dimension`` of [samples, ...]. ``zero`` units were zero for all
    samples, and ``constant`` ones had one other value for all. ``saturated`` is None if the type of
    layer has no bounds.
    """

    count: int
    dimension: int
    zero: int
    constant: int
    saturated: int | None
    exploding: tuple[int, ...] = ()
    """Which units exceed the median one by far, the largest first."""
    excess: float = 0.0
    """How many times the median the largest absolute value of the first of them is."""

    @property
    def dead(self) -> int:
        """Units that are zero or constant."""
        return self.zero + self.constant


@dataclass(frozen=True)
class LayerSummary:
    """A recorded layer: its specification, statistics, histogram and units."""

    layer: Layer
    kept: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    num_bytes: int | None = None
    values: ValueStatistics = ValueStatistics()
    finite: ValueStatistics | None = None
    """Statistics of the finite values alone, if there are others."""
    units: UnitStatistics | None = None
    bars: Bars | None = None
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    """Faults in results of reductions."""


def draw(kind: str, layers: Sequence[LayerSummary]) -> Figure:
    """Draw layers as histograms or over the depth of the net.

    Parameters
    ----------
    kind : {"histograms", "depth"}
        The kind of drawing.
    layers : sequence of LayerSummary
        The layers in order.

    Returns
    -------
    matplotlib.figure.Figure
        The figure.
    """
    has = {one.layer.label for one in layers if _can_draw(kind, one)}
    drawn = [one for one in layers if one.layer.label in has]
    # Measuring hundreds of axes takes longer than drawing them, so the grid is laid out by sizes.
    figure = blank(_size(kind, len(drawn)))
    if kind == "depth":
        figure.set_layout_engine("constrained")
    if not drawn:
        figure.text(0.5, 0.6, "There is nothing to draw.", ha="center", va="center")
    elif kind == "depth":
        _depth(figure.subplots(), drawn)
        figure.legend(loc="outside upper right", ncols=3, fontsize=8)
    else:
        _histograms(figure, drawn)
    _note(figure, [one for one in layers if one.layer.label not in has])
    return figure


def blank(size: tuple[float, float]) -> Figure:
    """Return an empty figure of a size in inches, which a notebook shows.

    Raises
    ------
    MissingPackageError
        matplotlib is not installed.
    """
    with needing("plot", "a figure"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=size)
    # A notebook shows figures that pyplot knows; this one renders itself.
    figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]  # IPython looks for it
    return figure


def _can_draw(kind: str, summary: LayerSummary) -> bool:
    if kind == "histograms":
        return summary.bars is not None
    return bool(np.isfinite(_finite(summary)[0]))


def _finite(summary: LayerSummary) -> NDArray[np.float64]:
    """Return mean, std, low and high of the finite values; NaN if there are none."""
    one = summary.finite or summary.values
    found = np.array([one.mean, one.std, one.low, one.high], dtype=np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def _size(kind: str, count: int) -> tuple[float, float]:
    if kind == "depth":
        return min(14.0, max(6.0, 2.5 + 0.25 * count)), 4.2
    columns, rows = _grid(count)
    return max(4.8, 2.4 * columns), max(3.0, 1.6 * rows + 0.5)


def _grid(count: int) -> tuple[int, int]:
    columns = max(1, min(_COLUMNS, count))
    return columns, max(1, math.ceil(count / columns))


def _histograms(figure: Figure, layers: Sequence[LayerSummary]) -> None:
    columns, rows = _grid(len(layers))
    width, height = figure.get_size_inches()
    left, right, bottom, top, across, down = _MARGINS
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom / height,
        top=1 - top / height,
        # The shares of the width and height for each of the axes.
        wspace=across * columns / (width - left - right - across * (columns - 1)),
        hspace=down * rows / (height - bottom - top - down * (rows - 1)),
    )
    for place, summary in enumerate(layers):
        _histogram(figure.add_subplot(rows, columns, place + 1), summary)
    figure.supxlabel("value", fontsize=9, y=0.05 / height)
    figure.supylabel("share of values, square-root scale", fontsize=9, x=0.08 / width)


def _histogram(axis: Axes, summary: LayerSummary) -> None:
    bars, layer = summary.bars, summary.layer
    assert bars is not None
    total = sum(bars.counts) + bars.below + bars.above or 1
    edges = np.linspace(bars.low, bars.high, len(bars.counts) + 1)
    axis.set_yscale("function", functions=(_root, np.square))
    axis.stairs(np.array(bars.counts) / total, edges, fill=True, color=BLUE)
    axis.set_title(short_title(layer, 20), fontsize=8, parse_math=False)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.xaxis.get_offset_text().set_fontsize(7)
    axis.locator_params(axis="x", nbins=4)
    axis.locator_params(axis="y", nbins=4)
    outside = bars.below + bars.above
    if outside:
        text = f"{outside:,} outside"
        axis.text(0.98, 0.95, text, ha="right", va="top", fontsize=6, transform=axis.transAxes)
    axis.set_gid(f"layer-{layer.label}")


def _depth(axis: Axes, layers: Sequence[LayerSummary]) -> None:
    places = np.arange(len(layers))
    mean, std, low, high = np.array([_finite(one) for one in layers]).T
    spread = mean - std, mean + std
    axis.fill_between(places, *spread, color=BLUE, alpha=0.25, label="mean ± std")
    # The band is invisible if there is only one layer.
    axis.vlines(places, *spread, color=BLUE, alpha=0.5, linewidth=1)
    axis.plot(places, mean, color=BLUE, marker="o", markersize=3, label="mean")
    for values, marker in ((low, "v"), (high, "^")):
        axis.plot(places, values, color=VERMILION, marker=marker, markersize=3, linestyle=":")
    axis.plot([], [], color=VERMILION, linestyle=":", marker="^", markersize=3, label="min, max")
    _scale(axis, std)
    ticks = places[:: math.ceil(len(layers) / _MOST_TICKS)]
    names = [short_title(layers[place].layer, 28) for place in ticks]
    axis.set_xticks(ticks, names, rotation=90, fontsize=7, parse_math=False)
    axis.set_xlabel("layer, in the order in which they return")
    axis.set_ylabel("value")
    axis.grid(axis="y", alpha=0.3)


def _scale(axis: Axes, std: NDArray[np.float64]) -> None:
    """Keep far extremes from flattening everything else."""
    spreads = np.sort(std[np.isfinite(std)])
    typical = float(spreads[len(spreads) // 2]) if len(spreads) else 0.0
    bottom, top = axis.dataLim.intervaly
    if typical > 0 and max(-bottom, top) > 1000 * typical:
        # The margin that matplotlib leaves is a share of all decades, and may reach past float64.
        axis.set_ylim(2 * min(0.0, bottom), 2 * max(0.0, top))
        linear = 10.0 ** math.floor(math.log10(typical))
        # As wide as the distance between two marks, so that marks around 0 don't overlap either.
        width = max(1.0, math.log10(max(-bottom, top) / linear) / _MOST_DECADES)
        axis.set_yscale("symlog", linthresh=linear, linscale=2 * width)
        locator: Any = axis.yaxis.get_major_locator()
        locator.set_params(numticks=_MOST_DECADES)
        axis.minorticks_off()


def _note(figure: Figure, left_out: Sequence[LayerSummary]) -> None:
    if not left_out:
        return
    text = f"Nothing to draw: {few([one.layer.label for one in left_out], 8)}"
    y = 1 - 0.05 / figure.get_size_inches()[1]
    figure.suptitle(text, x=0.01, y=y, ha="left", va="top", fontsize=8)


def _root(shares: Any) -> Any:
    return abs(shares) ** 0.5


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
