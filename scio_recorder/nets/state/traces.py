"""The side effects of a call of a module.

NOTE [How it is seen that a call left nothing behind]

A call can write to everything that it reaches: attributes of its module and of modules inside it,
objects and containers that these or its inputs hold, tensors, and generators of random numbers. All
of these are listed, and compared before and after the call: containers by the identity of their
items, tensors by their version counters, generators by their states. Objects that can't be
inspected, such as iterators, and buffers that are written without a new version, as batch norm does
in training, count as changed. Globals, and objects that only a function refers to, are not seen.
"""

from __future__ import annotations

import enum
import functools
import re
import types
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import chain
from operator import is_
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.tensors import private

_SCALARS = (bool, int, float, complex, str, bytes, torch.Size)
# Types of values that never change, or are code.
_INERT = (
    *_SCALARS,
    types.NoneType,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.EllipsisType,
    range,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
    np.generic,
    np.ufunc,
    enum.Enum,
    re.Pattern,
    PurePath,
    weakref.ReferenceType,
)
# Asked first, since it is quick.
_COMMON = {types.NoneType, bool, int, float, str}
# Attributes that every module has, and that of a function in place of its call.
_NOT_OWN = {*vars(nn.Module()), "_compiled_call_impl"}


def _is_inert(value: Any) -> bool:
    return type(value) in _COMMON or isinstance(value, _INERT)


class Reach:
    """The objects that can be reached from some values, by identity.

    Attributes
    ----------
    objects : dict
        Containers and other objects that hold something, in the order in which they are found,
        which is the same for similar structures.
    contents : dict
        The contents of each, as live views.
    tensors, generators : dict
        The tensors and generators that were found.
    is_clear : bool
        Whether all objects could be inspected.
    """

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.contents: dict[int, list[Iterable[Any]]] = {}
        self.tensors: dict[int, Tensor] = {}
        self.generators: dict[int, torch.Generator] = {}
        self.is_clear = True

    def add(self, values: Iterable[Any]) -> None:
        """Add the objects reached from values."""
        waiting = [value for value in values if not _is_inert(value)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, Tensor):
                self.tensors[id(value)] = value
                # It has no version counter.
                self.is_clear &= not value.is_inference()
            elif isinstance(value, torch.Generator):
                self.generators[id(value)] = value
            elif id(value) not in self.contents:
                waiting += [one for one in self.open(value) if not _is_inert(one)]

    def open(self, value: Any) -> Iterable[Any]:
        """Note the contents of a container or an object, and return them."""
        if isinstance(value, nn.Module):
            return [*self.open_module(value), *value.children()]
        views: list[Iterable[Any]] = []
        if isinstance(value, dict | types.MappingProxyType):
            views.append(value.values())
        elif isinstance(value, list | set | deque):
            views.append(value)
        if isinstance(getattr(value, "__dict__", None), dict):
            views.append(vars(value).values())
        is_fixed = isinstance(value, tuple | frozenset | functools.partial | types.MethodType)
        self.is_clear &= is_fixed or bool(views)
        self.objects[id(value)] = value
        self.contents[id(value)] = views
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        if isinstance(value, types.MethodType):
            return (value.__self__,)
        return value if isinstance(value, tuple | frozenset) else chain.from_iterable(views)

    def open_module(self, module: nn.Module) -> Iterable[Any]:
        """Note the contents of a module, and return those other than its children."""
        self.objects[id(module)] = module
        if not takes_hooks(module):
            # TorchScript keeps what it has out of sight.
            self.is_clear = False
            return []
        own = vars(module)
        self.contents[id(module)] = [own.values()]
        for name in ("_parameters", "_buffers", "_modules"):
            self.objects[id(own[name])] = own[name]
            self.contents[id(own[name])] = [own[name].values()]
        # Batch norm writes its buffers without new versions.
        self.is_clear &= not (module.training and own["_buffers"])
        found = [item for name, item in own.items() if name not in _NOT_OWN]
        return [*found, *own["_parameters"].values(), *own["_buffers"].values()]

    def join(self, other: Reach) -> None:
        """Add the findings of another one."""
        self.objects |= other.objects
        self.contents |= other.contents
        self.tensors |= other.tensors
        self.generators |= other.generators
        self.is_clear &= other.is_clear


