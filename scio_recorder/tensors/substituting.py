"""Other tensors put in the place of some, in the very structures that a network goes on with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from scio_recorder.tensors.structures import DICTS, OPAQUE, is_plain_kind, slot_names


def substitute(value: Any, replacements: Mapping[int, Tensor]) -> Any:
    """Put other tensors in the place of some, in the containers themselves where these can change.

    Whoever else holds a list, a dictionary or an object sees the replacement too. Tuples can't
    change, and are built again.

    Parameters
    ----------
    value : Any
        What :func:`flatten` takes.
    replacements : mapping of int to Tensor
        By the ``id`` of the tensor to be replaced.

    Returns
    -------
    Any
        The structure itself, or a new tuple or tensor.

    Examples
    --------
    >>> import torch
    >>> one, two = torch.ones(1), torch.zeros(1)
    >>> inner = [one]
    >>> substitute((inner, one), {id(one): two})
    ([tensor([0.])], tensor([0.]))
    >>> inner
    [tensor([0.])]
    """
    return _substitute(value, replacements, {})


def replaceable(value: Any) -> set[int]:
    """Return the ``id`` of each tensor that :func:`substitute` can replace.

    Parameters
    ----------
    value : Any
        What :func:`flatten` takes.

    Returns
    -------
    set of int
        Tensors in sets, for one, are not among them.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(1)
    >>> replaceable([one]) == {id(one)}, replaceable({one})
    (True, set())
    """
    looked_up = _LookedUp()
    substitute(value, looked_up)
    return looked_up.keys_seen


class _LookedUp(dict[int, Tensor]):
    """An empty mapping that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_seen: set[int] = set()

    def get(self, key: int, default: Any = None) -> Any:
        self.keys_seen.add(key)
        return default


def _substitute(value: Any, replacements: Mapping[int, Tensor], seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if value is None or isinstance(value, OPAQUE):
        return value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value
    if isinstance(value, tuple):
        items = [_substitute(item, replacements, seen) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            seen[id(value)] = _tuple_like(value, items)
        return seen[id(value)]
    for old, put in _places(value):
        new = _substitute(old, replacements, seen)
        if new is not old:
            put(new)
    return value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields"):
        return kind(items)
    new = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    return new


def _places(value: Any) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """Yield what a mutable structure holds, each with what puts something else in its place."""
    if isinstance(value, list | deque):
        setter: Any = list.__setitem__ if isinstance(value, list) else deque.__setitem__
        for index, item in enumerate(list(value)):
            yield item, partial(setter, value, index)
    base: Any = next((base for base in DICTS if isinstance(value, base)), None)
    if base is not None:
        for key, item in list(base.items(value)):
            yield item, partial(base.__setitem__, value, key)
    if isinstance(value, list | dict | SimpleNamespace) or is_plain_kind(type(value)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield item, partial(value.__dict__.__setitem__, name)
        for name in slot_names(value):
            yield getattr(value, name), partial(object.__setattr__, value, name)
