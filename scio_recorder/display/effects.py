"""What layers cause, as a figure: bars, or a map of layers and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scio_recorder.display.figure import BLUE, VERMILION, blank
from scio_recorder.display.matrix import extent_of, name_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class EffectMap:
    """The metric of patched runs.

    Parameters
    ----------
    title : str
        What the numbers are.
    values : array of float
        [layers], or [layers, positions].
    layers, positions : sequence of str
        Names; no positions where there are none.
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
        """How far from the corrupted metric the farthest finite number lies."""
        away = np.abs(np.append(self.values, self.clean) - self.corrupted)
        return float(np.max(away, initial=0.0, where=np.isfinite(away))) or 1.0


def draw_effects(shown: EffectMap) -> Figure:
    """Draw bars from the corrupted metric on, or a map whose white is the corrupted metric."""
    width = extent_of(len(shown.positions) or len(shown.layers))
    height = extent_of(len(shown.layers)) if shown.positions else 2.2
    # Names of layers stand below bars, and beside maps.
    margin = 0.5 + 0.075 * max(map(len, shown.layers))
    wide, high = (margin + 1.6, 1.2) if shown.positions else (1.3, margin + 0.8)
    figure = blank((width + wide, height + high))
    figure.set_layout_engine("constrained")
    axis: Axes = figure.subplots()
    axis.set_title(shown.title, fontsize=10, parse_math=False)
    if shown.positions:
        _map(figure, axis, shown, (width, height))
    else:
        _bars(axis, shown, width)
    return figure


def _map(figure: Figure, axis: Axes, shown: EffectMap, size: tuple[float, float]) -> None:
    axis.set_facecolor("#b0b0b0")
    image = axis.imshow(
        shown.values,
        # Blue leads to the clean run.
        cmap="RdBu" if shown.clean >= shown.corrupted else "RdBu_r",
        vmin=shown.corrupted - shown.reach,
        vmax=shown.corrupted + shown.reach,
        origin="lower",
        aspect="auto",
    )
    bar = figure.colorbar(image, ax=axis, pad=0.02)
    bar.ax.axhline(shown.corrupted, color="black", linewidth=1)
    bar.ax.axhline(shown.clean, color=VERMILION, linewidth=2)
    bar.set_label("metric; the line is the clean run, white the corrupted one", fontsize=8)
    name_ticks(axis, "x", shown.positions, size[0])
    name_ticks(axis, "y", shown.layers, size[1])
    axis.set_xlabel("position")


def _bars(axis: Axes, shown: EffectMap, width: float) -> None:
    axis.bar(
        range(len(shown.layers)), shown.values - shown.corrupted, bottom=shown.corrupted, color=BLUE
    )
    axis.axhline(shown.clean, color=VERMILION, linewidth=1.5, label="clean")
    axis.axhline(shown.corrupted, color="black", linewidth=1, label="corrupted")
    name_ticks(axis, "x", shown.layers, width)
    axis.set_xlim(-0.6, len(shown.layers) - 0.4)
    axis.set_ylabel("metric")
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
