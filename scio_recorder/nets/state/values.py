"""The values of tensors and the contents of objects, which can be restored."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.nets.state.traces import Reach
from scio_recorder.tensors.copies import is_dense

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class TensorState:
    """The memory and the values of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._data = tensor.data
        self._requires_grad = tensor.requires_grad
        self._values = clone(tensor)
        self._version = _version(tensor)

    def is_written_unseen(self) -> bool:
        """Whether there are other values without a new version, as writes to ``.data`` leave."""
        now, before = self._tensor.detach(), self._values
        if now.layout != torch.strided or _version(self._tensor) != self._version:
            return False
        if (now.shape, now.dtype) != (before.shape, before.dtype):
            return True
        both_nan = (now != now) & (before != before)
        return not bool(((now == before) | both_nan).all())

    def restore(self) -> None:
        """Restore memory and values, whatever the version: batch norm writes without a new one."""
        with torch.no_grad():
            # `net.to(device)` swaps the memory under a parameter.
            if not self._tensor.is_inference():
                self._tensor.data = self._data
            # Nobody can write to a tensor that has one number at several places.
            if not _is_expanded(self._data):
                self._data.copy_(self._values)
        if self._tensor.is_leaf and self._tensor.requires_grad != self._requires_grad:
            self._tensor.requires_grad_(self._requires_grad)
        self._version = _version(self._tensor)


def clone(tensor: Tensor) -> Tensor:
    """Return a detached copy that requires a gradient if the tensor is a leaf that does."""
    clone = tensor.detach().clone()
    return clone.requires_grad_(tensor.requires_grad) if tensor.is_leaf else clone


def _is_expanded(tensor: Tensor) -> bool:
    shape = zip(tensor.shape, tensor.stride(), strict=True) if is_dense(tensor) else ()
    return any(size > 1 and step == 0 for size, step in shape)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class ContentsState:
    """The contents of everything that a network reaches besides its modules.

    Parameters
    ----------
    reach : Reach
        The objects.

    Examples
    --------
    >>> net = nn.ReLU()
    >>> net.seen = {"counts": [1]}
    >>> reach = Reach()
    >>> reach.add([net])
    >>> state = ContentsState(reach)
    >>> net.seen["counts"][0] = 2
    >>> state.restore()
    >>> net.seen
    {'counts': [1]}
    """

    def __init__(self, reach: Reach) -> None:
        objects = [one for one in reach.objects.values() if not isinstance(one, nn.Module)]
        attributes = [getattr(one, "__dict__", None) for one in objects]
        self._contents = [
            (one, one.copy()) for one in (*objects, *attributes) if type(one) in _CONTAINERS
        ]
        self._arrays = [(one, one.copy()) for one in objects if isinstance(one, np.ndarray)]

    def restore(self) -> None:
        """Restore what has changed; all else is left alone."""
        for value, before in self._contents:
            now, then = _items(value), _items(before)
            if len(now) != len(then) or not all(map(is_, now, then)):
                value.clear()
                fill = value.extend if isinstance(value, list | deque) else value.update
                fill(before)
        for array, before in self._arrays:
            if array.flags.writeable:
                array[...] = before


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]
