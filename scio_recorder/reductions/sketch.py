"""Sorted, evenly thinned summaries of values: the arithmetic under `Quantiles`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["read_quantiles", "sort_rows", "thin"]

# Values read at once, so that reading needs little memory beside the summary itself.
_PORTION = 2**22


def sort_rows(values: Tensor) -> Tensor:
    """Sort each row of `values` [features, n]; may do so in place."""
    if values.device.type == "cpu" and values.is_contiguous():
        # NumPy sorts with vector instructions and without indices, ten times faster than torch.
        values.numpy().sort(axis=1)
        return values
    return values.sort(dim=1).values


def _order_rows(values: Tensor) -> Tensor:
    """Return the indices that sort each row of `values` [features, n]."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.argsort(values.numpy(), axis=1))
    return values.argsort(dim=1)


def thin(ordered: Tensor, step: int, odd: int) -> Tensor:
    """Keep every `step`-th of the sorted values [features, n], from the middle of each group.

    An even group has two middles; taking the lower and the upper one in turn (`odd` 0 and 1) lets
    the errors of successive calls cancel.
    """
    return ordered[:, step // 2 - 1 + odd :: step].contiguous()


def read_quantiles(values: Tensor, weights: Tensor, low: Tensor, high: Tensor, q: Tensor) -> Tensor:
    """Interpolate quantiles `q` [k] of weighted `values` [features, n] as [k, features].

    A value of `weights` [n] stands for that many neighbours in rank and sits in their middle;
    `low` and `high` [features] are the exact ends. With weights of one this is the linear
    interpolation of ``torch.quantile``.
    """
    width = max(1, _PORTION // (values.shape[1] + 2))
    parts = zip(*(torch.split(each, width) for each in (values, low, high)), strict=True)
    return torch.cat([_read(v, weights, low, high, q) for v, low, high in parts], dim=1)


def _read(values: Tensor, weights: Tensor, low: Tensor, high: Tensor, q: Tensor) -> Tensor:
    order = _order_rows(values)
    ordered, weight = values.gather(1, order), weights[order]
    last = weights.sum() - 1
    middle = weight.cumsum(1) - weight / 2 - 0.5
    ends = torch.zeros_like(middle[:, :1])
    position = torch.cat([ends, middle, ends + last], dim=1)
    known = torch.cat([low.unsqueeze(1), ordered, high.unsqueeze(1)], dim=1).double()
    target = (q * last).expand(len(values), -1).contiguous()
    upper = torch.searchsorted(position, target, right=True).clamp_(1, position.shape[1] - 1)
    left, right = position.gather(1, upper - 1), position.gather(1, upper)
    share = torch.where(right > left, (target - left) / (right - left), 1.0)
    found = _between(known.gather(1, upper - 1), known.gather(1, upper), share)
    # Where single values are kept beside thinned ones, the first of them has rank 0 as well.
    return torch.where(q == 0, known[:, :1], torch.where(q == 1, known[:, -1:], found)).T


def _between(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    """Interpolate; where an end is infinite, without the nan of 0 * inf and inf - inf."""
    inner = low + share * (high - low)
    return torch.where((share == 0) | (low == high), low, torch.where(share == 1, high, inner))
