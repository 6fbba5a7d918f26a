"""Events, and what is kept of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from scio_recorder.tensors.structures import tensors

__all__ = ["Event", "Stash"]


@dataclass
class Event:
    """What happened, as ``stash`` sees it: nothing is copied yet.

    Parameters
    ----------
    name : str
        Qualified name of the module, ``""`` for the root.
    type : type
        The module's class.
    grad : bool
        False for a call of forward, True for the gradient of one.
    value : Any
        What the module returned, or the tuple of gradients with respect to that: one entry for
        each of its tensors, None where no gradient came.
    args : tuple
        What forward received; empty where ``grad`` is True.
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
    """What is kept of an event.

    Parameters
    ----------
    name : str
        Qualified name of the module, ``""`` for the root.
    type : type
        The module's class.
    grad : bool
        False for a call of forward, True for the gradient of one.
    value : Any
        What the module returned, or the tuple of gradients, with every tensor replaced by what
        ``stash_value`` made of it.
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
