"""Histograms as SVG inside HTML."""

from __future__ import annotations

import math

from scio_recorder.display.summary import Bars

_HEIGHT = 100


def bars_path(bars: Bars) -> str:
    """Return the outline of a histogram as the data of an SVG path.

    A bin is 1 wide, the tallest is 100 high. Heights are square roots of counts, so that a peak at
    zero leaves the rest to be seen.

    Examples
    --------
    >>> bars_path(Bars((4, 0, 16), 0.0, 3.0))
    'M0 100V50h1V100h1V0h1V100z'
    """
    top = max(bars.counts, default=0)
    if not top:
        return ""
    heights = [round(_HEIGHT * (1 - math.sqrt(count / top)), 1) for count in bars.counts]
    steps = "".join(f"V{height:g}h1" for height in heights)
    return f"M0 {_HEIGHT}{steps}V{_HEIGHT}z"


def number_text(value: float | None) -> str:
    """Return a number in four digits, as short as it goes; nothing for one that is not known.

    Examples
    --------
    >>> [number_text(x) for x in (0.0, 1234567.0, -0.00001234, math.inf, None)]
    ['0', '1.235e+06', '-1.234e-05', 'inf', '']
    """
    return "" if value is None else f"{value:.4g}"
