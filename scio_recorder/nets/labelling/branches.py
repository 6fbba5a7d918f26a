"""Where in its source a traceback was, and whether a branch was taken there."""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

__all__ = ["Step", "calls_operation", "is_returned", "steps_of", "takes_branch"]

_Position = tuple[int, int, int, int]
# Methods and functions of torch that give a Python value for a tensor.
_READING = ("item", "tolist", "is_nonzero")
# What a branch compiles to, for code without source.
_BRANCHING = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "GET_ITER", "FOR_ITER")


@dataclass(frozen=True)
class Step:
    """One entry of a traceback: the instruction at which a frame was."""

    filename: str
    name: str
    line: int
    operation: str
    # First and last line, first and last column in bytes; None where Python does not keep them.
    position: _Position | None

    def __str__(self) -> str:
        text = linecache.getline(self.filename, self.line).strip()
        return f"{self.filename}:{self.line}" + (f" ({text})" if text else "")


def steps_of(traceback: TracebackType | None) -> list[Step]:
    """Return the entries of a traceback, the outermost first.

    Parameters
    ----------
    traceback : types.TracebackType or None
        Of an exception that was caught.

    Returns
    -------
    list of Step
        One for each frame.

    Examples
    --------
    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError as error:
    ...     [step.operation for step in steps_of(error.__traceback__)]
    ['BINARY_OP']
    """
    steps = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        index = traceback.tb_lasti // 2
        numbers = next((p for i, p in enumerate(code.co_positions()) if i == index), None)
        known = numbers is not None and None not in numbers
        steps.append(
            Step(
                filename=code.co_filename,
                name=code.co_name,
                line=traceback.tb_lineno,
                operation=dis.opname[code.co_code[traceback.tb_lasti]],
                position=numbers if known else None,  # type: ignore[arg-type]
            )
        )
        traceback = traceback.tb_next
    return steps


def takes_branch(step: Step) -> bool:
    """Whether the value that a step works on decides which code runs next.

    Parameters
    ----------
    step : Step
        The step.

    Returns
    -------
    bool
        True in the head of a branch or a loop, except where the other way is an exception.

    Examples
    --------
    >>> takes_branch(Step("<no source>", "forward", 1, "GET_ITER", None))
    True
    """
    tree = _parsed(step)
    nodes = list(ast.walk(tree)) if tree else []
    if any(_holds(node, step) for node in nodes if _is_check(node)):
        return False
    # The instruction of a branch bears the position of its whole statement in some Pythons.
    if step.operation.startswith(_BRANCHING):
        return True
    return any(_holds(head, step) for node in nodes for head in _heads(node))


def calls_operation(step: Step) -> bool:
    """Whether a step calls a function that is not one of those that read a value.

    Parameters
    ----------
    step : Step
        The step.

    Returns
    -------
    bool
        False for Python's built-in functions, for ``item`` and its kin, and without source.

    Examples
    --------
    >>> calls_operation(Step("<no source>", "forward", 1, "CALL", None))
    False
    """
    tree = _parsed(step)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call)) if tree else ()
    here = [call.func for call in calls if _spans(call) == step.position]
    return any(not _reads(func) for func in here)


def is_returned(step: Step) -> bool:
    """Whether a step is part of what its function returns.

    Parameters
    ----------
    step : Step
        The step.

    Returns
    -------
    bool
        False where there is no source.

    Examples
    --------
    >>> is_returned(Step("<no source>", "forward", 1, "CALL", None))
    False
    """
    tree = _parsed(step)
    returns = (node for node in ast.walk(tree) if isinstance(node, ast.Return)) if tree else ()
    return any(_holds(node, step) for node in returns)


def _parsed(step: Step) -> ast.Module | None:
    if step.position is None:
        return None
    try:
        return ast.parse("".join(linecache.getlines(step.filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _is_check(node: ast.AST) -> bool:
    """Whether a statement only decides whether to raise."""
    if isinstance(node, ast.If) and not node.orelse:
        return all(isinstance(statement, ast.Raise) for statement in node.body)
    return isinstance(node, ast.Assert)


def _heads(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node.test
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.iter
        yield from getattr(node, "ifs", ())
    elif isinstance(node, ast.Match):
        yield node.subject
    elif isinstance(node, ast.BoolOp):
        yield from node.values[:-1]


def _reads(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return hasattr(builtins, function.id)
    return isinstance(function, ast.Attribute) and function.attr in _READING


def _spans(node: ast.AST) -> _Position:
    names = ("lineno", "end_lineno", "col_offset", "end_col_offset")
    first, last, column, end_column = (getattr(node, name, 0) for name in names)
    return first, last, column, end_column


def _holds(node: ast.AST, step: Step) -> bool:
    assert step.position is not None
    first, last, column, end_column = step.position
    begin, end, start_column, stop_column = _spans(node)
    return (begin, start_column) <= (first, column) and (last, end_column) <= (end, stop_column)
