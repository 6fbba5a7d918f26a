"""T2: nets that could tell whether they are watched, by identity, references or hooks, can't."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_hooks

from tests.harness import recorder
from tests.zoo.base import Net, linear

PASSES = 3


def assert_undisturbed(net: nn.Module, *selectors: str) -> None:
    x = torch.randn(3, 4)
    truth = net(x)
    rnet = recorder(net, *selectors)
    for _ in range(PASSES):
        assert torch.equal(rnet(x), truth)


def test_list_that_is_returned_twice_stays_one_list() -> None:
    def twice(net: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        outputs = [net.linear(x)]
        return outputs, outputs

    def forward(net: Any, x: Tensor) -> Tensor:
        one, other = net.inner(x)
        one.append(x)
        return other[-1] + other[0]

    assert_undisturbed(Net(forward, inner=Net(twice, linear=linear())), "inner")


def test_state_that_a_module_hands_out_stays_its_state() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y, log = net.inner(x)
        log.append("seen")
        return y

    net = Net(forward, inner=Net(lambda net, x: (net.linear(x), net.log), linear=linear()))
    net.inner.log = []
    rnet = recorder(net, "inner")
    del net.inner.log[:]
    for count in range(1, PASSES + 1):
        rnet(torch.randn(3, 4))
        assert net.inner.log == ["seen"] * count


def test_weak_reference_to_an_output_finds_what_the_net_goes_on_with() -> None:
    def inner(net: Any, x: Tensor) -> Tensor:
        y = net.linear(x)
        net.seen = weakref.ref(y)
        return y

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.inner(x)
        return y * (2 if net.inner.seen() is y else 3)

    assert_undisturbed(Net(forward, inner=Net(inner, linear=linear())), "inner")


def test_hooks_of_the_user_outlive_records_of_what_a_layer_hands_on() -> None:
    net = Net(
        lambda net, x: net.same(x) * net.scale(x),
        same=nn.Identity(),
        scale=Net(lambda net, x: net.factor, factor=nn.Parameter(torch.ones(4))),
    )
    rnet = recorder(net)
    x = torch.randn(3, 4, requires_grad=True)
    heard: list[str] = []
    x.register_hook(lambda gradient: heard.append("x"))
    net.scale.factor.register_hook(lambda gradient: heard.append("factor"))
    for count in range(1, PASSES + 1):
        out = rnet(x).sum()
        read = [*rnet.activations.values()]
        rnet.record()
        # torch 2.8 and 2.9 drop the hooks of a leaf with a copy at its place.
        del read
        out.backward()
        assert sorted(heard) == sorted(["x", "factor"] * count)
        rnet.record("*")


def test_record_of_a_leaf_can_be_saved_and_copied() -> None:
    rnet = recorder(nn.Sequential(nn.Identity(), linear()), "0")
    x = torch.randn(3, 4, requires_grad=True)
    rnet(x)
    file = io.BytesIO()
    torch.save(rnet.activations["0"], file)
    file.seek(0)
    assert torch.equal(torch.load(file), x)
    assert torch.equal(copy.deepcopy(rnet.activations["0"]), x)


@pytest.mark.parametrize("grad", [False, True])
def test_global_hooks_of_the_user_see_no_foreign_modules(grad: bool) -> None:
    net = nn.Sequential(linear(), nn.Unflatten(1, (2, 2)), nn.LSTM(2, 2, batch_first=True))
    rnet = recorder(net)
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with torch.set_grad_enabled(grad):
            rnet(torch.randn(3, 4))
    finally:
        handle.remove()
    assert seen == [*net, net, rnet]


def test_collecting_outputs_leaves_optimizers_without_a_hook() -> None:
    rnet, found = recorder(nn.Linear(4, 2)), []

    def to_inputs(batch: Tensor) -> Tensor:
        found.append(len(optimizer_hooks))
        return batch

    before = len(optimizer_hooks)
    recording = rnet.collect([torch.ones(3, 4)] * 2, to_inputs=to_inputs, store="host")
    assert found == [before] * 2
    assert recording["0-1"].shape == (6, 2)
