"""Copies of networks, which run without a trace in the network, and quietly."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.nets.hookable import hooked, own_hooks
from scio_recorder.nets.state.untouched import (
    NetState,
    are_large,
    reached,
    without_hooks_on_all_modules,
)
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import map_tensors

# Warning filters are process-wide: two threads would restore each other's.
_QUIET = threading.RLock()


def copy_net(net: nn.Module, *, keep_hooks: bool = False) -> nn.Module:
    """Return a copy of a net that can be run without changing the net.

    Tensors are cloned, except for parameters that together are larger than 1 GiB, which share their
    memory.

    Parameters
    ----------
    net : torch.nn.Module
        The net.
    keep_hooks : bool
        Whether the copy has copies of the user's hooks, or only of the network's own.

    Raises
    ------
    NotSeparateError
        ``deepcopy`` refuses it, for example tensors inside a graph, or returns another one.

    Examples
    --------
    >>> net = nn.Linear(2, 1)
    >>> twin = copy_net(net)
    >>> twin.weight is net.weight, bool((twin.weight == net.weight).all())
    (False, True)
    """
    kept = [] if keep_hooks else own_hooks(net)
    memo = {id(vars(module)[name]): hooks for module, name, hooks in kept} | _shared(net)
    try:
        # Python warns of copies of iterators that the network holds.
        with torch.no_grad(), quiet():
            twin = copy.deepcopy(net, memo)
            for *_, hooks in kept:
                # Methods of the net's modules become methods of the copy's.
                hooks.update((key, copy.deepcopy(hook, memo)) for key, hook in hooks.items())
    except Exception as error:
        raise NotSeparateError from error
    if _kinds_of(twin) != _kinds_of(net):
        raise NotSeparateError
    return twin


def _kinds_of(net: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(part)) for name, part in net.named_modules(remove_duplicate=False)]


def clone(tensor: Tensor) -> Tensor:
    """Return a detached copy that requires a gradient if the tensor is a leaf that does."""
    clone = tensor.detach().clone()
    return clone.requires_grad_(tensor.requires_grad) if tensor.is_leaf else clone


def copy_inputs(inputs: Any) -> Any:
    """Return a copy of a net's inputs.

    Parameters
    ----------
    inputs : Any
        Any structure. Only the visible part of a tensor is copied: it may be a slice of a dataset.

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


class NotSeparateError(BaseException):
    """There is no copy of a net that runs alone. No ``except Exception`` of a net may catch it."""


def _shared(net: nn.Module) -> dict[int, Any]:
    """Return what stands for parameters too large to be cloned, by the ``id`` of each."""
    if not are_large(net.parameters()):
        return {}
    return {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in net.parameters()
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, and run compiled modules as if they were not.

    Compiling a copy takes long, and its result would be thrown away. What a network prints is seen:
    streams belong to the whole process.

    Examples
    --------
    >>> with quiet():
    ...     warnings.warn("not seen")
    """
    # If nothing was compiled, a stance would import the compiler.
    is_loaded = private.DYNAMO in sys.modules
    with (
        _QUIET,
        warnings.catch_warnings(action="ignore"),
        torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def separate_copy(net: nn.Module, *, keep_hooks: bool = False) -> Iterator[nn.Module]:
    """Yield a copy of a network that can be run in the block without a trace in the network.

    What both share ends as it was: a copy has the functions of the network, and so the variables of
    closures.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    keep_hooks : bool, default False
        Whether the copy has copies of the user's hooks, or only of the network's own.

    Raises
    ------
    NotSeparateError
        The network can't be copied, or the copy calls modules of the network itself.

    Examples
    --------
    >>> import weakref
    >>> net = nn.ReLU()
    >>> net.itself = weakref.ref(net)
    >>> with separate_copy(net):
    ...     pass
    Traceback (most recent call last):
    scio_recorder.nets.state.copying.NotSeparateError
    """
    twin, of_net = copy_net(net, keep_hooks=keep_hooks), reached([net])
    shared = {key: item for key, item in reached([twin]).items() if key in of_net}
    if any(issubclass(type(value), nn.Module) for value, _ in shared.values()):
        raise NotSeparateError
    thread = threading.get_ident()

    def refuse(*call: Any) -> None:
        # A global variable, which no walk follows, may lead back.
        if threading.get_ident() == thread:
            raise NotSeparateError

    state = NetState(shared, keep_random=True)
    try:
        with hooked(net, before=refuse), without_hooks_on_all_modules():
            yield twin
    finally:
        state.put_back(thorough=True)
    state.warn_of_traces()
