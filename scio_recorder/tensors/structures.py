"""Structures that hold tensors: taken apart, and built again with others in their place.

Networks return tensors, tuples, named tuples, dictionaries, dataclasses (transformers'
``ModelOutput``), objects such as key-value caches, and any nesting of these. Constructors are never
called when a structure is built again: many check or compute things that hold only the first time.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
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

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]

# Objects that are never opened: they hold no activations of their own, or must keep their identity.
OPAQUE = (
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
DICTS: tuple[Any, ...] = (OrderedDict, defaultdict, dict)
_CONTAINERS: tuple[Any, ...] = (*DICTS, list, SimpleNamespace)
_HEAP_TYPE = 1 << 9


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
    part = walk.visit(value, None)
    return walk.leaves, lambda leaves: part(_Building(leaves))


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


class _Building:
    """One structure that is being built: its tensors, and the objects made so far."""

    __slots__ = ("leaves", "made")

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.leaves = leaves
        # By the identity of the object in the old structure.
        self.made: dict[int, Any] = {}


_Part: TypeAlias = Callable[[_Building], Any]


class _Node:
    """One container or object that was met, with all that it was met in."""

    __slots__ = ("holders", "holds_tensors", "part", "value")

    def __init__(self, value: Any) -> None:
        # Held, so that no other object takes its identity.
        self.value = value
        self.holders: list[_Node] = []
        self.holds_tensors = False
        self.part: _Part

    def mark(self) -> None:
        """Note that there are tensors in this, and so in all that holds it."""
        if not self.holds_tensors:
            self.holds_tensors = True
            for holder in self.holders:
                holder.mark()


class _Walk:
    """One traversal: the leaves, and the containers and objects, each of which is met once.

    So the new structure refers to itself, and to a part twice, just where the old one does.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self._index: dict[int, int] = {}
        self._nodes: dict[int, _Node] = {}
        # Whether an object is open: what it holds may be filled with tensors later, as the parts
        # of a key-value cache are, and is copied even while it is empty.
        self._inside = False

    def visit(self, value: Any, holder: _Node | None) -> _Part:
        if isinstance(value, Tensor):
            return self._leaf(value, holder)
        if value is None or isinstance(value, OPAQUE):
            return lambda building: value
        if isinstance(value, np.ndarray):
            copied = value.copy()
            return lambda building: copied
        node = self._nodes.get(id(value))
        is_new = node is None
        if node is None:
            node = self._nodes[id(value)] = _Node(value)
        if holder is not None:
            node.holders.append(holder)
            if node.holds_tensors:
                holder.mark()
        if is_new:
            node.part = self._container(value, node)
        # Looked up when it is built: of a structure that contains itself, it is not known yet.
        return lambda building: _once(node, building)

    def _leaf(self, value: Tensor, holder: _Node | None) -> _Part:
        if holder is not None:
            holder.mark()
        index = self._index.setdefault(id(value), len(self.leaves))
        if index == len(self.leaves):
            self.leaves.append(value)
        return lambda building: building.leaves[index]

    def _container(self, value: Any, node: _Node) -> _Part:
        if isinstance(value, tuple):
            return self._tuple(value, node)
        kind = type(value)
        if kind in (set, frozenset):
            members = [self.visit(item, node) for item in value]
            return lambda building: kind([part(building) for part in members])
        if kind is MappingProxyType:
            return self._proxy(value, node)
        if kind is deque:
            return self._deque(value, node)
        return self._object(value, node)

    def _tuple(self, value: tuple[Any, ...], node: _Node) -> _Part:
        kind = type(value)
        if kind is torch.Size:
            return lambda building: value
        parts = [self.visit(item, node) for item in value]
        if kind is tuple or hasattr(kind, "n_sequence_fields"):
            # torch.return_types.* are struct sequences, built from an iterable by their own type.
            return lambda building: kind([part(building) for part in parts])
        restore = self._attributes(value, node)
        return lambda building: restore(
            tuple.__new__(kind, [part(building) for part in parts]), building
        )

    # What can hold itself is put in its place among the objects made before it is filled.

    def _proxy(self, value: Any, node: _Node) -> _Part:
        entries = [(key, self.visit(item, node)) for key, item in value.items()]

        def build(building: _Building) -> Any:
            behind: dict[Any, Any] = {}
            new = building.made[id(value)] = MappingProxyType(behind)
            behind.update((key, part(building)) for key, part in entries)
            return new

        return build

    def _deque(self, value: deque[Any], node: _Node) -> _Part:
        items = [self.visit(item, node) for item in value]

        def build(building: _Building) -> Any:
            new: deque[Any] = deque(maxlen=value.maxlen)
            building.made[id(value)] = new
            new.extend(part(building) for part in items)
            return new

        return build

    def _object(self, value: Any, node: _Node) -> _Part:
        kind = type(value)
        base: Any = next((base for base in _CONTAINERS if isinstance(value, base)), object)
        is_container = base is not object or dataclasses.is_dataclass(value)
        if not is_container and not is_plain_kind(kind):
            return lambda building: value
        items = [self.visit(item, node) for item in list.__iter__(value)] if base is list else []
        # Read as the base does: transformers' ModelOutput overrides access by key.
        entries = [(k, self.visit(v, node)) for k, v in base.items(value)] if base in DICTS else []
        is_inside, self._inside = self._inside, self._inside or not is_container
        restore = self._attributes(value, node)
        self._inside = is_inside
        is_shared_if_empty = not is_container and (
            isinstance(value, Enum) or not (is_inside or _can_be_filled(value))
        )

        def build(building: _Building) -> Any:
            if is_shared_if_empty and not node.holds_tensors:
                return value
            new = building.made[id(value)] = base.__new__(kind)
            if base is list:
                list.extend(new, (part(building) for part in items))
            for key, part in entries:
                base.__setitem__(new, key, part(building))
            return restore(new, building)

        return build

    def _attributes(self, value: Any, node: _Node) -> Callable[[Any, _Building], Any]:
        """Return what gives a new object the attributes of the old one, slots included."""
        own = getattr(value, "__dict__", {}).items()
        instance = [(name, self.visit(item, node)) for name, item in own]
        slots = [(name, self.visit(getattr(value, name), node)) for name in slot_names(value)]
        if isinstance(value, defaultdict):
            slots.append(("default_factory", self.visit(value.default_factory, node)))

        def restore(new: Any, building: _Building) -> Any:
            for name, part in instance:
                new.__dict__[name] = part(building)
            for name, part in slots:
                # Frozen dataclasses refuse their own setattr.
                object.__setattr__(new, name, part(building))
            return new

        return restore


def _once(node: _Node, building: _Building) -> Any:
    """Build an object, or return it where that was done, maybe while its own parts were built."""
    made, key = building.made, id(node.value)
    if key not in made:
        new = node.part(building)
        made.setdefault(key, new)
    return made[key]


def _can_be_filled(value: Any) -> bool:
    """Whether an object has containers, as an empty key-value cache has."""
    own = getattr(value, "__dict__", {}).values()
    return any(isinstance(item, list | dict | set | deque) for item in own)


def slot_names(value: Any) -> Iterator[str]:
    """Name the slots that an object has filled."""
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


def is_plain_kind(kind: type) -> bool:
    """Whether instances are nothing but their attributes, so that copying these copies them."""
    # Classes defined in Python, all the way up: others keep state where it can't be seen.
    return all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1])
