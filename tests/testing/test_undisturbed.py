"""`assert_undisturbed` finds each of these disturbances, and nothing in a recorder."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from scio_recorder import Recorder
from scio_recorder.testing import assert_undisturbed


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def after(change: Callable[[nn.Sequential, Tensor], Any]) -> Callable[..., Any]:
    """Return a call that runs a net, and makes a change of it or of its input afterwards."""

    def call(net: nn.Sequential, x: Tensor) -> Tensor:
        output = net(x)
        with torch.no_grad():
            change(net, x)
        return output

    return call


DISTURBANCES: dict[str, Callable[[nn.Sequential, Tensor], Any]] = {
    "other values": lambda net, x: net(x) + 1e-7,
    "a structure": lambda net, x: (net(x),),
    "detached": lambda net, x: net(x).detach(),
    "other gradients": lambda net, x: Doubled.apply(net(x)),
    "torch drew": after(lambda net, x: torch.rand(1)),
    "random drew": after(lambda net, x: random.random()),
    "numpy drew": after(lambda net, x: np.random.rand()),
    "run twice": lambda net, x: [net(x), net(x)][1],
    "a hook": after(lambda net, x: net[0].register_forward_hook(lambda *_: None)),
    "a hook of all": after(lambda net, x: HOOKS.append(register_module_forward_hook(print))),
    "a training flag": after(lambda net, x: net[2].eval()),
    "a buffer": after(lambda net, x: net[1].running_mean.add_(1)),
    "a parameter": after(lambda net, x: net[0].weight.mul_(2)),
    "requires_grad": after(lambda net, x: net[0].weight.requires_grad_(False)),
    "a gradient": after(lambda net, x: setattr(net[0].bias, "grad", torch.ones(4))),
    "an attribute": after(lambda net, x: setattr(net[3], "seen", 1)),
    "a number": after(lambda net, x: setattr(net[2], "p", 0.9)),
    "a lost attribute": after(lambda net, x: delattr(net[1], "eps")),
    "a class": after(lambda net, x: setattr(net[3], "__class__", nn.ReLU6)),
    "the input": after(lambda net, x: x.detach().zero_()),
    "the grad mode": lambda net, x: [net(x), torch.set_grad_enabled(False)][0],
    "the default dtype": after(lambda net, x: torch.set_default_dtype(torch.float64)),
}  # fmt: skip
HOOKS: list[Any] = []


@pytest.fixture(autouse=True)
def _modes_as_before():
    yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    while HOOKS:
        HOOKS.pop().remove()


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_a_disturbance_is_found(disturb: Any) -> None:
    net, x = make_net(), torch.randn(5, 4)
    with pytest.raises(AssertionError) as caught:
        assert_undisturbed(net, lambda x: disturb(net, x), x)
    assert str(caught.value)


TRACES = {name: disturb for name, disturb in DISTURBANCES.items() if name not in (
    "other values", "a structure", "detached", "other gradients", "the input")}  # fmt: skip


@pytest.mark.parametrize("disturb", TRACES.values(), ids=TRACES)
def test_a_trace_is_found(disturb: Any) -> None:
    net = make_net()
    with pytest.raises(AssertionError):
        assert_undisturbed(net, lambda: disturb(net, torch.randn(5, 4)))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_recorder_disturbs_nothing(mode: Any, needs_grad: bool) -> None:
    net, x = make_net(), torch.randn(5, 4, requires_grad=needs_grad)
    assert_undisturbed(net, lambda: Recorder(net, input_size=(2, 4), verbose=0))
    rnet = Recorder(net, input_size=(2, 4), verbose=0)
    rnet.record("*", inputs=True)
    for _ in range(3):
        with mode():
            assert_undisturbed(net, rnet, x)


def test_gradients_are_left_as_they_were() -> None:
    net = make_net()
    net[0].bias.grad = torch.ones(4)
    assert_undisturbed(net, net, torch.randn(5, 4))
    assert torch.equal(net[0].bias.grad, torch.ones(4))
    assert net[0].weight.grad is None
