"""Nets in which a later in-place operation overwrites what a module returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.zoo.base import Net, Table, images, linear, vectors

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = Table()


@CASES.add(vectors)
def inplace_relu() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), linear())


def _residual(net: Any, x: Tensor) -> Tensor:
    hidden = net.norm2(net.conv2(net.relu(net.norm1(net.conv1(x)))))
    hidden += x
    return net.relu(hidden)


def _block(width: int) -> nn.Module:
    parts = {"conv1": nn.Conv2d(width, width, 3, padding=1), "norm1": nn.BatchNorm2d(width)}
    more = {"conv2": nn.Conv2d(width, width, 3, padding=1), "norm2": nn.BatchNorm2d(width)}
    return Net(_residual, **parts, **more, relu=nn.ReLU(inplace=True))


@CASES.add(images)
def residual_cnn() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    return nn.Sequential(stem, _block(6), _block(6), *head)


class AddsOne(nn.Module):
    """Changes its own input in place and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Overwrites(nn.Module):
    """Changes its own input in place and returns something else."""

    def forward(self, x: Tensor) -> Tensor:
        result = x * 2
        x.mul_(3)
        return result


@CASES.add(vectors)
def change_of_own_input() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        doubled = net.overwrite(hidden)
        return net.last(net.add_one(hidden) + doubled)

    return Net(forward, first=linear(), overwrite=Overwrites(), add_one=AddsOne(), last=linear())


@CASES.add(vectors)
def change_of_net_input() -> nn.Module:
    return nn.Sequential(AddsOne(), linear(), AddsOne())


@CASES.add(vectors)
def change_of_view_of_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden.view(-1).mul_(2)
        other = net.second(x)
        other.t().add_(1)
        return net.last(hidden + other)

    return Net(forward, first=linear(), second=linear(), last=linear())


@CASES.add(vectors)
def change_of_slice() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden[:, 0] = 0
        hidden[1].add_(5)
        return net.last(hidden)

    return Net(forward, first=linear(), last=linear())


@CASES.add(vectors)
def change_of_passed_through() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        same = net.identity(net.first(x))
        kept = net.dropout(same)
        kept.mul_(2)
        return net.last(kept)

    return Net(
        forward, first=linear(), identity=nn.Identity(), dropout=nn.Dropout(0.0), last=linear()
    )


@CASES.add(images)
def change_after_flatten() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        maps = net.conv(x)
        flat = net.flatten(maps)
        flat.clamp_(min=0)
        maps.add_(1)
        return net.last(flat)

    return Net(forward, conv=nn.Conv2d(3, 2, 3), flatten=nn.Flatten(), last=nn.Linear(72, 4))


@CASES.add(vectors, unjudged=("split",))
def change_of_every_view() -> nn.Module:
    """Parts of one tensor and the whole of it, all returned, all overwritten."""

    def split(_: Any, x: Tensor) -> tuple[Tensor, ...]:
        hidden = x * 1
        return hidden, hidden.view(-1), hidden[:, :2], hidden[:, 2:]

    def forward(net: Any, x: Tensor) -> Tensor:
        whole, flat, left, right = net.split(net.first(x))
        left.mul_(2)
        flat.add_(1)
        return net.last(whole) + right.sum()

    return Net(forward, first=linear(), split=Net(split), last=linear())


def _caching(keep: Callable[[Tensor], Tensor], change: Callable[[Tensor], object]) -> nn.Module:
    """A module that keeps something of its output, which the net then changes."""

    def inner(net: Any, x: Tensor) -> Tensor:
        result = net.linear(x)
        net.cache = keep(result)
        return result

    def forward(net: Any, x: Tensor) -> Tensor:
        result = net.last(net.inner(x) * 2)
        with torch.no_grad():
            change(net.inner.cache)
        return result

    return Net(forward, inner=Net(inner, linear=linear(), cache=None), last=linear())


@CASES.add(vectors, unjudged=("inner",))
def cached_output_changed_later() -> nn.Module:
    return _caching(lambda result: result, lambda cache: cache.zero_())


@CASES.add(vectors, unjudged=("inner",))
def cached_view_changed_later() -> nn.Module:
    return _caching(lambda result: result[0], lambda cache: cache.zero_())


@CASES.add(vectors, unjudged=("inner",))
def cached_alias_off_the_graph_changed_later() -> nn.Module:
    return _caching(lambda result: result.detach(), lambda cache: cache.fill_(3))


@CASES.add(vectors, unjudged=("inner",))
def cached_in_a_list_changed_later() -> nn.Module:
    return _caching(lambda result: [result], lambda cache: cache[0].add_(3))


def _reading_back(keep: Callable[[Tensor], Tensor]) -> nn.Module:
    """What a module kept of its output shows what the net did to that output."""

    def inner(net: Any, x: Tensor) -> Tensor:
        result = net.linear(x)
        net.cache = keep(result)
        return result

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.inner(x)
        hidden.add_(1)
        return net.last(hidden) + net.inner.cache.detach().sum()

    return Net(forward, inner=Net(inner, linear=linear(), cache=None), last=linear())


@CASES.add(vectors, unjudged=("inner",))
def kept_output_shows_changes() -> nn.Module:
    return _reading_back(lambda result: result)


@CASES.add(vectors, unjudged=("inner",))
def kept_view_shows_changes() -> nn.Module:
    return _reading_back(lambda result: result[0])


@CASES.add(vectors, unjudged=("inner",))
def kept_alias_off_the_graph_shows_changes() -> nn.Module:
    return _reading_back(lambda result: result.detach())


@CASES.add(vectors)
def parameter_and_buffer_returned() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        shift = net.buffer(x)
        result = net.first(x) + net.weight(x) + shift
        shift.add_(1)
        return result

    return Net(
        forward,
        first=linear(),
        weight=Net(lambda net, _: net.value, value=nn.Parameter(torch.randn(4))),
        buffer=Net(lambda net, _: net.value, value=torch.randn(4)),
    )


@CASES.add(vectors)
def expanded_output() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        rows = net.expand(net.first(x))
        return net.last(rows * 2)

    def expand(_: Any, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True).expand(3, 4)

    return Net(forward, first=linear(), expand=Net(expand), last=linear())


@CASES.add(vectors)
def overwritten_twice() -> nn.Module:
    return nn.Sequential(linear(), AddsOne(), AddsOne(), nn.ReLU(inplace=True))


@CASES.add(vectors)
def overwritten_through_out_argument() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        result = net.last(hidden.clone())
        if not torch.is_grad_enabled():
            torch.add(result, 1, out=hidden)
        return result

    return Net(forward, first=linear(), last=linear())


@CASES.add(vectors)
def overwritten_only_without_gradients() -> nn.Module:
    """The branch that transformers take: in place where no graph is being built."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.first(x)
        hidden = hidden + x if torch.is_grad_enabled() else hidden.add_(x)
        return net.last(hidden)

    return Net(forward, first=linear(), last=linear())
