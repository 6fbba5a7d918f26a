"""Recordings to be shown: a small net with everything in it, and hostile names."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Recording
from tests.zoo.base import Net

HOSTILE = [
    "<script>alert(1)</script>",
    "\"quoted\" & 'single'",
    "</script><img src=x onerror=alert(2)>",
    "משהו",
    "\u202egnp-exe",
    "[red]markup[/red]",
    "{{ 7 * 7 }}{% raw %}{# no more",
    "línea\nnueva\x1b[31m",
    "\ud800",
]


def gate(net: Any, x: Tensor) -> Tensor:
    """Calls one module twice and leaves another out."""
    return net.act(-net.act(net.mix(x)) + 1)


def small_recorder() -> Recorder:
    torch.manual_seed(0)
    unused = nn.Sequential(nn.Linear(2, 2))
    first = Net(gate, mix=nn.Conv2d(3, 4, 1), act=nn.ReLU(), unused=unused)
    net = nn.Sequential(first, nn.Flatten(), nn.Linear(64, 8), nn.Tanh()).eval()
    with torch.no_grad():
        net[0].mix.bias[1] = -1e3
        net[2].weight[2] = 0
        net[2].bias[2] = 7
    rnet = Recorder(net, input_size=(1, 3, 4, 4))
    rnet.record("0.act", "2", "3")
    return rnet


def small_recording() -> Recording:
    """A channel that is always zero, a feature that is constant, a NaN and an infinity."""
    rnet = small_recorder()

    def spoil(activation: Tensor, batch: Tensor) -> Tensor:
        spoilt = activation.clone()
        spoilt[0, 0], spoilt[1, 1:3] = float("nan"), float("-inf")
        return spoilt

    batches = [torch.randn(5, 3, 4, 4), torch.randn(3, 3, 4, 4)]
    return rnet.collect(batches, transform={"2": spoil}, progress=False)


def awkward_recording() -> Recording:
    """Long numbers in every column of a page, beside warnings of every kind."""
    names = ("nans", *(f"encoder{place}" for place in range(24)))
    net = nn.Sequential(OrderedDict({name: nn.Sigmoid() for name in names}))
    rnet = Recorder(net, input_size=(1, 6, 6, 6))
    rnet.record("*")
    samples = torch.rand(40, 6, 6, 6) * 2e30 - 1e30
    samples[:, 0], samples[:, 1] = 0.0, 3.5
    spoilt = samples.clone()
    spoilt[0, 2:], spoilt[1, 3] = float("nan"), -float("inf")
    transforms = {name: lambda _, __: samples for name in names} | {"nans": lambda _, __: spoilt}
    return rnet.collect([samples], transform=transforms, progress=False)


def hostile_recording() -> Recording:
    net = nn.Sequential()
    for name in HOSTILE:
        net.add_module(name, nn.Identity())
    rnet = Recorder(net, input_size=(1, 3))
    rnet.record("*")
    return rnet.collect([torch.randn(4, 3)], progress=False)


def wide_recording(count: int) -> Recording:
    net = nn.Sequential(*(nn.Sequential(nn.ReLU()) for _ in range(count // 2)))
    rnet = Recorder(net, input_size=(1, 3), depth=9)
    rnet.record("*")
    return rnet.collect([torch.randn(4, 3)], progress=False)


def deep(net: Any, x: Tensor) -> Tensor:
    """Layers whose names begin alike, in a list that does not run itself."""
    for block in net.transformer_blocks:
        x = block(x)
    return x


def deep_recording() -> Recording:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(3))
    rnet = Recorder(Net(deep, transformer_blocks=blocks), input_size=(1, 3))
    rnet.record("*")
    return rnet.collect([torch.randn(4, 3)], progress=False)
