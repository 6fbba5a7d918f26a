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
call is judged first, and then those around it that it leaves too. Nodes own the hooks, which go
with the graph. They hold the guard weakly, and no module.

A write into an output that is a view takes the node that made this output out of the graph, but not
the one that made the base of the view. There the gradient is examined instead. A call is judged
only if a gradient was seen to enter it.

If gradients are differentiated (``create_graph=True``), a second backward pass also enters a call
by what it made in the first one. The nodes that made this are noted during the first pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from scio_recorder.analysis.guarding.finite import Found, Known
from scio_recorder.analysis.guarding.guard import Case, Cases, Guard, GuardedCall
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import tensors

# Leaves are numbered as if they came after everything else.
_LEAF = 1 << 63


class _BackwardPass(threading.local):
    """The backward pass that runs on a thread."""

    def __init__(self) -> None:
        self.task = -1
        self.known = Known()
        # Also those of the pass around it, which reentrant checkpointing begins it in: they come
        # first.
        self.cases = Cases()
        self.reads_cases_at_end = False


class CallGradients:
    """The gradients of one call.

    Parameters
    ----------
    call : GuardedCall
        The call.
    around : CallGradients or None
        Those of the call that contains it.
    inputs : iterable
        Its inputs.
    """

    def __init__(
        self, call: GuardedCall, around: CallGradients | None, inputs: Iterable[Any]
    ) -> None:
        self.call = call
        self.around = around
        self.has_returned = False
        # The number of operations that autograd had noted when the call began.
        self._start = private.num_operations()
        # The nodes that made inputs on another thread, if these have later numbers there.
        self._other_threads: set[Any] = set() if around is None else around._other_threads
        for tensor in tensors(inputs) if around is None else ():
            if tensor.grad_fn is not None and private.place_of(tensor.grad_fn) >= self._start:
                self._other_threads.add(tensor.grad_fn)
        # The last backward pass that entered the call, and its findings about what entered.
        self._task = -1
        self._found: list[Found] = []

    def innermost_with(self, node: Any) -> CallGradients | None:
        """Return the call, from this one outwards, of which a node is an operation; None for none.

        Parameters
        ----------
        node : Node
            One to which outputs of this call lead.
        """
        place = private.place_of(node)
        if place >= _LEAF or node in self._other_threads:
            return None
        call: CallGradients | None = self
        while call is not None and place < call._start:
            call = call.around
        return call

    def enter(self, task: int, found: Found) -> None:
        """Note what was found about a gradient that a backward pass brings."""
        if task != self._task:
            self._task, self._found = task, []
        self._found = [*self._found, found]

    def entered(self, task: int) -> list[Found]:
        """Return findings about all gradients that the backward pass has brought; none if none."""
        return self._found if task == self._task else []


class _Exit(NamedTuple):
    """An edge of a node that leads out of a call."""

    # The number of the edge, and the node to which it leads.
    edge: int
    target: Any
    # The call around to which this node belongs.
    owner: CallGradients | None


