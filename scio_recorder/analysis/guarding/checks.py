"""Checks of what calls receive and return, of which the first that fails names the origin.

NOTE [Who made it]

A call makes a NaN if it returns one without a NaN among its inputs. It makes an infinity if it
returns one and all its inputs are finite. Calls are checked when they return, the innermost first,
so the first that qualifies is the origin and not a container that passes it on. Inputs are examined
before the call, since modules work in place. In the backward pass the same holds for gradients:
the gradients of its outputs go in, and those of its inputs and its parameters come out. There a
call is the origin only if its inputs in the forward pass were finite too.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any, Literal, TypeAlias

import numpy as np
from torch import Tensor, nn

from scio_recorder import Architecture
from scio_recorder.analysis.guarding.finite import (
    KINDS,
    GuardedCode,
    Known,
    NonFinite,
    examine,
    kinds_made,
    kinds_of,
)
from scio_recorder.analysis.guarding.loss_scaling import LossScaling
from scio_recorder.analysis.guarding.origin import Direction, KeptInputs, Origin
from scio_recorder.errors import ArgumentError, NonFiniteError
from scio_recorder.layer import Layer
from scio_recorder.lowlevel import warn
from scio_recorder.tensors import private

Action: TypeAlias = Literal["raise", "warn", "record"]


class GuardedCall:
    """One call of a module.

    The graph holds calls that have returned, so what would keep the network alive goes then.

    Parameters
    ----------
    name : str
        The qualified name of the module.
    pass_number : int
        The number of the pass.
    around : GuardedCall or None
        The call that contains it; None for a call of the network.
    frame : frame or None
        The frame that called its first hook.

    Attributes
    ----------
    received : sequence of NonFinite
        Findings about its inputs.
    kept : KeptInputs or None
        Its inputs and the state before it, if these are kept.
    code : GuardedCode or None
        The findings about the operations of its own code, if these are examined.
    number : int or None
        How many calls of the module returned before it in its pass; None until it returns.
    start : int
        The number of operations that autograd had noted when it began.
    nodes : list
        The nodes of the graph to which the calls inside it lead.
    nodes_of_inputs : set
        The nodes that made inputs of the network. If another thread made them, they may have later
        numbers than `start`.
    """

    received: Sequence[NonFinite] = ()
    kept: KeptInputs | None = None
    code: GuardedCode | None = None
    number: int | None = None
    # The last backward pass that entered the call, and its findings about what entered.
    _task = -1
    _entered: Sequence[NonFinite] = ()

    def __init__(
        self, name: str, pass_number: int, around: GuardedCall | None, frame: FrameType | None
    ) -> None:
        self.name = name
        self.pass_number = pass_number
        self.around = around
        self.frame = frame
        self.start = private.num_operations()
        self.nodes: list[Any] = []
        self.nodes_of_inputs: Collection[Any] = () if around is None else around.nodes_of_inputs

    def release(self) -> None:
        """Let go of what the graph must not hold."""
        self.frame, self.kept, self.code, self.nodes = None, None, None, []

    def enter(self, task: int, found: NonFinite | None) -> None:
        """Note what was found about a gradient that a backward pass brings."""
        if task != self._task:
            self._task, self._entered = task, ()
        if found is not None:
            self._entered = [*self._entered, found]

    def entered(self, task: int) -> Sequence[NonFinite] | None:
        """Return findings about the gradients that a backward pass has brought; None if none."""
        return self._entered if task == self._task else None


class PassOfThread(threading.local):
    """The state of the pass that a thread runs."""

    def __init__(self) -> None:
        self.pass_number = 0
        # The calls that have not returned, the innermost last.
        self.calls: list[GuardedCall] = []
        # The mode of the own code that runs, if operations are examined.
        self.own_code: GuardedCode | None = None
        # How many calls of each module have returned.
        self.counts: dict[str, int] = {}
        self.known = Known()


class Checks:
    """The checks of one guard, and what they have found."""

    def __init__(self, architecture: Architecture, action: Action, kinds: Collection[str]) -> None:
        if action not in ("raise", "warn", "record"):
            raise ArgumentError(f'action={action!r}: write "raise", "warn" or "record"')
        chosen = [kinds] if isinstance(kinds, str) else kinds
        is_some = isinstance(chosen, Collection) and len(chosen) > 0
        if not is_some or not all(map(KINDS.__contains__, chosen)):
            raise ArgumentError(f'kinds={kinds!r}: write ("nan", "inf"), or one of these')
        self.origin: Origin | None = None
        self.num_passes = 0
        self.num_passed_on = 0
        self.scaling = LossScaling()
        # Whether nothing is checked any more, as after an exception in the block, whatever graphs
        # are left.
        self.is_over = False
        self.local = PassOfThread()
        self._architecture = architecture
        self._action = action
        self._kinds = frozenset(chosen)
        self._has_warned = False
        self._numbers = itertools.count()

    def begin_pass(self) -> int:
        """Count a pass, and return its number."""
        self.scaling.count_skipped()
        number = next(self._numbers)
        self.num_passes = number + 1
        return number

    def check(
        self,
        call: GuardedCall,
        direction: Direction,
        received: Sequence[NonFinite],
        returned: Sequence[NonFinite],
        leaf: Any = None,
    ) -> None:
        """Check what a call has returned.

        Parameters
        ----------
        call : GuardedCall
            The call.
        direction : {"forward", "gradient"}
            Whether these are its inputs and outputs, or gradients.
        received, returned : sequence of NonFinite
            What of it is not finite.
        leaf : Node, optional
            The node of the leaf whose gradient was returned, if it is one.

        Raises
        ------
        NonFiniteError
            The call is the origin, and the guard's action is to raise.
        """
        kinds = kinds_made(kinds_of(received), kinds_of(returned)) & self._kinds
        # A gradient is nobody's fault if the call received something of the kind.
        was_received = direction == "gradient" and call.received
        if not kinds or was_received or self._is_ignored(direction):
            return
        layer = self.layer_of(call)
        first = next(one for one in returned if one.kinds & kinds)
        place = min(getattr(first, f"first_{kind}") for kind in kinds & first.kinds)
        origin = Origin(
            layer=layer,
            direction=direction,
            pass_number=call.pass_number,
            num_nan=sum(one.nan for one in returned),
            num_inf=sum(one.inf for one in returned),
            num_values=sum(math.prod(one.shape) for one in returned),
            index=tuple(int(at) for at in np.unravel_index(place, first.shape)),
            parameter=_name_of(layer.module, leaf),
            inputs_finite=not received,
            weights_finite=not any(map(examine, _weights_of(layer.module))),
            operation=None if call.code is None else call.code.operation(layer, kinds),
            _architecture=self._architecture,
            _kept=call.kept,
        )
        self.origin = self.origin or origin
        self.is_over = self._action != "raise"
        if self._action == "raise":
            raise _error(origin)
        if self._action == "warn":
            warn(str(origin))

    def check_whole(self, direction: Direction, found: Sequence[NonFinite]) -> None:
        """Count a pass in which the network passed on NaNs or infinities, and made none.

        Parameters
        ----------
        direction : {"forward", "gradient"}
            Whether this is what the network returned, or the gradient of that.
        found : sequence of NonFinite
            What of it is not finite.
        """
        kinds = kinds_of(found) & self._kinds
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
            warn(f"{source}; no layer has made any")

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


def _error(origin: Origin) -> NonFiniteError:
    # A frame that raises must not hold the error. In a cycle, the frames of its traceback live on
    # until garbage is collected, and before torch 2.13 checkpoint's hooks on saved tensors, too.
    error = NonFiniteError(str(origin))
    error.origin = origin
    return error


def _weights_of(module: nn.Module | None) -> Iterator[Tensor]:
    if module is not None:
        yield from (*module.parameters(), *module.buffers())


def _name_of(module: nn.Module | None, leaf: Any) -> str | None:
    named = () if module is None else module.named_parameters(remove_duplicate=False)
    return next((name for name, own in named if leaf is not None and own is leaf.variable), None)
