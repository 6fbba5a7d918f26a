"""T1 where something is overwritten: by a later layer, by the caller, by a post-processor."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import MutationError, UnsupportedNetError
from scio_recorder.nets import refusals
from tests.harness import recorder
from tests.oracle import same_bits
from tests.zoo.base import Net, linear

if TYPE_CHECKING:
    from collections.abc import Callable

COPIES = ("auto", "always", "never")


def refusal(action: Callable[[], Any]) -> MutationError | None:
    try:
        action()
    except MutationError as error:
        return error
    return None


def assert_true_or_refused(rnet: Recorder, key: Any, truth: Tensor) -> None:
    refused = refusal(lambda: rnet.activations[key])
    if refused is None:
        assert same_bits(rnet.activations[key], truth)
    else:
        assert str(rnet.architecture[key].label) in str(refused)


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("grad", [False, True])
def test_caller_changing_its_output_is_noticed(copy: str, grad: bool, passes: int) -> None:
    rnet = recorder(nn.Sequential(linear(), nn.Tanh(), linear()), "", "2", copy=copy)
    with torch.set_grad_enabled(grad):
        for _ in range(passes):
            output = rnet(torch.randn(3, 4))
    truth = output.detach().clone()
    with torch.no_grad():
        output.add_(1)
    if copy == "never":
        for key in ("", "2"):
            with pytest.raises(MutationError):
                rnet.activations[key]
    elif copy == "always":
        assert same_bits(rnet.activations[""], truth)
    for key in ("", "2"):
        assert_true_or_refused(rnet, key, truth)


def test_caller_changing_its_input_is_noticed() -> None:
    for copy in COPIES:
        rnet = recorder(nn.Sequential(nn.Identity(), linear()), "0", copy=copy)
        for _ in range(3):
            x = torch.randn(3, 4)
            truth = x.clone()
            with torch.no_grad():
                rnet(x)
            x.mul_(3)
            assert_true_or_refused(rnet, "0", truth)


def test_optimiser_step_after_a_returned_parameter_is_noticed() -> None:
    weight = nn.Parameter(torch.randn(4))
    returns = Net(lambda net, _: net.weight, weight=weight)
    net = Net(lambda net, x: x * net.inner(x), inner=returns)
    rnet = recorder(net, "inner")
    for _ in range(3):
        truth = weight.detach().clone()
        rnet(torch.randn(3, 4)).sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        assert not same_bits(weight, truth)
        assert_true_or_refused(rnet, "inner", truth)


def pass_and_read(rnet: Recorder, x: Tensor, key: str) -> Tensor:
    rnet(x)
    return rnet.activations[key]


def test_never_copying_refuses_what_was_overwritten_in_the_pass() -> None:
    rnet = recorder(nn.Sequential(linear(), nn.ReLU(inplace=True)), "0", copy="never")
    for _ in range(3):
        x = torch.randn(3, 4)
        with torch.no_grad(), pytest.raises(MutationError, match="1-1"):
            pass_and_read(rnet, x, "0")


# Nothing counts writes to tensors of inference mode.
@pytest.mark.parametrize(
    ("copy", "mode"),
    [("always", torch.no_grad), *((copy, torch.inference_mode) for copy in COPIES)],
)
def test_what_is_copied_in_every_pass_is_right(copy: str, mode: Callable[[], Any]) -> None:
    net = nn.Sequential(linear(), nn.ReLU(inplace=True))
    rnet = recorder(net, "0", copy=copy)
    with mode():
        for _ in range(3):
            x = torch.randn(3, 4)
            rnet(x)
            assert same_bits(rnet.activations["0"], net[0](x))


class Late(nn.Module):
    """Starts to overwrite what its first layer receives and returns when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()
        self.overwrite = False

    def forward(self, x: Tensor) -> Tensor:
        received = x + 1
        hidden = self.first(received)
        result: Tensor = self.last(hidden)
        if self.overwrite:
            received.detach().zero_()
            hidden.detach().zero_()
        return result


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_net_that_starts_overwriting_is_never_failed(grad: bool, inputs: bool) -> None:
    """The pass returns; the lost record says so when it is read, and the next pass copies."""
    net = Late()
    rnet = recorder(net, "first", "last", inputs=inputs)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            rnet(torch.randn(3, 4))
        net.overwrite = True
        for is_first in (True, False, False):
            x = torch.randn(3, 4)
            truth = nn.functional.linear(x + 1, net.first.weight, net.first.bias).detach()
            output = rnet(x)
            expected = nn.functional.linear(truth, net.last.weight, net.last.bias)
            assert same_bits(output.detach(), expected.detach())
            assert same_bits(rnet.activations["last"].detach(), expected.detach())
            if is_first:
                with pytest.raises(MutationError, match=r"1-1 first .* next pass .* copied"):
                    rnet.activations["first"]
                if inputs:
                    with pytest.raises(MutationError, match="input of layer 1-1 first"):
                        rnet.inputs["first"]
            else:
                assert same_bits(rnet.activations["first"].detach(), truth)
                if inputs:
                    assert same_bits(rnet.inputs["first"].args[0], x + 1)


