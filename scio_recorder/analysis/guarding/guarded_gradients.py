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
with the graph. They hold the guard weakly, and no module. On a GPU, other threads call them.

A write into an output that is a view takes the node that made this output out of the graph, but not
the one that made the base of the view. There the gradient is examined instead. A call is checked
only if a gradient was seen to enter it.

If gradients are differentiated (``create_graph=True``), a second backward pass also enters a call
by what it made in the first one. The nodes that made this are noted during the first pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from scio_recorder.analysis.guarding.checks import Checks, GuardedCall
from scio_recorder.tensors import private, tensors

_Checks: TypeAlias = weakref.ref[Checks]
# Leaves are numbered as if they came after everything else.
_LEAF = 1 << 63
# The call that a gradient stays in, None for none, and the node of the leaf whose gradient it is.
_Exit: TypeAlias = tuple[GuardedCall | None, Any]


def attach(checks: Checks, call: GuardedCall, output: Any) -> None:
    """Attach hooks for the gradients of a call that has returned.

    Parameters
    ----------
    checks : Checks
        The checks of the guard, which the hooks hold weakly.
    call : GuardedCall
        The call.
    output : Any
        Its output.
    """
    reference, nodes = weakref.ref(checks), call.nodes
    for tensor in (output,) if isinstance(output, Tensor) else tensors(output):
        base = None if tensor.grad_fn is None else private.base_of(tensor)
        for end in (tensor,) if base is None else (tensor, base):
            node = end.grad_fn
            if node is not None and _owner_of(node, call) is call:
                node.register_prehook(partial(_enter, reference, call, end.output_nr, end is base))
                nodes.append(node)
    # The list grows meanwhile.
    for node in nodes:
        if reference in node.metadata:
            continue
        node.metadata[reference] = True
        exits: dict[int, _Exit] = {}
        for edge, (target, _) in enumerate(node.next_functions):
            if target is None:
                continue
            is_leaf = private.place_of(target) >= _LEAF
            owner = None if is_leaf else _owner_of(target, call)
            if owner is not None and reference not in target.metadata:
                # That of another call is visited when this one returns.
                owner.nodes.append(target)
            if owner is not call:
                exits[edge] = owner, target if is_leaf else None
        if exits:
            node.register_hook(partial(_leave, reference, call, exits))


def _owner_of(node: Any, call: GuardedCall) -> GuardedCall | None:
    """Return the call, from one outwards, of which a node is an operation; None for none."""
    if node in call.flags.nodes_of_inputs:
        return None
    place = private.place_of(node)
    around: GuardedCall | None = call
    while around is not None and place < around.start:
        around = around.around
    return around


def _enter(
    reference: _Checks,
    call: GuardedCall,
    number: int,
    is_base: bool,
    given: Sequence[Tensor | None],
) -> None:
    """Examine a gradient that enters a call; at the base of a view only if none came there."""
    checks, gradient = reference(), given[number]
    if checks is None or checks.is_over or gradient is None:
        return
    flags = checks.backward_flags()
    if not is_base or call.task != flags.task:
        call.task = flags.task
        flag = flags.of_tensor(gradient)
        flags.waiting.append((Checks.enter, call, flag))
        if call.around is None:
            checks.wait(flags, Checks.check_whole, "gradient", [flag])


def _leave(
    reference: _Checks,
    call: GuardedCall,
    exits: Mapping[int, _Exit],
    made: Sequence[Tensor | None],
    _given: Sequence[Tensor | None],
) -> None:
    """Examine the gradients that leave a call from a node."""
    checks = reference()
    if checks is None or checks.is_over:
        return
    flags = checks.backward_flags()
    for edge, (owner, leaf) in exits.items():
        gradient = made[edge]
        if gradient is None:
            continue
        if gradient.grad_fn is not None:
            _enter_again(reference, gradient, call, owner)
        is_first = leaf is not None and leaf.variable.grad is None and type(gradient) is Tensor
        # Sparse and mapped ones have no memory of their own.
        is_first = is_first and private.memory_of(gradient) > 0
        flag = flags.of_tensor(gradient, keeps=not is_first)
        if is_first:
            flag.taken = partial(_taken, leaf, gradient.untyped_storage())
        checks.wait(flags, Checks.check_gradient, call, owner, leaf, flag)


def _taken(leaf: Any, memory: Any) -> Tensor | None:
    """Return what autograd made of the first gradient of a leaf: a tensor with its memory.

    It makes another tensor if nobody else holds the gradient. While the memory is held no other
    tensor can have the same.
    """
    gradient = leaf.variable.grad
    is_same = (
        type(gradient) is Tensor and gradient.untyped_storage().data_ptr() == memory.data_ptr()
    )
    return gradient if is_same else None


def _enter_again(
    reference: _Checks, gradient: Tensor, call: GuardedCall, owner: GuardedCall | None
) -> None:
    """Let a second backward pass enter the calls, from one outwards, that a gradient leaves."""
    left: GuardedCall | None = call
    while left is not None and left is not owner and left.number is not None:
        enter = partial(_enter, reference, left, gradient.output_nr, False)
        gradient.grad_fn.register_prehook(enter)  # type: ignore[union-attr]  # asked by the caller
        left = left.around
