"""The line that makes a difference: faults planted in lines of forwards are named there."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare
from scio_recorder.errors import ComparisonError
from scio_recorder.tensors import private
from tests.analysis.comparing import forwards
from tests.analysis.comparing.forwards import NETS, inputs_of
from tests.analysis.comparing.planted_lines import FAULTS, LineFault, line_of, nets, patched
from tests.zoo.transformers import CASES

SOURCE = inspect.getsource(forwards)


def recorders(net: str, *both: torch.nn.Module) -> list[Recorder]:
    return [Recorder(one, input_data=inputs_of(net, 0)) for one in both]


def batches(net: str) -> list[torch.Tensor]:
    return [inputs_of(net, seed) for seed in (1, 2)]


def test_there_are_a_hundred_faults_in_ten_networks() -> None:
    assert len({(fault.net, fault.old, fault.new) for fault in FAULTS}) == 100
    assert {fault.net for fault in FAULTS} == NETS.keys()


# Two of each network; the others are for campaigns.
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=str(fault), marks=() if at % 5 == 0 else pytest.mark.campaign)
        for at, fault in enumerate(FAULTS)
    ],
)
def test_a_fault_is_named_at_its_line(fault: LineFault) -> None:
    one, two = recorders(fault.net, *nets(fault))
    first = compare(one, two, batches(fault.net), operations=True).first
    assert first is not None
    assert first.operation is not None
    line = line_of(SOURCE, fault.line) if fault.line else line_of(SOURCE, fault.old, fault.new)
    assert (first.operation.file, first.operation.line) == (forwards.__file__, line), first
    assert first.operation.source == SOURCE.splitlines()[line - 1].strip()
    assert first.operation.layer is first.layer
    if fault.is_named_there:
        there = first.candidate_operation
        changed = SOURCE.replace(fault.old, fault.new)
        assert there is not None
        assert (there.file, there.line) == (f"<{fault}>", _changed_line(fault)), first
        assert there.source == changed.splitlines()[there.line - 1].strip()


def _changed_line(fault: LineFault) -> int:
    return line_of(SOURCE, fault.old, fault.new)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("training", [False, True])
def test_equal_networks_differ_in_nothing(name: str, training: bool) -> None:
    both = nets(LineFault(name, "import math\n", "import math\n"))
    one, two = recorders(name, *(net.train(training) for net in both))
    assert compare(one, two, batches(name), operations=True).first is None


@pytest.mark.parametrize("name", ["GPT", "ResNet", "DenseNet", "ViT", "UNet", "MoE"])
def test_rounding_within_tolerance_is_no_difference(name: str) -> None:
    one, two = nets(LineFault(name, "import math\n", "import math\n"))
    both = recorders(name, one), Recorder(two.double(), input_data=doubled(inputs_of(name, 0)))
    options: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4, "to_inputs": (lambda x: x, doubled)}
    assert compare(both[0][0], both[1], batches(name), operations=True, **options).first is None


def doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def test_a_fault_is_judged_by_the_tolerance() -> None:
    faults = [
        LineFault("ResNet", "variance + 1e-5", "variance + 1.1e-5"),
        LineFault("ResNet", "out * self.weight[", "out / self.weight["),
    ]
    found = []
    for fault in faults:
        one, two = recorders("ResNet", *nets(fault))
        options: dict[str, Any] = {"atol": 1e-2, "operations": True}
        found.append(compare(one, two, batches("ResNet"), **options).first)
    assert found[0] is None
    assert found[1] is not None
    assert found[1].operation is not None
    assert found[1].operation.function == "mul"


# -- small codes -----------------------------------------------------------------------------------


def operations_of(
    one: Callable[..., Any], two: Callable[..., Any], *modules: nn.Module, **options: Any
) -> tuple[str | None, str | None]:
    """Return the operations that are named for two functions of (net, x), with the same modules."""
    both = []
    for function in (one, two):
        net = Code(function)
        for number, module in enumerate(modules):
            net.add_module(f"m{number}", copy.deepcopy(module))
        both.append(Recorder(nn.Sequential(net), input_size=(2, 4), force_static_flow=False))
    first = compare(*both, [torch.rand(2, 4) + 1], operations=True, **options).first
    assert first is not None
    found = first.operation, first.candidate_operation
    return tuple(one and str(one.label).partition("/")[2] for one in found)  # type: ignore[return-value]


class Code(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def test_codes_that_part() -> None:
    named = operations_of
    # Operands that are swapped, or of an earlier line.
    assert named(lambda _, x: x * 2 - x.exp(), lambda _, x: x.exp() - x * 2) == ("mul:0", "exp:0")
    assert named(lambda _, x: (x * 2) - x, lambda _, x: x - (x * 2)) == ("sub:0", "sub:0")
    # Another way to the same numbers is no difference.
    assert named(
        lambda _, x: x.reshape(8).view(2, 4).exp() + 1, lambda _, x: x.clone().exp() + 2
    ) == ("add:0", "add:0")
    # What comes in addition.
    assert named(lambda _, x: x.exp() + 1, lambda _, x: x.exp().sin() + 1) == ("exp:0", "sin:0")
    assert named(lambda _, x: x.exp(), lambda _, x: x.exp().half().float()) == ("exp:0", "half:0")
    # One of several equal operations.
    assert named(lambda _, x: x + 1 + 2 + 3, lambda _, x: x + 1 + 3) == ("add:1", "add:1")


class Writing(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        output = x.exp()
        x.mul_(self.factor)
        return output


def test_no_operation_is_blamed_for_what_a_module_writes_to_its_input() -> None:
    def code(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x + 1
        return net.inner(hidden), hidden.exp() * 2

    both = []
    for factor in (2.0, 3.0):
        net = Code(code)
        net.inner = Writing(factor)
        both.append(Recorder(nn.Sequential(net), input_size=(2, 4)))
    first = compare(*both, [torch.rand(2, 4)], operations=True).first
    assert first is not None
    assert first.layer.name == "0"
    assert first.operation is first.candidate_operation is None
    assert first.why_no_operation.startswith("no operation that is seen")


def test_codes_with_nothing_in_common() -> None:
    assert operations_of(lambda _, x: (x * 2).sum(0), lambda _, x: x.exp()) == (None, None)
    # But for one step in place of another.
    assert operations_of(lambda _, x: x.relu(), lambda _, x: x.exp()) == ("relu:0", "exp:0")


def test_code_that_only_calls_modules_has_the_calls_in_common() -> None:
    def named(code: Callable[..., Any], other: Callable[..., Any]) -> tuple[str | None, str | None]:
        return operations_of(code, other, nn.Linear(4, 4))

    assert named(lambda net, x: net.m0(x), lambda net, x: net.m0(x) * 2) == (None, "mul:0")
    assert named(lambda net, x: net.m0(x) * 2, lambda net, x: net.m0(x)) == ("mul:0", None)
    assert named(lambda net, x: net.m0(x), lambda net, x: net.m0(x.exp())) == (None, "exp:0")
    assert named(lambda net, x: net.m0(net.m0(x)), lambda net, x: net.m0(x)) == (None, None)


@pytest.mark.parametrize(
    ("code", "other", "said"),
    [
        (lambda _, x: (x * 2).sum(0), lambda _, x: x.exp(), "the two codes have no operation in"),
        (
            lambda _, x: x + 1,
            lambda _, x: torch.from_numpy((x + 1).numpy() * 3),
            "no operation that is seen in the layer's",
        ),
        (lambda _, x: x.exp(), lambda _, x: x.sin(), ""),
    ],
)
def test_what_is_printed_says_why_there_is_no_operation(
    code: Callable[..., Any], other: Callable[..., Any], said: str
) -> None:
    nets = (nn.Sequential(Code(function)) for function in (code, other))
    both = [Recorder(net, input_size=(2, 4)) for net in nets]
    difference = compare(*both, [torch.rand(2, 4) + 1], operations=True)
    assert difference.first is not None
    assert (difference.first.operation is None) == bool(said)
    assert difference.first.why_no_operation.startswith(said)
    printed = str(difference).replace("\n", " ")
    assert ("No operation is named: " + said in printed) == bool(said)


def test_assignments_and_memory_without_values() -> None:
    def assigned(start: int) -> Callable[..., Tensor]:
        def code(net: nn.Module, x: Tensor) -> Tensor:
            mask = torch.zeros(4)
            mask[start:] = 1.0
            return x * mask

        return code

    def filled(number: float) -> Callable[..., Tensor]:
        def code(net: nn.Module, x: Tensor) -> Tensor:
            unset = torch.empty_like(x)
            unset.view(torch.int32).random_()
            unset[0] = x[0]
            unset[1:].copy_(x[1:])
            return unset * number

        return code

    assert operations_of(assigned(2), assigned(3)) == ("setitem:0", "setitem:0")
    assert operations_of(filled(2.0), filled(3.0)) == ("mul:0", "mul:0")

    def mask(diagonal: int) -> Callable[..., Tensor]:
        # As CLIP makes it.
        def code(net: nn.Module, x: Tensor) -> Tensor:
            return x * torch.empty(2, 4).fill_(3).triu_(diagonal).exp()

        return code

    assert operations_of(mask(1), mask(0)) == ("triu_:0", "triu_:0")


def test_calls_of_other_modules() -> None:
    inner, other = nn.Linear(4, 4), nn.Linear(4, 4)

    def code(module: str, *, doubles: bool = False) -> Callable[..., Tensor]:
        def forward(net: nn.Module, x: Tensor) -> Tensor:
            h = x.exp()
            y: Tensor = net.get_submodule(module)(h * 2 if doubles else h)
            return y + x

        return forward

    # What a module receives is made by an operation; that another one is called is not.
    assert operations_of(code("m0"), code("m0", doubles=True), inner) == ("exp:0", "mul:0")
    assert operations_of(code("m0"), code("m1"), inner, other) == (None, None)
    # A module that is not compared makes the difference itself.
    nets = [nn.Sequential(Code(code("m0"))) for _ in range(2)]
    for net, module in zip(nets, (inner, other), strict=True):
        net[0].add_module("m0", module)
    one, two = (Recorder(net, input_size=(2, 4)) for net in nets)
    one.record("0")
    first = compare(one, two, [torch.rand(2, 4)], operations=True).first
    assert first is not None
    assert (first.layer.name, first.inputs_equal, first.operation) == ("0", True, None)


def test_in_place_operations_and_values_outside() -> None:
    def in_place(number: float) -> Callable[..., Tensor]:
        def code(net: nn.Module, x: Tensor) -> Tensor:
            y = x.clone()
            y.add_(1.0)
            y[:, 0].mul_(number)
            y += 1
            return y

        return code

    assert operations_of(in_place(2.0), in_place(3.0)) == ("mul_:0", "mul_:0")

    def through_a_view(name: str) -> Callable[..., Tensor]:
        def code(net: nn.Module, x: Tensor) -> Tensor:
            y = x.clone()
            getattr(y.T, name)()
            return y * 2

        return code

    assert operations_of(through_a_view("sin_"), through_a_view("exp_")) == ("sin_:0", "exp_:0")
    scales = torch.tensor(2.0), torch.tensor(3.0)
    assert operations_of(lambda _, x: x * scales[0], lambda _, x: x * scales[1]) == (
        "mul:0",
        "mul:0",
    )


class Times(torch.autograd.Function):
    """Multiplies: the function itself is seen by no mode, and what it calls is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: float) -> Tensor:
        return x * number


