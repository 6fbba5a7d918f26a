"""The guard that finds where a NaN or an infinity was made: its options and its findings.

NOTE [Who made it]

A call makes a NaN if it returns one without a NaN among its inputs. It makes an infinity if it
returns one and all its inputs are finite. Calls are judged when they return, the innermost first,
so the first that qualifies is the maker and not a container that passes it on. Inputs are judged
before the call, since modules work in place. In the backward pass the same holds for gradients:
the gradients of its outputs go in, and those of its inputs and its parameters come out. There a
call is a maker only if its inputs in the forward pass were finite too.
"""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor, nn

from scio_recorder.analysis.guarding.finite import KINDS, Found, NonFinite, Unread, examine, read
from scio_recorder.analysis.guarding.loss_scaling import LossScaling
from scio_recorder.errors import ArgumentError, NonFiniteError, warn
from scio_recorder.layer import Layer, counted
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.stores.disk_format.ids import SampleIds, to_ids
from scio_recorder.stores.kept_inputs import Calls, KeptCall, KeptCalls
from scio_recorder.stores.store import Held
from scio_recorder.tensors.copies import is_plain
from scio_recorder.tensors.digests import Weights, digest_of
from scio_recorder.tensors.structures import map_tensors, tensors

Action: TypeAlias = Literal["raise", "warn", "record"]
Direction: TypeAlias = Literal["forward", "gradient"]
_WORDS = {"nan": "NaN", "inf": "infinite"}


@dataclass(eq=False, slots=True)
class GuardedCall:
    """One call of a module, without a reference that would keep the network alive."""

    name: str
    pass_number: int
    is_outermost: bool
    # The number of the module's calls that returned before it in its pass.
    number: int = 0
    # Findings about its inputs.
    received: Sequence[Found] = ()


class CallBefore:
    """Copies of a module's inputs before a call, and of the state in which it will run.

    Parameters
    ----------
    layer : Layer
        A call of the module.
    module : torch.nn.Module
        The module.
    inputs : Inputs
        The inputs that its forward is about to receive.
    weights : Weights
        Takes digests of modules' parameters.
    """

    def __init__(self, layer: Layer, module: nn.Module, inputs: Inputs, weights: Weights) -> None:
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
        from scio_recorder.recording.recording import Recording

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
    num_nan, num_inf : int
        How many of each it made: in its whole output, or in the first gradient that is not finite.
    num_values : int
        The number of values among which these were counted.
    index : tuple of int
        The index of the first of them, in the first tensor that has any.
    parameter : str or None
        Name of the module's parameter, if this is the gradient of one.
    inputs_finite : bool
        Whether all its inputs, or the gradients of its outputs, were finite.
    weights_finite : bool
        Whether the module's parameters and buffers are finite.
    """

    layer: Layer
    direction: Direction
    pass_number: int
    num_nan: int
    num_inf: int
    num_values: int
    index: tuple[int, ...]
    parameter: str | None
    inputs_finite: bool
    weights_finite: bool
    _architecture: Architecture = field(repr=False)
    _kept: CallBefore | None = field(repr=False)

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
            if self.direction == "forward":
                raise ArgumentError(
                    "the inputs of the call were not kept: write guard(keep_inputs=True)"
                )
            raise ArgumentError(
                "it was made in a backward pass, and no part of that can run again on its own: "
                "save the weights and the batch instead, and run the step again"
            )
        self._kept.save(path, self._architecture, self.layer)

    @property
    def sample(self) -> int | None:
        """The index of the first affected sample; None for a parameter's gradient."""
        return self.index[0] if self.index and self.parameter is None else None

    def __str__(self) -> str:
        counts = ((self.num_nan, "nan"), (self.num_inf, "inf"))
        made = " and ".join(f"{count:,} {_WORDS[kind]}" for count, kind in counts if count)
        what, given = "what it returned", "its inputs"
        if self.direction == "gradient":
            of = "its inputs" if self.parameter is None else f"its parameter {self.parameter!r}"
            what, given = f"the gradient of {of}", "the gradients of its outputs"
        first = f", the first at {list(self.index)}" if self.index else ""
        states = ((given, self.inputs_finite), ("its weights", self.weights_finite))
        said = [f"{name} were {'' if is_so else 'not '}finite" for name, is_so in states]
        if self.inputs_finite and self.weights_finite:
            said = [f"{given} and its weights were finite"]
        return (
            f"layer {self.layer} made {made} of {self.num_values:,} values in {what}, in pass "
            f"{self.pass_number}{first}: {' and '.join(said)}"
        )


