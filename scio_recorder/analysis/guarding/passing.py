"""A call in the backward pass: where gradients enter and leave it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from scio_recorder.analysis.guarding.guard import Call
from scio_recorder.tensors import private
from scio_recorder.tensors.finite import Found
from scio_recorder.tensors.structures import tensors

# Leaves are numbered as if they came after everything else.
LEAF = 1 << 63

NOTHING: list[Found] = []

# An edge of a node that leads out of a call, by number: the call, and whether it leads to a leaf.
Exit: TypeAlias = tuple[int, "Passing", bool]


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
        # The nodes to which gradients go from here, without leaves; None as long as nobody asks.
        self.targets: list[Any] | None = None
        self._task = -1
        self._given = NOTHING

    def has(self, node: Any, place: int) -> bool:
        """Whether a node that its outputs lead to is one of its operations."""
        return place >= self.start and not (self.outside and node in self.outside)

    def is_inside(self, passing: Passing) -> bool:
        """Whether another call contains it."""
        around = self.around
        while around is not None and around is not passing:
            around = around.around
        return around is not None

    def exits(self, edges: tuple[tuple[Any, int], ...]) -> tuple[list[Exit], list[Any], int] | None:
        """Return how a call of one operation is left.

        Views of inputs and parameters count as no operations, since gradients are the same behind
        them. No input may come from another thread.

        Parameters
        ----------
        edges : tuple
            Those of the operation's node.

        Returns
        -------
        tuple or None
            The exits, the nodes to which they lead, without leaves, and the number of the last
            edge to such a node. None if the call has other operations.
        """
        leaf, views = kinds_of_nodes()
        exits: list[Exit] = []
        targets: list[Any] = []
        at_input = -1
        for index, (target, _) in enumerate(edges):
            place = LEAF if target is None or type(target) is leaf else private.place_of(target)
            if self.start <= place < LEAF and type(target) in views:
                target = target.next_functions[0][0]
                place = LEAF if type(target) is leaf else private.place_of(target)
            if self.start <= place < LEAF:
                return None
            exits.append((index, self, place == LEAF))
            if place < LEAF:
                targets.append(target)
                at_input = index
        return exits, targets, at_input

    def outside_of(self, target: Any, gradient: Tensor) -> tuple[Any, Tensor]:
        """Return the node to which an exit leads, and the gradient as it comes in there.

        Parameters
        ----------
        target : Node
            The node at the end of the edge, which may be that of a view inside the call.
        gradient : torch.Tensor
            The gradient that goes there.
        """
        while self.start <= private.place_of(target) < LEAF and target not in self.outside:
            target, gradient = target.next_functions[0][0], target(gradient)
        return target, gradient

    def place_outside(self, target: Any) -> int:
        """Return the place of a node to which an exit leads; -1 if it is no part of any call."""
        place = private.place_of(target)
        return -1 if place > LEAF or target in self.outside else place

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


@functools.cache
def kinds_of_nodes() -> tuple[type, frozenset[type]]:
    """Return the type of the nodes of leaves, and those of nodes that only rearrange gradients."""
    x = torch.ones(2, 2, requires_grad=True, device="cpu")
    with torch.enable_grad():
        # Reshaping the product of the last is safe, and has a node of its own.
        views: list[Any] = [x.view(4), x.t(), x[None] @ x]
    nodes = [view.grad_fn for view in views]
    return type(nodes[0].next_functions[0][0]), frozenset(map(type, nodes))


class Operations(NamedTuple):
    """What is known about the operations of all calls of a module."""

    # Whether they are those of the modules inside it, and no others.
    are_inside: bool
    # Whether a view may follow the only operation.
    end_with_view: bool
    # Whether each gradient that they make shows if those that they received are finite.
    vouch: bool


# The nodes that made an output, and the numbers of their outputs.
Ends: TypeAlias = list[tuple[Any, int]]


def ends_of(output: Any) -> Ends:
    """Return what made an output, of which nothing is held: it may be written to."""
    if type(output) is Tensor:
        node = output.grad_fn
        return [] if node is None else [(node, output.output_nr)]
    found = [output] if isinstance(output, Tensor) else tensors(output)
    return [(tensor.grad_fn, tensor.output_nr) for tensor in found if tensor.grad_fn is not None]
