"""Examining the gradients that enter and leave every call of a network.

NOTE [Gradients of a call]

A hook on a tensor sees the sum of the gradients that all its users send, and would blame one of
them for another. So the hooks are on the nodes of the graph. The nodes of a call are those that its
outputs lead to, and that autograd has numbered since the call began. Each thread has numbers of its
own, so nodes of inputs that were made on another thread are noted. Gradients enter a call at the
nodes that made its outputs. They leave it where one of its nodes leads to an older one, which made
an input, or to a leaf, usually a parameter. The gradient that leaves a node was made by this node
alone.

Each node is visited once, for the innermost call that it belongs to: a walk that leaves this call
continues when the call around it returns. If a gradient that leaves is not finite, the innermost
call is checked first, and then those around it that it leaves too. Nodes own the hooks, which go
with the graph. They hold the guard weakly, and no module.

A write into an output that is a view takes the node that made this output out of the graph, but not
the one that made the base of the view. There the gradient is examined instead. A call is checked
only if a gradient was seen to enter it.

If gradients are differentiated (``create_graph=True``), a second backward pass also enters a call
by what it made in the first one. The nodes that made this are noted during the first pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from scio_recorder.analysis.guarding.checks import Checks, GuardedCall
from scio_recorder.analysis.guarding.finite import NonFinite
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import tensors

# Leaves are numbered as if they came after everything else.
_LEAF = 1 << 63


class _Exit(NamedTuple):
    """An edge of a node that leads out of a call."""

    # The number of the edge, and the node to which it leads.
    edge: int
    target: Any
    # The call around to which this node belongs.
    owner: GuardedCall | None


def _owner_of(node: Any, call: GuardedCall) -> GuardedCall | None:
    """Return the call, from one outwards, of which a node is an operation; None for none."""
    place = private.place_of(node)
    if place >= _LEAF or node in call.nodes_of_inputs:
        return None
    around: GuardedCall | None = call
    while around is not None and place < around.start:
        around = around.around
    return around


class GuardedGradients:
    """The gradients of all calls of one guard."""

    def __init__(self, checks: Checks) -> None:
        # They hold this.
        self._checks = weakref.ref(checks)
        self._enter = partial(_call, weakref.WeakMethod(self._enter_call))
        self._leave = partial(_call, weakref.WeakMethod(self._leave_call))
        # Marks the nodes that were visited. It must not lead to the guard.
        self._mark = object()

    def attach(self, call: GuardedCall, output: Any) -> None:
        """Attach hooks for the gradients of a call that has returned.

        Parameters
        ----------
        call : GuardedCall
            The call.
        output : Any
            Its output.
        """
        own: list[Any] = []
        nodes_around = [] if call.around is None else call.around.nodes
        for node in call.nodes:
            (own if _owner_of(node, call) is call else nodes_around).append(node)
        for tensor in (output,) if isinstance(output, Tensor) else tensors(output):
            base = None if tensor.grad_fn is None else private.base_of(tensor)
            for end in (tensor,) if base is None else (tensor, base):
                if end.grad_fn is not None and _owner_of(end.grad_fn, call) is call:
                    self._attach_before(end, call, is_base=end is base)
                    own.append(end.grad_fn)
        # The list grows meanwhile.
        for node in own:
            if self._mark not in node.metadata:
                node.metadata[self._mark] = True
                self._attach_behind(node, call, own, nodes_around)

    def _attach_before(self, end: Tensor, call: GuardedCall, *, is_base: bool = False) -> None:
        """Examine what enters a call at the node that made a tensor."""
        node: Any = end.grad_fn
        node.register_prehook(partial(self._enter, call, end.output_nr, is_base))

    def _attach_behind(
        self, node: Any, call: GuardedCall, own: list[Any], nodes_around: list[Any]
    ) -> None:
        """Examine what leaves a call behind one of its nodes, and add the nodes ahead of that."""
        exits: list[_Exit] = []
        for index, (target, _) in enumerate(node.next_functions):
            owner = None if target is None else _owner_of(target, call)
            if owner is call:
                own.append(target)
            elif target is not None:
                exits.append(_Exit(index, target, owner))
                if owner is not None:
                    nodes_around.append(target)
        if exits:
            node.register_hook(partial(self._leave, call, exits))

    def _enter_call(
        self, call: GuardedCall, number: int, is_base: bool, given: Sequence[Tensor | None]
    ) -> None:
        """Examine a gradient that enters a call; behind a view only if none came there."""
        checks, gradient, task = self._active_checks(), given[number], private.backward_pass()
        if checks is None or gradient is None or (is_base and call.entered(task) is not None):
            return
        found = checks.local.known.examine(gradient)
        call.enter(task, found)
        if found is not None and call.around is None:
            checks.check_whole("gradient", [found])

    def _leave_call(
        self,
        call: GuardedCall,
        exits: list[_Exit],
        made: Sequence[Tensor | None],
        _given: Sequence[Tensor | None],
    ) -> None:
        """Examine the gradients that leave a call from a node."""
        checks = self._active_checks()
        for at in exits:
            gradient = made[at.edge]
            if checks is not None and gradient is not None:
                found = checks.local.known.examine(gradient)
                if found is not None or gradient.grad_fn is not None:
                    self._check(checks, gradient, found, call, at)

    def _check(
        self,
        checks: Checks,
        gradient: Tensor,
        found: NonFinite | None,
        call: GuardedCall,
        at: _Exit,
    ) -> None:
        """Check the calls, from one outwards, that a gradient leaves."""
        leaf = at.target if private.place_of(at.target) >= _LEAF else None
        left: GuardedCall | None = call
        # A call that has not returned yet differentiates what is inside it.
        while left is not None and left is not at.owner and left.number is not None:
            received = left.entered(private.backward_pass())
            if found is not None and received is not None:
                checks.check(left, "gradient", received, [found], leaf)
            if gradient.grad_fn is not None:
                # A second backward pass may enter here.
                self._attach_before(gradient, left)
            left = left.around

    def _active_checks(self) -> Checks | None:
        """Return the checks of the guard; None if nobody asks any more."""
        checks = self._checks()
        return None if checks is None or checks.is_over else checks


def _call(method: weakref.WeakMethod[Any], *values: Any) -> None:
    """Call a method of an object that a graph must not hold, if it is still there."""
    bound = method()
    if bound is not None:
        bound(*values)
