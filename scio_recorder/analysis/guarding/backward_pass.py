"""Looking at gradients in a backward pass: the hooks at each node, and what they tell.

NOTE [Gradients that wait]

If a Sequential hands the output of one module to the next, the next one's gradient goes back to the
module, and to nobody else. If the module makes something that is not finite of whatever is not, its
own gradients vouch for the one that it received. That one waits in memory until they have been
examined. It is examined too if one of them is not finite, or if there are none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from scio_recorder.analysis.guarding.guard import Case, Cases, Guard
from scio_recorder.analysis.guarding.passing import LEAF, Exit, Passing
from scio_recorder.tensors import private
from scio_recorder.tensors.finite import Found, Known, look

# The gradients of a chain that wait stay in memory, so their number is limited.
_MOST_WAITING = 4


class Waiting(NamedTuple):
    """A gradient that has not been examined."""

    # The backward pass, the node that made the gradient, and the number of the edge that it took.
    # The node leads to the one where this waits, and would never go if it was held there.
    task: int
    at: weakref.ref[AtNode]
    edge: int
    gradient: Tensor
    # The gradients that came in at the node. In a chain they are mostly the gradient before, and
    # take no memory.
    given: Sequence[Tensor | None]

    def examine(self, judge: Judge, backward: BackwardPass) -> None:
        """Examine the gradient, and judge the call that made it if it is not finite."""
        at = self.at() if self.task == backward.task else None
        if at is not None and backward.known.look(self.gradient) is not None:
            at.take_unseen(judge, backward, self.given)
            judge.judge(self.gradient, at.passing_at(self.edge), at.edges[self.edge][0])


class AtNode:
    """The hooks of one guard at a node of the graph, for all calls that begin or end there."""

    __slots__ = (
        *("_judges", "_judge", "_sees", "at_input", "edges", "entries", "exits", "seconds"),
        *("voucher", "vouches", "waiting", "__weakref__"),
    )

    def __init__(self, judge: weakref.ref[Judge]) -> None:
        self._judge = judge
        # Which of the two hooks are attached to the node.
        self._judges = self._sees = False
        # The calls that returned an output of the node.
        self.entries: list[tuple[int, Passing]] = []
        # The calls that made a gradient with this node, in a pass that was differentiated.
        self.seconds: tuple[tuple[int, Passing], ...] = ()
        self.exits: list[Exit] = []
        self.edges: tuple[tuple[Any, int], ...] = ()
        # Whether the gradients that are made there vouch for those that came in, and gradients that
        # have come in and wait for that.
        self.vouches = False
        self.waiting: tuple[Waiting, ...] = ()
        # The node that vouches for the gradient of one edge, if any, and the number of the edge.
        self.voucher: AtNode | None = None
        self.at_input = -1

    def attach(self, node: Any) -> None:
        """Attach the hooks that the node needs, once these are known."""
        if self.exits and not self._judges:
            # A hook behind the node also sees its incoming gradients.
            self._judges = True
            node.register_hook(self._after)
        elif not self._judges and not self._sees:
            self._sees = True
            node.register_prehook(self._before)

    def vouches_for(self, passing: Passing) -> bool:
        """Whether it vouches for a gradient from another call of the same container."""
        return self.vouches and self.entries[0][1].around is passing.around

    def call_inside(self, passing: Passing) -> Passing | None:
        """Return the outermost call inside another one that returned an output of the node."""
        return next((one for _, one in reversed(self.entries) if one.is_inside(passing)), None)

    def passing_at(self, index: int) -> Passing:
        """Return the call that an edge leaves."""
        return next(passing for number, passing, _ in self.exits if number == index)

    def take_unseen(
        self, judge: Judge, backward: BackwardPass, given: Sequence[Tensor | None]
    ) -> None:
        """Examine the gradients that came in, if none were because others vouch for them."""
        if self.vouches and not self._sees:
            self._take(judge, backward, given)

    def _before(self, given: Sequence[Tensor | None]) -> None:
        judge = self._judge()
        backward = None if judge is None else judge.begin()
        if judge is not None and backward is not None:
            self._take(judge, backward, given)

    def _take(self, judge: Judge, backward: BackwardPass, given: Sequence[Tensor | None]) -> None:
        """Examine the gradients that came in."""
        last, found = -1, None
        for index, passing in (*self.entries, *self.seconds):
            if index != last:
                gradient = given[index]
                last, found = index, None if gradient is None else backward.known.look(gradient)
            if found is not None:
                judge.take(found, passing)

    def _after(self, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        judge = self._judge()
        backward = None if judge is None else judge.begin()
        if judge is None or backward is None:
            return
        if backward.voucher is not None:
            judge.examine_waiting(backward, besides=self)
        waiting, self.waiting = self.waiting, ()
        if not (self.vouches or self._sees):
            self._take(judge, backward, given)
        last, has_vouched, is_finite, is_differentiable = None, False, True, False
        for index, passing, is_to_leaf in self.exits:
            gradient = made[index]
            if gradient is None:
                continue
            if gradient.grad_fn is not None:
                is_differentiable = True
                judge.note_differentiable(gradient, passing, self.edges[index][0])
            elif index == self.at_input and gradient.is_cpu and len(waiting) < _MOST_WAITING:
                last = Waiting(backward.task, weakref.ref(self), index, gradient, given)
                continue
            has_vouched = True
            # Nobody else receives the gradient of a leaf. On a device, nothing is known yet.
            look_at = look if is_to_leaf else backward.known.look
            is_finite &= gradient.is_cpu and look_at(gradient) is None
        for index, passing, _ in self.exits if is_differentiable else ():
            judge.listen_to_views(passing, self.edges[index][0])
        if not is_finite:
            self._judge_all(judge, backward, made, given, waiting)
        elif last is not None and self.voucher is not None:
            self.voucher.waiting = (last,) if has_vouched else (*waiting, last)
            judge.wait_for(self.voucher, backward)

    def _judge_all(
        self,
        judge: Judge,
        backward: BackwardPass,
        made: Sequence[Tensor | None],
        given: Sequence[Tensor | None],
        waiting: Sequence[Waiting],
    ) -> None:
        """Judge all gradients that were not judged because others seemed to vouch for them."""
        for one in waiting:
            one.examine(judge, backward)
        self.take_unseen(judge, backward, given)
        for index, passing, _ in self.exits:
            gradient = made[index]
            if gradient is None or (gradient.is_cpu and backward.known.look(gradient) is None):
                continue
            judge.judge(gradient, passing, self.edges[index][0])


class BackwardPass(threading.local):
    """The backward pass that runs on a thread."""

    def __init__(self) -> None:
        self.task = -1
        self.known = Known()
        self.cases = Cases()
        # The node for which gradients wait, and whether any have waited.
        self.voucher: weakref.ref[AtNode] | None = None
        self.has_waited = False


class Judge:
    """Judges the gradients of the calls of one guard, in its backward passes."""

    def __init__(self, guard: Guard) -> None:
        # The guard holds this.
        self._guard = weakref.ref(guard)
        # The key under which nodes of a graph refer to this guard. It must not lead to the guard.
        self.key = object()
        self._own = weakref.ref(self)
        self._backward = BackwardPass()

    def at(self, node: Any) -> AtNode:
        """Return what the guard has at a node of the graph."""
        at: AtNode | None = node.metadata.get(self.key)
        if at is None:
            at = node.metadata[self.key] = AtNode(self._own)
        return at

    def begin(self) -> BackwardPass | None:
        """Return what is known in the current backward pass; None if nobody asks."""
        guard = self._guard()
        if guard is None or guard.is_settled:
            return None
        backward, task = self._backward, private.backward_pass()
        if backward.task != task:
            backward.task = task
            backward.known.forget()
            backward.cases.reset()
            backward.voucher, backward.has_waited = None, False
        return backward

    def wait_for(self, voucher: AtNode, backward: BackwardPass) -> None:
        """Note that something vouches for a gradient, see NOTE [Gradients that wait]."""
        if not backward.has_waited:
            backward.has_waited = True
            private.call_at_end_of_backward(partial(self.examine_waiting, backward))
        backward.voucher = weakref.ref(voucher)

    def examine_waiting(self, backward: BackwardPass, besides: AtNode | None = None) -> None:
        """Examine the gradients that still wait, besides those that wait for one thing."""
        voucher = None if backward.voucher is None else backward.voucher()
        if voucher is not besides:
            backward.voucher = None
            if voucher is not None:
                waiting, voucher.waiting = voucher.waiting, ()
                for one in waiting:
                    one.examine(self, backward)

    def take(self, found: Found, passing: Passing) -> None:
        """Note the gradients that a call receives."""
        passing.given(self._backward.task).append(found)
        if passing.around is None and passing.call is not None:
            self._add(Case(passing.call, "gradient", (), [found], is_handed_on=True))

    def judge(self, gradient: Tensor, passing: Passing, target: Any) -> None:
        """Judge a call, and those around it that send the same gradient, by that gradient."""
        target, gradient = passing.outside_of(target, gradient)
        found, place = self._backward.known.look(gradient), passing.place_outside(target)
        is_leaf = private.place_of(target) > LEAF
        leaf = weakref.ref(target.variable) if is_leaf else None
        for around in passing.sending(place):
            given = list(around.given(self._backward.task))
            assert around.call is not None, "it has returned"
            self._add(Case(around.call, "gradient", given, [found], leaf))

    def note_differentiable(self, gradient: Tensor, passing: Passing, target: Any) -> None:
        """Listen to the gradients of a gradient that a call, and those around it, have made."""
        at = self.at(gradient.grad_fn)
        target, _ = passing.outside_of(target, gradient)
        for call in passing.sending(passing.place_outside(target)):
            at.seconds = (*at.seconds, (gradient.output_nr, call))
        at.attach(gradient.grad_fn)

    def listen_to_views(self, passing: Passing, target: Any) -> None:
        """Listen to views inside a call, which gradients enter directly in a second backward pass.

        Parameters
        ----------
        passing : Passing
            The call.
        target : Node or None
            The node at the end of one of its exits.
        """
        while target is not None and passing.start <= private.place_of(target) < LEAF:
            view, edges = self.at(target), target.next_functions
            if passing.outside or view.exits:
                return
            view.edges, view.exits = edges, [(0, passing, False)]
            view.attach(target)
            target = edges[0][0]

    def _add(self, case: Case) -> None:
        guard, cases = self._guard(), self._backward.cases
        is_first = not cases.is_waiting
        if guard is not None and cases.add(guard, case) and is_first:
            private.call_at_end_of_backward(partial(cases.read, guard))
