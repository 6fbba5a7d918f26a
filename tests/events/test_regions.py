"""Gradients of calls under reentrant checkpointing, whose backward pass comes in the block."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder.events import track
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


def test_gradients_are_those_without_checkpointing() -> None:
    found = []
    for net in (region(block()), Net(lambda net, x: net.inner(x), inner=block())):
        before = hook_state(net)
        with track(net) as events:
            net(start()).square().sum().backward()
        found.append(gradients(events))
        assert [event.grad for event in events] == [False] * 5 + [True] * 5
        assert hook_state(net) == before
    for (name, gradient), (wanted_name, wanted) in zip(*found, strict=True):
        assert name == wanted_name
        torch.testing.assert_close(gradient, wanted, rtol=1e-13, atol=0)


def test_a_backward_pass_after_the_block_is_said_to_be_missing() -> None:
    net = region(block())
    before = hook_state(net)
    events = track(net)
    loss = net(start()).sum()
    with pytest.warns(UserWarning, match=r"4 modules, such as 'inner.0'.*use_reentrant=False"):
        events.unregister()
    assert hook_state(net) == before
    loss.backward()
    # The network itself is outside the region.
    assert [name for name, _ in gradients(events)] == [""]


def test_a_pass_before_the_block_is_not_logged_by_its_backward_inside() -> None:
    net = region(block())
    loss = net(start()).sum()
    with track(net) as events:
        loss.backward()
    assert len(events) == 0


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_regions_in_regions(outer: bool, inner: bool) -> None:
    net = region(region(block(), inner), outer)
    with track(net) as events:
        net(start()).sum().backward()
    names = ["", "inner", "inner.inner", "inner.inner.2", "inner.inner.1", "inner.inner.0"]
    assert [name for name, _ in gradients(events)] == names
    forward = [event.name for event in events if not event.grad]
    assert forward == [*sorted(names[3:]), *names[2::-1]]


def test_neither_graph_nor_log_is_kept() -> None:
    net = Net(lambda net, x: net.inner(Mark.apply(x)), inner=region(block()))
    with track(net) as events:
        for _ in range(3):
            loss = net(start()).sum()
            loss.backward()
    assert marked_graphs() == 1
    dead = weakref.ref(events)
    del events
    gc.collect()
    assert dead() is None
    del loss
    assert marked_graphs() == 0
