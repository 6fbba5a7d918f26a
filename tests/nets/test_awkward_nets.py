"""T1, T4, T5, T7: nets and users that do what nobody expects get right records, or an error."""

from __future__ import annotations

import sys
from collections import deque
from copy import copy as shallow_copy
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from scio_recorder import Recorder, compare
from scio_recorder.errors import FlowError, UnsupportedNetError
from tests.harness import Interrupt, recorder
from tests.zoo.base import Net, linear

if TYPE_CHECKING:
    from collections.abc import Callable


def by_hand(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("stops", [False, True], ids=["forward", "extract"])
def test_surplus_call_is_refused_also_where_the_pass_stops_early(stops: bool) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return net.c(net.b(net.a(y) if net.is_twice else y))

    net = Net(forward, a=linear(), b=linear(), c=linear())
    net.is_twice = False
    rnet = recorder(net, "a", "b")
    run = rnet.extract if stops else rnet
    run(torch.randn(3, 4))
    net.is_twice = True
    with pytest.raises(FlowError, match="calls of the module: 1 at labelling, 2 now"):
        run(torch.randn(3, 4))


def test_inputs_are_those_of_the_call_that_returned() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        try:
            return net.a(x[:, :2])
        except RuntimeError:
            return net.a(x)

    net = Net(forward, a=linear())
    rnet = recorder(net, "a", inputs=True)
    for _ in range(3):
        x = torch.randn(3, 4)
        rnet(x)
        assert torch.equal(rnet.inputs["a"].args[0], x)
        assert torch.equal(rnet.activations["a"], by_hand(net.a, x))


class Stateful:
    def __init__(self, a: Tensor) -> None:
        self.a = a

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def batch_feature(tensor: Tensor) -> Any:
    return pytest.importorskip("transformers").BatchFeature({"a": tensor})


STRUCTURES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "deque": (lambda tensor: deque([tensor]), lambda held: held[0]),
    "set": (lambda tensor: {tensor}, lambda held: next(iter(held))),
    "object with a state": (Stateful, lambda held: held.a),
    "BatchFeature": (batch_feature, lambda held: held["a"]),
    "dict of deque": (lambda tensor: {"a": deque([tensor])}, lambda held: held["a"][0]),
}


