"""Statistics of each position: smallest and largest value, mean and variance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scio_recorder.reductions.base import join_means, portions
from scio_recorder.reductions.samples import SampleReduction


class _Extremum(SampleReduction):
    _state_names = ("_value",)
    _value: Tensor
    # Over the samples of a batch, and of two values.
    _over_samples: Callable[[Tensor, int], Tensor]
    _of_two: Callable[[Tensor, Tensor], Tensor]
    _word: str

    def _add(self, samples: Tensor) -> None:
        value = self._over_samples(samples, 0)
        self._value = value if self._value is None else self._of_two(self._value, value)

    def _join(self, other: _Extremum) -> None:
        self._value = self._of_two(self._value, other._value)

    def _result(self) -> Tensor:
        return self._value.clone()

    def overall(self, result: Any) -> dict[str, float]:
        """Return the smallest or the largest of all values."""
        if not isinstance(result, Tensor) or not result.numel():
            return {}
        return {self._word: float(self._over_samples(result.double().flatten(), 0))}


class Min(_Extremum):
    """Smallest value at each position, over the samples; NaN if any value is NaN.

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
    """Largest value at each position, over the samples; NaN if any value is NaN.

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


class Mean(SampleReduction):
    """Mean at each position, over the samples; NaN if any value is NaN.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The sum is kept in float64 (complex128 for complex activations). The result has the
    activation's shape without dimension 0; it is float64 for float64 and for integers of 32 and
    64 bits, float32 for other real types.

    Examples
    --------
    >>> import torch
    >>> mean = Mean()
    >>> mean.update(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
    >>> mean.update(torch.tensor([[2.0, 2.0]]))
    >>> mean.compute()
    tensor([2., 3.])
    """

    _state_names = ("_sum",)
    _takes_complex = True
    _sum: Tensor

    def _add(self, samples: Tensor) -> None:
        wide = torch.complex128 if samples.is_complex() else torch.float64
        for portion in portions(samples):
            total = portion.sum(0, dtype=wide)
            self._sum = total if self._sum is None else self._sum + total

    def _join(self, other: Mean) -> None:
        self._sum = self._sum + other._sum

    def _result(self) -> Tensor:
        return (self._sum / self._count).to(self._dtype)

    def overall(self, result: Any) -> dict[str, float]:
        """Return the mean of all values; none for complex values, whose magnitudes it doesn't show.

        Parameters
        ----------
        result : any
            The result of `compute`.

        Returns
        -------
        dict
            Empty if there is nothing to say, as with ``by``.
        """
        has_mean = isinstance(result, Tensor) and result.numel() and not result.is_complex()
        return {"mean": float(result.double().mean())} if has_mean else {}


class MomentsResult(NamedTuple):
    """Number of samples, mean and unbiased variance at each position.

    Attributes
    ----------
    count : int
        The number of samples.
    mean : Tensor
        Their mean, in the shape of a sample.
    variance : Tensor
        Their variance (n - 1), in the shape of a sample; NaN for a single sample.
    """

    count: int  # type: ignore[assignment]  # this name is worth more than tuple.count
    mean: Tensor
    variance: Tensor


class Moments(SampleReduction):
    """Count, mean and unbiased variance (n - 1) at each position, over the samples.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    The computation is in float64. Portions are centred at their own mean, and joined by the
    pairwise update of Chan, Golub and LeVeque (1979). Dtypes of the results are those of `Mean`.
    NaN and infinity give what ``torch.mean`` and ``torch.var`` give. The variance of a single
    sample is NaN.

    Examples
    --------
    >>> import torch
    >>> moments = Moments()
    >>> moments.update(torch.tensor([[1.0], [2.0], [6.0]]))
    >>> count, mean, variance = moments.compute()
    >>> count, mean.item(), variance.item()
    (3, 3.0, 7.0)
    """

    _state_names = ("_seen", "_mean", "_squares")
    _seen: int
    _mean: Tensor
    _squares: Tensor

    def _add(self, samples: Tensor) -> None:
        for portion in portions(samples):
            values = portion.double()
            mean = values.mean(0)
            self._take(len(values), mean, (values - mean).square_().sum(0))

    def _take(self, count: int, mean: Tensor, squares: Tensor) -> None:
        if self._seen is None:
            self._seen, self._mean, self._squares = count, mean, squares
            return
        self._mean, apart = join_means(self._seen, self._mean, count, mean)
        self._squares = self._squares + squares + apart.square()
        self._seen += count

    def _join(self, other: Moments) -> None:
        self._take(other._seen, other._mean, other._squares)

    def _result(self) -> MomentsResult:
        # Divided as tensors: one sample gives nan, not ZeroDivisionError.
        variance = self._squares / torch.full_like(self._squares, self._seen - 1)
        return MomentsResult(
            self._seen, self._mean.to(self._dtype, copy=True), variance.to(self._dtype)
        )

    def overall(self, result: Any) -> dict[str, float]:
        """Join the moments of all positions, which have equally many samples each.

        Parameters
        ----------
        result : any
            The result of `compute`.

        Returns
        -------
        dict
            Empty if there is nothing to say, as with ``by``.
        """
        if not isinstance(result, MomentsResult) or not result.mean.numel():
            return {}
        mean, variance = result.mean.double(), result.variance.double()
        values = result.count * mean.numel()
        within = variance.sum() * (result.count - 1) if result.count > 1 else 0.0
        squares = within + result.count * (mean - mean.mean()).square().sum()
        std = math.sqrt(float(squares) / (values - 1)) if values > 1 else math.nan
        return {"mean": float(mean.mean()), "std": std}
