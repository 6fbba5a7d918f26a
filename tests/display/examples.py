"""Recordings to be shown: a small net with everything in it, and hostile names."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Recording

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


class Gate(nn.Module):
    """Calls one module twice and leaves another out."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 4, 1)
        self.act = nn.ReLU()
        self.unused = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(-self.act(self.mix(x)) + 1)


def small_recorder() -> Recorder:
    torch.manual_seed(0)
    net = nn.Sequential(Gate(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh()).eval()
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


class Deep(nn.Module):
    """Layers whose names begin alike, in a list that does not run itself."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = block(x)
        return x


def deep_recording() -> Recording:
    rnet = Recorder(Deep(), input_size=(1, 3))
    rnet.record("*")
    return rnet.collect([torch.randn(4, 3)], progress=False)
