"""Events, and what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from scio_recorder.tensors.structures import tensors


@dataclass
class Event:
    """A call or a gradient as ``stash`` sees it: nothing is copied yet.

    Parameters
    ----------
    name : str
        Qualified name of the module, ``""`` for the root.
    type : type
        The module's class.
    grad : bool
        False for a call of forward, True for the gradient of one.
    value : Any
        The return value of the module, or the tuple of gradients with respect to it: one entry
        for each of its tensors, None where no gradient came.
    args : tuple
        The arguments of forward; empty where ``grad`` is True.
    kwargs : dict
        Likewise.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Stash:
    """The part of an event that is kept.

    Parameters
    ----------
    name : str
        Qualified name of the module, ``""`` for the root.
    type : type
        The module's class.
    grad : bool
        False for a call of forward, True for the gradient of one.
    value : Any
        The return value of the module, or the tuple of gradients. ``stash_value`` has replaced
        every tensor in it.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any

    @property
    def first_value(self) -> Any:
        """The first tensor in the value; the first item of any kind where there is none."""
        found = tensors(self.value)
        return found[0] if found else _first_item(self.value)


def _first_item(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list) and value:
        return _first_item(value[0])
    return value
