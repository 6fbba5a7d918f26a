"""Taking structures of tensors apart, and building them again with other tensors.

Networks return tensors, tuples, named tuples, dictionaries, dataclasses (transformers'
``ModelOutput``), objects such as key-value caches, and any nesting of these. Constructors are never
called when a structure is built again: many check or compute things that hold only the first time.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from operator import itemgetter, methodcaller
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.interpreter import cached_by_class, is_defined_in_python, referents

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]

# An object is opened if its attributes are taken apart, as those of a key-value cache are. These
# never are: they hold no activations, or must keep their identity.
_OPAQUE = (
    nn.Module,
    type,
    ModuleType,
    CodeType,
    weakref.ref,
    weakref.WeakSet,
    torch.Generator,
    torch.device,
    torch.dtype,
    torch.Size,
    str,
    bytes,
    int,
    float,
    complex,
    Enum,
)

# What refers to the memory of tensors, unseen.
_HIDING = (torch.UntypedStorage, memoryview, torch.Future)

# Built-in containers that can be filled, in the order in which they are tried: each creates and
# fills its own subclasses.
MAPPINGS: tuple[Any, ...] = (OrderedDict, defaultdict, dict)
COLLECTIONS: tuple[Any, ...] = (list, deque, set)
_BASES = (*MAPPINGS, *COLLECTIONS, SimpleNamespace)
# Views of dictionaries: the kind of dictionary, and the name of the method.
_VIEWS: dict[type, tuple[Any, str]] = {
    type(getattr(base(), name)()): (base, name)
    for base in (dict, OrderedDict)
    for name in ("keys", "values", "items")
}
# Weak references, and what makes them.
_WEAK: dict[type, Callable[[Any], Any]] = {
    weakref.ref: weakref.ref,
    weakref.ProxyType: weakref.proxy,
    weakref.CallableProxyType: weakref.proxy,
}


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
    _, leaves, rebuild, _ = taken_apart(value)
    return leaves, rebuild


def taken_apart(value: Any) -> Apart:
    """Take a structure apart as :func:`flatten` does, and say what its copies share with it."""
    if isinstance(value, Tensor):
        return Apart(value, [value], itemgetter(0), [])
    leaves: list[Tensor] = []
    slots: dict[int, _Slot] = {}

    def put_slot(tensor: Tensor) -> _Slot:
        if id(tensor) not in slots:
            slots[id(tensor)] = _Slot(len(leaves))
            leaves.append(tensor)
        return slots[id(tensor)]

    # The template holds no tensor, and nothing that the old structure receives later.
    copying = _Copy(Tensor, put_slot)
    template = copying.of(value)
    return Apart(value, leaves, partial(_rebuilt, template), copying.shared)


def tensors(value: Any) -> list[Tensor]:
    """Return the distinct tensors in a structure, in order of first appearance.

    Parameters
    ----------
    value : Any
        As for :func:`flatten`.

    Returns
    -------
    list of Tensor
        The leaves.

    Examples
    --------
    >>> [t.shape for t in tensors([torch.ones(2), {"k": torch.ones(3)}])]
    [torch.Size([2]), torch.Size([3])]
    """
    return taken_apart(value).leaves


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in a structure.

    Parameters
    ----------
    function : callable
        ``Tensor -> Any``; called once for each distinct tensor.
    value : Any
        As for :func:`flatten`.

    Returns
    -------
    Any
        The same structure with the results in place of the tensors.

    Examples
    --------
    >>> map_tensors(lambda t: t.shape[0], (torch.ones(2), [torch.ones(3)]))
    (2, [3])
    """
    leaves, rebuild = flatten(value)
    return rebuild([function(leaf) for leaf in leaves])


def fold(
    value: Any,
    leaf: Callable[[Any], Any],
    container: Callable[[Any, list[tuple[Any, Any]]], Any],
    is_leaf: Callable[[Any], bool] | None = None,
    _around: tuple[int, ...] = (),
) -> Any:
    """Return what functions make of a structure, from the inside out.

    Unlike :func:`flatten`, it looks into plain containers only: lists, tuples, mappings and
    dataclasses.

    Parameters
    ----------
    value : Any
        Any value.
    leaf : callable
        ``leaf(value)`` is asked about anything else, and about a container inside itself.
    container : callable
        ``container(value, parts)`` is asked about a container. Its parts are pairs: an index, a key
        or the name of a field, and what was made of the value there.
    is_leaf : callable, optional
        ``is_leaf(value)`` says which containers are not looked into.

    Returns
    -------
    Any
        What was made of the whole.

    Examples
    --------
    >>> def largest(container, parts):
    ...     return max(part for _, part in parts)
    >>> fold({"a": [1, 4], "b": 3}, abs, largest)
    4
    """
    kind: Any = type(value)
    parts_of = _parts_of(kind)
    if parts_of is None or id(value) in _around or (is_leaf is not None and is_leaf(value)):
        return leaf(value)
    around = (*_around, id(value))
    pairs = parts_of(value)
    parts = [(key, fold(part, leaf, container, is_leaf, around)) for key, part in pairs]
    return container(value, parts)