def test_what_nobody_sees_has_no_operation() -> None:
    def called(number: float) -> Callable[..., Tensor]:
        return lambda net, x: Times.apply(x.exp(), number) + 1

    def threaded(number: float) -> Callable[..., Tensor]:
        def code(net: nn.Module, x: Tensor) -> Tensor:
            made: list[Tensor] = []
            y = x.exp()
            thread = threading.Thread(target=lambda: made.append(y * number))
            thread.start()
            thread.join()
            return made[0] + 1

        return code

    assert operations_of(called(2.0), called(3.0)) == ("mul:0", "mul:0")
    assert operations_of(threaded(2.0), threaded(3.0)) == (None, None)


def test_all_calls_of_a_module() -> None:
    shared = nn.Sequential(nn.Linear(4, 4), Code(lambda net, x: (x + 1).sin()))
    one = nn.Sequential(shared, shared)
    two = copy.deepcopy(one)
    two[0][1].function = lambda net, x: (x + 2).sin()
    both = [Recorder(net, input_size=(1, 4)) for net in (one, two)]
    both[0].record("0.1", calls="any")
    first = compare(*both, [torch.rand(3, 4)], operations=True).first
    assert first is not None
    assert first.operation is not None
    assert (first.operation.function, first.inputs_equal) == ("add", None)


