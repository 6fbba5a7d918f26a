"""Checks of what calls receive and return; the call of the first that fails is the origin.

NOTE [Who made it]

A call makes a NaN if it returns one without a NaN among its inputs. It makes an infinity if it
returns one and all its inputs are finite. Calls are checked in the order in which they return, the
innermost first, so the first that qualifies is the origin and not a container that passes it on.
Inputs are examined before the call, since modules work in place. In the backward pass the same
holds for gradients: the gradients of its outputs go in, and those of its inputs and its parameters
come out. There a call is the origin only if its inputs in the forward pass were finite too.

NOTE [When calls are checked]

Checks wait until flags are read: when the network's call ends, or the backward pass, of which the
regions that checkpointing runs again are a part. Autograd says nothing of a backward pass that
fails, but lets go of the function that it would call at the end. Such a pass is checked later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor, nn

from scio_recorder import Architecture
from scio_recorder.analysis.guarding.finite import (
    KINDS,
    Flag,
    Flags,
    GuardedCode,
    are_finite,
    kinds_made,
    kinds_of,
)
from scio_recorder.errors import ArgumentError, NonFiniteError
from scio_recorder.layer import Layer, Operation
from scio_recorder.lowlevel import Inputs, Moment, WeightDigests, digest_of, warn
from scio_recorder.stores import Calls, Held, KeptCall, KeptCalls, SampleIds, to_ids
from scio_recorder.tensors import is_plain, map_tensors, private, tensors

Direction: TypeAlias = Literal["forward", "gradient"]


class KeptInputs:
    """Copies of a module's inputs before a call, and of the state in which it will run.

    Parameters
    ----------
    layer : Layer
        A call of the module.
    module : torch.nn.Module
        The module.
    inputs : Inputs
        The inputs that its forward is about to receive.
    weights : WeightDigests
        Takes digests of modules' parameters.
    """

    def __init__(
        self, layer: Layer, module: nn.Module, inputs: Inputs, weights: WeightDigests
    ) -> None:
        self._calls = KeptCalls()
        call = KeptCall(inputs, Moment.of(module, inputs), weights.digest(module))
        self._kept = self._calls.keep(layer, call)
        self._output: Any = None

    def end(self, output: Any) -> None:
        """Note the module's output."""
        self._kept["output"] = digest_of(output)
        self._output = map_tensors(lambda tensor: tensor.detach().clone(), output)

    def save(self, path: str | os.PathLike[str], architecture: Architecture, layer: Layer) -> None:
        """Write a recording of this call of a layer, with its output if that is a tensor."""
        # A guard does not wait for the import of what reads recordings.
        from scio_recorder import Recording

        output, calls, ids = self._output, self._calls, SampleIds()
        sizes = [len(tensor) for tensor in tensors(output) if tensor.ndim]
        num_samples = sizes[0] if sizes else 1
        is_kept = isinstance(output, Tensor) and is_plain(output) and output.ndim > 0
        if not calls.rows:
            calls.commit(num_samples, {str(layer.label): self._kept})
        ids.add(to_ids(range(num_samples)))
        held = Held(
            {layer.label: output} if is_kept else {},
            ids,
            Calls(calls, architecture, [str(layer.label)]),
        )
        Recording(architecture, held, reductions={}, relative_errors={}, settings={}).save(path)


