"""Looking at the gradients that enter and leave every call of a network.

NOTE [Gradients of a call]

A hook on a tensor sees the sum of the gradients that all its users send, and would blame one of
them for another. So a call is identified by its operations: the nodes of the graph that its outputs
lead to, and that autograd has numbered since the call began. Each thread has numbers of its own, so
nodes of inputs that were made on another thread are noted. Gradients enter at the nodes that made
its outputs. They leave where a node of the call leads to an older one, which made an input, or to a
leaf, usually a parameter. The gradient that leaves a node was made by this node alone.

Each such exit is noted once, for the innermost call that it belongs to. The calls around it are
asked only if a gradient there is not finite. So the walk over the nodes of a call skips the calls
inside it. Nodes own the hooks, which go with the graph. They hold the guard weakly, and no module.

If gradients are differentiated (``create_graph=True``), a second backward pass also enters a call
by what it made in the first one. The nodes that made this are noted during the first pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from scio_recorder.analysis.guarding.guard import Call, Case, Cases, Guard
from scio_recorder.tensors import private
from scio_recorder.tensors.finite import Found, Known, look
from scio_recorder.tensors.structures import tensors

# Leaves are numbered as if they came after everything else.
_LEAF = 1 << 63


class Passing:
    """A call in the backward pass.

    Parameters
    ----------
    start : int
        The number of operations that autograd had noted when the call began.
    around : Passing or None
        The call that contains it.
    inputs : Any
        Its inputs.
    """

    __slots__ = ("_given", "_task", "around", "call", "outside", "start", "targets")

    def __init__(self, start: int, around: Passing | None, inputs: Any) -> None:
        self.start = start
        self.around = around
        # The nodes that made inputs on another thread, if these have later numbers there.
        self.outside: set[Any] = _later(inputs, start) if around is None else around.outside
        self.call: Call | None = None
        # The nodes to which gradients go from here, without leaves.
        self.targets: list[Any] = []
        self._task = -1
        self._given: list[Found] = []

    def has(self, node: Any, place: int) -> bool:
        """Whether a node that its outputs lead to is one of its operations."""
        return place >= self.start and not (self.outside and node in self.outside)

    def sending(self, place: int) -> Iterator[Passing]:
        """Yield the calls, from this one outwards, that send a gradient to a node at a place."""
        around: Passing | None = self
        while around is not None and around.call is not None and place < around.start:
            yield around
            around = around.around

    def given(self, task: int) -> list[Found]:
        """Return findings about gradients that have come in and may not be finite."""
        if task != self._task:
            self._task, self._given = task, []
        return self._given


def _later(inputs: Any, start: int) -> set[Any]:
    nodes = [tensor.grad_fn for tensor in tensors(inputs)]
    return {node for node in nodes if node is not None and private.place_of(node) >= start}


class _Thread(threading.local):
    """The backward pass that runs on a thread."""

    def __init__(self) -> None:
        self.task = -1
        self.known = Known()
        self.cases = Cases()


class GuardedGradients:
    """The gradients of the calls of one guard."""

    def __init__(self, guard: Guard) -> None:
        # The guard holds this.
        self._guard = weakref.ref(guard)
        # The key under which nodes of a graph refer to this guard. It must not lead to the guard.
        self._key = object()
        self._own = weakref.ref(self)
        self._local = _Thread()

    def listen(self, passing: Passing, call: Call, output: Any) -> None:
        """Attach hooks for the gradients of a call that has just returned.

        Parameters
        ----------
        passing : Passing
            The call, as it began.
        call : Call
            The call, as it ended.
        output : Any
            Its output.
        """
        passing.call = call
        waiting: list[Any] = []
        for tensor in [output] if isinstance(output, Tensor) else tensors(output):
            node = tensor.grad_fn
            if node is not None and passing.has(node, private.place_of(node)):
                self._at(node).entries.append((tensor.output_nr, passing))
                waiting.append(node)
        seen = set(waiting)
        for node in waiting:
            for target in self._inside(node, passing):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        for node in waiting:
            at = node.metadata.get(self._key)
            if at is not None:
                at.attach(node)

    def _inside(self, node: Any, passing: Passing) -> list[Any]:
        """Return the nodes of a call to which one of them leads, or the inner call that it ends."""
        at: _AtNode | None = node.metadata.get(self._key)
        inner = None if at is None else at.call_inside(passing)
        found: list[Any] = []
        if inner is not None:
            for target in inner.targets:
                is_inside = passing.has(target, private.place_of(target))
                (found if is_inside else passing.targets).append(target)
            return found
        for index, (target, _) in enumerate(node.next_functions):
            place = -1 if target is None else private.place_of(target)
            if place > _LEAF:
                self._at(node).exits.append((index, passing, -1, weakref.ref(target.variable)))
            elif place >= 0 and passing.has(target, place):
                found.append(target)
            elif place >= 0:
                passing.targets.append(target)
                place = -1 if target in passing.outside else place
                self._at(node).exits.append((index, passing, place, None))
        return found

    def _at(self, node: Any) -> _AtNode:
        at: _AtNode | None = node.metadata.get(self._key)
        if at is None:
            at = node.metadata[self._key] = _AtNode(self._own)
        return at

    # -- in the backward pass ----------------------------------------------------------------------

    def begin(self) -> _Thread | None:
        """Return what is known in the current backward pass; None if nobody asks."""
        guard = self._guard()
        if guard is None or guard.is_settled:
            return None
        thread, task = self._local, private.backward_pass()
        if thread.task != task:
            thread.task = task
            thread.known.forget()
            thread.cases.reset()
        return thread

    def take(self, found: Found, passing: Passing) -> None:
        """Note the gradients that a call receives."""
        passing.given(self._local.task).append(found)
        if passing.around is None and passing.call is not None:
            self._add(Case(passing.call, "gradient", (), [found], is_handed_on=True))

    def judge(
        self, found: Found, passing: Passing, place: int, leaf: weakref.ref[Any] | None
    ) -> None:
        """Judge a call, and those around it that send the same gradient, by that gradient."""
        for around in passing.sending(place):
            given = list(around.given(self._local.task))
            assert around.call is not None, "it has returned"
            self._add(Case(around.call, "gradient", given, [found], leaf))

    def note_differentiable(self, gradient: Tensor, passing: Passing, place: int) -> None:
        """Listen to the gradients of a gradient that a call, and those around it, have made."""
        at = self._at(gradient.grad_fn)
        for call in passing.sending(place):
            at.seconds.append((gradient.output_nr, call))
        at.attach(gradient.grad_fn)

    def _add(self, case: Case) -> None:
        guard, cases = self._guard(), self._local.cases
        is_first = not cases.is_waiting
        if guard is not None and cases.add(guard, case) and is_first:
            private.call_at_end_of_backward(partial(cases.read, guard))


class _AtNode:
    """The hooks of one guard at a node of the graph, for all calls that begin or end there."""

    __slots__ = ("_judges", "_owner", "_sees", "entries", "exits", "seconds")

    def __init__(self, owner: weakref.ref[GuardedGradients]) -> None:
        self._owner = owner
        # Which of the two hooks are attached to the node.
        self._judges = self._sees = False
        # The calls that returned an output of the node.
        self.entries: list[tuple[int, Passing]] = []
        # The calls that made a gradient with this node, in a pass that was differentiated.
        self.seconds: list[tuple[int, Passing]] = []
        # Edges with the call that they leave, the place of their target (-1 if it is no part of any
        # call), and the leaf if it is one.
        self.exits: list[tuple[int, Passing, int, weakref.ref[Any] | None]] = []

    def attach(self, node: Any) -> None:
        """Attach the hooks that the node needs, once these are known."""
        if self.exits and not self._judges:
            # A hook behind the node also sees its incoming gradients.
            self._judges = True
            node.register_hook(self._after)
        elif not self._judges and not self._sees:
            self._sees = True
            node.register_prehook(self._before)

    def call_inside(self, passing: Passing) -> Passing | None:
        """Return the outermost call inside another one that returned an output of the node."""
        inside = [one for _, one in self.entries if one is not passing]
        return inside[-1] if inside else None

    def _before(self, gradients: Sequence[Tensor | None]) -> None:
        owner = self._owner()
        thread = None if owner is None else owner.begin()
        if owner is not None and thread is not None:
            self._take(owner, thread, gradients)

    def _take(
        self, owner: GuardedGradients, thread: _Thread, gradients: Sequence[Tensor | None]
    ) -> None:
        last, found = -1, None
        for index, passing in (*self.entries, *self.seconds):
            if index != last:
                gradient = gradients[index]
                last, found = index, None if gradient is None else thread.known.look(gradient)
            if found is not None:
                owner.take(found, passing)

    def _after(self, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        owner = self._owner()
        thread = None if owner is None else owner.begin()
        if owner is None or thread is None:
            return
        if not self._sees:
            self._take(owner, thread, given)
        for index, passing, place, leaf in self.exits:
            gradient = made[index]
            if gradient is not None:
                if gradient.grad_fn is not None:
                    owner.note_differentiable(gradient, passing, place)
                # No other call receives the gradient of a leaf.
                found = look(gradient) if leaf is not None else thread.known.look(gradient)
                if found is not None:
                    owner.judge(found, passing, place, leaf)
