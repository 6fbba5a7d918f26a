"""The smallest and the largest activation at each position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scio_recorder.reductions.samples import SampleReduction


class _Extremum(SampleReduction):
    _state_names = ("_value",)
    _value: Tensor
    # Over the samples of a batch, and of two values.
    _over_samples: Callable[[Tensor, int], Tensor]
    _of_two: Callable[[Tensor, Tensor], Tensor]
    _word: str

    def _kept_dtype(self, samples: Tensor) -> torch.dtype:
        return samples.dtype

    def _take(self, value: Tensor) -> None:
        self._value = value if self._value is None else self._of_two(self._value, value)

    def _add(self, samples: Tensor) -> None:
        self._take(self._over_samples(samples, 0))

    def _join(self, other: _Extremum) -> None:
        self._take(other._value)

    def _result(self) -> Tensor:
        return self._value.clone()

    def _overall(self, result: Any) -> dict[str, float]:
        """Return the smallest or the largest of all values."""
        if not isinstance(result, Tensor) or not result.numel():
            return {}
        return {self._word: float(self._over_samples(result.double().flatten(), 0))}


class Min(_Extremum):
    """Smallest value at each position, over the samples; nan where one was nan.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The result has the activation's dtype and its shape without dimension 0.

    Examples
    --------
    >>> import torch
    >>> smallest = Min()
    >>> smallest.update(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
    >>> smallest.compute()
    tensor([1., 2.])
    """

    _over_samples = staticmethod(torch.amin)
    _of_two = staticmethod(torch.minimum)
    _word = "low"


class Max(_Extremum):
    """Largest value at each position, over the samples; nan where one was nan.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The result has the activation's dtype and its shape without dimension 0.

    Examples
    --------
    >>> import torch
    >>> largest = Max(by=lambda batch: batch[1])
    >>> activation = torch.tensor([[1.0, 5.0], [3.0, 2.0]])
    >>> largest.update(activation, (activation, ["cat", "dog"]))
    >>> largest.compute()
    {'cat': tensor([1., 5.]), 'dog': tensor([3., 2.])}
    """

    _over_samples = staticmethod(torch.amax)
    _of_two = staticmethod(torch.maximum)
    _word = "high"
