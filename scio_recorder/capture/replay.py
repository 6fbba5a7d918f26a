"""Runs that start in the middle: what comes before is handed out as it was in an earlier run.

NOTE [Which calls are left out]

A run is noted once: the calls of modules in the order in which they start, and what each returned.
In a later run on the same inputs, everything until the replaced layer returns is the same again. So
a call that lies ahead of that, and that does not contain the layer, need not run: a copy of what it
returned is handed out. It must be a call that left nothing else behind (NOTE [How it is seen that a
call left nothing behind]), and whose output is in memory of its own: others may write to it later.
Calls that do not qualify run, and those inside them are looked at one by one. What the code between
the calls does is done again. The replaced layer is one of the calls that need not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.capture.hooks import Around, take_out
from scio_recorder.errors import FlowError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.state.traces import Look, Surroundings
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import is_plain, twin
from scio_recorder.tensors.structures import flatten

T = TypeVar("T")

# Kernels may take another way where memory is not aligned to this many bytes, as copies are.
_ALIGNMENT = 64


class _Kept:
    """What a call returned, to be handed out any number of times."""

    def __init__(self, output: Any) -> None:
        leaves, self._rebuild = flatten(output)
        self._leaves = [twin(leaf) for leaf in leaves]

    def copy(self) -> Any:
        """Return it anew."""
        return self._rebuild([twin(leaf) for leaf in self._leaves])


@dataclasses.dataclass(eq=False)
class _Call:
    """A call of the noted run; ``end`` is the number of the first call that started after it."""

    module: nn.Module
    end: int = 0
    # None where it has to run.
    kept: _Kept | None = None


class _Noted(Around):
    """Stands in place of a module's call, in the thread of a replay."""

    # No compiled code: see private.is_compiled.
    is_plain = True

    def __init__(self, module: nn.Module, replay: Replay) -> None:
        super().__init__(module)
        self.replay = replay
        self._module = module
        self._plain = private.plain_call(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call, or leave it out, or run it."""
        step = self.replay.step
        call = self.inner or self._plain
        if step is None or threading.get_ident() != self.replay.thread:
            return call(*args, **kwargs)
        return step(self._module, call, args, kwargs)


class Replay:
    """A run of a network that is noted, and runs that differ from it in one layer.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    architecture : Architecture
        Its labels.
    layers : sequence of (int, int)
        Those that will be replaced.
    surroundings : Surroundings, optional
        Tells which calls left something behind. Without it no call is left out.

    Examples
    --------
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> net = nn.Sequential(nn.Tanh(), nn.ReLU())
    >>> replay = Replay(net, label_net(net, input_size=(1,))[1], [(1, 1)], Surroundings(net))
    >>> with replay.installed(), torch.no_grad():
    ...     _ = replay.noted(lambda: net(torch.ones(1)))
    ...     replay.replaced((1, 1), lambda output: output - 5, lambda: net(torch.ones(1)))
    tensor([0.])
    """

    def __init__(
        self,
        net: nn.Module,
        architecture: Architecture,
        layers: Sequence[DepthIdx],
        surroundings: Surroundings | None = None,
    ) -> None:
        self.thread = threading.get_ident()
        # What happens at a call; None: it runs.
        self.step: Callable[..., Any] | None = None
        self._modules = [
            module for module in net.modules() if not isinstance(module, torch.jit.ScriptModule)
        ]
        self._architecture = architecture
        self._surroundings = surroundings
        self._calls: list[_Call] = []
        self._layers = set(layers)
        # Layer -> the number of its call.
        self._starts: dict[DepthIdx, int] = {}
        self._returns: Counter[nn.Module] = Counter()
        # In the run under way: the number of the next call and of the replaced one.
        self._next = self._target = 0
        self._replace: Callable[[Any], Any] = lambda output: output

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """See calls of the network's modules for the length of the block."""
        try:
            for module in self._modules:
                private.set_compiled_call(module, _Noted(module, self))
            yield
        finally:
            for module in self._modules:
                take_out(module, lambda call: isinstance(call, _Noted) and call.replay is self)

    def noted(self, run: Callable[[], T]) -> T:
        """Run the network, and note its calls."""
        before = _drawn_elsewhere()
        self.step = self._note
        try:
            result = run()
        finally:
            self.step = None
        if _drawn_elsewhere() != before:
            # Which call it was that drew numbers outside of torch, nothing tells.
            for call in self._calls:
                call.kept = None
        return result

    def replaced(self, layer: DepthIdx, replace: Callable[[Any], Any], run: Callable[[], T]) -> T:
        """Run the network on the inputs of the noted run, with something else from one layer.

        Parameters
        ----------
        layer : (int, int)
            One of the layers.
        replace : callable
            Takes what the layer returned in the noted run; what it returns goes on instead.
        run : callable
            Runs the network in the state of then.

        Raises
        ------
        FlowError
            The network makes other calls than in the noted run.
        """
        self._next, self._target, self._replace = 0, self._starts[layer], replace
        self.step = self._again
        try:
            result = run()
            if self.step is not None:
                raise self._lost()
        finally:
            self.step = None
        return result

    def _note(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number, call = len(self._calls), _Call(module)
        self._calls.append(call)
        look = self._surroundings and self._surroundings.look(module, (args, kwargs))
        output = run(*args, **kwargs)
        call.end = len(self._calls)
        is_needed = len(self._starts) < len(self._layers)
        self._find(module, number)
        if is_needed and look and look.is_unchanged() and _can_be_kept(output, look):
            call.kept = _Kept(output)
            if not any(number < start for start in self._starts.values()):
                for inner in self._calls[number + 1 :]:
                    inner.kept = None
        if len(self._starts) == len(self._layers):
            # What comes behind the last layer is never left out.
            self.step = None
        return output

    def _find(self, module: nn.Module, number: int) -> None:
        """See whether the call that has returned is one of the layers."""
        labels = self._architecture.calls(module)
        count = self._returns[module]
        self._returns[module] += 1
        if count < len(labels) and labels[count] in self._layers:
            self._starts[labels[count]] = number

    def _again(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self._next
        if number >= len(self._calls) or self._calls[number].module is not module:
            raise self._lost()
        call = self._calls[number]
        is_around = number < self._target < call.end
        if call.kept is None or is_around:
            self._next += 1
            output = run(*args, **kwargs)
        else:
            self._next = call.end
            output = call.kept.copy()
        if number != self._target:
            return output
        self.step = None
        return self._replace(output)

    def _lost(self) -> FlowError:
        layer = next(label for label, at in self._starts.items() if at == self._target)
        return FlowError(
            f"the network called other modules ahead of layer {self._architecture[layer]} than in "
            "the run before, on the same inputs: its flow depends on something that is not put "
            "back between runs, such as a global variable"
        )


def _can_be_kept(output: Any, look: Look) -> bool:
    """Whether copies of what a call returned do the same as that itself."""
    if not _is_simple(output):
        return False
    leaves, _ = flatten(output)
    memories = {private.memory_of(leaf) for leaf in leaves}
    return len(memories) == len(leaves) and not any(
        leaf.requires_grad
        or not is_plain(leaf)
        or leaf.data_ptr() % _ALIGNMENT
        or look.shares_memory(leaf)
        for leaf in leaves
    )


def _is_simple(value: Any) -> bool:
    """Whether a structure consists of tensors, numbers, texts and common containers."""
    if value is None or isinstance(value, Tensor | bool | int | float | complex | str):
        return True
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(map(_is_simple, vars(value).values())) if hasattr(value, "__dict__") else False
    return False


def _drawn_elsewhere() -> bytes:
    """Return the states of the generators that are not torch's."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
