"""Handwritten digits, some classes kept away from the net altogether."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """Images ``[samples, 1, 8, 8]``, float32 between 0 and 1, and labels ``[samples]``, int64."""

    images: Tensor
    labels: Tensor


class Digits(NamedTuple):
    """The known classes in three parts that share no image, and the unknown ones."""

    train: Split
    validation: Split
    test: Split
    unknown: Split


def load_digits(known: int = 7, generator: torch.Generator | None = None) -> Digits:
    """Load scikit-learn's handwritten digits, which come with the package.

    Parameters
    ----------
    known : int, default 7
        Digits below it are split 60 : 20 : 20 at random; the others are all ``unknown``.
    generator : torch.Generator, optional
        Decides the split; None (default) means torch's global one.

    Returns
    -------
    Digits
        Four splits.

    Raises
    ------
    ModuleNotFoundError
        scikit-learn is not installed.

    Examples
    --------
    >>> digits = load_digits()
    >>> digits.unknown.labels.unique()
    tensor([7, 8, 9])
    """
    # Only the demo needs scikit-learn.
    from sklearn import datasets

    bunch = datasets.load_digits()
    everything = Split(
        torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16,
        torch.tensor(bunch.target, dtype=torch.int64),
    )
    is_known = everything.labels < known
    positions = is_known.nonzero().flatten()
    shuffled = positions[torch.randperm(len(positions), generator=generator)]
    cuts = (len(shuffled) * 6 // 10, len(shuffled) * 8 // 10)
    train, validation, test = (_take(everything, part) for part in shuffled.tensor_split(cuts))
    return Digits(train, validation, test, _take(everything, ~is_known))


def _take(split: Split, which: Tensor) -> Split:
    return Split(split.images[which], split.labels[which])
