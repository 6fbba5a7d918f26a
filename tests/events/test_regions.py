"""Gradients of calls under reentrant checkpointing, whenever the backward pass comes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder.events import Tracker, track
from tests.harness import hook_state
from tests.zoo.base import Net
from tests.zoo.graphs import Mark, marked_graphs


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def region(inner: nn.Module, reentrant: bool = True) -> Net:
    return Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=reentrant), inner=inner)


def start() -> Tensor:
    return torch.ones(2, 4, dtype=torch.float64, requires_grad=True)


def gradients(events: Any) -> list[tuple[str, Tensor]]:
    return [(event.name, event.first_value) for event in events if event.grad]


def test_after_the_block_gradients_are_those_without_checkpointing() -> None:
    found = []
    for net in (region(block()), Net(lambda net, x: net.inner(x), inner=block())):
        before = hook_state(net)
        with track(net) as events:
            loss = net(start()).square().sum()
        loss.backward()
        found.append(gradients(events))
        assert [event.grad for event in events] == [False] * 5 + [True] * 5
        del loss
        assert hook_state(net) == before
    for (name, gradient), (wanted_name, wanted) in zip(*found, strict=True):
        assert name == wanted_name
        torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=0)


def test_hooks_stay_only_inside_regions_and_only_as_long_as_their_graph() -> None:
    net = Net(lambda net, x: net.last(net.first(x)), first=region(block()), last=nn.Linear(3, 1))
    net.double()
    before = hook_state(net)
    with track(net) as events:
        loss = net(start()).sum()
    kept = {name for name, state in hook_state(net).items() if state != before[name]}
    assert {name.rpartition("._")[0] for name in kept} == {
        *(f"first.inner.{i}" for i in range(3)),
        "first.inner",
    }
    # Passes after the block are not logged while the hooks are there, nor their gradients.
    net(start()).sum().backward()
    with torch.no_grad():
        net(start())
    assert len(events) == 7
    del loss
    assert hook_state(net) == before


def test_a_pass_before_the_block_is_not_logged_by_its_backward_inside() -> None:
    net = region(block())
    loss = net(start()).sum()
    with track(net) as events:
        loss.backward()
    assert len(events) == 0


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_regions_in_regions(outer: bool, inner: bool, inside: bool) -> None:
    net = region(region(block(), inner), outer)
    with track(net) as events:
        loss = net(start()).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    names = ["", "inner", "inner.inner", "inner.inner.2", "inner.inner.1", "inner.inner.0"]
    assert [name for name, _ in gradients(events)] == names
    forward = [event.name for event in events if not event.grad]
    assert forward == [*sorted(names[3:]), *names[2::-1]]


def test_two_logs_of_one_net_and_one_of_them_again() -> None:
    net = region(block())
    with track(net, include="0$") as first, track(net, include="2$") as second:
        loss = net(start()).sum()
    with track(net) as third:
        loss.backward()
    assert [name for name, _ in gradients(first)] == ["inner.0"]
    assert [name for name, _ in gradients(second)] == ["inner.2"]
    assert len(third) == 0
    first.register_all(net)
    for ends_before in (False, True):
        again = net(start()).sum()
        first.clear()
        if ends_before:
            first.unregister()
        again.backward()
        assert len(gradients(first)) == 5


def test_a_second_backward_is_logged_and_a_dead_log_takes_its_hooks_away() -> None:
    net = region(block())
    before = hook_state(net)
    with track(net) as events:
        loss = net(start()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(gradients(events)) == 10
    assert hook_state(net) != before
    del events
    assert hook_state(net) == before


def test_neither_graph_nor_log_is_kept() -> None:
    net = Net(lambda net, x: net.inner(Mark.apply(x)), inner=region(block()))
    with track(net) as events:
        for _ in range(3):
            loss = net(start()).sum()
    assert marked_graphs() == 1
    loss.backward()
    dead = weakref.ref(events)
    del events
    gc.collect()
    assert dead() is None
    del loss
    assert marked_graphs() == 0


def test_a_log_by_hand_goes_on_after_the_block() -> None:
    net = region(block())
    tracker = Tracker(lambda event: (event.name, event.grad))
    tracker.register(net.inner[1], "tanh")
    loss = net(start()).sum()
    tracker.unregister()
    tracker.unregister()
    loss.backward()
    assert list(tracker) == [("tanh", False), ("tanh", True)]
