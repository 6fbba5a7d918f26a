"""A number for each pair of layers: a heat map as a figure and in HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scio_recorder.display.figure import VERMILION, blank
from scio_recorder.display.outline import asset, short_name, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TICKS = 60
# Inches of a cell, and how large and how small the whole gets.
_CELL, _SMALLEST, _LARGEST = 0.24, 3.2, 12.0
_LONGEST_NAME = 28


@dataclass(frozen=True)
class Matrix:
    """Numbers from 0 to 1 for pairs of layers, NaN where there is none.

    Parameters
    ----------
    title : str
        What the numbers are.
    values : array of float
        [rows, columns].
    rows, columns : sequence of str
        Names of layers.
    axes : (str, str)
        What the rows and the columns belong to.
    notes : sequence of str
        What has to be said of some layers.
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
        """The column of the largest number of each row, None where there is none.

        That of a layer with itself does not count.
        """
        values = self.values.copy()
        if self.is_of_one:
            np.fill_diagonal(values, np.nan)
        return [None if np.isnan(row).all() else int(np.nanargmax(row)) for row in values]


def draw_matrix(matrix: Matrix) -> Figure:
    """Draw a heat map, the first row at the bottom, with the largest number of each row marked."""
    height, width = (extent_of(len(names)) for names in (matrix.rows, matrix.columns))
    longest = max(map(len, map(_short, (*matrix.rows, *matrix.columns))), default=0)
    margin = 0.5 + 0.075 * longest
    figure = blank((width + margin + 1.0, height + margin + 0.7))
    figure.set_layout_engine("constrained")
    axis: Axes = figure.subplots()
    axis.set_facecolor("#b0b0b0")
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
    for side, names, extent in (("x", matrix.columns, width), ("y", matrix.rows, height)):
        name_ticks(axis, side, names, extent)
    axis.set_ylabel(matrix.axes[0])
    axis.set_xlabel(matrix.axes[1])
    axis.set_title(matrix.title, fontsize=10, parse_math=False)
    return figure


def extent_of(count: int) -> float:
    """Return how many inches so many rows or columns take."""
    return min(_LARGEST, max(_SMALLEST, _CELL * count))


def name_ticks(axis: Axes, side: str, names: Sequence[str], extent: float) -> None:
    """Write names at the places of an axis, as large and as many as there is room for."""
    places = range(0, len(names), math.ceil(len(names) / _MOST_TICKS))
    # As large as two neighbours leave room for.
    size = min(8.0, 0.8 * 72 * extent / len(names) * places.step)
    shown = [_short(names[place]) for place in places]
    if side == "x":
        axis.set_xticks(places, shown, rotation=90, fontsize=size, parse_math=False)
    else:
        axis.set_yticks(places, shown, fontsize=size, parse_math=False)


def _short(name: str) -> str:
    return short_name(name, _LONGEST_NAME)


def matrix_html(matrix: Matrix) -> str:
    """Return a heat map as a table, whose cells say their number when they are pointed at."""
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
