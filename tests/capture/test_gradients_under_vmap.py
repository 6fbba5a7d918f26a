"""Backward passes under vmap, beside one backward pass after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import Recorder, track
from scio_recorder.errors import ArgumentError
from tests.harness import recorder
from tests.zoo.base import Net

BASIS = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(3, 4), inner, nn.ReLU(), nn.Linear(4, 2))


def start() -> Tensor:
    return torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()


def batched(net: Any, x: Tensor, basis: Tensor) -> Any:
    return torch.autograd.grad(net(x), x, basis, is_grads_batched=True)[0]


def mapped(net: Any, x: Tensor, basis: Tensor) -> Any:
    output = net(x)
    return torch.func.vmap(lambda row: torch.autograd.grad(output, x, row, retain_graph=True)[0])(
        basis
    )


def vectorised(net: Any, x: Tensor, basis: Tensor) -> Any:
    def weighted(given: Tensor) -> Any:
        return (net(given) * basis).sum((1, 2))

    return torch.autograd.functional.jacobian(weighted, x, vectorize=True)


def one_after_the_other(net: nn.Module, x: Tensor, basis: Tensor) -> dict[str, Tensor]:
    """Return the gradients of each layer's output, and of the input, by plain backward passes."""
    outputs: dict[str, Tensor] = {"input": x}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            # A tensor of its own, since containers return what their last module has returned.
            outputs[name] = output * 1
            return outputs[name]

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in net.named_modules()]
    net(x)
    for handle in handles:
        handle.remove()
    rows = [
        torch.autograd.grad(outputs[""], [*outputs.values()], row, retain_graph=True)
        for row in basis
    ]
    return dict(zip(outputs, map(torch.stack, zip(*rows, strict=True)), strict=True))


WAYS: list[Callable[[Any, Tensor, Tensor], Any]] = [batched, mapped, vectorised]


@pytest.mark.parametrize("way", WAYS)
def test_the_users_gradients_stay_and_ours_are_those_of_single_passes(way: Any) -> None:
    net = network()
    wanted, bare = one_after_the_other(net, start(), BASIS), way(net, start(), BASIS)
    torch.testing.assert_close(bare, wanted["input"])
    rnet = Recorder(net, input_size=(1, 3))
    with rnet.guard() as guard, track(net) as events:
        assert torch.equal(way(net, start(), BASIS), bare)
    assert guard.num_passes == 1
    logged = {event.name: event.value[0] for event in events if event.grad}
    rnet.record("*", gradients=True)
    came: list[Any] = []
    rnet.on_gradients(came.append)
    assert torch.equal(way(rnet, start(), BASIS), bare)
    assert len(came) == 1
    for layer in rnet.architecture.values():
        wants = wanted[layer.name]
        for gradient in (logged[layer.name], rnet.gradients[layer.label], came[0][layer.label]):
            torch.testing.assert_close(gradient, wants)


def test_levels_of_vmap_come_first() -> None:
    net, x, basis = network(), start(), BASIS.expand(3, 2, 5, 2)
    rnet = recorder(net, "0", input_size=(1, 3), gradients=True)
    output = rnet(x)

    def pulled(row: Tensor) -> Tensor:
        return torch.autograd.grad(output, x, row, retain_graph=True)[0]

    torch.func.vmap(torch.func.vmap(pulled))(basis)
    wanted = one_after_the_other(net, x, BASIS)["0"]
    torch.testing.assert_close(rnet.gradients["0"], wanted.expand(3, 2, 5, 4))


@pytest.mark.parametrize("way", WAYS)
def test_the_maker_of_a_nan_is_named(way: Any) -> None:
    # Of the third sample, the gradient is infinite, and zero times that is NaN.
    root = Net(lambda _, x: (x * torch.tensor([1.0, 1, 0, 1, 1])[:, None]).abs().sqrt())
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(root), nn.Linear(4, 2))
    with Recorder(net, input_size=(5, 3)).guard(action="record") as guard:
        way(net, start(), BASIS)
    origin = guard.origin
    assert origin is not None
    assert (origin.layer.name, origin.direction, origin.sample) == ("1.0", "gradient", 2)
    assert origin.num_nan == 2 * 4
    assert origin.num_values == 2 * 5 * 4


@pytest.mark.parametrize("way", [batched, mapped])
def test_regions_run_again_under_vmap(way: Any) -> None:
    net = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=False), inner=network())
    bare = way(net, start(), BASIS)
    rnet = recorder(net, "*", input_size=(5, 3), gradients=True)
    with rnet.guard(), track(net) as events:
        assert torch.equal(way(rnet, start(), BASIS), bare)
    assert [event.grad for event in events] == [False] * 8 + [True] * 8
    assert rnet.gradients["inner.0"].shape == (2, 5, 4)


def test_sums_of_passes_of_different_sizes_are_refused() -> None:
    rnet = recorder(network(), "0", input_size=(5, 3), gradients="accumulate")
    x = start()
    output = rnet(x)
    for rows in (2, 1):
        torch.autograd.grad(output, x, BASIS[:rows], is_grads_batched=True, retain_graph=True)
    with pytest.raises(ArgumentError, match="equally many rows"):
        _ = rnet.gradients["0"]
