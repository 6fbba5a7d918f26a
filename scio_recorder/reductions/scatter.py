"""Sums of squared deviations and products: the arithmetic under `Covariance`."""

from __future__ import annotations

import torch
from torch import Tensor

from scio_recorder.reductions.numerics import float32_products_are_exact

__all__ = ["NARROW", "add_product", "centre_by_class", "chan_weights", "symmetric"]

NARROW = 64


def centre_by_class(rows: Tensor, codes: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Subtract from each of `rows` [n, D], in place, the mean of the rows with the same code [n].

    Returns the codes that occur [c], how often [c], and their means [c, D]. Without codes, all
    rows have the code 0.
    """
    if codes is None:
        means = rows.mean(0, keepdim=True)
        rows -= means
        only = torch.zeros(1, dtype=torch.int64, device=rows.device)
        return only, only + len(rows), means
    present, index, counts = torch.unique(codes, return_inverse=True, return_counts=True)
    sums = rows.new_zeros(len(present), rows.shape[1]).index_add_(0, index, rows)
    means = sums / counts.unsqueeze(1)
    rows -= means[index]
    return present, counts, means


def add_product(total: Tensor, rows: Tensor) -> None:
    """Add ``rows.T @ rows`` to `total` [D, D], in place; complete only from the diagonal up.

    Working strip by strip leaves out most of the redundant half, which pays for the float64 sum.
    """
    width = rows.shape[1]
    if len(rows) == 1:
        # For one row, strips cost more than the redundant half.
        total.addmm_(rows.double().T, rows.double())
        return
    # Few features make the product a small part of the work: float64 costs little there, and
    # bears with single values that dwarf all others.
    if width < NARROW or not float32_products_are_exact(rows.device):
        rows = rows.double()
    # Narrow strips save the most; an accelerator needs wide ones to be busy.
    strip = max(16, min(128, width // 4)) if rows.device.type == "cpu" else 1024
    # The last strip takes the rest: products of a few columns are slower and less precise.
    for start in range(0, max(1, width - strip + 1), strip):
        end = width if width - start < 2 * strip else start + strip
        product = rows[:, start:end].T @ rows[:, start:]
        total[start:end, start:].add_(product)


def symmetric(total: Tensor) -> Tensor:
    """Return the full matrix of one that is complete only from the diagonal up."""
    upper = total.triu()
    return upper + upper.triu(1).T


def chan_weights(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """Return how two groups of sizes `ours` and `theirs` (float64) combine.

    The first is the share of theirs in the joined mean; the second, times the squared difference of
    the means, is what the joined sum of squares has in addition to the sum of both
    (Chan, Golub and LeVeque, 1979).
    """
    share = theirs / (ours + theirs)
    return share, ours * share
