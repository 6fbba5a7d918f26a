"""Structures that hold tensors: taken apart, and built again with others in their place.

Networks return tensors, tuples, named tuples, dictionaries, dataclasses (transformers'
``ModelOutput``), objects such as key-value caches, and any nesting of these. Constructors are never
called when a structure is built again: many check or compute things that hold only the first time.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Rebuild", "flatten", "map_tensors", "replaceable", "substitute", "tensors"]

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]

# Objects that are never opened: they hold no activations of their own, or must keep their identity.
_OPAQUE = (
    nn.Module,
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    torch.Generator,
    torch.device,
    torch.dtype,
    str,
    bytes,
    int,
    float,
    complex,
)

# Built-in bases in the order in which they are tried: each creates and fills its own subclasses.
_DICTS: tuple[Any, ...] = (OrderedDict, defaultdict, dict)
_CONTAINERS: tuple[Any, ...] = (*_DICTS, list, SimpleNamespace)
_HEAP_TYPE = 1 << 9
_BUILT_FROM_ITEMS: tuple[Any, ...] = (set, frozenset, deque)


def flatten(value: Any) -> tuple[list[Tensor], Rebuild]:
    """Take a structure apart.

    Parameters
    ----------
    value : Any
        A tensor, or any nesting of containers and objects that hold tensors.

    Returns
    -------
    leaves : list of Tensor
        The distinct tensors in order of first appearance; one that appears twice is listed once.
    rebuild : callable
        ``rebuild(leaves)`` gives the structure again with the i-th leaf replaced by ``leaves[i]``.
        Containers are new objects, also those without tensors; anything else is shared.

    Examples
    --------
    >>> leaves, rebuild = flatten({"a": torch.ones(2), "b": (torch.zeros(1), 3)})
    >>> len(leaves)
    2
    >>> rebuild(["x", "y"])
    {'a': 'x', 'b': ('y', 3)}
    """
    if isinstance(value, Tensor):
        return [value], _first
    walk = _Walk()
    return walk.leaves, walk.visit(value)


def tensors(value: Any) -> list[Tensor]:
    """Return the distinct tensors in a structure, in order of first appearance.

    Parameters
    ----------
    value : Any
        What :func:`flatten` takes.

    Returns
    -------
    list of Tensor
        The leaves.

    Examples
    --------
    >>> [t.shape for t in tensors([torch.ones(2), {"k": torch.ones(3)}])]
    [torch.Size([2]), torch.Size([3])]
    """
    return flatten(value)[0]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in a structure.

    Parameters
    ----------
    function : callable
        ``Tensor -> Any``; called once for each distinct tensor.
    value : Any
        What :func:`flatten` takes.

    Returns
    -------
    Any
        The same structure with the results in place of the tensors.

    Examples
    --------
    >>> map_tensors(lambda t: t.shape[0], (torch.ones(2), [torch.ones(3)]))
    (2, [3])
    """
    if isinstance(value, Tensor):
        return function(value)
    leaves, rebuild = flatten(value)
    return rebuild([function(leaf) for leaf in leaves])


def _first(leaves: Sequence[Any]) -> Any:
    return leaves[0]


