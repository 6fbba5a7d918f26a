"""The name by which a module is called: one that a network holds under several does not know it.

The stack of the interpreter shows which module calls it, and the instruction by which it does so
where it found it. An instruction that calls a variable says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scio_recorder.interpreter import names_called_by
from scio_recorder.tensors import private


class CallingName(NamedTuple):
    """The module that calls another one, and the name that it has for that, empty if not shown."""

    around: str
    attribute: str

    def __str__(self) -> str:
        return ".".join(filter(None, self))

    def agrees(self, other: CallingName) -> bool:
        """Whether both may stand for one name."""
        are_shown = self.attribute and other.attribute
        return self.around == other.around and not (are_shown and self != other)


def calling_name(names: Mapping[int, str]) -> CallingName:
    """Return the name under which the innermost running module was called in the network.

    Parameters
    ----------
    names : mapping of int to str
        The names of the network's modules, by ``id``.
    """
    module, caller, around = None, None, None
    for running, frame in private.running_modules():
        module = running if module is None else module
        if running is module:
            # Others may have put code around the call, which stands in between.
            caller = frame
        elif id(running) in names:
            around = running
            break
    shown = [] if caller is None or around is None else names_called_by(caller)
    # A list of its own or a property shows another name than that of the module.
    if _submodule(around, shown) is not module:
        shown = []
    return CallingName(names.get(id(around), ""), ".".join(shown))


def _submodule(around: Any, path: Sequence[str]) -> Any:
    for name in path:
        around = getattr(around, "_modules", {}).get(name)
    return around
