"""Operations: the names of torch's functions, the lines of code that call them, their list."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from scio_recorder.display.outline import Listed, Listing
from scio_recorder.display.page import rendered
from scio_recorder.interpreter import line_below
from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx, counted, describe
from scio_recorder.nets.attention import AttentionReader
from scio_recorder.nets.attention.kind import SeenAttention, SeenOperation
from scio_recorder.nets.hookable import hooked
from scio_recorder.nets.labelling.torchinfo import CallTrace, Row
from scio_recorder.nets.records import Inputs, LayerMapping
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import tensors

_TORCH = os.path.dirname(torch.__file__) + os.sep
# Columns of the list of operations: a line of code is to be read.
_WIDEST = 100
# The types of operations that are written in C++.
_BUILT_IN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType),
    *(types.WrapperDescriptorType, type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor)),
)
# Where modules are called.
_CALLS = inspect.getfile(nn.Module)


def function_name(function: Any) -> str:
    """Return the name by which an operation is known: a getter has its property's.

    Examples
    --------
    >>> function_name(torch.Tensor.__getitem__), function_name(torch.Tensor.T.__get__)
    ('getitem', 'T')
    >>> function_name(torch.ops.aten.add.Tensor), function_name(torch.nn.functional.softmax)
    ('add', 'softmax')
    """
    name = getattr(function, "__name__", None) or type(function).__name__
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)
    return _shown_name(str(name))


@lru_cache(4096)  # of texts: functions may hold what a network has made
def _shown_name(name: str) -> str:
    name = name.rpartition("::")[2].partition(".")[0]
    is_special = name.startswith("__") and name.endswith("__")
    return name[2:-2] if is_special else name


def is_global(function: Any) -> bool:
    """Whether a function lives as long as the process, so that it may be held.

    Examples
    --------
    >>> is_global(torch.softmax), is_global(torch.Tensor.__rsub__), is_global(lambda: None)
    (True, True, False)
    """
    if not isinstance(function, FunctionType):
        return isinstance(function, _BUILT_IN)
    module = sys.modules.get(function.__module__)
    try:
        return attrgetter(function.__qualname__)(module) is function
    except AttributeError:
        return False


class LibraryMode(TorchFunctionMode):
    """A function mode of this library, which takes the calls of functions unless it is paused."""

    is_paused = True

    def take(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and return what it returns."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The compiler follows this, and nothing behind it.
        if is_compiling() or self.is_paused:
            return func(*args, **kwargs)
        return self.take(func, args, kwargs)


# These methods reveal values without any operation.
HANDING_OUT = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class ValueRequests(LibraryMode):
    """Notes whether a pass of a net asks for values, or for sizes that depend on values.

    Attributes
    ----------
    were_made : bool
        Whether it has asked, also for values that do not depend on its data.

    Examples
    --------
    >>> requests = ValueRequests()
    >>> with requests.followed():
    ...     is_positive = bool(torch.ones(3).sum() > 0)
    >>> requests.were_made
    True
    """

    were_made = False

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the operations of this thread inside the block."""
        try:
            self.is_paused = False
            with private.operations_made_by(self._operate), self:
                yield
        finally:
            # An interruption can leave a torch mode active, which must do nothing then.
            self.is_paused = True

    def take(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function."""
        self.were_made |= func in HANDING_OUT
        return func(*args, **kwargs)

    def _operate(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_paused:
            self.were_made |= tells_value(operation) or dim_of_hits(operation, args) is not None
        return operation(*args, **kwargs or {})


def tells_value(operation: Any) -> bool:
    """Whether an operation returns no tensor, but what is in one."""
    return torch.Tag.data_dependent_output in operation.tags


def dim_of_hits(operation: Any, args: tuple[Any, ...]) -> int | None:
    """Return the dimension of a result whose size is an unknown number of hits of a mask."""
    if torch.Tag.dynamic_output_shape not in operation.tags:
        return None
    if operation is not torch.ops.aten.index.Tensor:
        return 0
    # Integers as indices give a known size.
    has_mask = any(index.dtype in (torch.bool, torch.uint8) for index in tensors(args[1]))
    return [index is None for index in args[1]].index(False) if has_mask else None


def unseen(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose work is no operation of a network, under no mode of this library.

    A recorder may run inside the code that another one looks at.
    """
    modes = private.function_modes()
    others = modes and [mode for mode in modes if not isinstance(mode, LibraryMode)]
    if len(others) == len(modes):
        return function(*args)
    try:
        private.set_function_modes(others)
        return function(*args)
    finally:
        private.set_function_modes(modes)


def returns_tensors(output: Any) -> bool:
    """Whether a call counts as an operation: it returned a tensor, or a tuple or list with one."""
    if isinstance(output, Tensor):
        return True
    return isinstance(output, tuple | list) and any(isinstance(part, Tensor) for part in output)


def calling_line() -> tuple[str, int, str]:
    """Return the line that calls a torch function: its file, its number and the line itself.

    A mode asks while it takes the call.

    It is that of the innermost frame outside of torch between the call and the ``forward`` of the
    module; where all is torch's own, of that ``forward``.
    """
    # Modes may be around each other.
    return line_below(_CALLS, "__torch_function__", _TORCH)


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
        # For each call that runs, the number of the network's own modes inside of this one.
        self._above: list[int | None] = []
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
        # As in a pass, what a mode around the module computes is no own code of it.
        self._above.append(private.replace_function_mode(self, self))

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._start(module, args, kwargs)
        # A copy that the network makes of a module has no hooks in a pass, and no name.
        open_calls = self._open.get(id(module))
        around = self._current[-2] if len(self._current) > 1 else None
        self._current[-1] = open_calls[-1].row if open_calls else around

    def _leave(self, *call: Any) -> None:
        self._current[-1] = None
        above = self._above.pop()
        private.replace_function_mode(self, None if above is None else self, above or 0)

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
        attention = {}
        for row, seen in self._attention:
            label = row.depth, row.depth_index or 0
            first, last = (OperationIdx(*label, *end) for end in (seen.first, seen.last))
            attention[last] = seen._replace(first=first, last=last)
        return attention

    def operations(
        self, layers: Mapping[DepthIdx, Layer], attention: Mapping[OperationIdx, SeenAttention]
    ) -> list[Operation]:
        """Return the operations of calls that returned, in the order in which they returned."""
        made = [noted for noted in self._made if noted.call.completion is not None]
        operations = []
        for number, noted in enumerate(made):
            # After the layers that had returned, and in order among each other.
            completion = noted.num_completed - 1 + (number + 1) / (len(made) + 1)
            layer = layers[noted.call.depth, noted.call.depth_index or 0]
            what = noted.function, noted.index, noted.output, noted.line
            completed = attention.get(OperationIdx(*layer.label, noted.function, noted.index))
            operations.append(Operation(layer, *what, completion, noted.is_seen, completed))
        return operations


class Operations(Listed, LayerMapping[Operation]):
    """Operations by label, read-only, in the order in which they returned.

    Keys are those of the recorder: an ``OperationIdx`` or a text such as ``"h.3/add:1"``.
    """

    def _listing(self) -> Listing:
        names = "Operation", "Output shape", "Line", "Source"
        rows = [(row.name, str(row.output_shape), row.place, row.source) for row in self.values()]
        return Listing(counted(len(self), "operation"), names, (), rows, widest=_WIDEST)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return rendered("listing.html", shown=self._listing())
