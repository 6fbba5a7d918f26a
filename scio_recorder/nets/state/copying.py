"""Copies of a net and of its inputs, that can be used without changing these."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder.tensors import private
from scio_recorder.tensors.structures import map_tensors

# Up to this many bytes, parameters are cloned, so that a net that changes them in its forward
# leaves no trace; beyond it, the copy shares their memory.
CLONED_PARAMETER_BYTES = 1 << 30

_ATOMIC = (type(None), bool, int, float, complex, str, bytes, torch.device, torch.dtype)


class _CopyTensors(TorchFunctionMode):
    """Make ``copy.deepcopy`` copy tensors inside a graph, which it refuses, out of the graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            # What `deepcopy` can do itself keeps views of one memory views of one memory.
            return func(*args, **(kwargs or {}))
        except Exception:
            if func is not Tensor.__deepcopy__:
                raise
            tensor, memo = args
            return memo.setdefault(id(tensor), clone(tensor))


def copy_net(
    net: nn.Module,
    *,
    keep_hooks: bool = False,
    share_uncopyable: bool = True,
) -> nn.Module:
    """Return a copy of a net that can be run without changing the net.

    Tensors are cloned, except for parameters that together are larger than 1 GiB, which share their
    memory.

    Parameters
    ----------
    net : torch.nn.Module
        The net, which may hold what ``copy.deepcopy`` refuses: tensors inside a graph, locks.
    keep_hooks : bool
        Whether the copy has copies of the user's hooks, or none.
    share_uncopyable : bool
        Whether attributes that can't be copied are shared, or the copy fails with the exception
        that they raise.

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
    with torch.no_grad(), _CopyTensors():
        memo = _first_memo(net, keep_hooks)
        try:
            return copy.deepcopy(net, memo)
        except Exception:
            if not share_uncopyable:
                raise
            return _copy_by_module(net, _first_memo(net, keep_hooks))


def copy_inputs(inputs: Any) -> Any:
    """Return a copy of a net's inputs.

    Parameters
    ----------
    inputs : Any
        Any structure. Only what a tensor shows is copied: it may be a slice of a whole dataset.

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
    return map_tensors(clone, inputs)


class OriginalCalledError(BaseException):
    """The copy of a net called a module of the net. No ``except Exception`` may catch it."""


@contextlib.contextmanager
def refusing_calls(net: nn.Module) -> Iterator[None]:
    """Raise :class:`OriginalCalledError` when this thread calls a module of the net.

    Parameters
    ----------
    net : torch.nn.Module
        The original of a copy that is run in the block. A closure that the copy shares with it may
        lead back to it.

    Examples
    --------
    >>> net = nn.ReLU()
    >>> with refusing_calls(net):
    ...     net(torch.ones(1))
    Traceback (most recent call last):
    scio_recorder.nets.state.copying.OriginalCalledError
    """
    thread = threading.get_ident()

    def refuse(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            raise OriginalCalledError

    plain = [module for module in net.modules() if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_pre_hook(refuse) for module in plain]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def clone(tensor: Tensor) -> Tensor:
    """Return a copy outside any graph that requires a gradient where a leaf does."""
    clone = tensor.detach().clone()
    return clone.requires_grad_(tensor.requires_grad) if tensor.is_leaf else clone


def _share(parameter: Tensor) -> Tensor:
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def _first_memo(net: nn.Module, keep_hooks: bool) -> dict[int, Any]:
    memo: dict[int, Any] = {}
    shares = are_large(net)
    for module in net.modules():
        if not keep_hooks:
            memo |= {
                id(vars(module)[name]): OrderedDict()
                for name in private.HOOK_DICTIONARIES
                if name in vars(module)
            }
        if shares:
            for parameter in module.parameters(recurse=False):
                memo.setdefault(id(parameter), _share(parameter))
    return memo


def are_large(net: nn.Module) -> bool:
    """Whether cloning the parameters would take too much memory."""
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
