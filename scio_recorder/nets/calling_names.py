"""The name by which a module is called: one that a network holds under several does not know it.

The stack of the interpreter shows which module calls it, and the instruction by which it does so
where it found it. An instruction that calls a variable says nothing.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

from torch import nn

# The file in which torch calls modules.
_MODULES = nn.Module.__call__.__code__.co_filename
# Instructions of the interpreter: those that read an attribute, and those that belong to a call.
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_BESIDE_CALLS = ("KW_NAMES", "PRECALL", "PUSH_NULL")


def calling_name(names: Mapping[int, str]) -> str | None:
    """Return the name under which the innermost running module was called in the network.

    It consists of the name of the module around it and of the attribute that was called, if the
    code that calls it names one: a module that is held under several names does not know.

    Parameters
    ----------
    names : mapping of int to str
        The names of the network's modules, by ``id``.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != _MODULES:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == _MODULES:
        frame = frame.f_back
    attribute = None if frame is None else _called_attribute(frame)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_filename == _MODULES else None
        if id(owner) in names:
            return ".".join(filter(None, (names[id(owner)], attribute)))
        frame = frame.f_back
    return attribute


def _called_attribute(frame: FrameType) -> str:
    """Return what a frame calls, such as ``block.act`` or ``layers.0``; nothing for a variable."""
    attributes, key, is_variable = _called(frame.f_code, frame.f_lasti)
    if is_variable:
        variables = frame.f_locals
        key = variables.get(key)
        if type(variables) is dict:
            # Until Python 3.12 a copy, which would keep the variables alive.
            variables.clear()
    return ".".join([*attributes, *([str(key)] if isinstance(key, int | str) else [])])


@functools.lru_cache(4096)
def _called(code: CodeType, at: int) -> tuple[list[str], Any, bool]:
    """Return the attributes and the key by which an instruction finds what it calls.

    The key is that of ``layers[key]`` or ``getattr(self, key)``, a constant or a variable.
    """
    found = [one for one in dis.get_instructions(code) if one.opname not in _BESIDE_CALLS]
    call = next((one.positions for one in found if one.offset == at), None)
    if call is None or call.lineno is None:
        return [], None, False
    # The instructions that find what is called begin where the call does, and end before it.
    finding = [
        place
        for place, one in enumerate(found)
        if one.offset < at
        and one.positions is not None
        and one.positions[::2] == call[::2]
        and one.positions[1::2] < call[1::2]
    ]
    attributes = [found[at].argval for at in finding if found[at].opname in _ATTRIBUTES]
    if not finding or not found[finding[-1]].opname.startswith(("BINARY_", "CALL")):
        return attributes, None, False
    key = found[finding[-1] - 1]
    name = key.argval[-1] if isinstance(key.argval, tuple) else key.argval
    return attributes, name, key.opname.startswith("LOAD_FAST")