class Case(NamedTuple):
    """The inputs and outputs of a call that are not finite, or may not be."""

    call: GuardedCall
    direction: Direction
    given: Sequence[Found]
    made: Sequence[Found]
    # The leaf whose gradient was made, if it is one.
    parameter: weakref.ref[Any] | None = None
    # Its inputs and the state before it, if these are kept.
    before: CallBefore | None = None
    # Whether the network handed on its own inputs, so that no call is judged.
    is_handed_on: bool = False


class Cases:
    """Cases in their order, judged at once if all is known, otherwise when they are read."""

    def __init__(self) -> None:
        self._waiting: list[Case] = []

    def add(self, guard: Guard, case: Case) -> bool:
        """Add a case, and return whether it must be read later."""
        self._waiting.append(case)
        is_first, found = len(self._waiting) == 1, (*case.given, *case.made)
        if is_first and not any(isinstance(one, Unread) for one in found):
            self.read(guard)
        return bool(self._waiting)

    def read(self, guard: Guard) -> None:
        """Judge all waiting cases; each device is waited for once."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        found = [(one.given, one.made, one.call.received) for one in waiting]
        numbers = iter(read([one for parts in found for part in parts for one in part]))
        for case, parts in zip(waiting, found, strict=True):
            given, made, received = (
                [one for one in itertools.islice(numbers, len(part)) if one is not None]
                for part in parts
            )
            if case.is_handed_on:
                guard.hand_on(case.direction, made)
            # A gradient is nobody's fault if the call received something of the kind.
            elif case.direction == "forward" or not received:
                guard.judge(case, given, made)


class Guard:
    """The findings of a guard so far.

    Attributes
    ----------
    origin : Origin or None
        The first call that made a NaN or an infinity, None as long as there is none.
    num_passes : int
        The number of calls of the network.
    num_passed_on : int
        The number of passes in which the network only passed on NaNs of its inputs, or of the
        gradients of the loss.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> net = nn.Sequential(nn.ReLU(), nn.LayerNorm(2, eps=0.0))
    >>> with Recorder(net, input_size=(1, 2)).guard(action="record") as guard:
    ...     _ = net(torch.tensor([[1.0, 2.0], [3.0, 3.0]]))
    >>> print(guard)
    layer 1-2 1 (LayerNorm) made 2 NaN of 4 values in what it returned, in pass 0, the first at ...
    >>> guard.origin.layer.name, guard.origin.sample, guard.origin.inputs_finite
    ('1', 1, True)
    """

    def __init__(self, architecture: Architecture, action: Action, kinds: Collection[str]) -> None:
        if action not in ("raise", "warn", "record"):
            raise ArgumentError(f'action={action!r}: write "raise", "warn" or "record"')
        chosen = {kinds} if isinstance(kinds, str) else set(kinds or ())
        if not chosen or not chosen <= set(KINDS):
            raise ArgumentError(f'kinds={kinds!r}: write ("nan", "inf"), or one of these')
        self.origin: Origin | None = None
        self.num_passes = 0
        self.num_passed_on = 0
        self._architecture = architecture
        self._action = action
        self._kinds = frozenset(chosen)
        self._scaling = LossScaling()
        self._has_warned = False
        self._numbers = itertools.count()
        # What examines gradients lives as long as this guard, and graphs hold it weakly.
        self.gradients: object = None
        # Whether the guard is done, as it is after an exception in the block, whatever graphs are
        # left.
        self.is_over = False

    @property
    def num_skipped_steps(self) -> int:
        """The steps that a ``GradScaler`` skipped because gradients of a scaled loss overflowed."""
        return self._scaling.num_skipped_steps

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

    # -- reports of those who examine tensors ------------------------------------------------------

    def begin_pass(self) -> int:
        """Count a pass, and return its number."""
        self._scaling.count_skipped()
        number = next(self._numbers)
        self.num_passes = number + 1
        return number

    def judge(self, case: Case, given: Sequence[NonFinite], made: Sequence[NonFinite]) -> None:
        """Judge a case with known numbers.

        Raises
        ------
        NonFiniteError
            The call is the maker, and the guard's action is to raise.
        """
        kinds = _made(given, made) & self._kinds
        if not kinds or self._is_excused(case.direction):
            return
        origin = self._origin(case, kinds, given, made)
        self.origin = self.origin or origin
        self.is_over = self._action != "raise"
        if self._action == "raise":
            raise _error(origin)
        if self._action == "warn":
            warn(str(origin))

    def hand_on(self, direction: Direction, found: Sequence[NonFinite]) -> None:
        """Note that the network handed on NaNs or infinities that it received, and made none."""
        held = {kind for one in found for kind in one.kinds} & self._kinds
        if not held or self._is_excused(direction):
            return
        self.num_passed_on += 1
        if self._action != "record" and not self._has_warned:
            self._has_warned = True
            what = " and ".join(sorted("NaNs" if kind == "nan" else "infinities" for kind in held))
            source = (
                f"the network returned {what} that its inputs held"
                if direction == "forward"
                else f"the gradient of the network's output holds {what}: the loss made them"
            )
            warn(f"{source}; no layer has made any")

    def _is_excused(self, direction: Direction) -> bool:
        """Whether nothing that is not finite matters, or the scale of the loss explains it."""
        return self.is_over or (direction == "gradient" and self._scaling.explains_overflow())

    def _origin(
        self,
        case: Case,
        kinds: frozenset[str],
        given: Sequence[NonFinite],
        made: Sequence[NonFinite],
    ) -> Origin:
        layer = self.layer_of(case.call)
        module = layer.module
        first = next(one for one in made if one.kinds & kinds)
        place = min(getattr(first, f"first_{kind}") for kind in kinds & first.kinds)
        held = () if module is None else (*module.parameters(), *module.buffers())
        return Origin(
            layer=layer,
            direction=case.direction,
            pass_number=case.call.pass_number,
            num_nan=sum(one.nan for one in made),
            num_inf=sum(one.inf for one in made),
            num_values=sum(math.prod(one.shape) for one in made),
            index=tuple(int(at) for at in np.unravel_index(place, first.shape)),
            parameter=_name_of(module, case.parameter),
            inputs_finite=not given,
            weights_finite=not any(read([examine(tensor) for tensor in held])),
            _architecture=self._architecture,
            _kept=case.before,
        )

    def layer_of(self, call: GuardedCall) -> Layer:
        """Return the row of the architecture that a call belongs to."""
        architecture = self._architecture
        labels = architecture.labels_of(call.name) or architecture.rows_of(call.name)
        rows = [architecture[label] for label in labels]
        rows.sort(key=lambda row: row.completion or 0)
        return rows[min(call.number, len(rows) - 1)]


def _error(origin: Origin) -> NonFiniteError:
    # A frame that raises must not hold the error. In a cycle, the frames of its traceback live on
    # until garbage is collected, and before torch 2.13 checkpoint's hooks on saved tensors, too.
    error = NonFiniteError(str(origin))
    error.origin = origin
    return error


def _made(had: Sequence[NonFinite], gives: Sequence[NonFinite]) -> frozenset[str]:
    """Return the kinds that were returned but not received, see NOTE [Who made it]."""
    given = frozenset[str]().union(*(one.kinds for one in had))
    kinds = frozenset[str]().union(*(one.kinds for one in gives))
    return (kinds & {"nan"} if given else kinds) - given


def _name_of(module: nn.Module | None, parameter: weakref.ref[Any] | None) -> str | None:
    leaf = None if parameter is None else parameter()
    if module is None or leaf is None:
        return None
    named = module.named_parameters(remove_duplicate=False)
    return next((name for name, own in named if own is leaf), None)
