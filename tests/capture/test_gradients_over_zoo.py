"""Gradients of every layer of the zoo against those of a perturbation added by hand.

The derivative of the loss by what a layer returned is the derivative, at zero, by a perturbation
that is added to it. `torch.func` takes it where it can run the net, plain autograd elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder.layer import Layer
from tests.harness import executed, make_recorder
from tests.oracle import scalar_loss, seed_everything
from tests.rotation import one_in
from tests.zoo import CASES, Case

# The hooks of this net warn when a module's output is differentiated by.
WARNS = "backward_hooks_of_the_user"
DIFFERENTIABLE = [
    case
    for case in CASES
    if case.backward and case.train and case.static_flow and case.name != WARNS
]
# Without a graph, or with a loss that equals nothing.
NOT_COMPARED = {"no_parameters", "not_a_number"}
# By case, the modules that return a tensor which existed before their call, or a leaf.
LEFT_OUT = {
    "change_of_passed_through": {"identity", "dropout"},
    "parameter_and_buffer_returned": {"weight"},
    "leaf_made_inside": {"start"},
}
# Kernels may add up in another order where a perturbation makes a copy.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def watched_loss(case: Case, layer: Layer, see: Callable[[Tensor], Any]) -> Tensor:
    """Run a fresh net, with what `see` returns in place of what one call returned."""
    net = case.fresh().train()
    module = net.get_submodule(layer.name)
    started: list[int] = []
    running: list[int] = []

    def before(_module: nn.Module, _args: Any) -> None:
        running.append(len(started))
        started.append(1)

    def after(_module: nn.Module, _args: Any, output: Tensor) -> Any:
        return see(output) if running.pop() == layer.call else None

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    args, kwargs = case.inputs(2)
    seed_everything(2)
    return scalar_loss(net(*args, **kwargs))


def is_on_graph(case: Case, layer: Layer) -> bool | None:
    """Whether what a call returns is on the graph; None where that comes with a re-run."""
    found: list[bool | None] = []
    watched_loss(
        case,
        layer,
        lambda output: found.append(output.requires_grad if torch.is_grad_enabled() else None),
    )
    return found[0]


def perturbed_loss(case: Case, layer: Layer) -> Callable[[Tensor], Tensor]:
    return lambda perturbation: watched_loss(case, layer, lambda output: output + perturbation)


def by_func(loss: Callable[[Tensor], Tensor], zero: Tensor) -> tuple[Tensor, Tensor | None]:
    gradient, value = torch.func.grad_and_value(loss)(zero)
    return value, gradient


def by_autograd(loss: Callable[[Tensor], Tensor], zero: Tensor) -> tuple[Tensor, Tensor | None]:
    perturbation = zero.clone().requires_grad_()
    value = loss(perturbation)
    (gradient,) = torch.autograd.grad(value, perturbation, allow_unused=True)
    return value.detach(), gradient


def by_hand(case: Case, layer: Layer, zero: Tensor, truth: Tensor) -> tuple[Tensor | None, bool]:
    """Return the gradient, and whether `torch.func` could take it."""
    for derive in (by_func, by_autograd):
        try:
            value, gradient = derive(perturbed_loss(case, layer), zero)
        except Exception:
            # Checkpointing, packed sequences, a net that needs the very tensor of its module, ...
            continue
        # A copy in place of a view or an alias makes another net: that shows in the loss.
        if gradient is not None and torch.allclose(value, truth, rtol=1e-5, atol=0):
            return gradient, derive is by_func
    return None, False


def judge(case: Case) -> tuple[int, int]:
    """Compare the gradients of one net; return how many, and how many with torch.func's."""
    net = case.fresh().train()
    rnet = make_recorder(net, case, training=True)
    rnet.record(*executed(rnet), gradients=True)
    args, kwargs = case.inputs(2)
    seed_everything(2)
    loss = scalar_loss(rnet(*args, **kwargs))
    if not loss.requires_grad:
        return 0, 0
    loss.backward()
    compared = with_func = 0
    left_out = {rnet.architecture[label].name for label in rnet.gradients.reasons}
    assert left_out == LEFT_OUT.get(case.name, set())
    for label, activation in rnet.activations.items():
        layer = rnet.architecture[label]
        if not isinstance(activation, Tensor) or layer.name in left_out | set(case.unjudged):
            continue
        if activation.layout != torch.strided or not activation.is_floating_point():
            continue
        on_graph = is_on_graph(case, layer)
        if not on_graph:
            assert on_graph is None or label not in rnet.gradients
            continue
        zero = torch.zeros_like(activation).detach()
        wanted, is_func = by_hand(case, layer, zero, loss.detach())
        if wanted is None:
            continue
        found = rnet.gradients.get(label)
        found = torch.zeros_like(wanted) if found is None else found
        torch.testing.assert_close(found, wanted, **CLOSE)
        compared += 1
        with_func += is_func
    return compared, with_func


@pytest.mark.parametrize("case", one_in(6, DIFFERENTIABLE), ids=repr)
def test_gradients_are_those_of_a_perturbation(case: Case) -> None:
    compared, _ = judge(case)
    assert bool(compared) != (case.name in NOT_COMPARED)


@pytest.mark.campaign
def test_most_are_compared_with_torch_func() -> None:
    counts = [judge(case) for case in DIFFERENTIABLE[:30]]
    compared, with_func = (sum(column) for column in zip(*counts, strict=True))
    assert compared > 100
    assert with_func > compared // 2
