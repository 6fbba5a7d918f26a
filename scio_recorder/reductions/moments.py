"""Mean and variance at each position."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scio_recorder.reductions.numerics import portions
from scio_recorder.reductions.samples import SampleReduction


class Mean(SampleReduction):
    """Mean at each position, over the samples; nan where one was nan.

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
            self._take(portion.sum(0, dtype=wide))

    def _take(self, total: Tensor) -> None:
        self._sum = total if self._sum is None else self._sum + total

    def _join(self, other: Mean) -> None:
        self._take(other._sum)

    def _result(self) -> Tensor:
        return (self._sum / self._count).to(self._dtype)

    def _overall(self, result: Any) -> dict[str, float]:
        """Return the mean of all values; that of complex ones says nothing of their magnitudes."""
        is_told = isinstance(result, Tensor) and result.numel() and not result.is_complex()
        return {"mean": float(result.double().mean())} if is_told else {}


class MomentsResult(NamedTuple):
    """Number of samples, mean and unbiased variance at each position.

    Attributes
    ----------
    count : int
        How many samples were seen.
    mean : Tensor
        Their mean, in the shape of a sample.
    variance : Tensor
        Their variance (n - 1), likewise; NaN of a single sample.
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
    Portions are centred at their own mean in the activation's precision, and joined in float64 by
    the pairwise update of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979). Dtypes as for `Mean`; nan and inf give what ``torch.mean``
    and ``torch.var`` give, a single sample the variance nan.

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
            self._take(len(portion), *_mean_and_squares(portion.to(self._dtype)))

    def _take(self, count: int, mean: Tensor, squares: Tensor) -> None:
        if self._seen is None:
            self._seen, self._mean, self._squares = count, mean, squares
            return
        total = self._seen + count
        # A weighted mean and not "mean + delta * share": an infinite mean stays infinite.
        joined = self._mean * (self._seen / total) + mean * (count / total)
        delta = mean - self._mean
        self._squares = self._squares + squares + delta.square() * (self._seen / total * count)
        self._seen, self._mean = total, joined

    def _join(self, other: Moments) -> None:
        self._take(other._seen, other._mean, other._squares)

    def _result(self) -> MomentsResult:
        # Divided as tensors: one sample gives nan, not ZeroDivisionError.
        variance = self._squares / torch.full_like(self._squares, self._seen - 1)
        return MomentsResult(
            self._seen, self._mean.to(self._dtype, copy=True), variance.to(self._dtype)
        )

    def _overall(self, result: Any) -> dict[str, float]:
        """Join the moments of all positions, which have equally many samples each."""
        if not isinstance(result, MomentsResult) or not result.mean.numel():
            return {}
        mean, variance = result.mean.double(), result.variance.double()
        values = result.count * mean.numel()
        within = variance.sum() * (result.count - 1) if result.count > 1 else torch.tensor(0.0)
        squares = within + result.count * (mean - mean.mean()).square().sum()
        std = math.sqrt(float(squares) / (values - 1)) if values > 1 else math.nan
        return {"mean": float(mean.mean()), "std": std}


def _mean_and_squares(portion: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations, in float64, of samples [n, ...]."""
    rounded = portion.mean(0)
    shift = torch.where(rounded.isfinite(), rounded, 0)
    centred = portion - shift
    # The rounded mean is far off beside a small spread; what it missed is summed after centring.
    missed = centred.sum(0).double()
    squares = centred.square_().sum(0).double()
    return shift.double() + missed / len(portion), squares - missed.square() / len(portion)
