"""Nothing that was logged keeps a graph alive, nor the graph the log."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from scio_recorder.events import track
from tests.zoo.base import Net


class Payload:
    """Held by a node of the graph, so that it tells whether that node is alive."""


class Marked(torch.autograd.Function):
    payloads: ClassVar[weakref.WeakSet[Payload]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.payload = Payload()
        Marked.payloads.add(ctx.payload)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def marked(_net: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = Marked.apply(x)
    return y.sin(), y.cos(), y.view(-1)


def net_of_marks() -> nn.Module:
    return Net(lambda net, x: net.inner(net.first(x)), first=nn.Linear(3, 3), inner=Net(marked))


@pytest.mark.parametrize("backward", ["none", "first", "all", "with_graph", "failed"])
def test_a_pass_inside_the_block_leaves_no_graph(backward: str) -> None:
    net = net_of_marks()
    with track(net) as events:
        outputs = net(torch.ones(2, 3))
        if backward == "failed":
            outputs[0].register_hook(lambda _: 1 / 0)
        loss = outputs[0].sum() if backward == "first" else sum(part.sum() for part in outputs)
        if backward == "failed":
            with pytest.raises(ZeroDivisionError):
                loss.backward(create_graph=True)
        elif backward == "with_graph":
            gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
            del gradients
        elif backward != "none":
            loss.backward()
        net.zero_grad()
        del outputs, loss
        # Exceptions hold frames in cycles; what C++ holds in cycles gc would not free.
        gc.collect()
        assert not Marked.payloads
    assert len(events) >= 3


def test_a_log_of_the_tensors_themselves_goes_with_the_tracker() -> None:
    net = net_of_marks()
    events = track(net, stash=lambda event: event)
    sum(part.sum() for part in net(torch.ones(2, 3))).backward()
    assert Marked.payloads
    del events
    gc.collect()
    assert not Marked.payloads


@pytest.mark.filterwarnings("ignore:.*existed before its call:UserWarning")
def test_many_training_steps_leave_nothing_behind() -> None:
    net = net_of_marks()
    net.bias = nn.Parameter(torch.zeros(3))
    net.returned = Net(lambda _, x: x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        outputs = net(net.returned(net.bias))
        optimizer.zero_grad()
        sum(part.sum() for part in outputs).backward()
        optimizer.step()
        events.clear()

    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    with track(net) as events:
        for _ in range(20):
            step()
        before = count()
        for _ in range(200):
            step()
        # A step that left one object behind would leave 200.
        assert count() - before < 100
        assert not Marked.payloads
