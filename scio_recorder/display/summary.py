"""The numbers that a page or a plot shows of a layer, without its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scio_recorder.layer import Layer

# A value is saturated within this share of the range from a bound, a unit from this share of its
# values on.
SATURATION_WIDTH = 0.01
SATURATION_SHARE = 0.95
# Lower and upper bound at which the slope vanishes, by the type of the layer. The zeros of ReLU6
# are sparsity, and the bounds of Hardtanh are arguments, which the type does not tell.
SATURATION_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "Hardsigmoid": (0.0, 1.0),
    "ReLU6": (None, 6.0),
    "Sigmoid": (0.0, 1.0),
    "Softsign": (-1.0, 1.0),
    "Tanh": (-1.0, 1.0),
}


@dataclass(frozen=True)
class Bars:
    """A histogram: counts in bins of equal width from ``low`` to ``high``, and what lies outside.

    Infinite values are among those ``below`` and ``above``; NaNs are nowhere.
    """

    counts: tuple[int, ...]
    low: float
    high: float
    below: int = 0
    above: int = 0


@dataclass(frozen=True)
class Values:
    """Statistics over all values of a layer. None: not known."""

    mean: float | None = None
    std: float | None = None
    low: float | None = None
    high: float | None = None
    zeros: float | None = None
    """Share of the values that are zero."""
    nans: int | None = None
    infinities: int | None = None


@dataclass(frozen=True)
class Units:
    """How many units of a layer do nothing, or nothing any more.

    A unit is a position along ``dimension`` of [samples, ...]. ``zero`` of them were zero for all
    samples, ``constant`` had one other value for all; ``saturated`` is None where the type of layer
    has no bounds.
    """

    count: int
    dimension: int
    zero: int
    constant: int
    saturated: int | None

    @property
    def dead(self) -> int:
        """Units that are zero or constant."""
        return self.zero + self.constant


@dataclass(frozen=True)
class LayerSummary:
    """A recorded layer: what is kept of it, and what it looks like."""

    layer: Layer
    kept: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    num_bytes: int | None = None
    values: Values = Values()
    finite: Values | None = None
    """Statistics of the finite values alone, where there are others."""
    units: Units | None = None
    bars: Bars | None = None
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    """Faults in results of reductions."""
