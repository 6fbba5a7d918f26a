"""A recorder under `torch.compile(fullgraph=True)`: the eager records, and no graph break."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.errors import FlowError, PostprocessorError, RecorderError
from scio_recorder.postprocessors import OnInput
from tests.harness import recorder
from tests.rotation import one_in
from tests.zoo.base import linear

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# Tracing is what can break; the code generator behind it would only cost time here.
BACKENDS = ("eager", "aot_eager")

# Dynamo hides this warning of its own, which it can't where warnings are errors.
DYNAMO_READS_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def small_net() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(inplace=True), nn.Sequential(linear(), nn.Tanh()))


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


@pytest.mark.parametrize(("backend", "grad"), one_in(8, itertools.product(BACKENDS, (True, False))))
def test_compiled_recorder_gives_the_records_of_the_eager_net(backend: str, grad: bool) -> None:
    net = small_net()
    rnet = recorder(net, "0", "1", "2.0", "2")
    compiled = torch.compile(rnet, fullgraph=True, backend=backend)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(3, 4)
            output = compiled(x)
            first = net[0].forward(x)
            hidden = net[2][0].forward(torch.relu(first))
            torch.testing.assert_close(rnet.activations["0"], first)
            torch.testing.assert_close(rnet.activations["1"], torch.relu(first))
            torch.testing.assert_close(rnet.activations["2.0"], hidden)
            torch.testing.assert_close(rnet.activations["2"], torch.tanh(hidden))
            torch.testing.assert_close(output, torch.tanh(hidden))
            assert not any(value.requires_grad for value in rnet.activations.values())


def test_compiled_recorder_intervenes_and_trains() -> None:
    net = small_net()
    rnet = recorder(net, "0")
    compiled = torch.compile(rnet, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4)
    output = compiled(x, activation_postproc=double)
    truth = torch.tanh(net[2][0].forward(torch.relu(net[0].forward(x) * 2)))
    torch.testing.assert_close(output, truth)
    torch.testing.assert_close(rnet.activations["0"], net[0].forward(x))
    output.sum().backward()
    mine = net[0].weight.grad.clone()
    net.zero_grad()
    truth.sum().backward()
    torch.testing.assert_close(mine, net[0].weight.grad)


@pytest.mark.campaign
def test_compiled_and_eager_passes_alternate() -> None:
    net = small_net()
    rnet = recorder(net, "0")
    compiled = torch.compile(rnet, fullgraph=True, backend="eager")
    for call in (compiled, rnet, compiled, rnet):
        x = torch.randn(3, 4)
        call(x)
        torch.testing.assert_close(rnet.activations["0"], net[0].forward(x))


def test_net_that_is_compiled_already_is_refused_with_the_way_out() -> None:
    with pytest.raises(RecorderError, match="compile"):
        Recorder(torch.compile(small_net(), backend="eager"), input_size=(3, 4), verbose=0)


@DYNAMO_READS_GRAD
@pytest.mark.parametrize("selector", ["1.0", "1.1/relu", "1/add"])
def test_calls_in_a_compiled_part_are_missed_by_no_tuple(selector: str) -> None:
    class Part(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(super().forward(x), 1)

    net = nn.Sequential(linear(), Part(linear(), nn.ReLU()))
    rnet = recorder(net)
    rnet.record(selector, "1", calls="any")
    x = torch.randn(3, 4)
    rnet(x)
    assert len(rnet.activations[selector]) == 1
    net[1].compile(backend="eager")
    with pytest.raises(FlowError, match="compiled part of the network runs"):
        rnet(x)
    rnet.record("1", calls="any")
    assert torch.equal(rnet(x), rnet.activations["1"][0])


def _hash(x: Tensor) -> int:
    return hash(x)


def test_failed_compilation_of_something_else_leaves_records_on_the_graph() -> None:
    """Dynamo stays installed then, and calls take other paths in the interpreter."""
    net = small_net()
    rnet = recorder(net, "0")
    for compile_now in (False, True):
        if compile_now:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(_hash, fullgraph=True, backend="eager")(torch.ones(1))
        fresh = recorder(net, "0")
        for each in (rnet, fresh):
            x = torch.randn(3, 4)
            output = each(x)
            record = each.activations["0"]
            hidden = net[0].forward(x).detach().requires_grad_()
            truth = torch.tanh(net[2][0].forward(torch.relu(hidden))).sum()
            (gradient,) = torch.autograd.grad(output.sum(), record)
            torch.testing.assert_close(gradient, torch.autograd.grad(truth, hidden)[0])


FORMS = {
    "callable": double,
    "list": [double, torch.neg],
    "by name": {"0": double, "1": torch.neg},
    "by label": {(1, 1): double, (1, 2): torch.neg},
}


@pytest.mark.parametrize("form", one_in(10, FORMS, first=1))
def test_every_form_of_postprocessors_compiles(form: str) -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net, "0", "1")
    compiled = torch.compile(rnet, fullgraph=True, backend="eager")
    last = double if form == "callable" else torch.neg
    for _ in range(2):
        x = torch.randn(3, 4)
        output = compiled(x, activation_postproc=FORMS[form])
        first = torch.nn.functional.linear(x, net[0].weight, net[0].bias)
        torch.testing.assert_close(rnet.activations["0"], first)
        torch.testing.assert_close(rnet.activations["1"], (first * 2).relu())
        torch.testing.assert_close(output, last((first * 2).relu()))


class _Breaks(nn.Module):
    is_failing = False

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        if self.is_failing:
            raise ArithmeticError
        return x * 1


@pytest.mark.campaign
@DYNAMO_READS_GRAD
def test_exception_beside_a_graph_break_leaves_the_recorder_usable() -> None:
    net = nn.Sequential(linear(), _Breaks())
    rnet = recorder(net, "0", "1")
    compiled = torch.compile(rnet, backend="eager")
    compiled(torch.randn(3, 4))
    net[1].is_failing = True
    with pytest.raises(ArithmeticError):
        compiled(torch.randn(3, 4))
    net[1].is_failing = False
    for _ in range(3):
        x = torch.randn(3, 4)
        truth = torch.nn.functional.linear(x, net[0].weight, net[0].bias)
        assert torch.equal(rnet(x), truth)
        assert torch.equal(rnet.activations["0"], truth)


def refuse(tensor: Tensor) -> Tensor:
    raise KeyError(f"not {tensor.ndim}")


@pytest.mark.campaign
def test_a_failing_postprocessor_is_named_and_later_passes_are_right() -> None:
    net = small_net()
    rnet = recorder(net, "0", "2.0")
    compiled, x = torch.compile(rnet, backend="eager"), torch.randn(3, 4)
    with pytest.raises(PostprocessorError, match=r"of layer 1-1 0 .* raised KeyError") as caught:
        compiled(x, activation_postproc=refuse)
    assert isinstance(caught.value, KeyError)
    for _ in range(2):
        compiled(x, activation_postproc={"0": double})
        first = net[0].forward(x)
        torch.testing.assert_close(rnet.activations["0"], first)
        torch.testing.assert_close(
            rnet.activations["2.0"], net[2][0].forward(torch.relu(2 * first))
        )


@pytest.mark.campaign
def test_a_recorder_that_can_not_be_compiled_for_a_call_runs_uncompiled() -> None:
    net = small_net()
    rnet = recorder(net, "2.0")
    output = torch.compile(rnet, backend="eager")(
        x := torch.randn(3, 4), activation_postproc=OnInput(double)
    )
    wanted = net[2][0].forward(2 * torch.relu(net[0].forward(x)))
    torch.testing.assert_close(rnet.activations["2.0"], wanted)
    torch.testing.assert_close(output, wanted.tanh())


@pytest.mark.filterwarnings("error:activations of a compiled pass:UserWarning")
def test_record_of_a_compiled_pass_says_once_that_it_has_no_gradient() -> None:
    rnet = recorder(small_net(), "0", "1")
    compiled = torch.compile(rnet, fullgraph=True, backend="eager")
    with torch.no_grad():
        compiled(torch.randn(3, 4))
        assert len(rnet.activations) == 2
    compiled(torch.randn(3, 4))
    with pytest.warns(UserWarning, match="detached copies"):
        record = rnet.activations["0"]
    assert not record.requires_grad
    compiled(torch.randn(3, 4))
    assert len(rnet.activations) == 2


def test_export_leaves_no_records() -> None:
    rnet = recorder(small_net(), "0", "1")
    x = torch.randn(3, 4)
    rnet(x)
    exported = torch.export.export(rnet, (x,)).module()
    torch.testing.assert_close(exported(x), rnet.net(x))
    for records in (rnet.activations, rnet.inputs, rnet.gradients):
        assert len(records) == 0
        with pytest.raises(RecorderError, match=r"none of any layer|has not run"):
            records["0"]
    assert hasattr(rnet, "gradients")
    rnet(x)
    assert torch.equal(rnet.activations["0"], rnet.net[0].forward(x))


def test_tracing_is_refused_and_leaves_the_recorder_as_it_was() -> None:
    rnet = recorder(small_net(), "0")
    x = torch.randn(3, 4)
    with pytest.raises(RecorderError, match=r"jit\.trace"):
        torch.jit.trace(rnet, x)
    assert hasattr(rnet, "gradients")
    rnet(x)
    assert torch.equal(rnet.activations["0"], rnet.net[0].forward(x))


@DYNAMO_READS_GRAD
def test_layers_in_a_compiled_block_are_missed_and_the_block_itself_is_recorded() -> None:
    block = torch.compile(nn.Sequential(linear(), nn.Tanh()), backend="eager")
    net = nn.Sequential(linear(), block)
    rnet = recorder(net, "0", "1")
    x = torch.randn(3, 4)
    for _ in range(3):
        output = rnet(x)
        torch.testing.assert_close(rnet.activations["1"], output)
    rnet.record("1._orig_mod.0")
    with pytest.raises(RecorderError, match=r"1\._orig_mod\.0"):
        rnet(x)


def compile_last(net: nn.Sequential) -> Any:
    net[-1].compile(backend="eager")
    return vars(net[-1])["_compiled_call_impl"]


@DYNAMO_READS_GRAD
@pytest.mark.parametrize(
    "compiled_when", one_in(3, ["before labelling", "before record", "after a pass"], first=2)
)
def test_what_compile_was_called_on_is_recorded_itself(compiled_when: str) -> None:
    net = small_net()
    if compiled_when == "before labelling":
        own = compile_last(net)
    rnet = Recorder(net, input_size=(3, 4), verbose=0)
    if compiled_when == "before record":
        own = compile_last(net)
    rnet.record("0", "2", inputs=True, gradients=True)
    if compiled_when == "after a pass":
        rnet(torch.randn(3, 4))
        own = compile_last(net)
    for _ in range(2):
        x = torch.randn(3, 4)
        output = rnet(x)
        received = torch.relu(net[0].forward(x))
        expected = torch.tanh(net[2][0].forward(received))
        assert torch.equal(rnet.activations["2"], expected)
        assert torch.equal(rnet.inputs["2"].args[0], received)
        output.square().sum().backward()
        assert torch.equal(rnet.gradients["2"], 2 * expected)
    assert torch.equal(rnet(x, activation_postproc={"2": double}), 2 * expected)
    rnet.remove()
    assert vars(net[2])["_compiled_call_impl"] is own


@pytest.mark.campaign
@DYNAMO_READS_GRAD
def test_recorders_around_one_compiled_block_come_and_go_in_any_order() -> None:
    net = small_net()
    own = compile_last(net)
    first, second = (recorder(net, "2") for _ in range(2))
    x = torch.randn(3, 4)
    for rnet in (first, second, first):
        assert torch.equal(rnet(x), net(x))
        assert torch.equal(rnet.activations["2"], net(x))
    first.remove()
    second(x)
    assert torch.equal(second.activations["2"], net(x))
    second.remove()
    assert vars(net[2])["_compiled_call_impl"] is own


@pytest.mark.campaign
@DYNAMO_READS_GRAD
def test_compiled_recorder_of_a_net_with_a_compiled_block_records_it() -> None:
    net = small_net()
    compile_last(net)
    rnet = recorder(net, "0", "2")
    compiled = torch.compile(rnet, backend="eager")
    x = torch.randn(3, 4)
    with torch.no_grad():
        compiled(x)
        assert torch.equal(rnet.activations["0"], net[0].forward(x))
        received = torch.relu(net[0].forward(x))
        assert torch.equal(rnet.activations["2"], torch.tanh(net[2][0].forward(received)))


@pytest.mark.campaign
@DYNAMO_READS_GRAD
def test_copies_of_a_net_with_a_recorded_compiled_block_have_no_hooks() -> None:
    net = small_net()
    compile_last(net)
    rnet = recorder(net, "2")
    rnet(torch.randn(3, 4))
    twin = copy.deepcopy(net)
    assert not any(module._forward_hooks for module in twin.modules())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_postprocessor_that_works_in_place_changes_the_record_of_a_compiled_pass() -> None:
    net = nn.Sequential(linear(), nn.ReLU())
    rnet = recorder(net, "0")
    compiled, x = torch.compile(rnet, fullgraph=True, backend="eager"), torch.randn(3, 4)
    with torch.no_grad():
        output = compiled(x, activation_postproc=lambda tensor: tensor.mul_(2))
        torch.testing.assert_close(rnet.activations["0"], 2 * net[0].forward(x))
        torch.testing.assert_close(output, torch.relu(2 * net[0].forward(x)))
