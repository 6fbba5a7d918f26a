"""What a pass calls of torch, and whether it asks for the values that its tensors hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from scio_recorder.tensors import private

# Makes a call of a function or operation with its arguments.
Caller: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def intercepted(call_function: Caller, call_operation: Caller) -> Iterator[None]:
    """Make every call of torch in the block, on this thread, by the given functions.

    Parameters
    ----------
    call_function : callable
        Calls a function or method of torch that Python code calls.
    call_operation : callable
        Calls an operation, of which functions are made.

    Examples
    --------
    >>> names = []
    >>> def call(called, args, kwargs):
    ...     names.append(called.__name__)
    ...     return called(*args, **kwargs)
    >>> with intercepted(call, call):
    ...     _ = bool(torch.ones(1))
    >>> names[-2:]
    ['__bool__', '_local_scalar_dense.default']
    """
    with _Functions(call_function), private.operations_made_by(call_operation):
        yield


def asks(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation gives Python a value, or the size of its result depends on values.

    Parameters
    ----------
    operation : torch._ops.OpOverload
        The operation.
    args : tuple
        Its arguments.

    Returns
    -------
    bool
        By torch's own tags.
    """
    if torch.Tag.data_dependent_output in operation.tags:
        return True
    if torch.Tag.dynamic_output_shape not in operation.tags:
        return False
    # A mask has some number of hits; numbers give a size that is known.
    indices = args[1] if operation is torch.ops.aten.index.Tensor else None
    return indices is None or any(_is_mask(index) for index in indices)


class Watch:
    """Notes whether a value was asked for in the block of :meth:`watching`.

    A pass in which none was asked for went its way without the data, and goes the same way on
    other data of the same shapes. Most networks ask for none, and need no closer look.

    Examples
    --------
    >>> watch = Watch()
    >>> with watch.watching():
    ...     total = torch.ones(3).sum() * 2
    >>> watch.asked
    False
    >>> with watch.watching():
    ...     is_positive = bool(total > 0)
    >>> watch.asked
    True
    """

    def __init__(self) -> None:
        self.asked = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what this thread does in the block."""
        with intercepted(self._function, self._operation):
            yield

    def _function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # This reads memory without any operation.
        self.asked |= function is Tensor.tolist
        return function(*args, **kwargs)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.asked |= asks(operation, args)
        return operation(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, call: Caller) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