@cached_by_class
def _parts_of(kind: type) -> Callable[[Any], Iterable[tuple[Any, Any]]] | None:
    """Return what takes plain containers of a class apart; None for other classes."""
    if issubclass(kind, (Tensor, type)):
        return None
    if issubclass(kind, Mapping):
        # Not every mapping yields its keys: a TensorDict yields its rows.
        return methodcaller("items")
    if issubclass(kind, list | tuple):
        return enumerate
    return _fields_of if dataclasses.is_dataclass(kind) else None


def is_container(value: Any) -> bool:
    """Whether :func:`fold` looks into a value.

    Examples
    --------
    >>> is_container({}), is_container(torch.ones(1)), is_container("text")
    (True, False, False)
    """
    kind: Any = type(value)
    return _parts_of(kind) is not None


def _fields_of(value: Any) -> Iterable[tuple[str, Any]]:
    names = (field.name for field in dataclasses.fields(value))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def holder_out_of_sight(shared: Iterable[SharedPart]) -> Any:
    """Return a part that holds tensors which :func:`flatten` does not find; None if none does.

    Such parts are functions with a closure, bound methods, ``functools.partial``, iterators, and
    dictionaries with tensors in their keys. The garbage collector sees what they hold, except in
    futures of torch, which hold tensors or will.

    Parameters
    ----------
    shared : iterable
        What copies of a structure share with it, from `taken_apart`.

    Returns
    -------
    Any
        The part, which no copy of the structure has for itself.

    Examples
    --------
    >>> holder_out_of_sight(taken_apart((torch.ones(2), len)).shared) is None
    True
    >>> holder_out_of_sight(taken_apart((torch.ones(2), torch.ones(2).sum)).shared)
    <built-in method sum of Tensor object at ...>
    """
    return next((part.container for part in shared if _leads_to(part.value, Tensor)), None)


