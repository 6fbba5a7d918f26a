"""Recomputed activations against copies that other hooks took in the pass itself."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import LayerNotFoundError, RecomputeError, Recorder, SelectorTypeError
from scio_recorder.postprocessors import GaussianNoise
from tests.harness import MODES, Mode, by_default, executed, make_recorder, run_pass, trace
from tests.oracle import Watch, differences, freeze, leaves, same_bits
from tests.zoo import CASES, Case
from tests.zoo.base import Net
from tests.zoo.graphs import Mark, marked_graphs
from tests.zoo.transformers import CASES as TRANSFORMERS

STATIC = [case for case in CASES if case.static_flow]
# Those in which more happens than calls of modules.
TELLING = {
    *("recursive_module", "shared_container", "inplace_relu", "change_of_own_input"),
    "counts_its_calls",
    *("parameter_and_buffer_returned", "nested_output", "mixed_inputs", "lstm_packed"),
    *("batch_norm", "dropout", "random_noise", "spectral_norm_hook", "multihead_attention"),
    *("channels_last", "checkpointed_reentrant", "forward_hooks_of_the_user"),
}


def truth_of(case: Case, mode: Mode, seed: int) -> dict[tuple[str, int], Any]:
    net = case.fresh().train(mode.training)
    with Watch(net) as watch:
        run_pass(net, case, mode, seed)
    return watch.calls


def plain(tree: Any) -> Any:
    """Compare values only: what is recomputed is off the graph."""
    for leaf in leaves(tree):
        leaf.requires_grad = False
    return tree


# Each once: training or not, with and without a graph, in inference mode, under autocast.
CHOSEN = ("train-grad", "eval-no_grad", "eval-inference", "train-autocast")


@pytest.mark.parametrize(
    "chosen", [CHOSEN[:2], pytest.param(CHOSEN[2:], marks=pytest.mark.campaign)], ids=" ".join
)
@pytest.mark.parametrize("case", by_default(STATIC, TELLING))
def test_all_layers_from_the_root(case: Case, chosen: tuple[str, str]) -> None:
    for mode in (mode for mode in MODES if mode.allows(case) and str(mode) in chosen):
        net = case.fresh().train(mode.training)
        rnet = make_recorder(net, case, training=mode.training)
        rnet.record((0, 1), inputs=True)
        run_pass(rnet, case, mode, 5)
        before = trace(net)
        try:
            found = rnet.recompute(*executed(rnet))
        except RecomputeError:
            assert case.name in REFUSED, mode
            continue
        assert not differences(trace(net), before), mode
        truth = truth_of(case, mode, 5)
        names = {module: name for name, module in net.named_modules()}
        for label in executed(rnet):
            layer = rnet.architecture[label]
            assert layer.module is not None
            wanted = truth[names[layer.module], layer.call]
            got = plain(freeze(found[label]))
            for leaf, other in zip(leaves(got), leaves(wanted), strict=True):
                leaf.kind = other.kind
            assert not differences(got, wanted), (mode, label)


# A Python attribute decides what the one returns; hooks, which kernels the other takes.
REFUSED = {"counts_its_calls", "transformer_encoder"}


def block() -> nn.Module:
    parts = {"norm": nn.BatchNorm1d(4), "drop": nn.Dropout(0.5), "act": nn.ReLU(inplace=True)}
    return Net(lambda net, x: net.act(net.drop(net.norm(x))), **parts)


def blocks(count: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), block()) for _ in range(count)))


def recorder(net: nn.Module | None = None, *selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(blocks() if net is None else net, input_size=(3, 4), verbose=0)
    if selectors:
        rnet.record(*selectors, inputs=True, **options)
    return rnet


def assert_as_seen(rnet: Recorder, watch: Watch, *names: str, call: int = 0) -> None:
    """Recompute these layers of the latest pass, and compare with what hooks copied in it."""
    found = rnet.recompute(*names)
    for name in names:
        assert same_bits(found[name], watch.calls[name, call].value)
        assert not found[name].requires_grad


# A list that hooks held by themselves would be put back.
RAN: list[str] = []


def test_only_the_nearest_recorded_module_runs() -> None:
    rnet = recorder()
    rnet.record("*", inputs=True)
    rnet.record("0", "2", "", re.compile(r"^1\.1$"), inputs=True)
    with Watch(rnet.net) as watch:
        rnet.net.train()
        rnet(torch.randn(3, 4))
    for name, module in rnet.net.named_modules():
        module.register_forward_hook(lambda *_, name=name: RAN.append(name))
    RAN.clear()
    assert_as_seen(rnet, watch, "1.1.drop", "1.1.norm")
    assert RAN == ["1.1.norm", "1.1.drop", "1.1.act", "1.1"]


def test_after_many_other_draws_and_in_another_state() -> None:
    rnet = recorder()
    rnet.record(re.compile(r"^\d$"), inputs=True)
    rnet.net.train()
    with Watch(rnet.net) as watch, torch.autocast("cpu", dtype=torch.bfloat16):
        rnet(torch.randn(3, 4))
    rnet.net.eval()
    torch.rand(1000)
    statistics = rnet.net[1][1].norm.running_mean.clone()
    with torch.inference_mode():
        found = rnet.recompute("1.1.drop")
    assert same_bits(found["1.1.drop"], watch.calls["1.1.drop", 0].value)
    assert found["1.1.drop"].dtype == watch.calls["1.1.drop", 0].value.dtype
    assert torch.equal(statistics, rnet.net[1][1].norm.running_mean)
    assert not any(module.training for module in rnet.net.modules())


def test_statistics_are_those_before_the_pass() -> None:
    def normed(net: Any, x: Tensor) -> Tensor:
        """Returns what it would have done in evaluation mode, and learns the statistics."""
        moved = net.inner(x - net.norm.running_mean)
        return moved + net.norm(x)

    net = nn.Sequential(Net(normed, norm=nn.BatchNorm1d(4), inner=nn.Identity())).train()
    rnet = recorder(net, "0")
    for _ in range(3):
        with Watch(net) as watch:
            rnet(torch.randn(3, 4))
    assert_as_seen(rnet, watch, "0.inner", "0.norm")
    assert int(net[0].norm.num_batches_tracked) == 3


def test_post_processors_of_that_pass_act_again() -> None:
    rnet = recorder(blocks().eval(), "1", "1.0")
    with Watch(rnet.net) as watch:
        rnet(
            torch.randn(3, 4),
            activation_postproc={"1.0": GaussianNoise(0.3), "1": lambda x: x.mul_(2)},
        )
    found = rnet.recompute("1.1.norm")
    assert same_bits(found["1.1.norm"], watch.calls["1.1.norm", 0].value)
    rnet(torch.randn(3, 4))
    assert not torch.equal(rnet.recompute("1.1.norm")["1.1.norm"], found["1.1.norm"])


def test_operations_that_a_post_processor_changed_are_an_error_also_where_it_does_not_show() -> (
    None
):
    # The output is of zeros and ones, so it is the same if the operation is not changed.
    inner = Net(lambda net, x: (net.last(x.tanh()) > -99).float(), last=nn.Linear(4, 4))
    net = Net(lambda net, x: net.inner(x.exp()), inner=inner)
    rnet = recorder(net, "inner", "*/tanh", "/exp")
    x, scale = torch.randn(3, 4), lambda value: value * 2
    rnet(x, activation_postproc={"inner/tanh": scale})
    with pytest.raises(RecomputeError, match=r"acted on .*inner/tanh:0 .* only layers are changed"):
        rnet.recompute("inner.last")
    rnet(x, activation_postproc={"/exp": scale})
    expected = net.inner.last.forward((2 * x.exp()).tanh())
    assert same_bits(rnet.recompute("inner.last")["inner.last"], expected.detach())


def test_a_run_of_the_whole_network_is_no_pass_of_a_block_around_it() -> None:
    net = blocks().eval()
    rnet, x = recorder(net, "", "1"), torch.randn(3, 4)
    with rnet.watch(activation_postproc={"1": lambda value: value * 2}) as passes:
        recording = rnet.collect([x], progress=False)
        with Watch(net) as watch:
            net(x)
        expected = watch.calls["2.1.norm", 0].value
        assert same_bits(rnet.recompute("2.1.norm")["2.1.norm"], expected)
        posts = {"1": lambda value: value * 2}
        collected = recording.recompute(rnet, "2.1.norm", activation_postproc=posts)
        torch.testing.assert_close(collected["2.1.norm"], expected)
    assert len(passes) == 1


def test_the_call_of_a_module_that_is_called_several_times() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net = Net(lambda net, x: net.inner(net.inner(net.inner(x))), inner=inner)
    rnet = recorder(net, (1, 2))
    with Watch(net) as watch:
        rnet(torch.randn(3, 4))
    second = rnet.architecture.labels_of("inner.0")[1]
    assert same_bits(rnet.recompute(second)[second], watch.calls["inner.0", 1].value)
    first = rnet.architecture.labels_of("inner.0")[0]
    with pytest.raises(RecomputeError, match="the latest pass left no inputs of layer"):
        rnet.recompute(first)


def test_inputs_that_are_structures_views_and_overwritten() -> None:
    def inner(net: Any, x: Tensor, *, parts: dict[str, Any]) -> Tensor:
        parts["list"].append(x)
        y: Tensor = net.act(x.relu_() + parts["scale"])
        return y * len(parts["list"])

    def forward(net: Any, x: Tensor) -> Tensor:
        base = net.first(x)
        return net.inner(base.t()[:2], parts={"scale": 3, "list": [1]})

    module = Net(inner, act=nn.Tanh())
    net = Net(forward, first=nn.Linear(4, 4), inner=module)
    rnet = recorder(net, "inner")
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context, Watch(net) as watch:
            rnet(torch.randn(3, 4))
        assert_as_seen(rnet, watch, "inner.act")


def test_recorded_layers_are_given_as_they_were_recorded() -> None:
    rnet = recorder(None, "1")
    rnet(torch.randn(3, 4))
    found = rnet.recompute("1")
    assert same_bits(found["1"], rnet.activations["1"])
    assert found["1"] is not rnet.activations["1"]


def test_a_pass_that_was_offloaded() -> None:
    rnet = recorder(None, "1", offload=True)
    with Watch(rnet.net) as watch:
        rnet(torch.randn(3, 4))
    assert_as_seen(rnet, watch, "1.1.drop")


def aside(net: Any, x: Tensor) -> Tensor:
    """What an inner layer returns does not show in what it returns."""
    net.aside(torch.ones(1, 2, 5, 5))
    return net.main(x)


def dense(net: nn.Module) -> nn.Module:
    return net


def channels_last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)


def step(net: nn.Module, *, fused: bool) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(net.parameters(), fused=fused).step()


def write_uncounted(parameter: Tensor) -> None:
    version = parameter._version
    parameter.data.mul_(1.5)
    assert parameter._version == version


CHANGES: dict[str, Any] = {
    "a step": lambda net: step(net, fused=False),
    "a fused step": lambda net: step(net, fused=True),
    "a write to a weight behind the counter": lambda net: write_uncounted(net[0].aside.weight),
    "a write to a bias behind the counter": lambda net: write_uncounted(net[0].aside.bias),
    "other memory": lambda net: setattr(net[0].aside.bias, "data", net[0].aside.bias.data + 1),
    "another parameter": lambda net: setattr(
        net[0].aside, "weight", nn.Parameter(net[0].aside.weight.detach() * 1.5)
    ),
}


@pytest.mark.parametrize("layout", [dense, channels_last])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_an_error_also_where_it_does_not_show(layout: Any, change: str) -> None:
    net = Net(aside, main=nn.Linear(4, 4), aside=nn.Conv2d(2, 200, 3))
    rnet = Recorder(layout(nn.Sequential(net)), input_size=(1, 4))
    rnet.record("0", inputs=True)
    rnet(torch.ones(2, 4))
    before = rnet.recompute("0.aside")["0.aside"]
    CHANGES[change](rnet.net)
    with pytest.raises(RecomputeError, match="weights have changed"):
        rnet.recompute("0.aside")
    rnet(torch.ones(2, 4))
    assert not torch.equal(rnet.recompute("0.aside")["0.aside"], before)


def sometimes(net: Any, x: Tensor) -> Tensor:
    """Runs a layer beside its output, as long as an attribute says so."""
    if net.runs:
        net.aside(x)
    return x * 2


def test_a_layer_that_does_not_run_again_is_an_error() -> None:
    rnet = Recorder(Net(sometimes, aside=nn.Linear(4, 4), runs=True), input_size=(1, 4))
    rnet.record("", inputs=True)
    rnet(torch.ones(2, 4))
    assert "aside" in rnet.recompute("aside")
    rnet.net.runs = False
    with pytest.raises(RecomputeError, match="attributes of modules"):
        rnet.recompute("aside")


def test_another_device_is_an_error() -> None:
    rnet = recorder(blocks().eval(), "1")
    rnet(torch.randn(3, 4))
    rnet.net.to("meta")
    with pytest.raises(RecomputeError, match="its parameters were on cpu, now on meta"):
        rnet.recompute("1.0")


def shared(net: Any, part: Tensor, whole: Tensor) -> Tensor:
    """Changes one of two arguments in place, which are views of one tensor."""
    part.mul_(2)
    return net.inner(whole) + 1


def sharing(net: Any, x: Tensor) -> Tensor:
    whole = x * 1
    return net.shared(whole[:, :2], whole)


def writing(net: Any, x: Tensor) -> Tensor:
    """Writes a buffer in evaluation mode that is too large to be copied in every pass."""
    net.large[:4] += 1
    return net.inner(x + net.large[:4])


def counting(net: Any, x: Tensor) -> Tensor:
    net.passes += 1
    return net.inner(x * net.passes)


LOST: list[tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], str, str]] = [
    (sharing, {"shared": Net(shared, inner=nn.Identity())}, "shared", "inputs that share memory"),
    (writing, {"large": torch.zeros(1 << 17)}, "", "buffers of more than 256 KiB"),
    (counting, {"passes": 0}, "", "attributes of modules that change"),
]


@pytest.mark.parametrize(("forward", "parts", "name", "cause"), LOST)
def test_the_error_names_what_is_not_kept(
    forward: Any, parts: dict[str, Any], name: str, cause: str
) -> None:
    net = nn.Sequential(Net(forward, inner=nn.Identity(), **parts))
    rnet, name = Recorder(net.eval(), input_size=(1, 4)), f"0.{name}".removesuffix(".")
    rnet.record(name, inputs=True)
    data = torch.randn(6, 4).split(3)
    recording = rnet.collect(data)
    with pytest.raises(RecomputeError, match=cause):
        recording.recompute(rnet, f"{name}.inner")
    with torch.no_grad():
        rnet(data[0])
    with pytest.raises(RecomputeError, match=f"{cause}|a large buffer has changed"):
        rnet.recompute(f"{name}.inner")


def test_large_buffers_are_watched_and_not_copied() -> None:
    def masked(net: Any, x: Tensor) -> Tensor:
        return net.act(x * net.mask[:, :4])  # type: ignore[no-any-return]

    net = nn.Sequential(Net(masked, mask=torch.ones(3, 1 << 17), act=nn.Tanh()))
    rnet = recorder(net.eval(), "0")
    rnet(torch.randn(3, 4))
    assert rnet.recompute("0.act")
    rnet.net[0].mask.add_(0)
    with pytest.raises(RecomputeError, match="a large buffer has changed since that pass: mask"):
        rnet.recompute("0.act")
    rnet(torch.randn(1, 4) * 0)
    rnet.net[0].mask.data.mul_(2)
    # Not seen in what zeros give.
    with pytest.raises(RecomputeError, match="large buffers"):
        rnet.recompute("0.act")


@pytest.mark.parametrize("columns", [4, 1 << 17])
def test_buffers_that_a_forward_replaces(columns: int) -> None:
    def memory(net: Any, x: Tensor) -> Tensor:
        out: Tensor = net.act(x + net.seen[:, :4])
        net.seen = net.seen + 1
        return out

    net = nn.Sequential(Net(memory, seen=torch.zeros(1, columns), act=nn.Tanh()))
    rnet = recorder(net.eval(), "0")
    for _ in range(2):
        with Watch(rnet.net) as watch:
            rnet(torch.randn(3, 4))
    seen = rnet.net[0].seen
    assert same_bits(rnet.recompute("0.act")["0.act"], watch.calls["0.act", 0].value)
    assert rnet.net[0].seen is seen
    assert seen.eq(2).all()


def test_what_was_not_recorded_is_an_error() -> None:
    rnet = recorder(None, "0")
    with pytest.raises(RecomputeError, match=r"the latest pass left no inputs.*run the net again"):
        rnet.recompute("0.1.norm")
    rnet(torch.randn(3, 4))
    fault = r'no inputs of layer 2-3 1.0 .*nor of a module around it.*record\("1", inputs=True\)'
    with pytest.raises(RecomputeError, match=fault):
        rnet.recompute("1.0")
    with pytest.raises(LookupError, match="no inputs of layer 0-1"):
        rnet.recompute("")
    rnet.record("0")
    rnet(torch.randn(3, 4))
    with pytest.raises(RecomputeError, match=r'left no inputs.*record\("0.1", inputs=True\)'):
        rnet.recompute("0.1.norm")
    with pytest.raises(LayerNotFoundError):
        rnet.recompute("nothing")
    with pytest.raises(SelectorTypeError, match="no layers"):
        rnet.recompute()


def test_enclosing_layers_go_by_the_order_of_calls() -> None:
    rnet = recorder()
    label = rnet.architecture.resolve("1.1.drop")
    around = rnet.architecture.enclosing(label)
    assert [rnet.architecture[one].name for one in around] == ["1.1", "1", ""]


def test_no_graph_is_kept() -> None:
    net = Net(
        lambda net, x: net.inner(Mark.apply(net.first(x))), first=nn.Linear(4, 4), inner=blocks(1)
    )
    rnet = recorder(net, "inner")
    rnet(torch.randn(3, 4)).sum().backward()
    found = rnet.recompute("inner.0.0")
    assert marked_graphs() == 1
    with torch.no_grad():
        rnet(torch.randn(3, 4))
    assert marked_graphs() == 0
    assert found


# Real architectures, in training mode (with dropout) or not; in both in the full campaign.
FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
REAL = [
    pytest.param(
        case,
        training,
        id=f"{case.name}-{'train' if training else 'eval'}",
        marks=[pytest.mark.campaign] * (case.name not in ("gpt2", "vit")),
    )
    for number, case in enumerate(TRANSFORMERS)
    for training in (False, True)
    if FULL or training == bool(number % 2)
]
SEEDS = (1, 2)


def around_and_inside(rnet: Recorder) -> tuple[list[Any], list[Any]]:
    """Return the modules of depth 1 to 3 that contain others, and what lies in them."""
    rows = [rnet.architecture[label] for label in executed(rnet)]
    around = [
        row
        for row in rows
        if 1 <= row.depth <= 3 and any(other.name.startswith(row.name + ".") for other in rows)
    ]
    inside = [row for row in rows if any(row.name.startswith(outer.name + ".") for outer in around)]
    return around, inside


@pytest.mark.filterwarnings("ignore:the net is in training mode")
@pytest.mark.parametrize(("case", "training"), REAL)
def test_inside_modules_that_were_recorded(case: Case, training: bool) -> None:
    torch.manual_seed(0)
    net = case.fresh().train(training)
    rnet = make_recorder(net, case, training=training)
    around, inside = around_and_inside(rnet)
    assert around
    assert inside
    rnet.record(*(row.label for row in around), inputs=True)
    data = [case.inputs(seed) for seed in SEEDS]
    names = {module: name for name, module in net.named_modules()}

    args, kwargs = data[0]
    with Watch(net) as watch, torch.no_grad():
        rnet(*args, **kwargs)
    before = trace(net)
    found = rnet.recompute(*(row.label for row in inside))
    assert not differences(trace(net), before)
    for row in inside:
        wanted = plain(watch.calls[names[row.module], row.call])
        assert not differences(plain(freeze(found[row.label])), wanted), row

    ids = itertools.count()
    with Watch(net) as watch:
        recording = rnet.collect(
            data,
            to_inputs=lambda given: given[0] or given[1],
            sample_ids=lambda given: [next(ids), next(ids)],
            transform=lambda activation, batch: torch.zeros(2, 0),
        )
    before = trace(net)
    batches = recording.recompute_batches(rnet, *(row.label for row in inside))
    for number, batch in enumerate(batches):
        for row in inside:
            calls = len(rnet.architecture.calls(row.module))
            wanted = plain(watch.calls[names[row.module], number * calls + row.call])
            assert not differences(plain(freeze(batch[row.label])), wanted), (number, row)
    assert number == len(SEEDS) - 1
    assert not differences(trace(net), before)
