"""Nets that differentiate inside forward, or recompute in backward (activation checkpointing)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.base import Net, Table, linear, vectors

CASES = Table()


def region(reentrant: bool, function: Any, *args: Any) -> Any:
    """A region under activation checkpointing, where there is a graph to save memory for."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=reentrant)


def block() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), nn.Dropout(0.4), linear())


def _checkpointed(reentrant: bool) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = region(reentrant, net.block, net.first(x))
        return net.last(region(reentrant, net.other, hidden))

    return Net(forward, first=linear(), block=block(), other=block(), last=linear())


@CASES.add(vectors)
def checkpointed() -> nn.Module:
    return _checkpointed(False)


@CASES.add(vectors, partial_backward=False)
def checkpointed_reentrant() -> nn.Module:
    return _checkpointed(True)


def _nested(reentrant: bool) -> nn.Module:
    def inner(net: Any, x: Tensor) -> Tensor:
        return net.outside(region(reentrant, net.inside, x))

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(region(reentrant, net.nested, net.first(x)))

    nested = Net(inner, inside=block(), outside=linear())
    return Net(forward, first=linear(), nested=nested, last=linear())


@CASES.add(vectors)
def checkpointed_nested() -> nn.Module:
    return _nested(False)


@CASES.add(vectors, partial_backward=False)
def checkpointed_nested_reentrant() -> nn.Module:
    return _nested(True)


def _shared(reentrant: bool) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = region(reentrant, net.shared, net.first(x))
        return net.shared(region(reentrant, net.shared, hidden))

    return Net(forward, first=linear(), shared=block())


@CASES.add(vectors)
def checkpointed_shared() -> nn.Module:
    return _shared(False)


@CASES.add(vectors, partial_backward=False)
def checkpointed_shared_reentrant() -> nn.Module:
    return _shared(True)


@CASES.add(vectors)
def checkpointed_sequential() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            for block in net.blocks:
                x = block(x)
            return x
        return checkpoint_sequential(net.blocks, 2, x, use_reentrant=False)

    return Net(forward, blocks=nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh()))


@CASES.add(vectors)
def checkpointed_whole_net() -> nn.Module:
    return Net(lambda net, x: region(False, net.inner, x), inner=block())


@CASES.add(vectors, inference=False)
def energy_gradient() -> nn.Module:
    """A force as the gradient of an energy, differentiable once more."""

    def forward(net: Any, x: Tensor) -> Tensor:
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = net.last(net.square(net.first(x))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=graph)
        return net.out(force)

    square = Net(lambda _, x: x * x)
    return Net(forward, first=linear(), square=square, last=linear(), out=linear())


class Doubled(torch.autograd.Function):
    """Doubles, with a gradient that is wrong on purpose so that it can be recognised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


@CASES.add(vectors)
def own_function() -> nn.Module:
    return nn.Sequential(linear(), Net(lambda _, x: Doubled.apply(x)), nn.ReLU(inplace=True))


@CASES.add(vectors, inference=False)
def leaf_made_inside() -> nn.Module:
    """A module returns a leaf of its own making, and the net differentiates to it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = net.start(x)
            energy = net.first(start).square().sum()
            (force,) = torch.autograd.grad(energy, start)
        return net.last(x + force)

    start = Net(lambda _, x: x.detach().clone().requires_grad_())
    return Net(forward, start=start, first=linear(), last=linear())


@CASES.add(vectors)
def detached_branch() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = net.target(x)
            target.mul_(2)
        return net.online(x) + target

    return Net(forward, online=linear(), target=linear())


@CASES.add(vectors)
def used_several_times() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        return net.last(hidden) * hidden + hidden.sin() + net.relu(hidden)

    return Net(forward, first=linear(), last=linear(), relu=nn.ReLU())


class Scales:
    """A hook of the user's that changes what it sees; an object, so that copies share nothing."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, _module: nn.Module, _inputs: Any, values: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(None if value is None else value * self.factor for value in values)
        return values * self.factor


@CASES.add(vectors)
def forward_hooks_of_the_user() -> nn.Module:
    net = nn.Sequential(linear(), nn.ReLU(inplace=True), linear())
    net[0].register_forward_hook(Scales(3))
    net[1].register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    net[2].register_forward_hook(Scales(0.5), prepend=True)
    return net


@CASES.add(vectors)
def backward_hooks_of_the_user() -> nn.Module:
    net = nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), nn.Sigmoid()))
    net[0].register_full_backward_hook(lambda _module, _inputs, _outputs: None)
    net[2].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 2,))
    net[1].register_full_backward_pre_hook(lambda _module, outputs: (outputs[0] * 3,))
    return net


@CASES.add(vectors, unjudged=("first",))
def tensor_hooks_inside() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        return net.last(hidden.relu_())

    return Net(forward, first=linear(), last=linear())


@CASES.add(vectors)
def frozen_parameters() -> nn.Module:
    net = nn.Sequential(linear(), nn.ReLU(inplace=True), linear())
    net[0].requires_grad_(False)
    return net
