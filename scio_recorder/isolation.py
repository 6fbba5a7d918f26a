"""Running a net without leaving a trace: copies of it, and global state that is put back."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["copy_inputs", "copy_net", "preserved_rng", "quiet", "restored"]

TensorCopier: TypeAlias = Callable[[Tensor], Tensor]

# Up to this many bytes, parameters are cloned, so that a net that changes them in its forward
# leaves no trace; beyond it, the copy shares their memory.
CLONED_PARAMETER_BYTES = 1 << 30

_HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype)


class _CopyTensors(TorchFunctionMode):
    """Make ``copy.deepcopy`` copy every tensor with the given function, wherever it meets one."""

    def __init__(self, copier: TensorCopier) -> None:
        super().__init__()
        self._copier = copier

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._copier(tensor)
        return memo[id(tensor)]


def copy_net(
    net: nn.Module, *, keep_hooks: bool = False, copier: TensorCopier | None = None
) -> nn.Module:
    """Return a copy of a net that can be run without changing the net.

    Parameters
    ----------
    net : torch.nn.Module
        The net, which may hold what ``copy.deepcopy`` refuses: tensors inside a graph, locks.
    keep_hooks : bool
        Whether the copy has copies of the user's hooks, or none.
    copier : callable, optional
        Copies each tensor, parameters included. By default tensors are cloned, except for
        parameters that together are larger than 1 GiB, which share their memory.

    Returns
    -------
    torch.nn.Module
        The copy.

    Examples
    --------
    >>> net = nn.Linear(2, 1)
    >>> twin = copy_net(net)
    >>> twin.weight is net.weight, bool((twin.weight == net.weight).all())
    (False, True)
    """
    with torch.no_grad(), _CopyTensors(copier or _clone):
        memo = _first_memo(net, keep_hooks, copier)
        try:
            return copy.deepcopy(net, memo)
        except Exception:
            return _copy_by_module(net, _first_memo(net, keep_hooks, copier))


def copy_inputs(inputs: Any, *, share_memory: bool = False) -> Any:
    """Return a copy of a net's inputs, or these themselves where they can't be copied.

    Parameters
    ----------
    inputs : Any
        Any structure.
    share_memory : bool
        Whether tensors are aliases, for those who need shapes and not values.

    Returns
    -------
    Any
        The same structure with other, detached tensors.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> copy_inputs({"x": x})["x"] is x
    False
    """
    with torch.no_grad(), _CopyTensors(torch.detach if share_memory else _clone):
        try:
            return copy.deepcopy(inputs)
        except Exception:
            return inputs


@contextlib.contextmanager
def restored(net: nn.Module, *, keep_hooks: bool = False) -> Iterator[None]:
    """Give back to a net, at the end of the block, every attribute and value that it had.

    Parameters
    ----------
    net : torch.nn.Module
        The net. Parameters that together are larger than 1 GiB keep in-place changes.
    keep_hooks : bool
        Whether the user's hooks stay for the length of the block.

    Examples
    --------
    >>> net = nn.BatchNorm1d(2)
    >>> with restored(net):
    ...     _ = net(torch.randn(8, 2))
    >>> int(net.num_batches_tracked)
    0
    """
    modules = list(net.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = [_contents(value) for saved in attributes for value in saved.values()]
    tensors = [_TensorState(tensor) for tensor in _state_tensors(net)]
    try:
        if not keep_hooks:
            for module in modules:
                vars(module).update(
                    {name: OrderedDict() for name in _HOOKS if name in vars(module)}
                )
        yield
    finally:
        for module, saved in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(saved)
        for restore in contents:
            restore()
        for state in tensors:
            state.restore()


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Put every global random number generator back as it was.

    Examples
    --------
    >>> before = torch.get_rng_state()
    >>> with preserved_rng():
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    cpu, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    # Asking a device that is not in use would initialise it.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what this thread prints, and warnings.

    Examples
    --------
    >>> with quiet():
    ...     print("not seen")
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            contextlib.redirect_stdout(_Muted(sys.stdout)),
            contextlib.redirect_stderr(_Muted(sys.stderr)),
        ):
            yield


class _Muted:
    """A stream that drops what its own thread writes: other threads go on printing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _TensorState:
    """The memory and the values of one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._data = tensor.data
        self._requires_grad = tensor.requires_grad
        self._version = None if tensor.is_inference() else tensor._version
        self._values = _clone(tensor)

    def restore(self) -> None:
        with torch.no_grad():
            # `net.to(device)` swaps the memory under a parameter.
            if self._tensor.data_ptr() != self._data.data_ptr():
                self._tensor.data = self._data
            if self._version is None or self._tensor._version != self._version:
                self._data.copy_(self._values)
        if self._tensor.is_leaf and self._tensor.requires_grad != self._requires_grad:
            self._tensor.requires_grad_(self._requires_grad)


def _clone(tensor: Tensor) -> Tensor:
    clone = tensor.detach().clone()
    return clone.requires_grad_(tensor.requires_grad) if tensor.is_leaf else clone


def _share(parameter: Tensor) -> Tensor:
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def _first_memo(net: nn.Module, keep_hooks: bool, copier: TensorCopier | None) -> dict[int, Any]:
    memo: dict[int, Any] = {}
    copy_parameter = copier or (_share if _are_large(net) else None)
    for module in net.modules():
        if not keep_hooks:
            memo |= {
                id(vars(module)[name]): OrderedDict() for name in _HOOKS if name in vars(module)
            }
        if copy_parameter is not None:
            for parameter in module.parameters(recurse=False):
                memo.setdefault(id(parameter), copy_parameter(parameter))
    return memo


def _are_large(net: nn.Module) -> bool:
    return sum(parameter.nbytes for parameter in net.parameters()) > CLONED_PARAMETER_BYTES


def _copy_by_module(net: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy module by module and attribute by attribute; what can't be copied is shared."""
    plain = [module for module in net.modules() if not _copies_itself(module)]
    for module in plain:
        memo[id(module)] = object.__new__(type(module))
    for module in plain:
        state = vars(memo[id(module)])
        for name, value in vars(module).items():
            state[name] = _copy_or_share(value, memo)
    twin: nn.Module = memo.get(id(net), net)
    return twin


def _copies_itself(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or type(module).__new__ is not object.__new__


def _copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMIC):
        return value
    # A copy that fails half way leaves unfinished objects in its memo.
    attempt = dict(memo)
    try:
        copied = copy.deepcopy(value, attempt)
    except Exception:
        return value
    memo.update(attempt)
    return copied


def _state_tensors(net: nn.Module) -> list[Tensor]:
    buffers = list(net.buffers())
    return buffers if _are_large(net) else [*net.parameters(), *buffers]


def _contents(value: Any) -> Callable[[], None]:
    """Return what puts the items of a container back into it."""
    if isinstance(value, dict):
        items = dict(value)
        return lambda: (value.clear(), value.update(items))[1]  # type: ignore[func-returns-value]
    if isinstance(value, list):
        elements = list(value)
        return lambda: value.__setitem__(slice(None), elements)
    return lambda: None
