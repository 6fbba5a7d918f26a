"""Running a net without leaving a trace: on a copy, or with its state and global state restored."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder.nets.hookable import hooked
from scio_recorder.nets.state.own_hooks import leave_own_hooks, own_hooks
from scio_recorder.nets.state.values import TensorState, clone
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import map_tensors

# Up to this many bytes, parameters are cloned, so that a net that changes them in its forward
# leaves no trace; beyond it, the copy shares their memory.
CLONED_PARAMETER_BYTES = 1 << 30
# Streams and warning filters are process-wide: two threads would restore each other's.
_QUIET = threading.RLock()
# NumPy reads past the end of its words if the position says so.
_MERSENNE_WORDS = 624


def random_state() -> dict[str, Any]:
    """Return the state of every global random number generator, as plain values and tensors.

    Returns
    -------
    dict
        The states of torch, NumPy and Python, for :func:`restore_random`.

    Examples
    --------
    >>> state = random_state()
    >>> first = torch.rand(2), np.random.rand(), random.random()
    >>> restore_random(state)
    >>> torch.equal(torch.rand(2), first[0]), np.random.rand() == first[1]
    (True, True)
    >>> random.random() == first[2]
    True
    """
    numpy: Any = np.random.get_state(legacy=False)
    if numpy["bit_generator"] == "MT19937":
        numpy["state"]["key"] = torch.from_numpy(numpy["state"]["key"].view(np.int32))
    version, words, gauss = random.getstate()
    # Words are signed: tensors of unsigned ones can't be pickled.
    # Asking a device that is not in use would initialise it.
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    return {
        "cpu": torch.get_rng_state(),
        "numpy": numpy,
        "python": [version, torch.frombuffer(array("I", words), dtype=torch.int32), gauss],
        "cuda": torch.cuda.get_rng_state_all() if uses_cuda else None,
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def restore_random(state: dict[str, Any]) -> None:
    """Restore the generators; an invalid state raises before its generator changes."""
    numpy, (version, words, gauss) = state["numpy"], state["python"]
    if numpy["bit_generator"] == "MT19937":
        if not 0 <= numpy["state"]["pos"] <= _MERSENNE_WORDS:
            raise ValueError("the state of a random number generator is out of bounds")
        key = numpy["state"]["key"].numpy().view(np.uint32)
        numpy = {**numpy, "state": {**numpy["state"], "key": key}}
    torch.set_rng_state(state["cpu"])
    np.random.set_state(numpy)
    random.setstate((version, tuple(words.numpy().view(np.uint32).tolist()), gauss))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"])


@contextlib.contextmanager
def restored(
    net: nn.Module, *, keep_hooks: bool = False, keep_parameters: bool = False
) -> Iterator[None]:
    """Restore every attribute and value of a net at the end of the block.

    Parameters
    ----------
    net : torch.nn.Module
        The net. Parameters that together are larger than 1 GiB keep in-place changes.
    keep_hooks : bool
        Whether the user's hooks stay inside the block. The network's own always do.
    keep_parameters : bool
        Whether parameters stay as the block leaves them: ordinary passes change none.

    Examples
    --------
    >>> net = nn.BatchNorm1d(2)
    >>> with restored(net):
    ...     _ = net(torch.randn(8, 2))
    >>> int(net.num_batches_tracked)
    0
    """
    put_back = attributes_of(list(net.modules()))
    parameters = () if keep_parameters or are_large(net) else net.parameters()
    tensors = [TensorState(tensor) for tensor in (*parameters, *net.buffers())]
    with gradients_aside(net.parameters()):
        try:
            if not keep_hooks:
                leave_own_hooks(net)
            yield
        finally:
            put_back()
            for state in tensors:
                state.restore()


def attributes_of(owners: Sequence[Any]) -> Callable[[], None]:
    """Return a function that restores objects' attributes and the contents of these."""
    attributes = [dict(vars(owner)) for owner in owners]
    contents = [
        (value, value.copy())
        for saved in attributes
        for value in saved.values()
        # Other classes of containers may refuse or do more.
        if type(value) in (dict, OrderedDict, list)
    ]

    def restore() -> None:
        for owner, saved in zip(owners, attributes, strict=True):
            vars(owner).clear()
            vars(owner).update(saved)
        for value, before in contents:
            _fill(value, before)

    return restore


@contextlib.contextmanager
def gradients_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set gradients of parameters aside inside the block, and restore them after it.

    Parameters
    ----------
    parameters : iterable of torch.Tensor
        The parameters of a net, whose forward may differentiate and add to gradients in place.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore every global random number generator after the block.

    Examples
    --------
    >>> before = torch.get_rng_state()
    >>> with preserved_rng():
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    before = random_state()
    try:
        yield
    finally:
        restore_random(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence this thread's output and warnings, and run compiled modules as if they were not.

    Compiling a copy takes long, and its result would be thrown away.

    Examples
    --------
    >>> with quiet():
    ...     print("not seen")
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_QUIET)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(_Muted(sys.stdout)))
        stack.enter_context(contextlib.redirect_stderr(_Muted(sys.stderr)))
        # If nothing was compiled, this would import the compiler.
        if private.DYNAMO in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
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


def _fill(value: Any, items: Any) -> None:
    """Restore the items of a container."""
    value.clear()
    if type(value) is list:
        value.extend(items)
    else:
        value.update(items)


class _CopyTensors(TorchFunctionMode):
    """Makes ``copy.deepcopy`` detach and copy tensors inside a graph, which it would refuse."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            # If `deepcopy` itself can copy them, views of one memory stay views of one memory.
            return func(*args, **(kwargs or {}))
        except Exception:
            if func is not Tensor.__deepcopy__:
                raise
            tensor, memo = args
            return memo.setdefault(id(tensor), clone(tensor))


def copy_net(net: nn.Module, *, keep_hooks: bool = False) -> nn.Module:
    """Return a copy of a net that can be run without changing the net.

    Tensors are cloned, except for parameters that together are larger than 1 GiB, which share their
    memory.

    Parameters
    ----------
    net : torch.nn.Module
        The net, which may hold tensors inside a graph. All else that ``deepcopy`` refuses raises.
    keep_hooks : bool
        Whether the copy has copies of the user's hooks, or only of the network's own.

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
    kept = [] if keep_hooks else list(own_hooks(net))
    memo = {id(vars(module)[name]): hooks for module, name, hooks in kept} | _shared(net)
    with torch.no_grad(), _CopyTensors():
        twin = copy.deepcopy(net, memo)
        for *_, hooks in kept:
            # Methods of the net's modules become methods of the copy's.
            hooks.update((key, copy.deepcopy(hook, memo)) for key, hook in hooks.items())
    return twin


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
    scio_recorder.nets.state.restoring.OriginalCalledError
    """
    thread = threading.get_ident()

    def refuse(*call: Any) -> None:
        if threading.get_ident() == thread:
            raise OriginalCalledError

    with hooked(net, before=refuse):
        yield


def _shared(net: nn.Module) -> dict[int, Any]:
    """Return what stands for parameters too large to be cloned, by the ``id`` of each."""
    if not are_large(net):
        return {}
    return {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in net.parameters()
    }


def are_large(net: nn.Module) -> bool:
    """Whether cloning the parameters would take too much memory."""
    return sum(parameter.nbytes for parameter in net.parameters()) > CLONED_PARAMETER_BYTES
