"""T4 and T5: layers that run more often, less often or unseen are an error that names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import FlowError, RecorderError
from tests.harness import recorder
from tests.oracle import same_bits
from tests.zoo.base import Net, linear


def repeating(times: int) -> Any:
    """Return a net that calls `step` as often as `times` says."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.first(x)
        for _ in range(net.times):
            x = net.step(x)
        return net.last(x)

    return Net(forward, first=linear(), step=linear(), last=linear(), times=times)


@pytest.mark.parametrize("seen", [0, 1, 3, 9])
def test_other_number_of_calls_is_named(seen: int) -> None:
    net = repeating(2)
    rnet = recorder(net, "first", "step")
    rnet(torch.randn(3, 4))
    net.times = seen
    with pytest.raises(FlowError) as caught:
        rnet(torch.randn(3, 4))
    message = str(caught.value)
    assert "step" in message
    assert "2" in message
    assert str(seen) in message
    assert "'first'" not in message
    assert len(rnet.activations) == 0
    net.times = 2
    x = torch.randn(3, 4)
    rnet(x)
    once = net.step.forward(net.first.forward(x))
    records = [rnet.activations[label] for label in rnet.architecture.labels_of("step")]
    assert all(map(same_bits, records, (once, net.step.forward(once))))


def test_one_of_several_calls_is_recorded_and_all_are_counted() -> None:
    net = repeating(3)
    rnet = recorder(net, "1-3")
    x = torch.randn(3, 4)
    rnet(x)
    assert list(rnet.activations) == [(1, 3)]
    truth = net.step.forward(net.step.forward(net.first.forward(x)))
    assert same_bits(rnet.activations["1-3"], truth)
    for times in (2, 4):
        net.times = times
        with pytest.raises(FlowError, match=f"3 at labelling, {times} now"):
            rnet(x)


def test_extract_counts_only_the_calls_before_its_end() -> None:
    net = repeating(3)
    rnet = recorder(net, "1-3")
    x = torch.randn(3, 4)
    truth = net.step.forward(net.step.forward(net.first.forward(x)))
    assert same_bits(rnet.extract(x)["1-3"], truth)
    net.times = 1
    with pytest.raises(FlowError, match="1 now"):
        rnet.extract(x)


def test_unselected_modules_may_run_as_often_as_they_like() -> None:
    net = repeating(2)
    rnet = recorder(net, "first")
    net.times = 7
    x = torch.randn(3, 4)
    rnet(x)
    assert same_bits(rnet.activations["first"], net.first.forward(x))


def test_call_that_goes_round_the_hooks_is_noticed() -> None:
    net = Net(lambda net, x: net.call(net.first, x), first=linear())
    net.call = lambda module, x: module(x)
    rnet = recorder(net, "first")
    rnet(torch.randn(3, 4))
    net.call = lambda module, x: module.forward(x)
    with pytest.raises(RecorderError, match="first"):
        rnet(torch.randn(3, 4))


def test_calls_outside_a_pass_do_not_count() -> None:
    net = nn.Sequential(linear(), nn.Tanh())
    rnet = recorder(net, "0")
    x = torch.randn(3, 4)
    rnet(x)
    truth = rnet.activations["0"].detach().clone()
    net[0](torch.randn(3, 4))
    net(torch.randn(3, 4))
    assert same_bits(rnet.activations["0"], truth)
    rnet(x)
    assert same_bits(rnet.activations["0"], truth)


def test_data_that_changes_the_flow_is_named_when_it_was_let_through() -> None:
    def while_large(net: Any, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = net.halve(x)
        return x

    net, x = Net(while_large, halve=Net(lambda _, x: x / 2)), torch.tensor([3.0])
    with pytest.raises(FlowError):
        Recorder(net, input_data=x, verbose=0)
    rnet = Recorder(net, input_data=x, force_static_flow=False, verbose=0)
    rnet.record("halve")
    rnet(torch.tensor([-3.5]))
    assert [rnet.activations[label].item() for label in rnet.recording] == [-1.75, -0.875]
    with pytest.raises(FlowError, match="halve"):
        rnet(torch.tensor([30.0]))
