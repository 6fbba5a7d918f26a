"""Other answers to what a net asks about its data: other values, and other numbers of hits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from scio_recorder.tensors.structures import map_tensors, tensors

HITS = (0, 4096, 1, 2, 3)
_INTEGERS = (0, 100, 1, -1, 2, 3, 4, 5, 6, 7)
_REALS = (0.0, 1e6, -1e6, 0.5, 1.0, 2.5, 3.0, 4.0)


def other_values(value: Any) -> list[Any]:
    """Return other values of the same kind.

    Parameters
    ----------
    value : bool, int, float, complex, list or numpy.ndarray
        What the net was told, a nested list for a whole tensor.

    Returns
    -------
    list
        The other flag, or the same structure filled with each of several numbers.

    Examples
    --------
    >>> other_values(True), other_values([[2.0, 3.0]])[:2]
    ([False], [[[0.0, 0.0]], [[1000000.0, 1000000.0]]])
    """
    if isinstance(value, bool):
        return [not value]
    numbers = _INTEGERS if isinstance(value, int) else _REALS
    return [_filled(value, number) for number in numbers]


def _filled(value: Any, number: float) -> Any:
    if isinstance(value, list):
        return [_filled(item, number) for item in value]
    if isinstance(value, np.ndarray):
        return np.full_like(value, number)
    return type(value)(number)


def counts_hits(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether the size of an operation's result is the unknown number of hits of a mask.

    Parameters
    ----------
    operation : callable
        An operation of ``torch.ops`` whose result has a size that depends on values.
    args : tuple
        Its arguments.

    Returns
    -------
    bool
        False for indices that are integers: they give a known size.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> counts_hits(torch.ops.aten.index.Tensor, (x, [torch.tensor([0])]))
    False
    """
    return _place(operation) == 0 or any(map(_is_mask, tensors(args[1])))


def with_hits(operation: Any, args: tuple[Any, ...], hits: int) -> tuple[Any, ...]:
    """Return arguments with which an operation finds a given number of hits.

    Parameters
    ----------
    operation : callable
        An operation of ``torch.ops`` whose result has a size that depends on values.
    args : tuple
        Its arguments.
    hits : int
        The number; as many as there are places if these are fewer.

    Returns
    -------
    tuple
        The arguments, with another mask, or with other values where all that are not 0 are hits.

    Examples
    --------
    >>> with_hits(torch.ops.aten.nonzero.default, (torch.ones(3),), 2)
    (tensor([2., 1., 0.]),)
    """
    place = _place(operation)

    def altered(tensor: Tensor) -> Tensor:
        if place == 1 and not _is_mask(tensor):
            return tensor
        falling = hits - torch.arange(tensor.numel(), device=tensor.device)
        return falling.clamp(min=0).reshape(tensor.shape).to(tensor.dtype)

    return (*args[:place], map_tensors(altered, args[place]), *args[place + 1 :])


def _place(operation: Any) -> int:
    """Return which argument tells the number of hits."""
    return int(operation in (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default))


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