def _leads_to(value: Any, kind: type, made: Mapping[int, tuple[Any, Any]] | None = None) -> bool:
    """Whether an object holds one of a kind, or what has been made anew, in whatever way."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        part = todo.pop()
        old, new = (made or {}).get(id(part), (part, part))
        # By `type`, and not `isinstance`: some objects claim to have another class.
        if issubclass(type(part), (kind, *_HIDING)) or old is not new:
            return True
        if id(part) not in seen:
            seen[id(part)] = part
            todo += _referents(part)
    return False


def _referents(value: Any) -> list[Any]:
    """Return what an object holds; of a function neither its module nor its code."""
    kind = type(value)
    if kind is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if kind in _WEAK:
        return [_referent(value)]
    return [] if issubclass(kind, _OPAQUE) else referents(value)


def _referent(reference: Any) -> Any:
    try:
        # A proxy hands on all attributes.
        return reference() if type(reference) is weakref.ref else reference.__init__.__self__
    except ReferenceError:
        return None


def is_opened(value: Any) -> bool:
    """Whether :func:`flatten` would look into an object, in a way that dynamo can follow."""
    # Dynamo may not ask tensors whether they are of classes that decide that themselves.
    if value is None or isinstance(value, Tensor):
        return False
    functions = FunctionType, BuiltinFunctionType, MethodType
    return not isinstance(value, (*functions, *_OPAQUE))


class Apart(NamedTuple):
    """A structure that was taken apart."""

    value: Any
    leaves: list[Tensor]
    rebuild: Rebuild
    shared: list[SharedPart]


class SharedPart(NamedTuple):
    """A value that a copy of a structure shares with it, and what contains that.

    A dictionary contains its keys, anything else itself.
    """

    container: Any
    value: Any


class _Slot(NamedTuple):
    """A place for a tensor."""

    place: int


def _rebuilt(template: Any, leaves: Sequence[Any]) -> Any:
    """Return a structure around other tensors; a function that can be pickled."""
    return _Copy(_Slot, lambda slot: leaves[slot.place]).of(template)


class _Copy:
    """One copy of a structure, with a replacement for each leaf of a kind.

    Each container and object is copied once. So the new structure shares parts, and refers to
    itself, exactly as the old one does.
    """

    def __init__(self, kind: type, replace: Callable[[Any], Any]) -> None:
        self._kind = kind
        self._replace = replace
        # By the id of the old object, which is held, so that no other object takes its id.
        self._made: dict[int, tuple[Any, Any]] = {}
        self.shared: list[SharedPart] = []

    def of(self, value: Any, is_inside: bool = False) -> Any:
        """Return the copy of a part; ``is_inside`` an opened object or not."""
        if type(value) in _WEAK:
            # An object stands in the memory of copies before its parts, which refer back to it.
            _, new = self._made.get(id(_referent(value)), (None, None))
            return value if new is None else _WEAK[type(value)](new)
        if isinstance(value, self._kind):
            return self._replace(value)
        if value is None or isinstance(value, _OPAQUE):
            return value
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.copy()
        if id(value) not in self._made:
            new = self._container(value, is_inside)
            if new is value:
                self.shared.append(SharedPart(value, value))
            # It may have been made while its parts were.
            self._made.setdefault(id(value), (value, new))
        return self._made[id(value)][1]

    def _container(self, value: Any, is_inside: bool) -> Any:
        kind = type(value)
        if isinstance(value, tuple) or kind is frozenset:
            parts = [self.of(item, is_inside) for item in value]
            # torch.return_types.* are struct sequences, built from an iterable by their own type.
            if kind in (tuple, frozenset) or hasattr(kind, "n_sequence_fields"):
                return kind(parts)
            return self._with_attributes(tuple.__new__(kind, parts), value, is_inside)
        if isinstance(value, np.ndarray):
            # The collector does not see what an array of objects holds.
            self.shared.append(SharedPart(value, value.tolist()))
            return value.copy()
        if kind in _VIEWS:
            base, name = _VIEWS[kind]
            return getattr(self.of(base(value.mapping), is_inside), name)()
        return self._object(value, is_inside)

    def _object(self, value: Any, is_inside: bool) -> Any:
        kind: Any = type(value)
        base = _base_of(kind)
        is_container = base is not object or dataclasses.is_dataclass(value)
        if not is_container:
            # A container in an opened object may receive tensors later, like the parts of a
            # key-value cache, so it is copied even while it is empty.
            may_fill = is_inside or _can_be_filled(value)
            is_plain = _is_plain_kind(kind)
            if not (is_plain and (may_fill or _leads_to(value, self._kind, self._made))):
                return value
        try:
            new = base.__new__(kind)
        except TypeError:
            return value  # a type of an extension, such as a lock: it keeps its state out of sight
        # It may contain itself, so it takes its place before it is filled.
        self._made[id(value)] = value, new
        if base is deque:
            deque.__init__(new, (), value.maxlen)
        # Read by the base's methods: transformers' ModelOutput overrides access by key.
        if base in MAPPINGS:
            refill(new, base, ((key, self.of(item, is_inside)) for key, item in base.items(value)))
            self.shared += [SharedPart(value, key) for key in base.keys(value)]
        elif base in COLLECTIONS:
            refill(new, base, (self.of(item, is_inside) for item in base.__iter__(value)))
        return self._with_attributes(new, value, is_inside or not is_container)

    def _with_attributes(self, new: Any, old: Any, is_inside: bool) -> Any:
        """Give a new object the attributes of the old one, slots included."""
        for name, item in getattr(old, "__dict__", {}).items():
            new.__dict__[name] = self.of(item, is_inside)
        kind: Any = type(old)
        for name in slots(kind):
            if hasattr(old, name):
                # Frozen dataclasses refuse their own setattr.
                object.__setattr__(new, name, self.of(getattr(old, name), is_inside))
        if isinstance(old, defaultdict):
            new.default_factory = old.default_factory
            self.shared.append(SharedPart(old, old.default_factory))
        return new


def refill(container: Any, base: Any, items: Iterable[Any]) -> None:
    """Give a container other items, whatever a class derived from it makes of that.

    Parameters
    ----------
    container : Any
        A container.
    base : type
        One of `MAPPINGS` or `COLLECTIONS`, of which it is, or is derived from.
    items : iterable
        Its items, for a mapping pairs.

    Examples
    --------
    >>> numbers = [1, 2]
    >>> refill(numbers, list, (3, 4))
    >>> numbers
    [3, 4]
    """
    base.clear(container)
    for item in items:
        if base in MAPPINGS:
            base.__setitem__(container, *item)
        else:
            (base.add if base is set else base.append)(container, item)


def _can_be_filled(value: Any) -> bool:
    """Whether an object has containers, as an empty key-value cache does."""
    attributes = getattr(value, "__dict__", {}).values()
    return any(isinstance(item, (*MAPPINGS, *COLLECTIONS)) for item in attributes)


@cached_by_class
def slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class that is written in Python.

    Examples
    --------
    >>> class Place:
    ...     __slots__ = ("__dict__", "row")
    >>> slots(Place)
    ('row',)
    """
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    )


@cached_by_class
def _base_of(kind: type) -> Any:
    """Return the built-in container that a class is, or is derived from; ``object`` if none."""
    return next((base for base in _BASES if issubclass(kind, base)), object)


def _is_plain_kind(kind: type) -> bool:
    """Whether instances consist only of their attributes, so that copying these copies them."""
    # All bases must be defined in Python: other classes keep state that can't be seen.
    return all(is_defined_in_python(base) for base in kind.__mro__[:-1])
