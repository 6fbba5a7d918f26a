"""The smallest and the largest activation at each position."""

from __future__ import annotations

import torch
from torch import Tensor

from scio_recorder.reductions.base import SampleReduction

__all__ = ["Max", "Min"]


class _Extremum(SampleReduction):
    _state_names = ("_value",)
    _value: Tensor

    @staticmethod
    def _over_samples(samples: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def _of_two(one: Tensor, two: Tensor) -> Tensor:
        raise NotImplementedError

    def _kept_dtype(self, samples: Tensor) -> torch.dtype:
        return samples.dtype

    def _take(self, value: Tensor) -> None:
        self._value = value if self._value is None else self._of_two(self._value, value)

    def _add(self, samples: Tensor) -> None:
        self._take(self._over_samples(samples))

    def _join(self, other: _Extremum) -> None:
        self._join_members(other)
        if other._value is not None:
            self._take(other._value)

    def _result(self) -> Tensor:
        return self._value.clone()


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

    @staticmethod
    def _over_samples(samples: Tensor) -> Tensor:
        return samples.amin(0)

    @staticmethod
    def _of_two(one: Tensor, two: Tensor) -> Tensor:
        return torch.minimum(one, two)


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

    @staticmethod
    def _over_samples(samples: Tensor) -> Tensor:
        return samples.amax(0)

    @staticmethod
    def _of_two(one: Tensor, two: Tensor) -> Tensor:
        return torch.maximum(one, two)