class Conditional(nn.Module):
    """Overwrites its first layer's output under one condition."""

    def __init__(self, condition: Callable[[Any], bool]) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()
        self.condition = condition
        self.given: dict[str, Any] = {}

    def forward(self, x: Tensor, mask: Any = None, how: str = "") -> Tensor:
        self.given = {"mask": mask, "how": how}
        hidden = self.first(x)
        result: Tensor = self.last(hidden)
        if self.condition(self):
            hidden.detach().zero_()
        return result


@pytest.mark.parametrize(
    ("condition", "call"),
    [
        (lambda net: net.training, lambda rnet, x: (rnet.train(), rnet(x))),
        (lambda net: torch.is_grad_enabled(), lambda rnet, x: torch.enable_grad()(rnet)(x)),
        (
            lambda net: torch.is_autocast_enabled("cpu"),
            lambda rnet, x: torch.autocast("cpu")(rnet.forward)(x),
        ),
        (lambda net: net.given["mask"] is not None, lambda rnet, x: rnet(x, torch.ones(3))),
        (lambda net: net.given["mask"] is not None, lambda rnet, x: rnet(x, mask=torch.ones(3))),
        (lambda net: len(net.given["mask"] or ()) == 2, lambda rnet, x: rnet(x, mask=[x, x])),
        (lambda net: net.given["how"] == "other", lambda rnet, x: rnet(x, mask=None, how="other")),
    ],
    ids=["training", "gradients", "autocast", "input", "keyword", "structure", "text"],
)
def test_the_first_pass_in_another_setting_copies(condition: Any, call: Any) -> None:
    net = Conditional(condition)
    rnet = recorder(net.eval(), "first")
    with torch.no_grad():
        for _ in range(3):
            rnet(torch.randn(3, 4), mask=None, how="")
            rnet(torch.randn(3, 4))
            rnet(torch.randn(3, 4), mask=[torch.ones(3)])
        x = torch.randn(3, 4)
        call(rnet, x)
        dtype = torch.bfloat16 if rnet.activations["first"].dtype == torch.bfloat16 else x.dtype
        with torch.autocast("cpu", enabled=dtype == torch.bfloat16):
            truth = nn.functional.linear(x, net.first.weight, net.first.bias)
        assert same_bits(rnet.activations["first"].detach(), truth)


@pytest.mark.parametrize("grad", [False, True])
def test_inplace_postprocessor_changes_the_record(grad: bool) -> None:
    net = nn.Sequential(linear(), nn.Sigmoid(), linear())
    rnet = recorder(net, "0")
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(3, 4)
            output = rnet(x, activation_postproc=lambda tensor: tensor.mul_(2))
            changed = net[0].forward(x) * 2
            assert same_bits(rnet.activations["0"], changed)
            assert same_bits(output, net[2].forward(torch.sigmoid(changed)))