class _Walk:
    """One traversal: the leaves met so far, and the containers that are being visited."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._meetings = 0
        # Whether an object is open: what it holds may be filled with tensors later, as the parts
        # of a key-value cache are, and is copied even while it is empty.
        self._inside = False
        # A structure that contains itself is kept by reference at the second meeting.
        self._open: set[int] = set()

    def visit(self, value: Any) -> Rebuild:
        if isinstance(value, Tensor):
            return self._leaf(value)
        if value is None or isinstance(value, _OPAQUE) or id(value) in self._open:
            return lambda leaves: value
        if isinstance(value, np.ndarray):
            copied = value.copy()
            return lambda leaves: copied
        self._open.add(id(value))
        try:
            return self._container(value)
        finally:
            self._open.discard(id(value))

    def _leaf(self, value: Tensor) -> Rebuild:
        self._meetings += 1
        index = self._index.setdefault(id(value), len(self.leaves))
        if index == len(self.leaves):
            self.leaves.append(value)
        return lambda leaves: leaves[index]

    def _container(self, value: Any) -> Rebuild:
        if isinstance(value, tuple):
            return self._tuple(value)
        if type(value) is list:
            parts = [self.visit(item) for item in value]
            return lambda leaves: [part(leaves) for part in parts]
        if type(value) in _BUILT_FROM_ITEMS:
            kind, members = type(value), [self.visit(item) for item in value]
            return lambda leaves: kind([part(leaves) for part in members])
        if type(value) in (dict, MappingProxyType):
            items = [(key, self.visit(item)) for key, item in value.items()]
            if type(value) is dict:
                return lambda leaves: {key: part(leaves) for key, part in items}
            return lambda leaves: MappingProxyType({key: part(leaves) for key, part in items})
        return self._object(value)

    def _tuple(self, value: tuple[Any, ...]) -> Rebuild:
        kind = type(value)
        if kind is torch.Size:
            return lambda leaves: value
        parts = [self.visit(item) for item in value]
        if kind is tuple:
            return lambda leaves: tuple([part(leaves) for part in parts])
        if hasattr(kind, "n_sequence_fields"):
            # torch.return_types.* are struct sequences, built from an iterable by their own type.
            return lambda leaves: kind([part(leaves) for part in parts])
        restore = self._attributes(value)
        return lambda leaves: restore(tuple.__new__(kind, [part(leaves) for part in parts]), leaves)

    def _object(self, value: Any) -> Rebuild:
        kind = type(value)
        base: Any = next((base for base in _CONTAINERS if isinstance(value, base)), object)
        is_container = base is not object or dataclasses.is_dataclass(value)
        if not is_container and not _is_plain(kind):
            return lambda leaves: value
        before = self._meetings
        items = [self.visit(item) for item in list.__iter__(value)] if base is list else []
        # Read as the base does: transformers' ModelOutput overrides access by key.
        entries = [(k, self.visit(v)) for k, v in base.items(value)] if base in _DICTS else []
        is_inside, self._inside = self._inside, self._inside or not is_container
        restore = self._attributes(value)
        self._inside = is_inside
        is_empty = not is_container and self._meetings == before
        is_fixed = isinstance(value, Enum) or not (is_inside or _can_be_filled(value))
        if is_empty and is_fixed:
            return lambda leaves: value

        def rebuild(leaves: Sequence[Any]) -> Any:
            new = base.__new__(kind)
            if base is list:
                list.extend(new, [part(leaves) for part in items])
            for key, part in entries:
                base.__setitem__(new, key, part(leaves))
            return restore(new, leaves)

        return rebuild

    def _attributes(self, value: Any) -> Callable[[Any, Sequence[Any]], Any]:
        """Return what gives a new object the attributes of the old one, slots included."""
        instance = [(k, self.visit(v)) for k, v in getattr(value, "__dict__", {}).items()]
        slots = [(k, self.visit(getattr(value, k))) for k in _slots(value)]
        if isinstance(value, defaultdict):
            slots.append(("default_factory", self.visit(value.default_factory)))

        def restore(new: Any, leaves: Sequence[Any]) -> Any:
            for name, part in instance:
                new.__dict__[name] = part(leaves)
            for name, part in slots:
                # Frozen dataclasses refuse their own setattr.
                object.__setattr__(new, name, part(leaves))
            return new

        return restore


def _can_be_filled(value: Any) -> bool:
    """Whether an object has containers, as an empty key-value cache has."""
    own = getattr(value, "__dict__", {}).values()
    return any(isinstance(item, list | dict | set | deque) for item in own)


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


def _is_plain(kind: type) -> bool:
    """Whether instances are nothing but their attributes, so that copying these copies them."""
    # Classes defined in Python, all the way up: others keep state where it can't be seen.
    return all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1])


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
    >>> one, two = torch.ones(1), torch.zeros(1)
    >>> inner = [one]
    >>> substitute((inner, one), {id(one): two})
    ([tensor([0.])], tensor([0.]))
    >>> inner
    [tensor([0.])]
    """
    return _substitute(value, replacements, set())


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


def _substitute(value: Any, replacements: Mapping[int, Tensor], seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if value is None or isinstance(value, _OPAQUE) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, tuple):
        items = [_substitute(item, replacements, seen) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else _tuple_like(value, items)
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
    base: Any = next((base for base in _DICTS if isinstance(value, base)), None)
    if base is not None:
        for key, item in list(base.items(value)):
            yield item, partial(base.__setitem__, value, key)
    if isinstance(value, list | dict | SimpleNamespace) or _is_plain(type(value)):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield item, partial(value.__dict__.__setitem__, name)
        for name in _slots(value):
            yield getattr(value, name), partial(object.__setattr__, value, name)
