"""The guard: its findings, and the two hooks on each module by which it examines all calls.

NOTE [Which calls are running]

Each thread has a list of the calls that it runs, from the outermost on. Torch calls no hook after a
call that something like ``KeyboardInterrupt`` has ended. So each entry holds the frame of torch's
function that runs it: a call whose frame is not on the stack any more has ended, and so have those
in it. This function calls hooks itself if the call fails, and in another one inside it otherwise.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from scio_recorder import Architecture
from scio_recorder.analysis.guarding.checks import (
    Action,
    Checks,
    GuardedCall,
    KeptInputs,
    Origin,
    PassOfThread,
)
from scio_recorder.analysis.guarding.finite import Flag, GuardedCode, kinds_of
from scio_recorder.analysis.guarding.guarded_gradients import attach
from scio_recorder.errors import ArgumentError, FlowError, UnsupportedNetError
from scio_recorder.layer import counted
from scio_recorder.lowlevel import (
    CallHook,
    CallHooks,
    CallWrapper,
    Inputs,
    WeightDigests,
    interpreter,
    refuse_transforms,
    run_in_mode,
    warn_of_other_kernels,
)
from scio_recorder.tensors import booleans, private

__all__ = ["Action", "Guard", "Origin"]

_UNCOMPILED = (
    'write `with torch.compiler.set_stance("force_eager"), rnet.guard(): ...`, where the same '
    "network runs uncompiled"
)
# Those for which torch has a fused kernel.
_FUSED = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
# Of Python's interpreter, for each module in another one, with and without hooks on operations.
_FRAMES_OF_CALL = {False: 5, True: 11}
_SPARE_FRAMES = 60


class Guard:
    """The findings of a guard so far.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> net = nn.Sequential(nn.ReLU(), nn.LayerNorm(2, eps=0.0))
    >>> with Recorder(net, input_size=(1, 2)).guard(action="record") as guard:
    ...     _ = net(torch.tensor([[1.0, 2.0], [3.0, 3.0]]))
    >>> print(guard)
    layer 1-2 1 (LayerNorm) made 2 NaN of 4 values in what it returned, in pass 0, the first at ...
    >>> guard.origin.layer.name, guard.origin.sample, guard.origin.inputs_finite
    ('1', 1, True)
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks

    @property
    def origin(self) -> Origin | None:
        """The first call that made a NaN or an infinity; None as long as there is none."""
        return self._checks.origin

    @property
    def num_passes(self) -> int:
        """The number of calls of the network, and of its parts where these are called alone."""
        return self._checks.num_passes

    @property
    def num_passed_on(self) -> int:
        """The passes in which the network only passed on NaNs of its inputs, or of the loss."""
        return self._checks.num_passed_on

    @property
    def num_skipped_steps(self) -> int:
        """The steps that a ``GradScaler`` skipped because gradients of a scaled loss overflowed."""
        return self._checks.scaling.num_skipped_steps

    def __str__(self) -> str:
        if self.origin is not None:
            return str(self.origin)
        said = f"no layer has made a NaN or an infinity in {counted(self.num_passes, 'pass')}"
        if self.num_passed_on:
            said += f"; {self.num_passed_on} only handed on NaNs or infinities"
        if self.num_skipped_steps:
            steps = counted(self.num_skipped_steps, "step")
            said += f"; the scaler of the loss has skipped {steps}"
        return said

    def __repr__(self) -> str:
        return f"Guard({self})"