class GuardedGradients:
    """The gradients of all calls of one guard."""

    def __init__(self, guard: Guard) -> None:
        # The guard holds this.
        self._guard = weakref.ref(guard)
        self._enter = partial(_call, weakref.WeakMethod(self._enter_call))
        self._leave = partial(_call, weakref.WeakMethod(self._leave_call))
        # Marks the nodes that were visited. It must not lead to the guard.
        self._mark = object()
        self._backward = _BackwardPass()

    def attach(
        self, call: CallGradients, output: Any, nodes: list[Any], nodes_around: list[Any]
    ) -> None:
        """Attach hooks for the gradients of a call that has returned.

        Parameters
        ----------
        call : CallGradients
            The call.
        output : Any
            Its output.
        nodes : list
            The nodes to which the calls inside it have led. No hook may hold them, which they own.
        nodes_around : list
            Receives those to which it leads itself.
        """
        call.has_returned = True
        own: list[Any] = []
        for node in nodes:
            (own if call.innermost_with(node) is call else nodes_around).append(node)
        for tensor in (output,) if isinstance(output, Tensor) else tensors(output):
            base = None if tensor.grad_fn is None else private.base_of(tensor)
            for end in (tensor,) if base is None else (tensor, base):
                if end.grad_fn is not None and call.innermost_with(end.grad_fn) is call:
                    self._attach_before(end, call, is_base=end is base)
                    own.append(end.grad_fn)
        # The list grows meanwhile.
        for node in own:
            if self._mark not in node.metadata:
                node.metadata[self._mark] = True
                self._attach_behind(node, call, own, nodes_around)

    def _attach_before(self, end: Tensor, call: CallGradients, *, is_base: bool = False) -> None:
        """Examine what enters a call at the node that made a tensor."""
        node: Any = end.grad_fn
        node.register_prehook(partial(self._enter, call, end.output_nr, is_base))

    def _attach_behind(
        self, node: Any, call: CallGradients, own: list[Any], nodes_around: list[Any]
    ) -> None:
        """Examine what leaves a call behind one of its nodes, and add the nodes ahead of that."""
        exits: list[_Exit] = []
        for index, (target, _) in enumerate(node.next_functions):
            owner = None if target is None else call.innermost_with(target)
            if owner is call:
                own.append(target)
            elif target is not None:
                exits.append(_Exit(index, target, owner))
                if owner is not None:
                    nodes_around.append(target)
        if exits:
            node.register_hook(partial(self._leave, call, exits))

    def _current(self) -> _BackwardPass | None:
        """Return what is known in the current backward pass; None if nobody asks."""
        guard = self._guard()
        if guard is None or guard.is_over:
            return None
        backward, task = self._backward, private.backward_pass()
        if backward.task != task:
            backward.task, backward.known, backward.reads_cases_at_end = task, Known(), False
        return backward

    def _enter_call(
        self, call: CallGradients, number: int, is_base: bool, given: Sequence[Tensor | None]
    ) -> None:
        """Examine a gradient that enters a call; behind a view only if none came there."""
        backward, gradient = self._current(), given[number]
        if backward is None or gradient is None or (is_base and call.entered(backward.task)):
            return
        found = backward.known.examine(gradient)
        call.enter(backward.task, found)
        if found is not None and call.around is None:
            self._add(backward, Case(call.call, "gradient", (), [found], is_handed_on=True))

    def _leave_call(
        self,
        call: CallGradients,
        exits: list[_Exit],
        made: Sequence[Tensor | None],
        given: Sequence[Tensor | None],
    ) -> None:
        """Examine the gradients that leave a call from a node."""
        backward = self._current()
        if backward is None:
            return
        for at in exits:
            gradient = made[at.edge]
            if gradient is not None:
                found = backward.known.examine(gradient)
                if found is not None or gradient.grad_fn is not None:
                    self._judge(backward, gradient, found, call, at)

    def _judge(
        self,
        backward: _BackwardPass,
        gradient: Tensor,
        found: Found,
        call: CallGradients,
        at: _Exit,
    ) -> None:
        """Judge the calls, from one outwards, that a gradient leaves."""
        is_leaf = private.place_of(at.target) >= _LEAF
        leaf = weakref.ref(at.target.variable) if is_leaf else None
        left: CallGradients | None = call
        # A call that has not returned yet differentiates what is inside it.
        while left is not None and left is not at.owner and left.has_returned:
            given = left.entered(backward.task)
            if found is not None and given:
                self._add(backward, Case(left.call, "gradient", given, [found], leaf))
            if gradient.grad_fn is not None:
                # A second backward pass may enter here.
                self._attach_before(gradient, left)
            left = left.around

    def _add(self, backward: _BackwardPass, case: Case) -> None:
        """Add a case, which is judged at the end of the backward pass if a device is behind."""
        guard, cases = self._guard(), backward.cases
        if guard is None or not cases.add(guard, case):
            return
        if not backward.reads_cases_at_end:
            backward.reads_cases_at_end = True
            private.call_at_end_of_backward(partial(cases.read, guard))


def _call(method: weakref.WeakMethod[Any], *values: Any) -> None:
    """Call a method of an object that a graph must not hold, if it is still there."""
    bound = method()
    if bound is not None:
        bound(*values)
