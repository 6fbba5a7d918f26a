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
inside it. Most calls are of one operation, between views of its inputs and parameters, and get one
hook. Nodes own the hooks, which go with the graph. They hold the guard weakly, and no module.

If gradients are differentiated (``create_graph=True``), a second backward pass also enters a call
by what it made in the first one. The nodes that made this are noted during the first pass.
"""

from __future__ import annotations

from typing import Any

from scio_recorder.analysis.guarding.backward_pass import AtNode, Judge
from scio_recorder.analysis.guarding.guard import Guard
from scio_recorder.analysis.guarding.passing import (
    LEAF,
    Ends,
    Operations,
    Passing,
    kinds_of_nodes,
)
from scio_recorder.tensors import private


class GuardedGradients:
    """The gradients of the calls of one guard."""

    def __init__(self, guard: Guard) -> None:
        self._judge = Judge(guard)

    def listen(
        self, passing: Passing, ends: Ends, operations: Operations | None, is_chained: bool
    ) -> None:
        """Attach hooks for the gradients of a call that has returned.

        Parameters
        ----------
        passing : Passing
            The call.
        ends : list of tuple
            What made its output.
        operations : Operations, optional
            What is known about the operations of all calls of the module.
        is_chained : bool
            Whether a Sequential hands on its output, so that nobody else receives it.
        """
        is_known = operations is not None and len(ends) == 1
        waiting: list[Any] = []
        for node, number in ends:
            if passing.has(node, private.place_of(node)):
                if is_known and self._is_simple(passing, node, number, operations, is_chained):
                    return
                self._judge.at(node).entries.append((number, passing))
                waiting.append(node)
        self._walk(waiting, passing)
        for node in waiting:
            at = node.metadata.get(self._judge.key)
            if at is not None:
                at.attach(node)

    def _is_simple(
        self, passing: Passing, node: Any, number: int, operations: Any, is_chained: bool
    ) -> bool:
        """Attach at most one hook to a call, and return whether that is enough."""
        known: AtNode | None = node.metadata.get(self._judge.key)
        if operations.are_inside and known is not None:
            known.entries.append((number, passing))
            return True
        if operations.are_inside or known is not None or passing.outside:
            return False
        at_output = node
        if operations.end_with_view and type(node) in kinds_of_nodes()[1]:
            node, number = node.next_functions[0]
        edges = node.next_functions
        found = passing.exits(edges)
        if found is None:
            return False
        exits, targets, at_input = found
        passing.targets = targets
        at = self._judge.at(at_output)
        if is_chained and len(targets) == 1:
            voucher: AtNode | None = targets[0].metadata.get(self._judge.key)
            if voucher is not None and voucher.vouches_for(passing):
                at.voucher, at.at_input = voucher, at_input
        at.edges, at.exits, at.vouches = edges, exits, operations.vouch
        at.entries.append((number, passing))
        at.attach(node)
        return True

    def _walk(self, waiting: list[Any], passing: Passing) -> None:
        """Add all nodes of a call to which some of them lead, and note where they lead out."""
        outside: list[Any] = []
        passing.targets = outside
        seen = set(waiting)
        for node in waiting:
            for target in self._inside(node, passing, outside):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)

    def _inside(self, node: Any, passing: Passing, outside: list[Any]) -> list[Any]:
        """Return the nodes of a call to which one of them leads, or the inner call that it ends.

        Nodes outside of the call, without leaves, are added to those that are given.
        """
        at: AtNode | None = node.metadata.get(self._judge.key)
        inner = None if at is None else at.call_inside(passing)
        edges = node.next_functions
        targets = [target for target, _ in edges]
        if inner is not None:
            if inner.targets is None:
                self._walk([node], inner)
            targets = inner.targets or []
        found: list[Any] = []
        for index, target in enumerate(targets):
            place = -1 if target is None else private.place_of(target)
            if 0 <= place < LEAF and passing.has(target, place):
                found.append(target)
            elif place >= 0:
                if place < LEAF:
                    outside.append(target)
                if inner is None:
                    at = self._judge.at(node)
                    at.edges = edges
                    at.exits.append((index, passing, place > LEAF))
        return found
