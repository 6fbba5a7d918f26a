"""The effects of a call, kept so that it need not run again.

NOTE [Writes into inputs]

Layers of language models put keys and values into a cache that they receive. Such a call does more
than return something, but its effect is known: some objects among its inputs hold other things
afterwards. The same is done to the inputs of a later run, in which the objects are found by the
same path. Everything put there must be new, as everything returned must.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from torch import Tensor

from scio_recorder.nets.state.traces import Look, Reach, held_by, parts_of
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import is_plain, twin
from scio_recorder.tensors.structures import flatten, tensors

# Kernels may compute differently if memory is not aligned to this many bytes, as copies are.
_ALIGNMENT = 64
# The path to an object among inputs: names of attributes, keys and indices, one after the other.
_Path: TypeAlias = tuple[Any, ...]


class _Value:
    """A value that is copied each time it is handed out."""

    def __init__(self, value: Any) -> None:
        leaves, self._rebuild = flatten(value)
        self._leaves = [twin(leaf) for leaf in leaves]

    def copy(self) -> Any:
        return self._rebuild([twin(leaf) for leaf in self._leaves])


class Kept:
    """The output of a call, and its writes into objects that it received.

    Parameters
    ----------
    output : Any
        The output.
    filled : list
        Paths to objects, each with a place in the object and the value that was put there.
    """

    def __init__(self, output: Any, filled: list[tuple[_Path, Any, Any]]) -> None:
        self._output = _Value(output)
        self._filled = [(path, name, _Value(value)) for path, name, value in filled]

    @classmethod
    def of(cls, output: Any, look: Look, inputs: Any) -> Kept | None:
        """Keep a call that has returned; None if it had effects that can't be repeated.

        Parameters
        ----------
        output : Any
            The output.
        look : Look
            The state before the call.
        inputs : Any
            The inputs of the call.
        """
        changed = look.changed()
        if changed is None or not _is_simple(output):
            return None
        filled: list[tuple[_Path, Any, Any]] = []
        for value, before in changed:
            path, changes = _path(inputs, value), _changes(value, before)
            if path is None or changes is None:
                return None
            filled += [(path, name, item) for name, item in changes]
        new = [item for _, _, item in filled]
        return cls(output, filled) if _is_new(output, new, look) else None

    def again(self, inputs: Any) -> Any:
        """Do to inputs what the call did to its own, and return a copy of its output."""
        for path, name, value in self._filled:
            holder = inputs
            for step in path:
                holder = held_by(holder)[step]
            held = held_by(holder)
            if isinstance(held, list) and name == len(held):
                held.append(value.copy())
            else:
                held[name] = value.copy()
        return self._output.copy()


def _path(inputs: Any, wanted: Any) -> _Path | None:
    """Return the shortest path from inputs to an object in them."""
    ways: list[tuple[Any, _Path]] = [(inputs, ())]
    seen = set()
    for value, path in ways:
        if value is wanted:
            return path
        if id(value) not in seen and not isinstance(value, Tensor):
            seen.add(id(value))
            ways += [(part, (*path, name)) for name, part in parts_of(value)]
    return None


def _changes(value: Any, before: list[tuple[Any, Any]]) -> list[tuple[Any, Any]] | None:
    """Return the new contents of an object; None if something was removed."""
    old, now = dict(before), dict(parts_of(value))
    if held_by(value) is None or not old.keys() <= now.keys():
        return None
    return [(name, item) for name, item in now.items() if old.get(name, now) is not item]


def _is_new(output: Any, new: list[Any], look: Look) -> bool:
    """Whether tensors of a call lie in memory of their own, and its objects are new."""
    reach = Reach()
    reach.add(new)
    if not reach.is_clear or reach.objects.keys() & (look.own.objects | look.given.objects).keys():
        return False
    leaves = [leaf for value in (output, *new) for leaf in tensors(value)]
    memories = {private.memory_of(leaf) for leaf in leaves}
    return len(memories) == len(leaves) and not any(
        leaf.requires_grad
        or not is_plain(leaf)
        or vars(leaf)  # attributes that somebody has added
        or leaf.data_ptr() % _ALIGNMENT
        or look.shares_memory(leaf)
        for leaf in leaves
    )


def _is_simple(value: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether a structure consists of tensors, numbers, texts and common containers.

    No container may be inside itself.
    """
    if value is None or isinstance(value, Tensor | bool | int | float | complex | str):
        return True
    if id(value) in around:
        return False
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, tuple | list):
        parts = list(value)
    elif dataclasses.is_dataclass(type(value)) and hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    else:
        return False
    return all(_is_simple(part, around | {id(value)}) for part in parts)
