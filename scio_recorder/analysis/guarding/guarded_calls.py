"""Examining the inputs and the output of every call of a network, by two hooks on each module.

NOTE [Which calls are running]

Each thread has a list of the calls that it runs, from the outermost on. Torch calls no hook after a
call that something like ``KeyboardInterrupt`` has ended. So each entry holds the frame that called
its first hook: a call whose frame is not on the stack any more has ended, and so have those in it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Collection, Iterator
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from scio_recorder.analysis.guarding.checks import Check, Checks, GuardedCall
from scio_recorder.analysis.guarding.finite import Known
from scio_recorder.analysis.guarding.guard import Action, CallBefore, Guard
from scio_recorder.analysis.guarding.guarded_gradients import GuardedGradients
from scio_recorder.capture.engine import fusable, refuse_transforms, warn_of_other_kernels
from scio_recorder.capture.hooks import CallHook, CallHooks
from scio_recorder.errors import ArgumentError, FlowError, UnsupportedNetError
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import boolean
from scio_recorder.tensors.digests import Weights
from scio_recorder.tensors.structures import tensors


@contextlib.contextmanager
def guarded(
    architecture: Architecture,
    action: Action,
    kinds: Collection[str],
    *,
    gradients: bool,
    keep_inputs: bool,
) -> Iterator[Guard]:
    """Check every call of a network's modules inside a block.

    Backward passes of passes made in the block are checked after it too, as long as somebody holds
    the guard. Inputs are kept until a call returns, and those of the one that fails from then on.

    Raises
    ------
    ArgumentError
        An argument has a value that can't work.
    FlowError
        No module of the network was called.
    UnsupportedNetError
        The network is compiled, in part or as a whole.
    """
    checks = Checks(architecture, action, kinds)
    boolean("gradients", gradients, ArgumentError)
    boolean("keep_inputs", keep_inputs, ArgumentError)
    # The rows of a module differ in nothing that matters here.
    rows = {
        row.module: row
        for row in architecture.values()
        if row.module is not None and takes_hooks(row.module)
    }
    if private.DYNAMO in sys.modules and any(map(private.is_compiled, rows)):
        raise UnsupportedNetError(
            "the network is compiled, in part or as a whole, and compiled code ignores hooks: "
            "guard the uncompiled network"
        )
    watched = GuardedGradients(checks) if gradients else None
    checks.gradients = watched
    weights = Weights() if keep_inputs else None
    passes = _GuardedPasses(architecture, rows.keys(), checks, watched, weights)
    hooks = CallHooks()
    try:
        # A method would be held weakly, and looked up at each call.
        ends = partial(passes.begin_call), partial(passes.end_call)
        hooks.add(*(CallHook(one, row.name, *ends, always=True) for one, row in rows.items()))
        yield Guard(checks)
        checks.make(checks.local.waiting)
    except BaseException:
        checks.is_over = True
        raise
    finally:
        hooks.remove()
        passes.local.calls.clear()
    if hooks.compiled:
        raise UnsupportedNetError(
            f"the module {next(iter(hooks.compiled))!r} ran as compiled code inside the block, "
            "which can't be guarded: leave the network uncompiled there"
        )
    if not checks.num_passes:
        raise FlowError(
            "nothing was guarded: the network was not called inside the block, or a copy of it "
            "was called, or it was compiled before"
        )


class _RunningCall(NamedTuple):
    """A call that has not returned yet."""

    call: GuardedCall
    # The frame that called its first hook.
    frame: FrameType | None
    # Nodes of the graph to which the calls inside it lead.
    nodes: list[Any]
    # Its inputs and the state before it, if these are kept.
    before: CallBefore | None


class _Local(threading.local):
    """The calls that a thread runs."""

    def __init__(self) -> None:
        self.calls: list[_RunningCall] = []
        # How many calls of each module have returned in the pass.
        self.counts: dict[str, int] = {}
        self.pass_number = 0

    def call_around(self, frame: FrameType | None) -> _RunningCall | None:
        """Return the innermost call that a frame is part of, and forget those that have ended."""
        calls = self.calls
        while calls:
            last, inner = calls[-1], frame
            while inner is not None and inner is not last.frame:
                inner = inner.f_back
            if inner is not None:
                return last
            calls.pop()
        return None


class _GuardedPasses:
    """The passes of one block: what the hooks of all modules share."""

    def __init__(
        self,
        architecture: Architecture,
        modules: Collection[nn.Module | None],
        checks: Checks,
        gradients: GuardedGradients | None,
        weights: Weights | None,
    ) -> None:
        self.local = _Local()
        self._checks = checks
        self._gradients = gradients
        # Takes digests of parameters, if inputs are kept.
        self._weights = weights
        self._modules = modules
        # Found once: there are many passes, and most networks have none.
        self._fusable = fusable(architecture)
        self._has_warned = False

    def _begin_pass(self) -> None:
        """Begin a pass: a call that is part of no other."""
        refuse_transforms("guarded")
        # The pass before may have failed, with findings that wait for a device.
        self._checks.make(self._checks.local.waiting)
        self._checks.local.known = Known()
        if self._fusable and not self._has_warned:
            self._has_warned = warn_of_other_kernels(self._fusable, self._modules, "guarded")
        # Checkpointing calls modules again in a backward pass, as part of a pass that was counted.
        if private.backward_pass() == -1:
            self.local.counts.clear()
            self.local.pass_number = self._checks.begin_pass()

    def begin_call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Examine the inputs of a call that begins, since the module may work in place."""
        # A frame that a variable of its own held would live until garbage is collected.
        frame = inspect.currentframe().f_back.f_back  # type: ignore[union-attr]  # a hook's caller
        running = self.local.call_around(frame)
        if running is None:
            self._begin_pass()
        around = None if running is None else running.call
        call, before = GuardedCall(name, self.local.pass_number, around), None
        if not self._checks.is_over:
            values = *args, *kwargs.values()
            call.received = self._checks.local.known.examine_all(values)
            if around is None:
                call.nodes_of_inputs = {tensor.grad_fn for tensor in tensors(values)}
            if self._weights is not None:
                layer, inputs = self._checks.layer_of(call), Inputs(args, kwargs)
                before = CallBefore(layer, module, inputs, self._weights)
        self.local.calls.append(_RunningCall(call, frame, [], before))

    def end_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Examine the output of a call that has returned."""
        frame = inspect.currentframe().f_back.f_back  # type: ignore[union-attr]  # a hook's caller
        running = self.local.call_around(frame)
        # The call may have failed, or a hook ahead of ours, so that it never began.
        if running is None or running.frame is not frame:
            return
        calls = self.local.calls
        calls.pop()
        running.call.number = self.local.counts.get(name, 0)
        self.local.counts[name] = running.call.number + 1
        if not self._checks.is_over:
            self._check(running, output)
            if self._gradients is not None and torch.is_grad_enabled():
                nodes_around = calls[-1].nodes if calls else []
                self._gradients.attach(running.call, output, running.nodes, nodes_around)

    def _check(self, running: _RunningCall, output: Any) -> None:
        """Check a call that has returned, by what it has returned."""
        call, before, is_of_network = running.call, running.before, running.call.around is None
        returned = self._checks.local.known.examine_all((output,))
        if returned:
            if before is not None:
                before.end(output)
            given = call, "forward", call.received, returned
            self._checks.add(Check(*given, is_of_network=is_of_network, before=before))
        if is_of_network or before is not None:
            self._checks.make(self._checks.local.waiting)
