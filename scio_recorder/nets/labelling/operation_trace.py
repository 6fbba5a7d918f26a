"""The operations of a pass, as they are listed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from scio_recorder.layer import DepthIdx, Layer, Operation, describe
from scio_recorder.nets.architecture import operation_row
from scio_recorder.nets.hookable import hooked
from scio_recorder.nets.labelling.torchinfo import CallTrace, Row
from scio_recorder.nets.operations import (
    LibraryMode,
    Line,
    calling_line,
    function_name,
    returns_tensors,
)
from scio_recorder.tensors import private


class _Made(NamedTuple):
    """An operation, and what had happened before."""

    row: Row
    function: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name
    output_spec: Any
    is_transformed: bool
    line: Line
    num_completed: int


class OperationTrace(CallTrace):
    """Makes the rows of one pass, and notes the operations of the own code of each call.

    Hooks of others are no own code: between the first and the last hook before a forward, and again
    after it, no call is the current one.
    """

    def __init__(self, net: nn.Module, twin: nn.Module, batch_dim: int | None = None) -> None:
        super().__init__(net, twin, batch_dim)
        self._current: list[Row | None] = []
        self._made: list[_Made] = []
        self._counted: dict[tuple[int, str], int] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take the calls and the operations inside a block."""
        leaving = hooked(self._twin, before=self._begin, after=self._leave, always=True, first=True)
        with leaving, super().watched(), _Listing(self._note):
            yield

    def _begin(self, *call: Any) -> None:
        self._current.append(None)

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._start(module, args, kwargs)
        # A copy that the network makes of a module has no row.
        open_calls = self._open.get(id(module))
        self._current[-1] = open_calls[-1].row if open_calls else None

    def _leave(self, *call: Any) -> None:
        self._current[-1] = None

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        super()._end(module, args, kwargs, output)
        self._current.pop()

    def _note(self, function: Callable[..., Any], output: Any) -> None:
        row = self._current[-1] if self._current else None
        if row is None or not returns_tensors(output):
            return
        if private.is_in_compiled_function():
            # It runs uncompiled while the network is labelled, and nothing is seen of it later.
            return
        name = function_name(function)
        index = self._counted.get((id(row), name), 0)
        self._counted[id(row), name] = index + 1
        is_transformed = private.transform_around() is not None
        spec, line = describe(output), calling_line()
        self._made.append(_Made(row, name, index, spec, is_transformed, line, self._completed))

    def operations(self, layers: Mapping[DepthIdx, Layer]) -> list[Operation]:
        """Return the operations of calls that returned, in the order in which they returned."""
        made = [one for one in self._made if one.row.completion is not None]
        found = []
        for number, one in enumerate(made):
            layer = layers[one.row.depth, one.row.depth_index or 0]
            # After the layers that had returned, and in order among each other.
            completion = one.num_completed - 1 + (number + 1) / (len(made) + 1)
            row = operation_row(
                layer, one.function, one.index, completion, one.output_spec, *one.line
            )
            found.append(dataclasses.replace(row, executed=not one.is_transformed))
        return found


class _Listing(LibraryMode):
    """Hands each call of a function, and what it returned, to a function."""

    is_paused = False

    def __init__(self, note: Callable[[Callable[..., Any], Any], None]) -> None:
        self._note = note

    def take(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function, and note it."""
        output = func(*args, **kwargs)
        self._note(func, output)
        return output
