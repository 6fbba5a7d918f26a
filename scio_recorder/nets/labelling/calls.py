"""Which calls a net makes in one pass: their order, and the shapes that went in and out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from scio_recorder.layer import describe, shapes_of
from scio_recorder.nets.state.restoring import copy_inputs


@dataclass(eq=False)
class Call:
    """One call of a module; ``completion`` stays None if it did not return."""

    module: nn.Module
    number: int
    input_shape: Any
    handled_error: BaseException | None
    completion: int | None = None
    output_spec: Any = None


class CallTrace:
    """The calls of one pass, in the order in which they started.

    Parameters
    ----------
    net : torch.nn.Module
        The net to observe, from the constructor until :meth:`detach`.
    grad : bool
        Whether the net runs with gradients, although the caller has turned them off.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.ReLU())
    >>> trace = CallTrace(net)
    >>> _ = net(torch.ones(2))
    >>> trace.detach()
    >>> [(type(call.module).__name__, call.completion) for call in trace.calls]
    [('Sequential', 1), ('ReLU', 0)]
    """

    def __init__(self, net: nn.Module, *, grad: bool = False) -> None:
        self.calls: list[Call] = []
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._net = net
        self.grad = grad
        self._open: dict[int, list[Call]] = {}
        self._counts: dict[int, int] = {}
        self._completed = 0
        self._handles: list[RemovableHandle] = []
        for module in net.modules():
            if not isinstance(module, ScriptModule):
                self._attach(module)

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(self._start, with_kwargs=True),
            module.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        ]

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self._net and self.inputs is None:
            # As they were before the pass, which may resize them or fill a cache among them.
            self.inputs = copy_inputs((args, kwargs))
            if self.grad:
                # The caller's `no_grad` puts this back.
                torch.set_grad_enabled(True)
        number = self._counts.get(id(module), 0)
        self._counts[id(module)] = number + 1
        call = Call(module, number, _input_shape(args, kwargs), sys.exc_info()[1])
        self.calls.append(call)
        self._open.setdefault(id(module), []).append(call)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open[id(module)].pop()
        # A hook that is always called can't tell an exception from an output of None otherwise. A
        # call that the net makes while it handles an exception has had this one from its start.
        if sys.exc_info()[1] is call.handled_error:
            call.completion = self._completed
            call.output_spec = describe(output)
            self._completed += 1


def _input_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = shapes_of(describe(args))
    named = shapes_of(describe(kwargs))
    if not kwargs:
        return shapes[0] if len(args) == 1 else shapes
    return (*shapes, named) if args else named
