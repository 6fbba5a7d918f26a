"""Runs that start in the middle: earlier calls hand out their outputs of a noted run.

NOTE [Which calls are left out]

A run is noted once: the calls of modules in the order in which they start, and their outputs. A
later run on the same inputs is the same until the replaced layer returns. So an earlier call that
does not contain the layer need not run: a copy of its output is handed out. It must be a call that
left nothing else behind (NOTE [How it is seen that a call left nothing behind]), with an output in
memory of its own, since others may write to it later. Calls that do not qualify run, and the calls
inside them are examined one by one. For that the network runs a second time, which most networks
don't need. The code between the calls always runs. The replaced layer is one of the calls that need
not run.
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
from torch import nn

from scio_recorder.capture.around import AroundPlain
from scio_recorder.capture.kept import Kept
from scio_recorder.capture.uncopied import is_hooked_by_others
from scio_recorder.errors import FlowError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.state.traces import Surroundings

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class _Call:
    """A call of the noted run; ``end`` is the number of the first call that started after it."""

    module: nn.Module
    end: int = 0
    # None if it has to run.
    kept: Kept | None = None


class _Noted(AroundPlain):
    """Stands in place of a module's call in the thread of a replay."""

    def __init__(self, module: nn.Module, replay: Replay) -> None:
        super().__init__(module)
        self.replay = replay

    def run(self, args: Any, kwargs: Any) -> Any:
        """Note the call, leave it out, or run it."""
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
        The layers to be replaced.
    surroundings : Surroundings, optional
        Tells which calls left something behind. Without it, no call is left out.

    Examples
    --------
    >>> import torch
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
        # The action at a call; None runs it.
        self.step: Callable[..., Any] | None = None
        self._modules = [*filter(takes_hooks, net.modules())]
        self._architecture = architecture
        self._surroundings = surroundings
        self._layers = set(layers)
        self._chosen = {architecture[label].module for label in layers}
        within = {module: {*module.modules()} - {module} for module in self._modules}
        # The modules that contain no layer.
        self._closed = {one for one, inner in within.items() if inner and not self._chosen & inner}
        # Hooks could do anything.
        hooked = set(filter(is_hooked_by_others, self._modules))
        self._running = {one for one, inner in within.items() if hooked & {one, *inner}}
        self._calls: list[_Call] = []
        # Layer -> the number of its call.
        self._starts: dict[DepthIdx, int] = {}
        self._returns: Counter[nn.Module] = Counter()
        # Whether the running code is inside a call that contains no layer.
        self._is_inside = False
        # Whether calls inside such calls are noted, and whether that has proved necessary.
        self._is_thorough = self.is_incomplete = False
        # In the current run: the numbers of the next call and of the replaced one.
        self._next = self._target = 0
        self._replace: Callable[[Any], Any] = lambda output: output

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Intercept calls of the network's modules inside the block."""
        noted = {module: _Noted(module, self) for module in self._modules}
        try:
            for module, around in noted.items():
                around.put_around(module)
            yield
        finally:
            for module, around in noted.items():
                around.take_from(module)

    def noted(self, run: Callable[[], T]) -> T:
        """Run the network, and note its calls; once more if it `is_incomplete` afterwards."""
        self._is_thorough = self.is_incomplete or self._surroundings is None
        self.is_incomplete = False
        for noted in (self._calls, self._starts, self._returns):
            noted.clear()
        before = _drawn_elsewhere()
        self.step = self._note
        try:
            result = run()
        finally:
            self.step = None
        if _drawn_elsewhere() != before and self._surroundings is not None:
            # Which call drew numbers outside of torch is unknown.
            self.leave_out_nothing()
        return result

    def leave_out_nothing(self) -> None:
        """Let all calls run from now on; the run has to be noted once more."""
        self._surroundings, self.is_incomplete = None, True

    def replaced(self, layer: DepthIdx, replace: Callable[[Any], Any], run: Callable[[], T]) -> T:
        """Run the network on the inputs of the noted run, with another output of one layer.

        Parameters
        ----------
        layer : (int, int)
            One of the layers.
        replace : callable
            Takes the layer's output in the noted run; its result goes on instead.
        run : callable
            Runs the network in the state of the noted run.

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
        is_layer = module in self._chosen
        if self._is_inside and not is_layer:
            return run(*args, **kwargs)
        number, call = len(self._calls), _Call(module)
        self._calls.append(call)
        look = None
        if self._surroundings is not None and module not in self._running:
            look = self._surroundings.look(module, (args, kwargs))
        is_closed = not self._is_thorough and module in self._closed
        outer = self._is_inside
        self._is_inside = outer or is_closed
        try:
            output = run(*args, **kwargs)
        finally:
            self._is_inside = outer
        call.end = len(self._calls)
        is_needed = len(self._starts) < len(self._layers)
        self._find(module, number)
        call.kept = Kept.of(output, look, (args, kwargs)) if is_needed and look else None
        if is_closed or outer:
            # The calls inside a call that must run are not known yet.
            self.is_incomplete |= outer or (is_needed and call.kept is None)
        if call.kept is not None and not any(number < start for start in self._starts.values()):
            for inner in self._calls[number + 1 :]:
                inner.kept = None
        if len(self._starts) == len(self._layers):
            # Calls behind the last layer are never left out.
            self.step = None
        return output

    def _find(self, module: nn.Module, number: int) -> None:
        """Check whether the call that has returned is one of the layers."""
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
            output = call.kept.again((args, kwargs))
        if number != self._target:
            return output
        self.step = None
        return self._replace(output)

    def _lost(self) -> FlowError:
        layer = next(label for label, at in self._starts.items() if at == self._target)
        return FlowError(
            f"the network called other modules ahead of layer {self._architecture[layer]} than in "
            "the run before, on the same inputs: its flow depends on something that is not "
            "restored between runs, such as a global variable"
        )


def _drawn_elsewhere() -> bytes:
    """Return the states of the generators outside of torch."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
