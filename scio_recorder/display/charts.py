"""Figures of layers: similarities of pairs, profiles over the depth of a net, effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scio_recorder.display.figure import BLUE, VERMILION, blank
from scio_recorder.display.outline import asset, short_name, text, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
_MOST_TICKS = 60
# Inches of a cell, and the largest and smallest size of a map.
_CELL, _SMALLEST, _LARGEST = 0.24, 2.8, 12.0
_LONGEST_NAME = 28
# The factor by which the lines for values off the scale lie beyond the others.
_APART = 8.0
# The colour of cells without a number.
_GREY = "#b0b0b0"


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = blank((width, height))
    figure.set_layout_engine("constrained")
    return figure, figure.subplots()


def _short(name: str) -> str:
    return short_name(name, _LONGEST_NAME)


def _extent_of(count: int) -> float:
    """Return the inches that a number of rows or columns takes."""
    return min(_LARGEST, max(_SMALLEST, _CELL * count))


def _name_ticks(axis: Axes, side: str, names: Sequence[str], extent: float) -> None:
    """Write names along an axis, as large and as many as there is room for."""
    places = range(0, len(names), max(1, math.ceil(len(names) / _MOST_TICKS)))
    # As large as the distance of two neighbours allows.
    size = min(8.0, 0.8 * 72 * extent / max(1, len(names)) * places.step)
    shown = [_short(names[place]) for place in places]
    if side == "x":
        axis.set_xticks(places, shown, rotation=90, fontsize=size, parse_math=False)
    else:
        axis.set_yticks(places, shown, fontsize=size, parse_math=False)


@dataclass(frozen=True)
class Matrix:
    """Numbers from 0 to 1 for pairs of layers; NaN if there is none.

    Parameters
    ----------
    title : str
        The meaning of the numbers.
    values : array of float
        [rows, columns].
    rows, columns : sequence of str
        Names of layers.
    axes : (str, str)
        Titles of the axes of rows and columns.
    notes : sequence of str
        Remarks about some layers.
    is_of_one : bool, default False
        Whether rows and columns are the same layers.
    """

    title: str
    values: NDArray[np.float64]
    rows: Sequence[str]
    columns: Sequence[str]
    axes: tuple[str, str]
    notes: Sequence[str] = ()
    is_of_one: bool = False

    @property
    def peaks(self) -> list[int | None]:
        """The column of the largest number of each row; None if it has no number.

        The number of a layer with itself does not count.
        """
        values = self.values.copy()
        if self.is_of_one:
            np.fill_diagonal(values, np.nan)
        return [None if np.isnan(row).all() else int(np.nanargmax(row)) for row in values]


def draw_matrix(matrix: Matrix) -> Figure:
    """Draw a heat map, the first row at the bottom, with the largest number of each row marked."""
    height, width = (_extent_of(len(names)) for names in (matrix.rows, matrix.columns))
    longest = max(map(len, map(_short, (*matrix.rows, *matrix.columns))), default=0)
    margin = 0.5 + 0.075 * longest
    figure, axis = _axes(width + margin + 1.0, height + margin + 0.7)
    axis.set_facecolor(_GREY)
    # Vermilion stands out from every colour of the map.
    image = axis.imshow(
        matrix.values, cmap="viridis", vmin=0, vmax=1, origin="lower", aspect="auto"
    )
    figure.colorbar(image, ax=axis, pad=0.02)
    last = len(matrix.columns) - 1, len(matrix.rows) - 1
    axis.plot((0, last[0]), (0, last[1]), color=VERMILION, linestyle=":", linewidth=1)
    marked = [(column, row) for row, column in enumerate(matrix.peaks) if column is not None]
    size = 18 * min(width / len(matrix.columns), height / len(matrix.rows))
    for column, row in marked:
        axis.plot(column, row, "o", color=VERMILION, markersize=min(7.0, size), clip_on=False)
    _name_ticks(axis, "x", matrix.columns, width)
    _name_ticks(axis, "y", matrix.rows, height)
    axis.set_ylabel(matrix.axes[0])
    axis.set_xlabel(matrix.axes[1])
    axis.set_title(matrix.title, fontsize=10, parse_math=False)
    return figure


def matrix_html(matrix: Matrix) -> str:
    """Return a heat map as a table, whose cells show their number to the pointer."""
    head = "".join(f'<th scope="col">{text(_short(name))}</th>' for name in matrix.columns)
    body = "".join(_row(matrix, row, peak) for row, peak in enumerate(matrix.peaks))
    notes = "".join(f"<div>{text(note)}</div>" for note in matrix.notes)
    return (
        f'<style>\n{asset("matrix.css")}</style><div class="scio-matrix">'
        f"<p>{text(matrix.title)}</p><table><thead><tr><th></th>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>{notes}</div>"
    )


def _row(matrix: Matrix, row: int, peak: int | None) -> str:
    name, cells = matrix.rows[row], []
    for column, value in enumerate(matrix.values[row].tolist()):
        said = f"{name}, {matrix.columns[column]}: {value:.4f}"
        kind = ' class="sm-none"' if math.isnan(value) else ""
        kind = ' class="sm-peak"' if column == peak else kind
        cells.append(f'<td{kind} style="--v:{value:.3f}" title="{text(said)}"></td>')
    return f'<tr><th scope="row">{text(_short(name))}</th>{"".join(cells)}</tr>'


@dataclass(frozen=True)
class Profile:
    """A number from 0 to infinity for each layer, in order.

    Parameters
    ----------
    title : str
        A sentence about the whole.
    measure : str
        The meaning of the numbers.
    names : sequence of str
        The layers.
    values : array of float
        NaN if there is no number.
    differs : array of bool
        Whether the number counts as a difference.
    noise : array of float, optional
        The noise in each number.
    marked : int, optional
        The layer that stands out.
    """

    title: str
    measure: str
    names: Sequence[str]
    values: Floats
    differs: NDArray[np.bool_]
    noise: Floats | None = None
    marked: int | None = None


def draw_profile(profile: Profile) -> Figure:
    """Draw numbers on a logarithmic scale, with zeros on a line below and infinities on one above.

    Parameters
    ----------
    profile : Profile
        The numbers.

    Returns
    -------
    matplotlib.figure.Figure
        The figure.
    """
    count = len(profile.names)
    width = min(14.0, max(6.0, 2.5 + 0.25 * count))
    figure, axis = _axes(width, 4.8)
    axis.set_yscale("log")
    low, high = _lines(axis, profile)
    if profile.noise is not None:
        noise = _heights(profile.noise, low, high)
        axis.plot(noise, ":", color="0.45", marker=".", markersize=4, label="noise of the floor")
    _points(axis, profile, _heights(profile.values, low, high))
    _name_ticks(axis, "x", profile.names, width)
    axis.set_xlim(-0.6, count - 0.4)
    axis.set_ylabel(profile.measure)
    axis.grid(axis="y", alpha=0.3)
    axis.set_title(visible(profile.title), fontsize=9, loc="left", parse_math=False, wrap=True)
    figure.legend(loc="outside lower right", ncols=5, fontsize=8)
    return figure


def _lines(axis: Axes, profile: Profile) -> tuple[float, float]:
    """Draw the lines for values off the scale, and return their heights."""
    values = np.concatenate([profile.values, [] if profile.noise is None else profile.noise])
    known = values[np.isfinite(values) & (values > 0)]
    low, high = (known.min() / _APART, known.max() * _APART) if len(known) else (0.1, 10.0)
    axis.set_ylim(low / 2, high * 2)
    lines = [(low, "equal")]
    if not np.isfinite(profile.values).all():
        lines.append((high, "no finite number"))
    for height, name in lines:
        axis.axhline(height, color="0.6", linewidth=0.8, linestyle="--")
        across = axis.get_yaxis_transform()
        axis.text(1.0, height, name, fontsize=7, ha="right", va="bottom", transform=across)
    return low, high


def _heights(values: Floats, low: float, high: float) -> Floats:
    return np.where(np.isfinite(values), np.clip(values, low, high), high)


def _points(axis: Axes, profile: Profile, heights: Floats) -> None:
    places = np.arange(len(heights))
    axis.plot(places, heights, color=BLUE, linewidth=1, alpha=0.5)
    for name, chosen, fill in (
        ("no difference", ~profile.differs, "white"),
        ("difference", profile.differs, BLUE),
    ):
        if chosen.any():
            style: dict[str, Any] = {"markerfacecolor": fill, "markersize": 5, "label": name}
            axis.plot(places[chosen], heights[chosen], "o", color=BLUE, **style)
    if profile.marked is not None:
        height = heights[profile.marked]
        axis.axvline(profile.marked, color=VERMILION, linewidth=0.8, alpha=0.6)
        place, label = [profile.marked], "first difference"
        axis.plot(place, [height], "D", color=VERMILION, markersize=9, label=label)


@dataclass(frozen=True)
class EffectMap:
    """The metric of patched runs.

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

    title: str
    values: NDArray[np.float64]
    layers: Sequence[str]
    positions: Sequence[str]
    clean: float
    corrupted: float

    @property
    def reach(self) -> float:
        """The largest finite distance from the corrupted metric."""
        away = np.abs(np.append(self.values, self.clean) - self.corrupted)
        return float(np.max(away, initial=0.0, where=np.isfinite(away))) or 1.0


