"""Nets in which modules are shared, repeated, skipped, recursive or many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.base import Net, Table, linear, vectors

CASES = Table()


@CASES.add(vectors)
def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


@CASES.add(vectors)
def single_module() -> nn.Module:
    return nn.Linear(4, 2)


@CASES.add(vectors)
def no_parameters() -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Softmax(dim=-1))


@CASES.add(vectors)
def repeated_module() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = net.relu(net.linear(x))
        return x

    return Net(forward, linear=linear(), relu=nn.ReLU(inplace=True))


@CASES.add(vectors)
def shared_module() -> nn.Module:
    shared = linear()
    first = nn.Sequential(shared, nn.Tanh())
    second = nn.Sequential(nn.ReLU(), shared)
    return nn.Sequential(first, second, shared)


@CASES.add(vectors)
def shared_container() -> nn.Module:
    block = nn.Sequential(linear(), nn.ReLU(inplace=True))
    return Net(lambda net, x: net.two(net.one(x)) + net.one(x), one=block, two=block)


class Recursive(nn.Module):
    """Calls itself, so that calls end in another order than they start."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth == 0:
            return self.linear(x)
        return self.linear(self(x, depth - 1)).mul_(2)


@CASES.add(vectors)
def recursive_module() -> nn.Module:
    return nn.Sequential(linear(), Recursive(), linear())


@CASES.add(vectors)
def recursive_root() -> nn.Module:
    return Recursive()


@CASES.add(vectors)
def containers() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        for layer, scale in zip(net.layers, net.scales, strict=True):
            x = layer(x) * scale
        return net.named["b"](net.named["a"](x))

    return Net(
        forward,
        layers=nn.ModuleList(linear() for _ in range(3)),
        named=nn.ModuleDict({"a": linear(), "b": nn.ReLU(inplace=True), "unused": linear()}),
        scales=nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(3)),
    )


@CASES.add(vectors)
def no_forward_of_container() -> nn.Module:
    """Children that are called while the module that holds them never is."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.holder.inner.second(net.holder.first(x))

    inner = Net(lambda _net, _x: None, second=linear())
    return Net(forward, holder=Net(lambda _net, _x: None, first=linear(), inner=inner))


@CASES.add(vectors)
def direct_forward_call() -> nn.Module:
    """`.forward()` called by hand fires no hook: that module has no call to record."""
    return Net(lambda net, x: net.last(net.first.forward(x)), first=linear(), last=linear())


@CASES.add(vectors)
def very_deep() -> nn.Module:
    return nn.Sequential(*(nn.Tanh() if i % 2 else linear() for i in range(60)))


@CASES.add(vectors)
def nested_deeply() -> nn.Module:
    net: nn.Module = linear()
    for _ in range(20):
        net = nn.Sequential(net)
    return net


@CASES.add(vectors, static_flow=False)
def data_dependent_branch() -> nn.Module:
    """Both branches run the same modules, so that the labels hold all the same."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.last(-hidden if hidden.sum() > 0 else hidden)

    return Net(forward, first=linear(), last=linear())


@CASES.add(vectors, static_flow=False)
def data_dependent_loop() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        while hidden.norm() > 1:
            hidden = hidden / 2
        return net.last(hidden)

    return Net(forward, first=linear(), last=linear())


@CASES.add(vectors)
def looks_at_shapes_and_items() -> nn.Module:
    """None of this makes the flow depend on the data."""

    def forward(net: Any, x: Tensor) -> Tensor:
        if x.shape[0] > 1 and x.dim() == 2:
            x = net.first(x)
        x = x * x.detach().abs().max().item()
        return net.last(x).sum() + x[x > 0].sum() / max(len(x), 1)

    return Net(forward, first=linear(), last=linear())


class Optional(nn.Module):
    """Runs its middle layer only while the attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = linear(), linear(), linear()
        self.use_middle = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.use_middle:
            x = self.middle(x)
        return self.last(x)


@CASES.add(vectors)
def optional_branch() -> nn.Module:
    return Optional()


@CASES.add(vectors)
def counts_its_calls() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.steps += 1
        result = net.linear(x) + net.steps
        net.last_seen = result.detach()
        return result

    return Net(forward, linear=linear(), steps=0, last_seen=None)
