"""What a call did, kept so that it need not run again.

NOTE [What a call puts into what it was given]

Layers of language models put keys and values into a cache that they are given. Such a call does
more than return something, but what it does is known: some objects among its inputs hold other
things afterwards. That is done again to the inputs of a later run, whose objects are found in the
same order. What was put there must be new, as what is returned must.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from scio_recorder.nets.state.traces import Look, Reach
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import is_plain, twin
from scio_recorder.tensors.structures import flatten

# Kernels may take another way where memory is not aligned to this many bytes, as copies are.
_ALIGNMENT = 64


class _Place(int):
    """Stands for an object or a tensor among the inputs, by its number."""


class _Filled(NamedTuple):
    """What one of the objects among the inputs holds after the call."""

    where: _Place
    names: list[Any]
    items: list[Any]


class Kept:
    """What a call returned, and what it put into objects that it was given.

    Parameters
    ----------
    output : Any
        What it returned.
    filled : list of _Filled
        What these objects hold.
    """

    def __init__(self, output: Any, filled: list[_Filled]) -> None:
        leaves, self._rebuild = flatten((output, filled))
        self._leaves = [twin(leaf) for leaf in leaves]

    @classmethod
    def of(cls, output: Any, look: Look) -> Kept | None:
        """Keep a call that has returned; None where it did more than can be done again.

        Parameters
        ----------
        output : Any
            What it returned.
        look : Look
            What was there before it.
        """
        changed = look.changed()
        if changed is None or not _is_simple(output):
            return None
        places = _places(look.given)
        filled = [one for value in changed if (one := _filled(value, places)) is not None]
        if len(filled) < len(changed):
            return None
        new = [item for one in filled for item in one.items if type(item) is not _Place]
        return cls(output, filled) if _is_new((output, new), new, look) else None

    def again(self, inputs: Any) -> Any:
        """Do to inputs what the call did to its own, and return what it returned."""
        output, filled = self._rebuild([twin(leaf) for leaf in self._leaves])
        if filled:
            given = Reach()
            given.add((inputs,))
            values = [*given.objects.values(), *given.tensors.values()]
            for one in filled:
                items = [values[at] if type(at) is _Place else at for at in one.items]
                _fill(values[one.where], one.names, items)
        return output


def _places(given: Reach) -> dict[int, _Place]:
    return {at: _Place(number) for number, at in enumerate((*given.objects, *given.tensors))}


def _filled(value: Any, places: dict[int, _Place]) -> _Filled | None:
    """Return what an object holds, None where it is of a kind that can't be filled."""
    held = value if type(value) in (list, dict) else getattr(value, "__dict__", None)
    if held is None or isinstance(value, list | dict) is not (held is value):
        return None
    names = list(held) if isinstance(held, dict) else []
    items = held.values() if isinstance(held, dict) else held
    return _Filled(places[id(value)], names, [places.get(id(item), item) for item in items])


def _fill(value: Any, names: list[Any], items: list[Any]) -> None:
    if type(value) is list:
        value[:] = items
        return
    held = value if type(value) is dict else vars(value)
    held.clear()
    held.update(zip(names, items, strict=True))


def _is_new(whole: Any, new: list[Any], look: Look) -> bool:
    """Whether tensors of a call lie in memory of their own, and its objects were not there."""
    reach = Reach()
    reach.add(new)
    if not reach.is_clear or reach.objects.keys() & (look.own.objects | look.given.objects).keys():
        return False
    leaves, _ = flatten(whole)
    memories = {private.memory_of(leaf) for leaf in leaves}
    return len(memories) == len(leaves) and not any(
        leaf.requires_grad
        or not is_plain(leaf)
        or leaf.data_ptr() % _ALIGNMENT
        or look.shares_memory(leaf)
        for leaf in leaves
    )


def _is_simple(value: Any) -> bool:
    """Whether a structure consists of tensors, numbers, texts and common containers."""
    if value is None or isinstance(value, Tensor | bool | int | float | complex | str):
        return True
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(map(_is_simple, vars(value).values())) if hasattr(value, "__dict__") else False
    return False
