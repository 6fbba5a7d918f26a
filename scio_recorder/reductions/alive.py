"""Which units of a layer are active, dead or saturated."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import By, RowReduction, num_true

# A value is saturated if it lies within this share of the range from a bound, and a unit if this
# share of its values is.
SATURATION_WIDTH = 0.01
SATURATION_SHARE = 0.95
Bounds = tuple[float | None, float | None]


class AliveResult(NamedTuple):
    """Statistics of each unit over all data.

    Attributes
    ----------
    count : int
        The number of values of each unit.
    active : Tensor
        The share of values above zero, [units], float64.
    dead : Tensor
        Whether all values were equal, usually zero, [units], bool. False after one value.
    at_bound : Tensor or None
        The share of values at a bound, [units], float64. None without ``bounds``.
    max_abs : Tensor
        The largest absolute value, [units].
    """

    count: int  # type: ignore[assignment]  # this name is worth more than tuple.count
    active: Tensor
    dead: Tensor
    at_bound: Tensor | None
    max_abs: Tensor

    @property
    def saturated(self) -> Tensor | None:
        """Whether at least 95 % of the values were at a bound, [units]; None without ``bounds``."""
        return None if self.at_bound is None else self.at_bound >= SATURATION_SHARE


class Alive(RowReduction):
    """How often each unit is active, and whether it is dead or saturated.

    A unit of a ReLU that is zero for every sample of a dataset no longer learns. A unit of a
    sigmoid at a bound hardly learns, since the slope vanishes there.

    Parameters
    ----------
    feature_dim : int, optional
        The dimension that holds the units: 1 for the channels of images, -1 for the features of
        tokens. Every other position is a value of a unit. None: all but dimension 0 are units.
    bounds : (float or None, float or None), optional
        The bounds of the activation function, such as (-1, 1) for tanh, or (None, 6) for ReLU6. A
        value is at a bound if its distance is at most 1 % of the range between them.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    NaNs are neither active nor at a bound. A unit with one is not dead, and its largest absolute
    value is NaN.

    Examples
    --------
    >>> import torch
    >>> alive = Alive()
    >>> alive.update(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 3.0]]))
    >>> count, active, dead, _, max_abs = alive.compute()
    >>> count, active.tolist(), dead.tolist(), max_abs.tolist()
    (3, [0.0, 0.666...], [True, False], [0.0, 3.0])
    """

    _state_names = ("_rows", "_active", "_at_bound", "_low", "_high")
    _state_kinds = ("whole", *["tensor int64 {units}"] * 2, *["tensor float.. {units}"] * 2)
    _rows: int
    _active: Tensor
    _at_bound: Tensor
    _low: Tensor
    _high: Tensor

    def __init__(
        self, feature_dim: int | None = None, bounds: Bounds | None = None, *, by: By | None = None
    ) -> None:
        self._bounds = None if bounds is None else _checked(bounds)
        super().__init__(feature_dim, by=by, bounds=self._bounds and list(self._bounds))

    def _add(self, samples: Tensor) -> None:
        # Units stay in their dimension: moving it to the end would copy everything.
        dim = self._feature_dim
        values = samples.flatten(1) if dim is None else samples.movedim(dim, 1)
        values = values.unsqueeze(-1).flatten(2)  # [batch, units, positions]
        rows = len(values) * values.shape[2]
        # After reducing the first dimension little is left; reducing both at once is slow if there
        # are few positions. Booleans have a smallest value, but no absolute values.
        low = values.amin(0).amin(-1).to(self._dtype)
        high = values.amax(0).amax(-1).to(self._dtype)
        is_active = torch.gt(values, 0, out=torch.empty_like(values, dtype=torch.float32))
        active = num_true(is_active, 0).sum(-1)
        at_bound = torch.zeros_like(active)
        if self._bounds is not None:
            at_bound = _is_at_bound(values, self._bounds).sum(0).sum(-1)
        self._take(rows, active, at_bound, low, high)

    def _join(self, rows: int, active: Tensor, at_bound: Tensor, low: Tensor, high: Tensor) -> None:
        self._rows += rows
        self._active = self._active + active
        self._at_bound = self._at_bound + at_bound
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)

    def _result(self) -> AliveResult:
        return AliveResult(
            self._rows,
            self._active.double() / self._rows,
            # A comparison with NaN is false.
            (self._low == self._high) & self._low.isfinite() & (self._rows > 1),
            None if self._bounds is None else self._at_bound.double() / self._rows,
            torch.maximum(self._low.abs(), self._high.abs()),
        )


def unit_dimension(type_name: str, ndim: int) -> int:
    """Return the dimension of [samples, ...] along which the units of a layer lie.

    Channels come first in images and after one-dimensional convolutions. Features come last in
    sequences, and if a module works on the last dimension. 0: each sample is one value.

    Parameters
    ----------
    type_name : str
        Name of the module's class.
    ndim : int
        The number of dimensions of its activations.
    """
    # The LayerNorm2d of many vision models takes [samples, channels, height, width].
    if type_name.endswith(("1d", "2d", "3d")):
        return min(1, ndim - 1)
    if type_name.startswith(("Linear", "LayerNorm", "RMSNorm", "Embedding")):
        return ndim - 1
    return 2 if ndim == 3 else min(1, ndim - 1)


def _is_at_bound(values: Tensor, bounds: Bounds) -> Tensor:
    """Return whether values lie at a bound; a missing bound counts as zero for the range."""
    low, high = bounds
    width = SATURATION_WIDTH * ((high or 0.0) - (low or 0.0))
    if values.is_floating_point() and values.dtype.itemsize < torch.float32.itemsize:
        # A comparison with a number rounds the number to the dtype of the values.
        values = values.float()
    at_bound = torch.zeros_like(values, dtype=torch.bool)
    if low is not None:
        at_bound |= values <= low + width
    if high is not None:
        at_bound |= values >= high - width
    return at_bound


def _checked(bounds: Bounds) -> Bounds:
    try:
        low, high = (None if bound is None else float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low = high = None
    is_range = low is not None and high is not None and low < high
    if not is_range and (low is None) == (high is None):
        raise CollectError(
            f"Alive(bounds={bounds!r}): give two numbers (low, high), low < high, one of which may "
            "be None, such as (-1, 1) for tanh."
        )
    return low, high
