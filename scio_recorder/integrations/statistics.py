"""Statistics of layers' outputs, computed portion by portion."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from scio_recorder.display.figure import SATURATION_BOUNDS
from scio_recorder.errors import ArgumentError
from scio_recorder.reductions.alive import Alive, unit_dimension, with_units
from scio_recorder.reductions.base import join_means
from scio_recorder.tensors.structures import tensors

__all__ = ["OF_UNITS", "STATISTICS", "Portion", "UnitStatistics", "check_names", "values_of"]

STATISTICS = ("mean", "std", "norm", "zeros", "nonfinite")
# The statistics of single units.
OF_UNITS = ("max_abs", "dead", "saturated")


def check_names(statistics: Collection[str], more: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of statistics; raise if one is unknown."""
    known = (*STATISTICS, *more)
    one = isinstance(statistics, str) or not isinstance(statistics, Collection)
    names: tuple[Any, ...] = (statistics,) if one else tuple(statistics)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        given = unknown[0] if unknown else names
        raise ArgumentError(f"statistics={given!r}: choose among {', '.join(map(repr, known))}")
    return names


def values_of(value: Any) -> Tensor | None:
    """Return the real values of all tensors in a structure as one vector; None without any.

    Complex values count by their modulus, booleans and integers as float32.
    """
    parts = [_flat(tensor) for tensor in tensors(value) if tensor.layout == torch.strided]
    parts = [part for part in parts if part.numel()]
    if len(parts) < 2:
        return parts[0] if parts else None
    return torch.cat([part.to(parts[0].device, torch.float64) for part in parts])


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.abs()
    # NumPy and some kernels lack the narrow types.
    return (tensor if tensor.dtype == torch.float64 else tensor.float()).flatten()


class Portion(NamedTuple):
    """Sums over some values, on their device, that can be joined with those of other portions.

    Examples
    --------
    >>> one, other = Portion.of(torch.tensor([0.0, 1.0])), Portion.of(torch.tensor([5.0, 6.0]))
    >>> one.join(other).compute()
    {'mean': 3.0, 'std': 2.9439..., 'norm': 7.8740..., 'zeros': 0.25, 'nonfinite': 0}
    """

    size: int
    sums: Tensor  # finite values, their mean, squares about it, zeros

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Return the sums of values [n], n > 0; nothing waits for the device."""
        finite = values.isfinite()
        # Apple's GPUs have no float64.
        wide = torch.float32 if values.device.type == "mps" else torch.float64
        present = torch.where(finite, values, 0)
        count = finite.sum(dtype=wide)
        mean = present.sum(dtype=wide) / count.clamp(min=1)
        spread = torch.where(finite, present.to(wide) - mean, 0).square().sum()
        zeros = (values == 0).sum(dtype=wide)
        return cls(values.numel(), torch.stack([count, mean, spread, zeros]))

    def join(self, other: Self) -> Self:
        """Return the sums over both portions."""
        count, mean, spread, zeros = self.sums
        its_count, its_mean, its_spread, its_zeros = other.sums.to(self.sums.device)
        joint, apart = join_means(count, mean, its_count, its_mean)
        squares = spread + its_spread + apart.square()
        joined = torch.stack([count + its_count, joint, squares, zeros + its_zeros])
        return type(self)(self.size + other.size, joined)

    def compute(self) -> dict[str, float]:
        """Return the statistics by name; those that are not defined are left out.

        ``mean``, ``std`` (n - 1) and ``norm`` (the root of the sum of squares) are over finite
        values, ``zeros`` is a share of all values and ``nonfinite`` a number of values.
        """
        count, mean, spread, zeros = self.sums.tolist()
        result: dict[str, float] = {}
        if count:
            result["mean"] = mean
        if count > 1:
            result["std"] = math.sqrt(spread / (count - 1))
        if count:
            result["norm"] = math.sqrt(spread + count * mean * mean)
        result["zeros"] = zeros / self.size
        result["nonfinite"] = self.size - int(count)
        return result


class UnitStatistics:
    """Statistics of the units of a layer, channels or features, over some calls.

    Parameters
    ----------
    kind : type
        The class of the module.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self._name = kind.__name__
        self._alive: Alive | None = None

    def take(self, value: object) -> None:
        """Add the module's output, or the gradient of it, if it is a tensor of numbers."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return
        if value.layout == torch.strided and value.ndim:
            dimension = unit_dimension(self._name, value.ndim)
            if self._alive is None:
                self._alive = Alive(dimension or 1, SATURATION_BOUNDS.get(self._name))
            self._alive.update(with_units(value, dimension))

    def compute(self, *, with_states: bool) -> dict[str, float]:
        """Return the statistics by name: the largest value, and the shares of units in a state."""
        if self._alive is None:
            return {}
        result = self._alive.compute()
        found = {"max_abs": float(result.max_abs.max())}
        if with_states:
            found["dead"] = float(result.dead.double().mean())
            if result.saturated is not None:
                found["saturated"] = float(result.saturated.double().mean())
        return found