def test_postprocessor_that_returns_something_new_leaves_the_record() -> None:
    net = nn.Sequential(linear(), nn.ReLU(inplace=True))
    rnet = recorder(net, "0")
    for _ in range(3):
        x = torch.randn(3, 4)
        with torch.no_grad():
            output = rnet(x, activation_postproc=lambda tensor: tensor * 2)
            assert same_bits(rnet.activations["0"], net[0].forward(x))
            assert same_bits(output, torch.relu(net[0].forward(x) * 2))


@pytest.mark.parametrize("grad", [False, True])
def test_only_what_was_overwritten_is_copied_after_the_first_pass(grad: bool) -> None:
    seen: list[int] = []
    net = nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.Tanh())
    for layer in (net[0], net[2]):
        layer.register_forward_hook(lambda _module, _args, output: seen.append(output.data_ptr()))
    rnet = recorder(net, "0", "2")
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            seen.clear()
            rnet(torch.randn(3, 4))
    assert rnet.activations["2"].data_ptr() == seen[1]
    if not grad:
        assert rnet.activations["0"].data_ptr() != seen[0]


@pytest.mark.parametrize("grad", [False, True])
def test_offloaded_records_are_true_and_detached(grad: bool) -> None:
    net = nn.Sequential(linear(), nn.ReLU(inplace=True), linear())
    rnet = recorder(net, "0", "2", offload=True)
    for _ in range(3):
        x = torch.randn(3, 4)
        with torch.set_grad_enabled(grad):
            output = rnet(x)
        truth = output.detach().clone()
        with torch.no_grad():
            output.add_(1)
        assert same_bits(rnet.activations["0"], net[0].forward(x))
        assert same_bits(rnet.activations["2"], truth)
        assert not any(record.requires_grad for record in rnet.activations.values())


class Hiding(nn.Module):
    """Returns something that holds a tensor, which the network overwrites."""

    class Layer(nn.Module):
        def __init__(self, make: Any) -> None:
            super().__init__()
            self._make = make

        def forward(self, x: Tensor) -> Any:
            self.__dict__["hidden"] = x * 1
            return self._make(self.hidden)

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer = self.Layer(make)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        hidden: Tensor = self.layer.__dict__.pop("hidden")
        return hidden.mul_(2)


@pytest.mark.parametrize("settings", [*({"copy": copy} for copy in COPIES), {"offload": True}])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda hidden: functools.partial(torch.add, hidden), "partial"),
        (lambda hidden: {"inside": (lambda: hidden, 1)}, "function"),
        (lambda hidden: {hidden: 1}, "dict"),
    ],
)
def test_tensors_that_no_record_can_copy_are_refused(
    make: Any, named: str, settings: dict[str, Any]
) -> None:
    rnet = recorder(Hiding(make), "layer", **settings)
    with pytest.raises(UnsupportedNetError, match=rf"layer \(Layer\) returns a {named}"):
        rnet(torch.randn(3, 4))
    rnet.record("")
    x = torch.randn(3, 4)
    assert same_bits(rnet(x), x * 2)


def test_only_the_first_pass_looks_at_all_that_an_output_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Any] = []
    search = refusals.holder_out_of_sight

    def look(shared: Any) -> Any:
        looked.append(shared)
        return search(shared)

    monkeypatch.setattr(refusals, "holder_out_of_sight", look)
    layer = Net(lambda net, x: {"hidden": net.inner(x), "say": str.upper}, inner=linear())
    rnet = recorder(nn.Sequential(layer), "0")
    for _ in range(3):
        rnet(torch.ones(3, 4))
    assert len(looked) == 1


@pytest.mark.parametrize("holds", [lambda found: found, lambda found: SimpleNamespace(say=found)])
def test_a_later_pass_that_returns_what_no_copy_can_have_is_refused(holds: Any) -> None:
    def forward(net: Any, x: Tensor) -> Any:
        hidden = net.inner(x)
        return {"sum": hidden.sum(), "say": holds(hidden.tolist if net.says else None)}

    layer = Net(forward, inner=linear(), says=False)
    rnet = recorder(nn.Sequential(layer), "0")
    for _ in range(2):
        rnet(torch.ones(3, 4))
    layer.says = True
    with pytest.raises(UnsupportedNetError, match="with tensors inside it"):
        rnet(torch.ones(3, 4))
