"""What is private to Python's interpreter: its stack, its instructions, and who refers to what.

No other file but `tensors/private.py` looks into frames, bytecode or the garbage collector. Both
answer questions, and hand out a frame only as something to ask about. A frame that a variable of
its own function held would live until garbage is collected.
"""

from __future__ import annotations

import dis
import functools
import gc
import linecache
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

_T = TypeVar("_T")

# Returns the frame of the caller, or with a number n that of the n-th one around it. It is a
# builtin, since hooks ask.
frame_around: Callable[..., FrameType] = sys._getframe
# Returns the number of references to an object, those of the caller included.
num_references: Callable[[Any], int] = sys.getrefcount
# Returns what an object refers to, as far as the garbage collector sees it.
referents: Callable[..., list[Any]] = gc.get_referents

# Instructions of the interpreter: those that read an attribute, and those that belong to a call.
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_BESIDE_CALLS = ("KW_NAMES", "PRECALL", "PUSH_NULL")
# The flag of classes that are made while a program runs (Py_TPFLAGS_HEAPTYPE).
_HEAP_TYPE = 1 << 9


# -- the stack -------------------------------------------------------------------------------------


def stack(outermost: Collection[CodeType] = ()) -> Iterator[FrameType]:
    """Yield the frames of running functions, the caller's first, up to some functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in outermost:
        yield frame
        frame = frame.f_back


def is_called_in(frame: FrameType | None, outer: FrameType | None) -> bool:
    """Whether a frame is another one, or was called inside it, directly or not."""
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def has_room_for(number: int) -> bool:
    """Whether this many more calls fit on the stack, around which the interpreter sets a limit."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - number))
    except ValueError:
        # There are fewer frames.
        return True
    return False


def level_outside(packages: Collection[str]) -> int:
    """Return how far out the nearest code outside of some packages is, for the caller 1."""
    level = 0
    for level, frame in enumerate(stack()):
        if level and str(frame.f_globals.get("__name__")).partition(".")[0] not in packages:
            return level
    return level + 1


def lines_on_stack() -> Iterator[tuple[str, int]]:
    """Yield the file and the number of each line that is running, the caller's first."""
    frames = stack()
    next(frames)
    yield from ((frame.f_code.co_filename, frame.f_lineno) for frame in frames)


def line_below(file: str, function: str, hidden: str) -> tuple[str, int, str]:
    """Return the innermost line of code that is neither hidden nor inside calls of a function.

    Parameters
    ----------
    file : str
        Only frames inside the innermost one of this file count.
    function : str
        The name of the function.
    hidden : str
        The beginning of the names of files that are hidden, unless there is no other.

    Returns
    -------
    tuple
        The name of its file, its number, and the line itself.
    """
    frames: list[FrameType] = []
    for frame in stack():
        if frame.f_code.co_filename == file:
            break
        frames = [] if frame.f_code.co_name == function else [*frames, frame]
    shown = (frame for frame in frames if not frame.f_code.co_filename.startswith(hidden))
    nearest = next(shown, frames[-1])
    name, number = nearest.f_code.co_filename, nearest.f_lineno
    return name, number, linecache.getline(name, number, nearest.f_globals).strip()


def running(functions: Collection[CodeType]) -> tuple[CodeType, dict[str, Any]] | None:
    """Return which of some functions runs nearest around the caller, and its variables."""
    for frame in stack():
        if frame.f_code in functions:
            return frame.f_code, frame.f_locals
    return None


def objects_in(traceback: TracebackType | None) -> Iterator[Any]:
    """Yield the objects whose methods an error has left, the outermost first."""
    while traceback is not None:
        yield traceback.tb_frame.f_locals.get("self")
        traceback = traceback.tb_next


# -- instructions ----------------------------------------------------------------------------------


def names_called_by(frame: FrameType) -> list[str]:
    """Return how a frame finds what it is calling: by attributes, and the key of a container.

    Empty if the instruction does not say, as one that calls a variable.
    """
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
    shown = [step for step in dis.get_instructions(code) if step.opname not in _BESIDE_CALLS]
    call = next((step.positions for step in shown if step.offset == at), None)
    # Instructions that find what is called begin where the call does in the text, and end before.
    finding = [
        place
        for place, step in enumerate(shown)
        if call is not None
        and step.positions is not None
        and step.offset < at
        and step.positions[::2] == call[::2]
        and step.positions[1::2] < call[1::2]
    ]
    names = [str(shown[place].argval) for place in finding if shown[place].opname in _ATTRIBUTES]
    if not finding or not shown[finding[-1]].opname.startswith(("BINARY_", "CALL")):
        return names, None
    key = shown[finding[-1] - 1]
    value = key.argval[-1] if isinstance(key.argval, tuple) else key.argval
    is_variable = key.opname.startswith("LOAD_FAST")
    return (names, value) if is_variable else ([*names, str(value)], None)


# -- objects and classes ---------------------------------------------------------------------------


def cached_by_class(compute: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Let a function of a class remember its results while the classes live.

    Examples
    --------
    >>> @cached_by_class
    ... def name(kind):
    ...     print("asked")
    ...     return kind.__name__
    >>> name(int), name(int)
    asked
    ('int', 'int')
    """
    return _Results(compute).__getitem__


class _Results(dict[Any, Any]):
    """Results by class. A class that lives only for a while takes its results with it."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__()
        self._compute = compute
        # By the ids of classes, with references that tell when they are gone.
        self._passing: dict[int, tuple[Any, Any]] = {}

    def __missing__(self, kind: Any) -> Any:
        entry = self._passing.get(id(kind))
        if entry is not None:
            return entry[0]
        result = self._compute(kind)
        names = vars(sys.modules.get(kind.__module__, sys))
        if not is_defined_in_python(kind) or names.get(kind.__qualname__) is kind:
            self[kind] = result
        else:
            end = weakref.ref(kind, functools.partial(self._forget, id(kind)))
            self._passing[id(kind)] = result, end
        return result

    def _forget(self, key: int, gone: Any) -> None:
        self._passing.pop(key, None)


def is_defined_in_python(kind: type) -> bool:
    """Whether a class is made by a ``class`` statement, so that its state can be seen."""
    return bool(kind.__flags__ & _HEAP_TYPE)