@contextlib.contextmanager
def guarded(
    architecture: Architecture,
    action: Action,
    kinds: Collection[str],
    *,
    gradients: bool,
    keep_inputs: bool,
    operations: bool,
    scaler: Any,
    immediate: bool,
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
    NonFiniteError
        A pass that has failed, and was not checked yet, made a NaN or an infinity.
    UnsupportedNetError
        The network is compiled, in part or as a whole.
    """
    options = {"keep_inputs": keep_inputs, "operations": operations, "immediate": immediate}
    booleans(ArgumentError, gradients=gradients, **options)
    modules, hooks = architecture.hookable, CallHooks()
    _check_that_hooks_run(modules, operations)
    network: Any = next(iter(modules))
    weights = [*network.parameters()]
    checks = Checks(architecture, weights, action, kinds, scaler, immediate or keep_inputs)
    # Asked in each pass, and most networks have none.
    fused = [row for row in architecture.values() if isinstance(row.module, _FUSED)]
    warns = partial(warn_of_other_kernels, fused, modules, "guarded", of_functions=operations)
    digests = WeightDigests() if keep_inputs else None
    calls = _GuardedCalls(checks, checks.local, warns if fused else None, digests, gradients)
    wrappers = [_wrapper(module, checks) for module in modules] if operations else []
    wrappers.append(CallWrapper(network, calls.run))
    try:
        for wrapper in wrappers:
            wrapper.put_around()
        # A method would be held weakly, and looked up at each call.
        ends = partial(calls.begin), partial(calls.end)
        hooked = [CallHook(module, name, *ends, always=True) for module, name in modules.items()]
        hooks.add(*hooked)
        yield Guard(checks)
    except BaseException as error:
        origin, checks.is_over = checks.late(error), True
        if origin is None:
            raise
        raise checks.error(origin) from error
    finally:
        hooks.remove()
        for wrapper in wrappers:
            wrapper.remove()
        calls.innermost(None)
    _check_that_it_ran(checks, hooks)


def _check_that_it_ran(checks: Checks, hooks: CallHooks) -> None:
    if hooks.compiled:
        raise UnsupportedNetError(
            f"the module {next(iter(hooks.compiled))!r} ran as compiled code inside the block, "
            f"which can't be guarded: {_UNCOMPILED}"
        )
    if not checks.num_passes:
        raise FlowError(
            "nothing was guarded: the network was not called inside the block, or a copy of it "
            "was called, or it was compiled before"
        )
    checks.tell_late()


def _wrapper(module: nn.Module, checks: Checks) -> CallWrapper:
    """Return what stands around the calls of a module whose operations are examined."""

    def run(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mode = None if checks.is_over else GuardedCode(module, checks.local)
        return run_in_mode(checks.local, mode, call, args, kwargs)

    return CallWrapper(module, run)


def _check_that_hooks_run(modules: Mapping[nn.Module, str], operations: bool) -> None:
    is_uncompiled = private.DYNAMO not in sys.modules or private.runs_uncompiled()
    if not is_uncompiled and any(map(private.is_compiled, modules)):
        raise UnsupportedNetError(
            "the network is compiled, in part or as a whole, and compiled code ignores hooks: "
            f"{_UNCOMPILED}"
        )
    depth = 2 + max([name.count(".") for name in modules.values()])
    needed = depth * _FRAMES_OF_CALL[operations] + _SPARE_FRAMES
    if not interpreter.has_room_for(needed):
        needed += len([*interpreter.stack()])
        raise UnsupportedNetError(
            f"modules lie {depth} deep inside each other, and a guarded call of each needs "
            f"{_FRAMES_OF_CALL[operations]} frames of Python: write sys.setrecursionlimit"
            f"({2 * needed}) before the block"
        )


@dataclass(slots=True)
class _GuardedCalls:
    """The calls of a network's modules in one block: what the hooks of all modules share."""

    checks: Checks
    local: PassOfThread
    # Warns if another kernel runs, and returns whether it does; None if none can, or once it has.
    warns: Callable[[], bool] | None
    # Takes digests of parameters, if inputs are kept.
    digests: WeightDigests | None
    has_gradients: bool

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the network, and tell what was found in a pass that an error ends."""
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if self.innermost(interpreter.frame_around()) is not None:
                raise
            origin = self.checks.late(error)
            if origin is None:
                raise
            raise self.checks.error(origin) from error

    def _begin_pass(self) -> None:
        """Begin a pass: a call that is part of no other."""
        local = self.local
        if self.warns is not None and self.warns():
            self.warns = None
        # Checkpointing calls modules again in a backward pass, as part of a pass that was counted.
        if private.backward_pass() == -1:
            refuse_transforms("guarded")
            self.checks.begin_pass()
        else:
            flags, local.flags = local.flags, self.checks.backward_flags()
            local.flags.pass_number, local.flags.counts = flags.pass_number, flags.counts

    def begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Examine the inputs of a call that begins, since the module may work in place."""
        local = self.local
        calls, frame = local.calls, interpreter.frame_around(3)
        try:
            # Where the forward of a module calls another: most often, and found without a search.
            around = calls[-1] if calls[-1].frame is interpreter.frame_around(7) else None
        except (IndexError, ValueError):
            around = None
        if around is None:
            around = self.innermost(frame)
        if around is None:
            self._begin_pass()
        flags = local.flags
        call = GuardedCall(name, flags, around, frame, private.num_operations())
        calls.append(call)
        if self.checks.is_over:
            return
        call.received = flags.of((*args, *kwargs.values()) if kwargs else args)
        if around is None and self.has_gradients:
            flags.nodes_of_inputs = flags.nodes()
        if self.digests is not None:
            layer, inputs = self.checks.layer_of(call), Inputs(args, kwargs)
            call.kept = KeptInputs(layer, module, inputs, self.digests)
        code = local.own_code
        # Another module's code, if this is a copy that shares what stands around its call.
        if code is not None and code.module is module:
            call.code, code.is_paused = code, False

    def innermost(self, frame: FrameType | None) -> GuardedCall | None:
        """Return the innermost call around a frame, and forget those that have ended inside it."""
        calls = self.local.calls
        while calls:
            if interpreter.is_called_in(frame, calls[-1].frame):
                return calls[-1]
            calls.pop().release()
        return None

    def end(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Examine the output of a call that has returned, or failed in a hook ahead of ours."""
        local = self.local
        calls, frame = local.calls, interpreter.frame_around(3)
        if local.own_code is not None:
            local.own_code.is_paused = True
        call = calls[-1] if calls and calls[-1].frame is frame else self._failed_in(frame)
        if call is None:
            return
        del calls[-1]
        flags = call.flags
        call.number = flags.counts[name]
        flags.counts[name] += 1
        try:
            if not self.checks.is_over:
                returned = flags.of((output,), keeps=True)
                check = Checks.check, call, "forward", call.received, returned, call.code
                flags.waiting.append(check)
                if call.around is None:
                    flags.waiting.append((Checks.check_whole, "forward", returned))
                # What a hook raises is lost if the call has failed.
                if call.frame is frame:
                    self._examine(call, output, returned)
        finally:
            call.release()

    def _failed_in(self, frame: FrameType) -> GuardedCall | None:
        """Return the call of a hook that torch's function calls itself, inside another frame.

        Calls inside it may have been interrupted. None if it never began, since a hook ahead of
        ours has failed.
        """
        frames = frame, interpreter.frame_around(3)
        call = self.innermost(frames[1])
        return call if call is not None and call.frame in frames else None

    def _examine(self, call: GuardedCall, output: Any, returned: list[Flag]) -> None:
        checks, flags = self.checks, call.flags
        if self.has_gradients and torch.is_grad_enabled():
            attach(checks, call, output)
        if call.kept is not None and not flags.read() and kinds_of(returned):
            call.kept.end(output)
        if call.around is None:
            flags.nodes_of_inputs = ()
            if flags.task == -1:
                checks.end_pass(flags)
        if checks.is_immediate:
            checks.tell(checks.settle(flags))
