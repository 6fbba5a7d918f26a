"""`rnet.check`: it passes where promises hold, and each fault that is planted makes it fail."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import Recorder
from scio_recorder.capture import keeping
from scio_recorder.capture.engine import Capture
from scio_recorder.errors import ArgumentError, CheckError, ComparisonError, UnsupportedNetError
from scio_recorder.nets.records import Records
from tests.harness import MODES, Mode, make_recorder, trace
from tests.oracle import differences, seed_everything
from tests.rotation import one_in
from tests.zoo import CASES, Case
from tests.zoo.base import Net


def overwriting(net: Any, x: Tensor) -> Tensor:
    """Hides the output of its first layer in zeros, which torch does not count as a write."""
    hidden = net.first(x)
    output: Tensor = net.last(hidden)
    hidden.detach().numpy()[:] = 0
    return output


def checkpointed(net: Any, x: Tensor) -> Tensor:
    """Runs the layer inside it again in the backward pass."""
    output: Tensor = checkpoint(lambda x: net.inner(x).exp(), x, use_reentrant=False)
    return output


class Doubled(torch.autograd.Function):
    """Returns its input, and twice its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


class Suspicious(nn.Module):
    """Does something else if the layer inside it is hooked, once it is alert."""

    is_alert = False

    def __init__(self, disturb: Callable[[Suspicious, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.disturb = disturb
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        changed = self.disturb(self, x) if self.is_alert and self.inner._forward_hooks else None
        return x if changed is None else changed


def added(net: Suspicious, x: Tensor) -> Tensor:
    return x + 1


def counted(net: Suspicious, x: Tensor) -> None:
    net.seen += 1


def drawn(net: Suspicious, x: Tensor) -> None:
    torch.rand(1)


def drawn_by_python(net: Suspicious, x: Tensor) -> None:
    random.random()


def switched(net: Suspicious, x: Tensor) -> None:
    net.inner.eval()


def doubled(net: Suspicious, x: Tensor) -> Tensor:
    changed: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return changed


def hooked(net: Suspicious, x: Tensor) -> None:
    net.register_forward_hook(lambda *call: None)


def failed(net: Suspicious, x: Tensor) -> None:
    raise ZeroDivisionError("hooks are not allowed")


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


@pytest.fixture
def x() -> Tensor:
    seed_everything(3)
    return torch.randn(5, 4)


# By default each case meets one of three modes, the next case the next mode.
MET = [
    (case, MODES[:6:2][(number + turn) % 3])
    for number, case in enumerate([*CASES][::3])
    for turn in range(3)
]


@pytest.mark.parametrize(("case", "mode"), one_in(3, MET), ids=str)
def test_the_nets_of_the_zoo_pass_and_keep_no_trace(case: Case, mode: Mode) -> None:
    if not mode.allows(case) or case.hooks_change_kernel:
        pytest.skip("the case has no such pass, or torch itself takes another kernel in it")
    net = case.fresh()
    rnet = make_recorder(net, case, training=mode.training, force_static_flow=case.static_flow)
    net.train(mode.training)
    args, kwargs = case.inputs(1)
    seed_everything(5)
    before = trace(net)
    with mode.entered():
        report = rnet.check(*args, **kwargs)
    assert {layer.label for layer in report.layers} == {
        label for label, layer in rnet.architecture.items() if layer.executed
    }
    assert "output" in report.facts
    assert not report.unrepeatable
    assert not differences(trace(net), before)


def test_report_counts_what_was_compared(x: Tensor) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    rnet = Recorder(net, input_size=(3, 4))
    rnet.record("1", "2", "2/relu")
    report = rnet.check(x)
    assert [layer.name for layer in report.layers] == ["1", "2"]
    assert [row.name for row in report.left_out] == ["2/relu:0"]
    assert str(report).splitlines()[2:] == [
        "as in a bare run: output, random numbers, training flags, hooks, 4 gradients, 3 buffers",
        f"recorded and not compared: {report.left_out[0]}",
    ]
    with torch.no_grad():
        assert "no gradients: gradient mode is off" in str(rnet.check(x))


def test_nothing_of_before_is_lost(x: Tensor) -> None:
    rnet = Recorder(plain(), input_size=(1, 4))
    rnet.record("0", gradients=True)
    rnet(x).sum().backward()
    hidden = rnet.net[0](x)
    gradients = [one.grad.clone() for one in rnet.net.parameters() if one.grad is not None]
    rnet.check(2 * x)
    assert torch.equal(rnet.activations["0"], hidden)
    assert all(map(torch.equal, gradients, [one.grad for one in rnet.net.parameters()]))
    rnet(3 * x)
    assert torch.equal(rnet.activations["0"], rnet.net[0](3 * x))
    rnet.remove()
    assert not any(module._forward_hooks for module in rnet.net.modules())


def test_a_pass_of_before_can_still_run_backward(x: Tensor) -> None:
    def gradient(checks: bool) -> Any:
        torch.manual_seed(0)
        net = Net(checkpointed, inner=nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        rnet = Recorder(net, input_size=(1, 4))
        rnet.record("inner")
        output = rnet(x, activation_postproc=lambda tensor: tensor * 3)
        if checks:
            rnet.check(x)
        output.square().sum().backward()
        return net.inner[0].weight.grad

    # Its checkpointed region runs again, with the post-processor.
    assert torch.equal(gradient(checks=True), gradient(checks=False))


def test_input_keeps_its_graph(x: Tensor) -> None:
    weight = torch.ones(4, requires_grad=True)
    given = x * weight
    report = Recorder(plain(), input_size=(1, 4)).check(given)
    assert "gradient of input 0" in report.facts
    given.sum().backward()
    assert weight.grad is not None


# -- wrong records ---------------------------------------------------------------------------------


def test_a_wrong_copy_is_found(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    right = keeping.own_copy
    monkeypatch.setattr(keeping, "own_copy", lambda tensor: right(tensor) + 1)
    with pytest.raises(CheckError, match=r"layer 1-1 0 .*not what it returned: .* by 1 at most"):
        Recorder(plain(), input_size=(1, 4)).check(x)


def test_a_record_that_was_overwritten_is_found(x: Tensor) -> None:
    rnet = Recorder(plain(), input_size=(1, 4))
    rnet.record("2", "0", copy="never")
    with pytest.raises(CheckError, match=r"layer 1-1 0 .*its record was lost") as caught:
        rnet.check(x)
    assert caught.value.layer.name == "0"


@pytest.mark.parametrize("is_blind", [False, True])
def test_a_write_that_is_not_counted_is_found_in_the_second_pass(
    is_blind: bool, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(overwriting, first=nn.Linear(4, 4), last=nn.Linear(4, 2))
    rnet = Recorder(net, input_size=(1, 4))
    rnet.record("*")
    if is_blind:
        monkeypatch.setattr(keeping, "same_bits", lambda one, other: True)
        with pytest.raises(CheckError, match=r"layer 1-1 first .*20 of 20 numbers"):
            rnet.check(x)
    else:
        assert "output" in rnet.check(x).facts


def test_records_under_each_others_labels_are_found(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Any = Capture.activations

    def swapped(capture: Capture) -> Any:
        records = right.fget(capture)
        values = {label: records[label] for label in records}
        one, two = (1, 1), (1, 2)
        values[one], values[two] = values[two], values[one]
        return values

    rnet = Recorder(nn.Sequential(nn.Tanh(), nn.Tanh()), input_size=(1, 4))
    assert isinstance(rnet.activations, Records)
    monkeypatch.setattr(Capture, "activations", property(swapped))
    with pytest.raises(CheckError, match="layer 1-1 0"):
        rnet.check(x)


def test_another_structure_is_found(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = Capture.activations
    monkeypatch.setattr(
        Capture,
        "activations",
        property(lambda own: {at: (one,) for at, one in right.fget(own).items()}),
    )
    with pytest.raises(CheckError, match=r"layer 1-1 0 .* in place of"):
        Recorder(plain(), input_size=(1, 4)).check(x)


# -- a network that is disturbed -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("disturb", "named"),
    [
        (added, "output differs, 20 of 20 numbers, by 1 at most"),
        (counted, "buffer seen differs"),
        (drawn, "random numbers differs"),
        (drawn_by_python, "random numbers differs"),
        (switched, "training flags differs, False in place of True"),
        (doubled, "gradient of inner"),
        (hooked, "hooks differs"),
        (failed, "raised ZeroDivisionError: hooks are not allowed. The bare one does not"),
    ],
)
def test_what_hooks_change_is_found(disturb: Any, named: str, x: Tensor) -> None:
    rnet = Recorder(Suspicious(disturb).eval(), input_size=(1, 4))
    rnet.net.train()
    rnet.net.is_alert = True
    with pytest.raises(CheckError, match=named):
        rnet.check(x)
    # As before, whatever was found.
    assert rnet.net.inner.training
    assert not any(module._forward_hooks for module in rnet.net.modules())


def test_a_layer_that_nobody_hooks_is_not_disturbed(x: Tensor) -> None:
    rnet = Recorder(nn.Sequential(Suspicious(added), nn.Tanh()).eval(), input_size=(1, 4))
    rnet.record("1")
    rnet.net[0].is_alert = True
    assert [layer.name for layer in rnet.check(x).layers] == ["1"]


@pytest.mark.parametrize(
    "number", [lambda: int.from_bytes(os.urandom(3), "big"), lambda: time.perf_counter_ns() % 2**20]
)
def test_what_does_not_repeat_is_named_and_not_judged(
    number: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It adds a number that no state decides.
    net = Net(lambda net, x: net.inner(x) + number(), inner=nn.Linear(4, 4))
    rnet = Recorder(net, input_size=(1, 4))
    report = rnet.check(x)
    assert report.unrepeatable == ("output",)
    assert "two bare runs differ in it: output" in str(report)
    assert "gradient of inner.weight" in report.facts
    # Records are judged all the same.
    right = keeping.own_copy
    monkeypatch.setattr(keeping, "own_copy", lambda tensor: right(tensor) + 1)
    with pytest.raises(CheckError, match="layer 1-1 inner"):
        rnet.check(x)


# -- what is refused -------------------------------------------------------------------------------


def test_refusals(x: Tensor) -> None:
    rnet = Recorder(plain(), input_size=(1, 4))
    with pytest.raises(ArgumentError, match="leave activation_postproc= out"):
        rnet.check(x, activation_postproc=lambda tensor: tensor)
    rnet.record("0")
    with rnet.watch():
        rnet.net(x)
        with pytest.raises(ComparisonError, match="leave the block"):
            rnet.check(x)
    rnet.net[2].compile()
    with pytest.raises(UnsupportedNetError, match=r"without torch\.compile"):
        rnet.check(x)


def test_an_error_of_the_bare_net_is_its_own(x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Recorder(plain(), input_size=(1, 4)).check(x[:, :3])
    assert not isinstance(caught.value, CheckError)
