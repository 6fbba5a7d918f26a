"""How far each layer is away from something, over the depth of a net, as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scio_recorder.display.figure import BLUE, VERMILION, blank
from scio_recorder.display.outline import short_name, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
_MOST_TICKS = 50
_LONGEST_NAME = 28
# How far, as a factor, the lines of what has no place on the scale lie from the rest.
_APART = 8.0


@dataclass(frozen=True)
class Profile:
    """A number from 0 to infinity for each layer, in order.

    Parameters
    ----------
    title : str
        A sentence about the whole.
    measure : str
        What the numbers are.
    names : sequence of str
        The layers.
    values : array of float
        NaN where there is no number.
    differs : array of bool
        Whether that counts as a difference.
    noise : array of float, optional
        How much of it is noise.
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
    figure = blank((min(14.0, max(6.0, 2.5 + 0.25 * count)), 4.8))
    figure.set_layout_engine("constrained")
    axis: Axes = figure.subplots()
    axis.set_yscale("log")
    low, high = _lines(axis, profile)
    if profile.noise is not None:
        noise = _heights(profile.noise, low, high)
        axis.plot(noise, ":", color="0.45", marker=".", markersize=4, label="noise of the floor")
    _points(axis, profile, _heights(profile.values, low, high))
    ticks = range(0, count, max(1, math.ceil(count / _MOST_TICKS)))
    names = [short_name(profile.names[place], _LONGEST_NAME) for place in ticks]
    axis.set_xticks(ticks, names, rotation=90, fontsize=7, parse_math=False)
    axis.set_xlim(-0.6, count - 0.4)
    axis.set_ylabel(profile.measure)
    axis.grid(axis="y", alpha=0.3)
    axis.set_title(visible(profile.title), fontsize=9, loc="left", parse_math=False, wrap=True)
    figure.legend(loc="outside lower right", ncols=5, fontsize=8)
    return figure


def _lines(axis: Axes, profile: Profile) -> tuple[float, float]:
    """Draw the lines of what has no place on the scale, and return where they are."""
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
    """Return where numbers are drawn."""
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