def draw_effects(shown: EffectMap) -> Figure:
    """Draw bars that begin at the corrupted metric, or a map in which it is white."""
    width = _extent_of(len(shown.positions) or len(shown.layers))
    height = _extent_of(len(shown.layers)) if shown.positions else 2.2
    # Names of layers stand below bars, and beside maps.
    margin = 0.5 + 0.075 * max(map(len, shown.layers))
    wide, high = (margin + 0.3, 2.2) if shown.positions else (1.3, margin + 0.8)
    figure, axis = _axes(width + wide, height + high)
    figure.suptitle(shown.title, fontsize=10, parse_math=False, wrap=True)
    if shown.positions:
        _map(figure, axis, shown, (width, height))
    else:
        _bars(axis, shown, width)
    return figure


def _map(figure: Figure, axis: Axes, shown: EffectMap, size: tuple[float, float]) -> None:
    axis.set_facecolor(_GREY)
    image = axis.imshow(
        shown.values,
        # Blue points to the clean run.
        cmap="RdBu" if shown.clean >= shown.corrupted else "RdBu_r",
        vmin=shown.corrupted - shown.reach,
        vmax=shown.corrupted + shown.reach,
        origin="lower",
        aspect="auto",
    )
    # Below the map, so that the figure is narrow enough for a phone.
    bar = figure.colorbar(image, ax=axis, location="bottom", pad=0.02, aspect=30)
    bar.ax.axvline(shown.corrupted, color="black", linewidth=1)
    # At an end of the bar, half of the line would be cut off.
    bar.ax.axvline(shown.clean, color=VERMILION, linewidth=2, clip_on=False)
    bar.set_label("metric (black: the corrupted run, red: the clean one)", fontsize=8)
    _name_ticks(axis, "x", shown.positions, size[0])
    _name_ticks(axis, "y", shown.layers, size[1])
    axis.set_xlabel("position")


def _bars(axis: Axes, shown: EffectMap, width: float) -> None:
    axis.bar(
        range(len(shown.layers)), shown.values - shown.corrupted, bottom=shown.corrupted, color=BLUE
    )
    axis.axhline(shown.clean, color=VERMILION, linewidth=1.5, label="clean")
    axis.axhline(shown.corrupted, color="black", linewidth=1, label="corrupted")
    _name_ticks(axis, "x", shown.layers, width)
    axis.set_xlim(-0.6, len(shown.layers) - 0.4)
    axis.set_ylabel("metric")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