@dataclass(frozen=True, eq=False)
class Origin:
    """The call that made the first NaN or infinity.

    Parameters
    ----------
    layer : Layer
        The call; if the module ran more often than at labelling, its last labelled call.
    direction : {"forward", "gradient"}
        Whether the fault is in its output, or in the gradients that it gave back.
    pass_number : int
        The number of the pass in the block, from 0 on; for a gradient, of the differentiated pass.
    num_nan, num_inf : int or None
        How many of each it made: in its whole output, or in the first gradient that is not finite.
        None if that was gone or overwritten when the pass ended. Up to 64 MiB of a pass are kept.
    num_values : int
        The number of values among which these were counted.
    index : tuple of int or None
        The index of the first of them, in the first tensor that has any; None as these.
    parameter : str or None
        Name of the module's parameter, if this is the gradient of one.
    inputs_finite : bool
        Whether all its inputs, or the gradients of its outputs, were finite.
    weights_finite : bool or None
        Whether the module's parameters and buffers are finite; None for a gradient if they were
        written to in that backward pass.
    operation : Operation or None
        With ``operations=True``, the operation in the call's own code with which the fault began:
        the first that gives a NaN or an infinity which it was not given, numbers included. None
        for a gradient, and where no operation that is seen did it.
    """

    layer: Layer
    direction: Direction
    pass_number: int
    num_nan: int | None
    num_inf: int | None
    num_values: int
    index: tuple[int, ...] | None
    parameter: str | None
    inputs_finite: bool
    weights_finite: bool | None
    operation: Operation | None
    _architecture: Architecture = field(repr=False)
    _kinds: frozenset[str] = field(repr=False)
    _kept: KeptInputs | None = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the inputs of the call, and the state in which it ran, as a recording.

        ``open_recording(path).recompute(rnet, label)`` runs the module again, which makes the same
        NaNs, and ``.inputs[label][0]`` is what it received. Nothing of the net is needed to read.

        Parameters
        ----------
        path : str or path-like
            The folder. It is empty or does not exist yet.

        Raises
        ------
        ArgumentError
            Inputs were not kept.
        CollectError
            Some inputs are of a type that can't be kept on disk.
        RecordingError
            The folder is not empty, or the disk fails.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder, open_recording
        >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.LayerNorm(2, eps=0.0)), input_size=(1, 2))
        >>> with rnet.guard(action="record", keep_inputs=True) as guard:
        ...     out = rnet(torch.tensor([[3.0, 3.0]]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     guard.origin.save(f"{folder}/fault")
        ...     recording = open_recording(f"{folder}/fault")
        ...     recording.inputs["1"][0].args, recording.recompute(rnet, "1")["1"]
        ((tensor([[3., 3.]]),), tensor([[nan, nan]]))
        """
        if self._kept is None:
            raise ArgumentError(
                "the inputs of the call were not kept: write guard(keep_inputs=True). No part of a "
                "backward pass can run again on its own: for a gradient, save the weights and the "
                "batch instead, and run the step again"
            )
        self._kept.save(path, self._architecture, self.layer)

    @property
    def sample(self) -> int | None:
        """The index of the first affected sample; None for a parameter's gradient."""
        return self.index[0] if self.index and self.parameter is None else None

    def __str__(self) -> str:
        counts = ((self.num_nan, "NaN"), (self.num_inf, "infinite"))
        made = " and ".join(f"{count:,} {kind}" for count, kind in counts if count)
        first = f", the first at {list(self.index)}" if self.index else ""
        if self.num_nan is None:
            made = "NaNs" if "nan" in self._kinds else "infinities"
            first = " (how many is not known, since the tensor was gone or overwritten when the "
            first += "pass ended: write guard(immediate=True))"
        what, given = "what it returned", "its inputs"
        if self.direction == "gradient":
            of = "its inputs" if self.parameter is None else f"its parameter {self.parameter!r}"
            what, given = f"the gradient of {of}", "the gradients of its outputs"
        operation = "" if self.operation is None else f"; {self.operation.made_at}"
        amount = f"{'among' if self.num_nan is None else 'of'} {self.num_values:,} values"
        return (
            f"layer {self.layer} made {made} {amount} in {what}, in pass {self.pass_number}"
            f"{first}: {self._states(given)}{operation}"
        )

    def _states(self, given: str) -> str:
        if self.inputs_finite and self.weights_finite:
            return f"{given} and its weights were finite"
        said = f"{given} were {'' if self.inputs_finite else 'not '}finite"
        if self.weights_finite is None:
            return f"{said}, and its weights have changed since"
        return f"{said} and its weights were {'' if self.weights_finite else 'not '}finite"


# -- checks ----------------------------------------------------------------------------------------

Action: TypeAlias = Literal["raise", "warn", "record"]

_SCALED = (
    "; if a GradScaler scales the loss, write guard(scaler=scaler): overflows while its scale is "
    "above one are counted then"
)


@dataclass(eq=False)
class GuardedCall:
    """One call of a module. The graph holds calls that have returned."""

    # The qualified name of the module.
    name: str
    # Those of its pass.
    flags: Flags
    # The call that contains it; None for a call of the network.
    around: GuardedCall | None
    # That of torch's function which runs it; None once it has returned.
    frame: FrameType | None
    # The number of operations that autograd had noted when it began.
    start: int
    # The flags of its inputs.
    received: Sequence[Flag] = field(default=(), init=False)
    # Its inputs and the state before it, if these are kept, until it returns.
    kept: KeptInputs | None = field(default=None, init=False)
    # The operations of its own code, if these are examined, until it returns.
    code: GuardedCode | None = field(default=None, init=False)
    # How many calls of the module returned before it in its pass; None until it returns.
    number: int | None = field(default=None, init=False)
    # Those nodes of its own in the graph to which the calls inside it lead, until it returns.
    nodes: list[Any] = field(default_factory=list, init=False)
    # The last backward pass that entered the call.
    task: int = field(default=-1, init=False)

    def release(self) -> None:
        """Let go of what the graph must not hold, since it would keep the network alive."""
        self.frame = self.kept = self.code = None
        self.nodes = []


class PassOfThread(threading.local):
    """The state of the pass that a thread runs."""

    def __init__(self) -> None:
        # The calls that have not returned, the innermost last.
        self.calls: list[GuardedCall] = []
        # The mode of the own code that runs, if operations are examined.
        self.own_code: GuardedCode | None = None
        self.flags = Flags()


class LossScaling:
    """The overflows of gradients that a ``GradScaler`` provokes, and takes back.

    A scaler multiplies the loss by a scale at which gradients in half precision just fit. If they
    don't, it skips the step and continues with a smaller scale. If the network itself makes a NaN,
    the scale falls to one within a few skipped steps, and then no longer explains it.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._num_skipped = 0
        # The scale in the first backward pass that overflowed since the scaler's last step.
        self._scale: float | None = None

    @property
    def num_skipped_steps(self) -> int:
        """The number of steps that the scaler has skipped: each made the scale smaller."""
        if self._scale is not None and self._scaler.get_scale() < self._scale:
            self._num_skipped, self._scale = self._num_skipped + 1, None
        return self._num_skipped

    def explains_overflow(self) -> bool:
        """Whether gradients may overflow, and note that they do."""
        if self._scaler is None or not self._scaler.is_enabled() or self._scaler.get_scale() <= 1:
            return False
        if self.num_skipped_steps >= 0 and self._scale is None:
            self._scale = self._scaler.get_scale()
        return True


class Checks:
    """The checks of one guard, and what they have found."""

    def __init__(
        self,
        architecture: Architecture,
        weights: Sequence[nn.Parameter],
        action: Action,
        kinds: Collection[str],
        scaler: Any,
        is_immediate: bool,
    ) -> None:
        if action not in ("raise", "warn", "record"):
            raise ArgumentError(f'action={action!r}: write "raise", "warn" or "record"')
        chosen = [kinds] if isinstance(kinds, str) else kinds
        is_some = isinstance(chosen, Collection) and len(chosen) > 0
        if not is_some or not all(map(KINDS.__contains__, chosen)):
            raise ArgumentError(f'kinds={kinds!r}: write ("nan", "inf"), or one of these')
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise ArgumentError(
                f"scaler is a {type(scaler).__name__}: write the GradScaler that scales the loss"
            )
        self.origin: Origin | None = None
        self.num_passes = 0
        self.num_passed_on = 0
        self.scaling = LossScaling(scaler)
        self.is_immediate = is_immediate
        # Whether nothing is checked any more, as after an exception in the block, whatever graphs
        # are left.
        self.is_over = False
        self.local = PassOfThread()
        self._architecture = architecture
        self._action = action
        self._kinds = frozenset(chosen)
        self._hint = _SCALED if scaler is None else ""
        self._has_warned = False
        self._numbers = itertools.count()
        # By the number of the backward pass.
        self._backward: dict[int, Flags] = {}
        self._weights = weights

    # -- passes ------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a pass of this thread, and tell of what was found in those that have failed."""
        _ = self.scaling.num_skipped_steps
        number = next(self._numbers)
        self.num_passes = number + 1
        self.tell_late()
        self.local.flags = Flags(number)

    def end_pass(self, flags: Flags) -> None:
        """Check a pass that has succeeded."""
        self.tell(self.finish(flags))

    def backward_flags(self) -> Flags:
        """Return the flags of the backward pass around the caller, at whose end they are read."""
        task = private.backward_pass()
        flags = self._backward.get(task)
        if flags is None:
            flags = Flags(task=task)
            with contextlib.suppress(RuntimeError):  # without versions, in inference mode
                flags.versions = {id(weight): weight._version for weight in self._weights}
            end = partial(_end_backward, weakref.ref(self), task)
            flags.end = weakref.ref(end, flags.forget)
            private.call_at_end_of_backward(end)
            self._backward[task] = flags
        return flags

    def settle(self, flags: Flags) -> Origin | None:
        """Read flags, and do the checks that wait; return an origin that is to be raised.

        As long as all is finite the checks go on to wait: later ones ask what entered their calls.
        """
        if self.is_over or flags.read():
            return None
        waiting, flags.waiting = flags.waiting, []
        origins = (check(self, flags, *rest) for check, *rest in waiting)
        return next(filter(None, origins), None)

    def finish(self, flags: Flags) -> Origin | None:
        """Settle the flags of a pass that is over."""
        try:
            return self.settle(flags)
        finally:
            flags.close()

    def wait(self, flags: Flags, check: Any, *rest: Any) -> None:
        """Let a check wait, or do it now if the guard is immediate."""
        flags.waiting.append((check, *rest))
        if self.is_immediate:
            self.tell(self.settle(flags))

    def late(self, error: BaseException | None = None) -> Origin | None:
        """Return what was found in passes that errors have ended, and nobody was told of.

        Nobody is told of a pass that was interrupted just now.
        """
        origin = None
        if not isinstance(error, Exception | None):
            self.local.flags.close()
            return None
        # The last pass of this thread first, if it did not come to its end.
        for flags in (self.local.flags, *self._backward.values()):
            is_backward = flags.task in self._backward
            if (is_backward and flags.end() is None) or (flags.task == -1 and flags.waiting):
                self._backward.pop(flags.task, None)
                # The device may be what has failed.
                with contextlib.suppress(RuntimeError):
                    origin = origin or self.finish(flags)
        return origin

    def end_backward(self, task: int) -> None:
        """Check a backward pass that has succeeded."""
        flags = self._backward.pop(task)
        del flags.end
        # Reentrant checkpointing runs backward passes inside another, which has begun before.
        around = [other for other in self._backward.values() if other.thread == flags.thread]
        for origin in [*map(self.settle, around), self.finish(flags)]:
            self.tell(origin)

    def tell_late(self) -> None:
        """Tell of what was found in passes that errors have ended, if anything was."""
        self.tell(self.late())

    def tell(self, origin: Origin | None) -> None:
        """Raise an error that tells of an origin, if there is one."""
        if origin is not None:
            raise self.error(origin)

    def error(self, origin: Origin) -> NonFiniteError:
        """Return the error that tells of an origin.

        A frame that raises must not hold the error. In a cycle, the frames of its traceback live on
        until garbage is collected, and before torch 2.13 checkpoint's hooks on saved tensors, too.
        """
        error = NonFiniteError(self._told(origin))
        error.origin = origin
        return error

    def _told(self, origin: Origin) -> str:
        return f"{origin}{self._hint if origin.direction == 'gradient' else ''}"

    # -- checks ------------------------------------------------------------------------------------

    def enter(self, flags: Flags, call: GuardedCall, flag: Flag) -> None:
        """Note a gradient that has entered a call."""
        flags.received.setdefault(call, []).append(flag)

    def check_gradient(
        self, flags: Flags, call: GuardedCall, owner: GuardedCall | None, leaf: Any, flag: Flag
    ) -> Origin | None:
        """Check the calls, from one outwards, that a gradient leaves.

        Parameters
        ----------
        flags : Flags
            Those of the backward pass.
        call, owner : GuardedCall
            The innermost of them, and the one that it stays in; None if it leaves all.
        leaf : Node or None
            The node of the leaf whose gradient it is, if it is one.
        flag : Flag
            That of the gradient.
        """
        left: GuardedCall | None = call
        # A call that has not returned yet differentiates what is inside it.
        while flag.kinds and left is not None and left is not owner and left.number is not None:
            received = flags.received.get(left)
            # Its pass may go on, or have been interrupted.
            origin = None if received is None else self.settle(left.flags)
            # A gradient is nobody's fault if the call received something that is not finite.
            if origin is None and received is not None and not kinds_of(left.received):
                origin = self.check(flags, left, "gradient", received, [flag], leaf=leaf)
            if origin is not None:
                return origin
            left = left.around
        return None

    def check(
        self,
        flags: Flags,
        call: GuardedCall,
        direction: Direction,
        received: Sequence[Flag],
        returned: Sequence[Flag],
        code: GuardedCode | None = None,
        leaf: Any = None,
    ) -> Origin | None:
        """Check one call by what it received and returned, with its own code, or for a leaf."""
        kinds = kinds_made(kinds_of(received), kinds_of(returned)) & self._kinds
        if not kinds or self._is_ignored(direction):
            return None
        layer = self.layer_of(call)
        faulty = [flag for flag in returned if flag.kinds]
        origin = Origin(
            layer=layer,
            direction=direction,
            pass_number=call.flags.pass_number,
            **_counts(faulty, kinds, kinds_of(received), self._kinds),
            num_values=sum(flag.num_values for flag in faulty),
            parameter=_name_of(layer.module, leaf),
            inputs_finite=not kinds_of(received),
            weights_finite=_are_weights_finite(layer.module, flags.versions),
            operation=None if code is None else code.operation(layer, kinds),
            _architecture=self._architecture,
            _kinds=kinds,
            _kept=call.kept,
        )
        self.origin = self.origin or origin
        self.is_over = self._action != "raise"
        if self._action == "warn":
            warn(self._told(origin))
        return origin if self._action == "raise" else None

    def check_whole(self, flags: Flags, direction: Direction, returned: Sequence[Flag]) -> None:
        """Count a pass in which the network passed on NaNs or infinities, and made none.

        Parameters
        ----------
        flags : Flags
            Those of the pass.
        direction : {"forward", "gradient"}
            Whether this is what the network returned, or the gradient of that.
        returned : sequence of Flag
            Those of it.
        """
        kinds = kinds_of(returned) & self._kinds
        if not kinds or self._is_ignored(direction):
            return
        self.num_passed_on += 1
        if self._action != "record" and not self._has_warned:
            self._has_warned = True
            what = " and ".join(sorted("NaNs" if kind == "nan" else "infinities" for kind in kinds))
            source = (
                f"the network returned {what} that its inputs held"
                if direction == "forward"
                else f"the gradient of the network's output holds {what}: the loss made them"
            )
            hint = self._hint if direction == "gradient" else ""
            warn(f"{source}; no layer has made any{hint}")

    def _is_ignored(self, direction: Direction) -> bool:
        """Whether nothing is looked for any more, or the scale of the loss explains it."""
        return self.is_over or (direction == "gradient" and self.scaling.explains_overflow())

    def layer_of(self, call: GuardedCall) -> Layer:
        """Return the row of the architecture that a call belongs to."""
        architecture = self._architecture
        labels = architecture.labels_of(call.name) or architecture.rows_of(call.name)
        rows = [architecture[label] for label in labels]
        rows.sort(key=lambda row: row.completion or 0)
        return rows[min(call.number or 0, len(rows) - 1)]


def _end_backward(reference: weakref.ref[Checks], task: int) -> None:
    checks = reference()
    if checks is not None:
        checks.end_backward(task)


def _counts(
    faulty: Sequence[Flag], kinds: frozenset[str], given: frozenset[str], sought: frozenset[str]
) -> dict[str, Any]:
    """Count what was made, and find the first; None for all if it is not known any more."""
    counted = [flag.counted() for flag in faulty]
    known = [one for one in counted if one is not None]
    if len(known) < len(counted):
        return {"num_nan": None, "num_inf": None, "index": None}
    # A NaN hides infinities until they are counted.
    kinds = kinds_made(given, kinds_of(known)) & sought or kinds
    first = next(one for one in known if one.kinds & kinds)
    place = min(getattr(first, f"first_{kind}") for kind in kinds & first.kinds)
    index = tuple(int(at) for at in np.unravel_index(place, first.shape))
    nan, inf = sum(one.nan for one in known), sum(one.inf for one in known)
    return {"num_nan": nan, "num_inf": inf, "index": index}


def _are_weights_finite(module: nn.Module | None, versions: Mapping[int, int]) -> bool | None:
    """Whether parameters and buffers are finite; None if some have other versions than they had."""
    if module is None:
        return True
    if any(versions.get(id(own), own._version) != own._version for own in module.parameters()):
        return None
    return are_finite([*module.parameters(), *module.buffers()])


def _name_of(module: nn.Module | None, leaf: Any) -> str | None:
    named = () if module is None else module.named_parameters(remove_duplicate=False)
    return next((name for name, own in named if leaf is not None and own is leaf.variable), None)
