"""The operations of a pass, as they are listed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx, describe
from scio_recorder.nets.attention import AttentionReader
from scio_recorder.nets.attention.kind import SeenAttention, SeenOperation
from scio_recorder.nets.hookable import hooked
from scio_recorder.nets.labelling.torchinfo import CallTrace, Row
from scio_recorder.nets.operations import (
    LibraryMode,
    calling_line,
    function_name,
    returns_tensors,
)
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors import private


class _NotedOperation(NamedTuple):
    """An operation of a call, until the labels of calls are known."""

    call: Row
    # The number of calls that had returned.
    num_completed: int
    # Whether it can be recorded.
    is_seen: bool
    function: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name
    output: Any
    line: tuple[str, int, str]


class OperationTrace(CallTrace, LibraryMode):
    """Makes the rows of one pass, and notes the operations of the own code of each call.

    Hooks of others are no own code: between the first and the last hook before a forward, and again
    after it, no call is the current one.
    """

    is_paused = False

    def __init__(self, net: nn.Module, twin: nn.Module, batch_dim: int | None = None) -> None:
        super().__init__(net, twin, batch_dim)
        self._current: list[Row | None] = []
        self._made: list[_NotedOperation] = []
        self._reader = AttentionReader()
        # With the call whose own code computes it.
        self._attention: list[tuple[Row, SeenAttention]] = []
        self._counted: Counter[tuple[int, str]] = Counter()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take the calls and the operations inside a block."""
        leaving = hooked(self._twin, before=self._begin, after=self._leave, always=True, first=True)
        with leaving, super().watched(), self:
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

    def take(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function, and note it if it is an operation."""
        output = func(*args, **kwargs)
        row = self._current[-1] if self._current else None
        # A compiled function runs uncompiled now, and nothing is seen of it later.
        if row is None or not returns_tensors(output) or private.is_in_compiled_function():
            return output
        name = function_name(func)
        is_seen = private.transform_around() is None
        what = name, self._counted[id(row), name], describe(output), calling_line()
        self._made.append(_NotedOperation(row, self._completed, is_seen, *what))
        self._counted[id(row), name] += 1
        if is_seen:
            received = Inputs(tuple(args), dict(kwargs))
            seen = self._reader.see(SeenOperation(row, row.module, *what[:2], received, output))
            if seen is not None:
                # Without the tensors.
                first, last = ((end.function, end.index) for end in (seen.first, seen.last))
                self._attention.append((row, seen._replace(first=first, last=last)))
        return output

    def attention(self) -> dict[OperationIdx, SeenAttention]:
        """Return the attention in own code, by the labels of the operations that complete it."""
        found = {}
        for row, seen in self._attention:
            label = row.depth, row.depth_index or 0
            first, last = (OperationIdx(*label, *end) for end in (seen.first, seen.last))
            found[last] = seen._replace(first=first, last=last)
        return found

    def operations(
        self, layers: Mapping[DepthIdx, Layer], attention: Mapping[OperationIdx, SeenAttention]
    ) -> list[Operation]:
        """Return the operations of calls that returned, in the order in which they returned."""
        made = [one for one in self._made if one.call.completion is not None]
        found = []
        for number, one in enumerate(made):
            # After the layers that had returned, and in order among each other.
            completion = one.num_completed - 1 + (number + 1) / (len(made) + 1)
            layer = layers[one.call.depth, one.call.depth_index or 0]
            what = one.function, one.index, one.output, one.line
            completed = attention.get(OperationIdx(*layer.label, one.function, one.index))
            found.append(Operation(layer, *what, completion, one.is_seen, completed))
        return found