@pytest.mark.parametrize("copy", ["auto", "always"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("make", "get"), STRUCTURES.values(), ids=STRUCTURES)
def test_overwritten_tensors_inside_rare_structures(
    make: Any, get: Any, grad: bool, copy: str
) -> None:
    inner = Net(lambda net, x: make(net.linear(x)), linear=linear())
    net = Net(lambda net, x: get(net.inner(x)).mul_(2).sum(), inner=inner)
    rnet = recorder(net, "inner", copy=copy)
    for _ in range(3):
        x = torch.randn(3, 4)
        truth = by_hand(inner.linear, x)
        with torch.set_grad_enabled(grad):
            output = rnet(x)
        assert torch.equal(output, (truth * 2).sum())
        assert type(rnet.activations["inner"]) is type(make(x))
        assert torch.equal(get(rnet.activations["inner"]), truth)


def test_generator_is_refused_rather_than_recorded_used_up() -> None:
    inner = Net(lambda net, x: (net.linear(x) * factor for factor in range(3)), linear=linear())
    rnet = recorder(Net(lambda net, x: sum(net.inner(x)), inner=inner), "inner")
    with pytest.raises(UnsupportedNetError, match=r"generator.*record the layers inside"):
        rnet(torch.randn(3, 4))


@pytest.mark.parametrize("copy", ["auto", "always"])
def test_record_of_an_input_holds_when_the_caller_overwrites_it(copy: str) -> None:
    rnet = recorder(nn.Sequential(nn.Identity(), linear()), "0", copy=copy)
    x = torch.randn(3, 4, requires_grad=True)
    truth = x.detach().clone()
    rnet(x)
    with torch.no_grad():
        x.add_(1)
    assert torch.equal(rnet.activations["0"], truth)


class CalledInside(torch.autograd.Function):
    """Runs a layer without a graph, and returns what it returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.weight = layer.weight
        return layer(x)  # type: ignore[no-any-return]  # a module may return anything

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight, None


@pytest.mark.parametrize("copy", ["auto", "always"])
def test_record_of_what_an_autograd_function_returned_is_on_the_graph(copy: str) -> None:
    outer = Net(lambda net, x: CalledInside.apply(x, net.inner), inner=linear())
    net = Net(lambda net, x: net.b(net.outer(net.a(x))), a=linear(), outer=outer, b=linear())
    rnet = recorder(net, copy=copy)
    for _ in range(2):
        out = rnet(torch.ones(3, 4))
        assert torch.equal(rnet.activations["outer"], rnet.activations["outer.inner"])
        gradient = torch.autograd.grad(out.sum(), rnet.activations["outer"])[0]
        assert torch.equal(gradient, net.b.weight.sum(0).expand(3, 4))


def test_extract_through_a_recorder_that_records() -> None:
    inner = recorder(nn.Sequential(linear(), linear()), "0", "1")
    outer = recorder(nn.Sequential(inner, nn.ReLU()), "0._net.0")
    x = torch.randn(3, 4)
    (record,) = outer.extract(x).values()
    assert torch.equal(record, by_hand(inner.net[0], x))


class Fails(nn.Module):
    is_failing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_failing:
            raise ArithmeticError
        return x * 1


INTERRUPTS = [
    ("Capture.run", 1),
    ("Capture.run", 40),
    ("Capture._run", 20),
    ("Capture._expect_rerun", 5),
    ("ModuleHook.after", 20),
    ("Pass.receive", 60),
    ("Keeper.keep", 40),
    ("Capture._finish", 20),
    ("Pass._learn", 40),
]


@pytest.mark.parametrize(("function", "bytecode"), INTERRUPTS)
def test_interrupt_inside_the_recorder_leaves_it_usable(function: str, bytecode: int) -> None:
    net = nn.Sequential(linear(), Fails(), linear())
    rnet = recorder(net)
    interrupt = Interrupt(function, bytecode)
    outer = sys.gettrace()
    # Early Python 3.12 gives bytecodes only where a frame has asked for them before tracing starts.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            rnet(torch.randn(3, 4), activation_postproc=lambda tensor: tensor * 2)
    finally:
        sys.settrace(outer)
    assert not rnet.activations
    for _ in range(2):
        x = torch.randn(3, 4)
        first = by_hand(net[0], x)
        assert torch.equal(rnet(x), by_hand(net[2], first))
        assert torch.equal(rnet.activations["0"], first)
        assert torch.equal(rnet.activations["2"], by_hand(net[2], first))
        # The post-processor of the interrupted pass must not act outside it.
        assert torch.equal(net(x), by_hand(net[2], first))
    net[1].is_failing = True
    with pytest.raises(ArithmeticError):
        rnet(torch.randn(3, 4))
    assert not any(module._forward_hooks for module in net.modules())


@dataclass
class Part:
    value: Tensor
    whole: Any = None


def in_list(x: Tensor) -> Any:
    made: list[Any] = [x]
    made.append(made)
    return made


def in_dict(x: Tensor) -> Any:
    made: dict[Any, Any] = {0: x}
    made["whole"] = made
    return made


def in_dataclass(x: Tensor) -> Any:
    part = Part(x)
    part.whole = {"part": part}
    return {0: x, "part": part}


@pytest.mark.parametrize("make", [in_list, in_dict, in_dataclass])
def test_containers_that_hold_themselves_are_taken_and_returned(
    make: Callable[[Tensor], Any],
) -> None:
    net = Net(lambda net, held: net.a(net.inner(held)[0]), inner=Net(make_inner), a=linear())
    net.inner.make, net.inner.layer = make, linear()
    rnet = recorder(net, "*", input_data=[make(torch.ones(3, 4))], inputs=True)
    for _ in range(2):
        x = torch.randn(3, 4)
        output = rnet(make(x))
        truth = by_hand(net.inner.layer, x)
        assert torch.equal(rnet.activations["inner"][0], truth)
        assert torch.equal(rnet.inputs["inner"].args[0][0], x)
        assert torch.equal(output, by_hand(net.a, truth))


def make_inner(net: Any, held: Any) -> Any:
    return net.make(net.layer(held[0]))


SCRIPTING = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, torch.ones(3, 4)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made_by", SCRIPTING)
def test_net_with_a_part_in_torchscript_can_be_used_in_every_way(made_by: str) -> None:
    part: Any = SCRIPTING[made_by](nn.Sequential(linear(), nn.ReLU()))
    net = nn.Sequential(linear(), part, linear())
    x = torch.randn(3, 4)
    first = by_hand(net[0], x)
    rnet = recorder(net, "*", calls="any")
    assert torch.equal(rnet(x), net[2].forward(part(first)))
    assert torch.equal(rnet.activations["0"][0], first)
    with rnet.guard() as guard:
        rnet(x).sum().backward()
    assert guard.origin is None
    with rnet.track() as events:
        net(x)
    assert [event.name for event in events if not event.grad] == ["0", "2", ""]
    rnet.record("0")
    effects = rnet.sweep(x, -x, lambda out: out.sum())
    second = net[2].forward(part(first)).sum()
    assert effects["0"] == pytest.approx(second.item(), rel=1e-6)


@pytest.mark.parametrize("copy", ["auto", "always"])
def test_leaf_that_inference_mode_made_is_recorded(copy: str) -> None:
    net = Net(lambda net, x: net.layer((x * 2).requires_grad_()), layer=linear())
    rnet = recorder(net, "layer", inputs=True, copy=copy)
    x = torch.randn(3, 4)
    for _ in range(3):
        with torch.inference_mode():
            rnet(x)
        assert torch.equal(rnet.inputs["layer"].args[0], x * 2)
        assert torch.equal(rnet.activations["layer"], by_hand(net.layer, x * 2))


class WithoutHooks(nn.Sequential):
    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


def test_net_whose_own_call_passes_hooks_by() -> None:
    net = WithoutHooks(linear(), nn.ReLU())
    rnet, x = recorder(net, "*"), torch.randn(3, 4)
    assert str(rnet.architecture[0, 1]) == "0-1 (root) (WithoutHooks)"
    assert rnet.recording == ((1, 1), (1, 2))
    recording = rnet.collect([x, x + 1], progress=False)
    truth = torch.cat([by_hand(net[0], x), by_hand(net[0], x + 1)])
    assert torch.equal(recording["0"], truth)
    other = deepcopy(net)
    with torch.no_grad():
        other[0].bias.add_(1)
    difference = compare(rnet, recorder(other), [x], progress=False)
    assert difference.first is not None
    assert difference.first.layer.name == "0"
    with rnet.saved_tensors("0"):
        rnet(x).sum().backward()
    assert torch.equal(net[0].bias.grad, (by_hand(net[0], x) > 0).sum(0).float())
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        rnet(x.double())


@pytest.mark.parametrize(("copied", "calls"), [(deepcopy, 1), (shallow_copy, 2)])
def test_copies_of_modules_that_a_pass_makes_have_no_rows(
    copied: Callable[[nn.Module], nn.Module], calls: int
) -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.out(net.body(x) + copied(net.body)(x))

    net = Net(forward, body=nn.Sequential(linear(), nn.Tanh()), out=linear())
    rnet = Recorder(net, input_size=(3, 4))
    assert rnet.summary.total_params == sum(p.numel() for p in net.parameters())
    # A shallow copy holds the modules themselves.
    assert len(rnet.architecture.labels_of("body.0")) == calls
    rnet.record("body.0", "out")
    for _ in range(3):
        x = torch.randn(3, 4)
        inside = by_hand(net.body[0], x)
        assert torch.equal(rnet(x), by_hand(net.out, inside.tanh() + inside.tanh()))
        for label in rnet.architecture.labels_of("body.0"):
            assert torch.equal(rnet.activations[label], inside)
