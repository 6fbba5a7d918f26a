"""The name by which a module is called: one that a network holds under several does not know it.

The stack of the interpreter shows which module calls it, and the instruction by which it does so
where it found it. An instruction that calls a variable says nothing.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn

# The file in which torch calls modules.
_MODULES = nn.Module.__call__.__code__.co_filename
# Instructions of the interpreter: those that read an attribute, and those that belong to a call.
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_BESIDE_CALLS = ("KW_NAMES", "PRECALL", "PUSH_NULL")


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
    frame = inspect.currentframe()
    module, caller, around = None, None, None
    while frame is not None:
        if frame.f_code.co_filename == _MODULES:
            running = frame.f_locals.get("self")
            module = running if module is None else module
            if running is module:
                # Others may have put code around the call, which stands in between.
                caller = frame.f_back
            elif id(running) in names:
                around = running
                break
        frame = frame.f_back
    shown = [] if caller is None or around is None else _called_by(caller)
    # A list of its own or a property shows another name than that of the module.
    if _submodule(around, shown) is not module:
        shown = []
    return CallingName(names.get(id(around), ""), ".".join(shown))


def _submodule(around: Any, path: Sequence[str]) -> Any:
    for name in path:
        around = getattr(around, "_modules", {}).get(name)
    return around


def _called_by(frame: FrameType) -> list[str]:
    """Return how a frame finds what it calls: attributes, and the key of a list."""
    names, variable = _called_at(frame.f_code, frame.f_lasti)
    if variable is None:
        return names
    variables = frame.f_locals
    key = variables.get(variable)
    if type(variables) is dict:
        # Until Python 3.12 a copy, which would keep the variables alive.
        variables.clear()
    return [*names, str(key)] if isinstance(key, int | str) else names


@functools.lru_cache(4096)
def _called_at(code: CodeType, at: int) -> tuple[list[str], str | None]:
    """Return by which names an instruction finds what it calls, and by which variable's value.

    ``layers[0]`` and ``getattr(self, "first")`` have a key, which may be a variable.
    """
    found = [one for one in dis.get_instructions(code) if one.opname not in _BESIDE_CALLS]
    call = next((one.positions for one in found if one.offset == at), None)
    # Instructions that find what is called begin where the call does in the text, and end before.
    finding = [
        place
        for place, one in enumerate(found)
        if call is not None
        and one.positions is not None
        and one.offset < at
        and one.positions[::2] == call[::2]
        and one.positions[1::2] < call[1::2]
    ]
    names = [str(found[at].argval) for at in finding if found[at].opname in _ATTRIBUTES]
    if not finding or not found[finding[-1]].opname.startswith(("BINARY_", "CALL")):
        return names, None
    key = found[finding[-1] - 1]
    value = key.argval[-1] if isinstance(key.argval, tuple) else key.argval
    is_variable = key.opname.startswith("LOAD_FAST")
    return (names, value) if is_variable else ([*names, str(value)], None)
