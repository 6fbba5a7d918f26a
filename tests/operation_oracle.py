"""What the functions called inside forwards truly return: a function mode copies every output.

Nothing of the package is used here. The mode is active for the whole pass, and functions around
the calls and the ``forward`` of modules say whose own code runs. Names come from torch itself.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from tests.oracle import Leaf, plain_leaf, snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# What is not initialised has other values each time.
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided"}


class Key(NamedTuple):
    """A module's first name, which call of it, a function, and which call of that in this one."""

    name: str
    call: int
    function: str
    number: int


class Called(NamedTuple):
    """Copies of what a function received and returned, the latter with gradients that come."""

    output: Any
    args: Any
    kwargs: Any


def short_name(function: Callable[..., Any]) -> str:
    """Return the name of a function without what stands around it."""
    found = resolve_name(function) or function.__name__
    parts = [part for part in found.split(".") if part not in ("__get__", "default")]
    if isinstance(function, torch._ops.OpOverload):
        return str(function).split(".")[1]
    name = parts[-1]
    return name[2:-2] if name[:2] == name[-2:] == "__" else name


class Operations(TorchFunctionMode):
    """Copies of what the functions in the own code of a net's modules return while it is entered.

    `calls` is in the order in which functions return. Leaves get the gradients of a later backward
    pass. A ``forward`` that is called without its module belongs to the code around it, and hooks
    belong to nobody.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in net.named_modules()}
        self._called = nn.Module.__call__
        self._started: Counter[str] = Counter()
        self._counted: Counter[tuple[str, int, str]] = Counter()
        # The calls that have not returned: of which module, and whose own code runs.
        self._open: list[tuple[nn.Module, tuple[str, int] | None]] = []
        self.calls: dict[Key, Called] = {}

    def __enter__(self) -> Any:
        watch, called = self, self._called

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module not in watch._names:
                # One that the net makes meanwhile is no other than the code around it.
                return called(module, *args, **kwargs)
            watch._open.append((module, None))
            try:
                return called(module, *args, **kwargs)
            finally:
                watch._open.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]
        for module, name in self._names.items():
            if type(module).forward is not nn.Module.forward:
                module.forward = self._around(module, name, module.forward)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        nn.Module.__call__ = self._called  # type: ignore[method-assign]
        for module in self._names:
            vars(module).pop("forward", None)

    def _around(self, module: nn.Module, name: str, forward: Callable[..., Any]) -> Any:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._open[-1] != (module, None):
                return forward(*args, **kwargs)
            self._open[-1] = module, (name, self._started[name])
            self._started[name] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                # Hooks behind the forward must not count.
                self._open[-1] = module, None

        return run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = self._open[-1][1] if self._open else None
        if owner is None:
            return func(*args, **kwargs)
        received = [snapshot(one, plain_leaf) for one in (tuple(args), dict(kwargs))]
        output = func(*args, **kwargs)
        if is_operation(output):
            name = short_name(func)
            key = Key(*owner, name, self._counted[*owner, name])
            self._counted[*owner, name] += 1
            self.calls[key] = Called(snapshot(output, _leaf), *received)
        return output


def _leaf(tensor: Tensor) -> Leaf:
    leaf = plain_leaf(tensor)
    leaf.is_view = tensor._is_view()
    if tensor.requires_grad and tensor.layout == torch.strided:
        tensor.register_hook(lambda gradient: setattr(leaf, "gradient", gradient))
    return leaf


def is_operation(output: Any) -> bool:
    parts: Iterable[Any] = output if isinstance(output, (tuple, list)) else [output]
    return any(isinstance(part, Tensor) for part in parts)