class Stateful(nn.Module):
    """Counts its calls, draws random numbers, and goes wrong at one of them."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.limit = limit
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x + torch.rand_like(x)
        self.seen.append(x.detach())
        x = x * 3 if len(self.seen) == self.limit else x * 2
        return x + len(self.seen)


def test_the_batch_runs_again_from_its_own_state() -> None:
    torch.manual_seed(1)
    one, two = Stateful(9).train(), Stateful(4).train()
    both = [Recorder(net, input_size=(5, 4)) for net in (one, two)]
    both[0].record("*")
    both[0](torch.rand(5, 4))
    before = [copy.deepcopy(net.state_dict()) for net in (one, two)]
    kept, lengths = both[0].activations["norm"].clone(), [len(one.seen), len(two.seen)]
    two.seen = one.seen[:]
    loader, random = [torch.rand(5, 4) for _ in range(4)], torch.get_rng_state()
    first = compare(*both, loader, operations=True).first
    assert first is not None
    assert first.operation is not None
    assert first.operation.source.startswith("x = x * 3 if")
    assert first.operation.function == "mul"
    # One call before the comparison, and three batches in it.
    assert first.sample_id == 10
    assert torch.equal(torch.get_rng_state(), random)
    assert len(one.seen) == len(two.seen) == lengths[0]
    for net, state in zip((one, two), before, strict=True):
        assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
        for module in net.modules():
            assert private.compiled_call(module) is None
    assert torch.equal(both[0].activations["norm"], kept)
    assert not private.function_modes()


def test_networks_that_share_modules() -> None:
    shared = nn.Linear(4, 4)
    nets = [
        nn.Sequential(shared, Code(lambda net, x, number=number: (x.sin() + number).exp()))
        for number in (1, 2)
    ]
    one, two = (Recorder(net, input_size=(1, 4)) for net in nets)
    first = compare(one, two, [torch.rand(2, 4)], operations=True).first
    assert first is not None
    assert first.operation is not None
    assert first.operation.function == "add"
    assert compare(one, one, [torch.rand(2, 4)], operations=True).first is None


def test_both_runs_under_autocast_and_inference_mode() -> None:
    fault = LineFault("GPT", "weights = scores.softmax(-1)", "weights = scores.softmax(-2)")
    one, two = recorders("GPT", *nets(fault))
    for context in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with context:
            first = compare(one, two, batches("GPT"), operations=True).first
        assert first is not None
        assert first.operation is not None
        assert first.operation.function == "softmax"


def test_recordings_and_compiled_recorders_have_no_operations() -> None:
    one = Recorder(nn.Sequential(nn.ReLU()), input_size=(1, 4))
    one.record("*")
    recording = one.collect([torch.rand(2, 4)], progress=False)
    with pytest.raises(ComparisonError, match="give two networks that are not compiled"):
        compare(recording, one, [torch.rand(2, 4)], operations=True)
    with pytest.raises(ComparisonError, match="give two networks that are not compiled"):
        compare(one, torch.compile(one), [torch.rand(2, 4)], operations=True)


def test_the_lines_are_shown(tmp_path: Path) -> None:
    fault = FAULTS[0]
    one, two = recorders(fault.net, *nets(fault))
    difference = compare(one, two, batches(fault.net), operations=True)
    first = difference.first
    assert first is not None
    assert first.operation is not None
    line = f"{forwards.__file__}:{first.operation.line}: {fault.old}"
    assert f"and the operation div:0 made it at {line}" in difference.sentence
    assert f"the operation div:0 made it at <{fault}>:{first.operation.line}" in str(difference)
    page = difference.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert line in page
    assert fault.new in page
    difference.plot()


@pytest.mark.parametrize(
    ("name", "part", "old", "new"),
    [
        ("gpt2", "GPT2Block", "= attn_output + residual", "= attn_output - residual"),
        ("gpt2", "GPT2Block", "= residual + feed_forward", "= feed_forward"),
        ("gpt2", "GPT2Attention", "attn_output.reshape(*", "attn_output.flip(0).reshape(*"),
        ("llama", "LlamaRMSNorm", ".pow(2).mean(-1", ".abs().mean(-1"),
        ("llama", "LlamaRMSNorm", "variance + self.variance_epsilon", "variance"),
        ("llama", "LlamaMLP", "self.gate_proj(x)) * self", "self.gate_proj(x)) + self"),
        ("llama", "LlamaRotaryEmbedding", "cos = emb.cos()", "cos = emb.sin()"),
    ],
)
def test_a_patched_forward_of_transformers(name: str, part: str, old: str, new: str) -> None:
    modeling = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    case = next(case for case in CASES if case.name == name)
    fault, original = LineFault(name, old, new), getattr(modeling, part)
    net, changed = case.fresh().eval(), patched(modeling, fault, original)[part]
    other = copy.deepcopy(net)
    for module in other.modules():
        if type(module) is original:
            module.__class__ = changed
    args, kwargs = case.inputs(1)
    one, two = (Recorder(each, input_data=args or kwargs) for each in (net, other))
    first = compare(one, two, [args or kwargs], operations=True).first
    assert first is not None
    assert first.operation is not None
    source, start = inspect.getsourcelines(original)
    line = start - 1 + line_of("".join(source), old, new)
    assert (first.operation.file, first.operation.line) == (modeling.__file__, line)


@pytest.mark.filterwarnings("ignore::UserWarning")  # fast paths, and nested tensors of PyTorch
def test_attention_in_an_encoder_that_would_give_it_nested_tensors() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.layers[1].self_attn.in_proj_weight.mul_(1.1)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    batch = {"src": torch.randn(2, 5, 16), "src_key_padding_mask": padding}
    with torch.no_grad():
        assert net(**batch)[1, 3:].count_nonzero() == 0  # as nested tensors leave it
    one, two = (Recorder(each, input_data=batch) for each in (net, other))
    one.record("layers.1.self_attn")
    first = compare(one, two, [batch], operations=True).first
    assert first is not None
    assert first.operation is not None
    assert first.operation.name == "layers.1.self_attn/multi_head_attention_forward:0"
