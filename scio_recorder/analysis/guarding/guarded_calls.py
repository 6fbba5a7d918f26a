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

from scio_recorder.analysis.guarding.finite import Known
from scio_recorder.analysis.guarding.guard import CallBefore, Case, Cases, Guard, GuardedCall
from scio_recorder.analysis.guarding.guarded_gradients import CallGradients, GuardedGradients
from scio_recorder.capture.engine import fusable, refuse_transforms, warn_of_other_kernels
from scio_recorder.capture.hooks import CallHook, CallHooks
from scio_recorder.errors import ArgumentError, FlowError, UnsupportedNetError
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import boolean
from scio_recorder.tensors.digests import Weights


@contextlib.contextmanager
def guarded(
    architecture: Architecture, guard: Guard, *, gradients: bool, keep_inputs: bool
) -> Iterator[Guard]:
    """Let a guard judge every call of a network's modules inside a block.

    Backward passes of passes made in the block are judged after it too, as long as somebody holds
    the guard. Inputs are kept until a call returns, and those of the one that fails from then on.

    Raises
    ------
    FlowError
        No module of the network was called.
    UnsupportedNetError
        The network is compiled, in part or as a whole.
    """
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
    guard.gradients = watched = GuardedGradients(guard) if gradients else None
    weights = Weights() if keep_inputs else None
    passes = _GuardedPasses(architecture, rows.keys(), guard, watched, weights)
    hooks = CallHooks()
    try:
        # A method would be held weakly, and looked up at each call.
        ends = partial(passes.begin_call), partial(passes.end_call)
        hooks.add(*(CallHook(one, row.name, *ends, always=True) for one, row in rows.items()))
        yield guard
        passes.thread.cases.read(guard)
    except BaseException:
        guard.is_over = True
        raise
    finally:
        hooks.remove()
        passes.thread.calls.clear()
    if hooks.compiled:
        raise UnsupportedNetError(
            f"the module {next(iter(hooks.compiled))!r} ran as compiled code inside the block, "
            "which can't be guarded: leave the network uncompiled there"
        )
    if not guard.num_passes:
        raise FlowError(
            "nothing was guarded: the network was not called inside the block, or a copy of it "
            "was called, or it was compiled before"
        )


class _RunningCall(NamedTuple):
    """A call that has not returned yet."""

    call: GuardedCall
    # The frame that called its first hook.
    frame: FrameType | None
    gradients: CallGradients | None
    # Nodes of the graph to which the calls inside it lead.
    nodes: list[Any]
    # Its inputs and the state before it, if these are kept.
    before: CallBefore | None


class _Thread(threading.local):
    """The pass that a thread runs."""

    def __init__(self) -> None:
        self.calls: list[_RunningCall] = []
        self.known = Known()
        # How many calls of each module have returned.
        self.counts: dict[str, int] = {}
        self.pass_number = 0
        self.cases = Cases()

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
        guard: Guard,
        gradients: GuardedGradients | None,
        weights: Weights | None,
    ) -> None:
        self._guard = guard
        self._gradients = gradients
        # Takes digests of parameters, if inputs are kept.
        self._weights = weights
        self.thread = _Thread()
        self._modules = modules
        # Found once: there are many passes, and most networks have none.
        self._fusable = fusable(architecture)
        self._has_warned = False

    def _begin_pass(self) -> None:
        """Begin a pass: a call that is part of no other."""
        refuse_transforms("guarded")
        thread = self.thread
        # The pass before may have failed, with findings that wait for a device.
        thread.cases.read(self._guard)
        thread.cases, thread.known = Cases(), Known()
        if self._fusable and not self._has_warned:
            self._has_warned = warn_of_other_kernels(self._fusable, self._modules, "guarded")
        # Checkpointing calls modules again in a backward pass, as part of a pass that was counted.
        if private.backward_pass() == -1:
            thread.counts.clear()
            thread.pass_number = self._guard.begin_pass()

    def begin_call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Examine the inputs of a call that begins, since the module may work in place."""
        thread = self.thread
        # A frame that a variable of its own held would live until garbage is collected.
        frame = inspect.currentframe().f_back.f_back  # type: ignore[union-attr]  # a hook's caller
        around = thread.call_around(frame)
        if around is None:
            self._begin_pass()
        call = GuardedCall(name, thread.pass_number, is_outermost=around is None)
        gradients = before = None
        if not self._guard.is_over:
            values = *args, *kwargs.values()
            call.received = thread.known.examine_all(values)
            if self._gradients is not None and torch.is_grad_enabled():
                outer = None if around is None else around.gradients
                gradients = CallGradients(call, outer, values)
            if self._weights is not None:
                layer, inputs = self._guard.layer_of(call), Inputs(args, kwargs)
                before = CallBefore(layer, module, inputs, self._weights)
        thread.calls.append(_RunningCall(call, frame, gradients, [], before))

    def end_call(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Examine the output of a call that has returned."""
        thread = self.thread
        frame = inspect.currentframe().f_back.f_back  # type: ignore[union-attr]  # a hook's caller
        running = thread.call_around(frame)
        # The call may have failed, or a hook ahead of ours, so that it never began.
        if running is None or running.frame is not frame:
            return
        thread.calls.pop()
        running.call.number = thread.counts.get(name, 0)
        thread.counts[name] = running.call.number + 1
        if not self._guard.is_over:
            self._judge(running, output)
            if self._gradients is not None and running.gradients is not None:
                nodes_around = thread.calls[-1].nodes if thread.calls else []
                self._gradients.attach(running.gradients, output, running.nodes, nodes_around)

    def _judge(self, running: _RunningCall, output: Any) -> None:
        """Judge a call that has returned, by what it has returned."""
        call, cases = running.call, self.thread.cases
        made = self.thread.known.examine_all((output,))
        if made:
            if running.before is not None:
                running.before.end(output)
            case = Case(call, "forward", call.received, made, before=running.before)
            cases.add(self._guard, case)
            if call.is_outermost:
                cases.add(self._guard, Case(call, "forward", (), made, is_handed_on=True))
        if call.is_outermost or running.before is not None:
            cases.read(self._guard)