class Surroundings:
    """The objects that calls of a network's modules can write to.

    Parameters
    ----------
    net : torch.nn.Module
        The network.

    Examples
    --------
    >>> net = nn.Sequential(nn.Dropout(), nn.ReLU(inplace=True), nn.Tanh())
    >>> surroundings, x = Surroundings(net), torch.ones(2)
    >>> for module in net:
    ...     look = surroundings.look(module, x)
    ...     _ = module(x)
    ...     print(look.changed())
    None
    None
    []
    """

    def __init__(self, net: nn.Module) -> None:
        self._reach: dict[nn.Module, Reach] = {}
        self._find(net)

    def _find(self, module: nn.Module) -> Reach:
        reach = self._reach.get(module)
        if reach is None:
            reach = self._reach[module] = Reach()
            reach.add(reach.open_module(module))
            for child in module.children():
                reach.join(self._find(child))
        return reach

    def look(self, module: nn.Module, inputs: Any = ()) -> Look:
        """Note the state, before a call of a module, of everything that it can write to.

        Parameters
        ----------
        module : torch.nn.Module
            A module of the network.
        inputs : Any
            Its inputs.
        """
        given = Reach()
        given.add((inputs,))
        return Look(self._reach[module], given)


class Look:
    """The state of these objects before a call.

    Parameters
    ----------
    own, given : Reach
        The objects reached from the module, and from its inputs.
    """

    def __init__(self, own: Reach, given: Reach) -> None:
        self.own = own
        self.given = given
        self._own_state, self._given_state = _state(own), _state(given)
        self._parts = [list(parts_of(value)) for value in given.objects.values()]
        self._random = _random()

    def is_unchanged(self) -> bool:
        """Whether nothing has changed, except perhaps global generators."""
        return _is_same(self.own, self._own_state) and _is_same(self.given, self._given_state)

    def changed(self) -> list[tuple[Any, list[tuple[Any, Any]]]] | None:
        """Return the objects among the inputs with changed contents, and their earlier contents.

        None if something else has changed.
        """
        is_same = _is_same(self.given, self._given_state, with_contents=False)
        is_same = is_same and _is_same(self.own, self._own_state)
        if not (is_same and all(map(torch.equal, self._random, _random()))):
            return None
        if _is_same(self.given, self._given_state):
            return []
        given = zip(self.given.objects.values(), self._parts, strict=True)
        return [(value, parts) for value, parts in given if not _same_parts(value, parts)]

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was in use before."""
        memory = private.memory_of(tensor)
        return any(
            memory == private.memory_of(other)
            for reach in (self.own, self.given)
            for other in reach.tensors.values()
        )

    def restore_generators(self) -> None:
        """Restore the states of generators that the module holds."""
        for generator, state in zip(self.own.generators.values(), self._own_state[2], strict=True):
            generator.set_state(state)


_State: TypeAlias = tuple[list[Any], list[int], list[Tensor]]


def _state(reach: Reach) -> _State:
    return (
        [*chain.from_iterable(chain.from_iterable(reach.contents.values()))],
        # If it is not clear, it counts as changed whatever else is found.
        [tensor._version for tensor in reach.tensors.values()] if reach.is_clear else [],
        [generator.get_state() for generator in reach.generators.values()],
    )


def _is_same(reach: Reach, before: _State, *, with_contents: bool = True) -> bool:
    if not reach.is_clear:
        return False
    contents, versions, generators = _state(reach)
    return (
        versions == before[1]
        and (not with_contents or _hold_same(contents, before[0]))
        and all(map(torch.equal, generators, before[2]))
    )


def _hold_same(now: list[Any], before: list[Any]) -> bool:
    if len(now) != len(before):
        return False
    return all(map(is_, now, before)) or all(map(_is_equal, now, before))


def held_by(value: Any) -> Any:
    """Return the container of a value's parts by name or number; None if it has no parts."""
    if type(value) in (list, tuple, dict):
        return value
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict and not isinstance(value, list | dict) else None


def parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the parts of a value with their names or numbers."""
    held = held_by(value)
    return held.items() if isinstance(held, dict) else enumerate(held or ())


def _same_parts(value: Any, before: list[tuple[Any, Any]]) -> bool:
    now = list(parts_of(value))
    return (
        held_by(value) is not None
        and [name for name, _ in now] == [name for name, _ in before]
        and _hold_same([part for _, part in now], [part for _, part in before])
    )


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal numbers or texts."""
    return one is other or (type(one) in _SCALARS and type(one) is type(other) and one == other)


def _random() -> list[Tensor]:
    """Return the states of torch's own generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own
        states += torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states.append(torch.mps.get_rng_state())
    return states
