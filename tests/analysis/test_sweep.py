"""Sweeps beside loops by hand: the state of each run, estimates, and errors."""

from __future__ import annotations

import itertools
import math
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from scio_recorder import ComparisonError, FlowError, Recorder, UnsupportedNetError
from scio_recorder.errors import ArgumentError
from tests.analysis.comparing.test_device import WAITS
from tests.analysis.guarding.nonfinite import Do
from tests.analysis.sweeping import ByHand, weighed
from tests.harness import trace
from tests.oracle import differences, seed_everything
from tests.zoo import Net


class Counted(nn.Linear):
    """Counts its runs outside of everything that a sweep can see."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        return super().forward(x)


def chain(depth: int = 4, kind: Callable[..., nn.Module] = Counted) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(kind(3, 3), nn.Tanh()) for _ in range(depth)))


def recorder(net: nn.Module, *names: Any, **settings: Any) -> Recorder:
    rnet = Recorder(net, verbose=0, **settings)
    rnet.record(*names)
    return rnet


X, Y = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(3))


def assert_as_by_hand(build: Callable[[], nn.Module], *names: str) -> Recorder:
    """Sweep these layers of a net, and compare with new nets of which each runs once."""
    rnet, hand = recorder(build().eval(), *names, input_size=(2, 3)), ByHand(build, weighed)
    effects = rnet.sweep(X, Y, weighed)
    clean, found = hand.run(((X,), {}))
    assert (effects.clean, effects.corrupted) == (clean, hand.run(((Y,), {}))[0])
    for name in names:
        assert float(effects[name]) == hand.patched(((Y,), {}), (name, 0), found[name, 0])
    return rnet


def test_each_run_is_a_whole_one_and_the_corrupted_one_is_made_again() -> None:
    rnet = assert_as_by_hand(chain, "1", "1.0", "2.1")
    Counted.runs = 0
    rnet.sweep(X, Y, weighed)
    assert Counted.runs == (2 + 3 + 1) * 4


def holding_itself(x: Tensor) -> list[Any]:
    made: list[Any] = [x]
    made.append(made)
    return made


def test_a_layer_that_returns_a_list_in_itself() -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        first = Net(lambda net, x: holding_itself(net.layer(x)), layer=nn.Linear(3, 3))
        return nn.Sequential(first, Net(lambda net, made: net.layer(made[0]), layer=nn.ReLU()))

    assert_as_by_hand(build, "0.layer", "1")


def test_a_patch_that_changes_nothing_gives_the_corrupted_metric() -> None:
    rnet = recorder(chain(), "*", input_size=(2, 3))
    effects = rnet.sweep(Y, Y.clone(), weighed)
    assert set(effects.values.tolist()) == {effects.corrupted} == {effects.clean}
    estimated = rnet.sweep(Y, Y.clone(), lambda out: out.sum(), estimate=True)
    assert set(estimated.values.tolist()) == {estimated.corrupted}


def gpt2() -> nn.Module:
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, bos_token_id=0)
    config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def vit() -> nn.Module:
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(intermediate_size=32, image_size=8, patch_size=4, **sizes)
    return ViTForImageClassification(config)


IDS = torch.randint(50, (2, 2, 5), generator=torch.Generator().manual_seed(4))
IMAGES = torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(4))


def logit(output: Any) -> Tensor:
    return output.logits.flatten(0, -2)[-1, 1] - output.logits.flatten(0, -2)[-1, 0]


@pytest.mark.parametrize(
    ("build", "inputs", "pattern", "positions", "training"),
    [
        (gpt2, IDS, "transformer.h.?", [0, -1, 2], True),
        (gpt2, IDS, "*.attn", None, False),
        (gpt2, IDS, "*.0.mlp*", [0, -1, 2], False),
        (vit, IMAGES, "*layer*.?", None, True),
    ],
)
def test_transformers(
    build: Any, inputs: Any, pattern: str, positions: list[int] | None, training: bool
) -> None:
    clean, corrupted = inputs
    net = build().train(training)
    mode = "train" if training else "eval"
    rnet = recorder(net, pattern, input_data=clean, mode=mode)
    hand = ByHand(build, logit, training=training)
    before, found = hand.run(((clean,), {}))
    after, _ = hand.run(((corrupted,), {}))
    seed_everything(5)
    state = trace(net)
    effects = rnet.sweep(clean, corrupted, logit, positions)
    assert not differences(trace(net), state)
    assert (effects.clean, effects.corrupted) == (before, after)
    for layer in effects.layers:
        places = [None] if positions is None else positions
        wanted = [
            hand.patched(((corrupted,), {}), (layer.name, 0), found[layer.name, 0], at)
            for at in places
        ]
        assert effects[layer.label].flatten().tolist() == wanted


def test_each_run_has_a_cache_of_its_own() -> None:
    clean, corrupted = IDS

    def metric(output: Any) -> float:
        return weighed((output.logits, [list(layer) for layer in output.past_key_values]))

    effects = recorder(gpt2().eval(), "transformer.h.?", input_data=clean).sweep(*IDS, metric)
    hand = ByHand(gpt2, metric)
    _, found = hand.run(((clean,), {}))
    for layer in effects.layers:
        key = layer.name, 0
        assert float(effects[layer.label]) == hand.patched(((corrupted,), {}), key, found[key])


@pytest.mark.parametrize("estimate", [False, True])
def test_inputs_that_the_network_changes_are_put_back(estimate: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Do(lambda x: x.add_(1)), nn.Linear(3, 3))

    given = [{"input": X.clone()}, {"input": Y.clone()}]
    rnet = recorder(build(), "0", "1", input_size=(2, 3))
    effects = rnet.sweep(*given, lambda output: output.square().sum(), estimate=estimate)
    hand = ByHand(build, lambda output: output.square().sum())
    clean, found = hand.run(((X,), {}))
    assert (effects.clean, effects.corrupted) == (clean, hand.run(((Y,), {}))[0])
    for name in ("0", "1") if not estimate else ():
        assert float(effects[name]) == hand.patched(((Y,), {}), (name, 0), found[name, 0])
    assert torch.equal(given[0]["input"], X)
    assert torch.equal(given[1]["input"], Y)


def noting(write: Callable[[Any, Tensor], object]) -> Net:
    """Return a module that writes what it gets to somewhere, for a later module to read."""

    def forward(net: Any, x: Tensor) -> Any:
        write(net, x)
        return net.linear(x)

    places = {"last": None, "notes": [], "state": {"inner": {}}, "others": []}
    generator, total = torch.Generator().manual_seed(0), torch.zeros(3)
    return Net(forward, linear=nn.Linear(3, 3), generator=generator, total=total, **places)


def swap(module: Any, x: Tensor) -> None:
    module.total = x.mean(0)


def by_buffer(module: Any, x: Tensor) -> None:
    module.total.add_(x.mean(0))


WRITES: dict[str, tuple[Callable[[Any, Tensor], object], Callable[[Any], Any]]] = {
    "attribute": (lambda own, x: setattr(own, "last", x + 1), lambda own: own.last),
    "list": (lambda own, x: own.notes.append(x), lambda own: own.notes[-1]),
    "nested": (lambda own, x: own.state["inner"].update(x=x), lambda own: own.state["inner"]["x"]),
    "buffer": (by_buffer, lambda own: own.total),
    "new buffer": (swap, lambda own: own.total),
    "parent": (lambda own, x: setattr(own.others[0], "x", x), lambda own: own.others[0].x),
    "data": (lambda own, x: x.mul_(2), lambda own: 0),
    "generator": (
        lambda own, x: torch.rand(3, generator=own.generator),
        lambda own: torch.rand(3, generator=own.generator),
    ),
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_a_call_leaves_behind_is_there_for_the_next_one(kind: str) -> None:
    write, read = WRITES[kind]

    def build() -> nn.Module:
        torch.manual_seed(0)
        first = noting(write)
        last = nn.Linear(3, 3)

        def forward(net: Any, x: Tensor) -> Tensor:
            hidden = net.first(net.before(x * 1))
            return net.last(net.second(hidden) + read(net.first) + x)

        net = Net(forward, before=Counted(3, 3), first=first, second=nn.Linear(3, 3), last=last)
        first.others.append(net)
        return net

    assert_as_by_hand(build, "before", "first", "second", "last")


class Counting(nn.Module):
    """Counts its calls somewhere, and weighs its output by the count."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))
        self.register_buffer("expanded", torch.ones(1).expand(3))
        self.plain = torch.ones(3)
        self.nested = {"list": [1, torch.ones(3)], "deque": deque([1]), "set": {1}}
        self.thing = types.SimpleNamespace(count=1, tensor=torch.ones(3))
        self.array = np.ones(3)
        self.write = write

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        count = self.write(self)
        return self.last(self.inner(x) * torch.as_tensor(count).float())


def counted(thing: Any) -> int:
    thing.count += 1
    return int(thing.count)


PLACES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda net: net.plain.add_(1),
    "through data": lambda net: net.buffer.data.add_(1) * net.buffer,
    "other data": lambda net: setattr(net.buffer, "data", net.buffer + 1) or net.buffer,
    "through data of a weight": lambda net: net.weight.data.add_(1) * net.weight,
    "in a list": lambda net: net.nested["list"].append(1) or len(net.nested["list"]),
    "a tensor in a list": lambda net: net.nested["list"][1].add_(1),
    "in a deque": lambda net: net.nested["deque"].append(1) or len(net.nested["deque"]),
    "in a set": lambda net: (
        net.nested["set"].add(len(net.nested["set"]) + 1) or len(net.nested["set"])
    ),
    "in an object": lambda net: counted(net.thing),
    "a tensor in an object": lambda net: net.thing.tensor.add_(1),
    "in an array": lambda net: np.add(net.array, 1, out=net.array),
}


@pytest.mark.parametrize("where", PLACES)
def test_each_run_starts_in_the_same_state_wherever_the_network_keeps_it(where: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return Counting(PLACES[where])

    net: Any = assert_as_by_hand(build, "first", "inner").net
    state = net.weight, net.buffer, net.plain, net.array, net.thing.tensor, net.nested["list"][1]
    assert all((one == 1).all() for one in state)
    assert (len(net.nested["list"]), net.nested["deque"], net.nested["set"]) == (2, deque([1]), {1})
    assert net.thing.count == 1


def test_attributes_of_tensors_go_on() -> None:
    def marked(x: Tensor) -> Tensor:
        y: Any = x * 2
        y.factor = 3
        return y

    def uses(net: Any, x: Tensor) -> Any:
        y = net.marks(x)
        return net.last(y * y.factor)

    rnet = recorder(Net(uses, marks=Do(marked), last=nn.Linear(3, 3)), "last", input_size=(2, 3))
    effects = rnet.sweep(X, Y, weighed)
    assert effects["last"] == effects.clean


def test_modules_with_hooks_of_others_run() -> None:
    def build() -> nn.Module:
        net, seen = chain(kind=nn.Linear), []
        net[0][0].register_forward_hook(lambda module, args, output: seen.append(output))
        net[2].register_forward_hook(lambda module, args, output: output + seen.pop())
        return net

    assert_as_by_hand(build, "0", "1", "2")


def test_hooks_on_all_modules_do_not_run() -> None:
    rnet = recorder(chain(kind=nn.Linear), "1", "2", input_size=(2, 3))
    wanted, counts = rnet.sweep(X, Y, weighed), list[int]()

    def counted(module: nn.Module, args: Any, output: Any) -> Any:
        counts.append(1)
        return output + 1

    handle = nn.modules.module.register_module_forward_hook(counted)
    try:
        assert torch.equal(rnet.sweep(X, Y, weighed).values, wanted.values)
        assert not counts
        rnet.net(X)
        assert len(counts) == 13
    finally:
        handle.remove()


class Ticking(nn.Module):
    """Keeps state where nobody can see it."""

    ticks = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).ticks += 1
        return x * self.ticks


def beside(net: Any, x: Tensor) -> Tensor:
    """Adds what ticks to what a layer returns."""
    ticks: Tensor = net.layer(x) + net.beside(torch.ones(2, 3))
    return ticks


@pytest.mark.parametrize("place", ["before the layer", "after it", "beside it"])
def test_a_net_that_keeps_state_out_of_reach_is_refused(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(3, 3)
    net, name = {
        "before the layer": (nn.Sequential(Ticking(), layer), "1"),
        "after it": (nn.Sequential(layer, Ticking()), "0"),
        "beside it": (Net(beside, layer=nn.Identity(), beside=Ticking()), "layer"),
    }[place]
    rnet = recorder(net, name, input_size=(2, 3))
    monkeypatch.setattr(Ticking, "ticks", 0)
    # Beside the layer, -3 + 2 is below zero in the first corrupted run, and -3 + 4 above it again.
    inputs = (torch.ones(2, 3), torch.full((2, 3), -3.0)) if place == "beside it" else (X, Y)
    metric = (lambda out: (out > 0).sum()) if place == "beside it" else weighed
    with pytest.raises(ComparisonError, match=r"when it ran again at the end.*keeps state"):
        rnet.sweep(*inputs, metric)


def test_a_metric_that_keeps_state_is_refused_unless_it_is_no_number() -> None:
    runs: Any = itertools.count()
    with pytest.raises(ComparisonError, match=r"when it ran again at the end.*keeps state"):
        recorder(chain(), "0", input_size=(2, 3)).sweep(X, Y, lambda out: next(runs))
    runs = iter([1.0, math.nan, 2.0, math.nan])
    effects = recorder(chain(), "0", input_size=(2, 3)).sweep(X, Y, lambda out: next(runs))
    assert math.isnan(effects.corrupted)
    assert float(effects["0"]) == 2


def test_estimates_are_gradient_times_difference() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Softmax(-1))
    net.double().requires_grad_(False)
    clean, corrupted = torch.randn(2, 2, 4, 3, dtype=torch.float64)
    rnet = recorder(net, "0", "2", input_data=clean)
    effects = rnet.sweep(clean, corrupted, lambda out: out[0, :, 1].sum(), "all", estimate=True)
    first, second = net[0](clean), net[2](net[0](clean).relu())
    own = net[0](corrupted).requires_grad_()
    inner = net[2](own.relu())
    metric = inner.softmax(-1)[0, :, 1].sum()
    slopes = torch.autograd.grad(metric, (own, inner))
    for row, slope, change in zip(
        effects.values, slopes, (first - own, second - inner), strict=True
    ):
        torch.testing.assert_close(row, metric.detach() + (slope * change).sum((0, 2)))
    assert effects.is_estimate
    assert effects.corrupted == metric.item()
    assert not any(parameter.requires_grad for parameter in net.parameters())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_estimates_stand_beside_their_layers() -> None:
    """A module returns after those inside it, and comes before them among the labels."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)).double()
    clean, corrupted = torch.randn(2, 5, 3, dtype=torch.float64)
    rnet = recorder(net, "*", input_data=clean)
    effects = rnet.sweep(clean, corrupted, lambda out: out.square().sum(), estimate=True)
    kept, other = {}, {}
    for x, values in ((clean, kept), (corrupted, other)):
        values["0.0"] = net[0][0](x)
        values["0.1"] = values["0"] = values["0.0"].tanh()
        values["1"] = values[""] = net[1](values["0"])
    metric = other["1"].square().sum()
    slopes = torch.autograd.grad(metric, [other[name] for name in kept])
    expected = {
        name: metric + (slope * (kept[name] - other[name])).sum()
        for name, slope in zip(kept, slopes, strict=True)
    }
    for layer, value in zip(effects.layers, effects.values, strict=True):
        torch.testing.assert_close(value, expected[layer.name].detach())
    assert len({round(value.item(), 9) for value in expected.values()}) == 2


def shortcut(net: Any, x: Tensor) -> Tensor:
    """Has layers that return what they were given, which goes on beside them as well."""
    x = net.first(x)
    y = net.inner(x).tanh() + net.skip(x)
    return y + net.inplace(y * 2) * net.skip(y)


def test_estimates_count_what_goes_on_from_a_layer_alone() -> None:
    torch.manual_seed(0)
    parts = {"first": nn.Linear(3, 3), "inner": nn.Linear(3, 3), "skip": nn.Identity()}
    net = Net(shortcut, inplace=nn.ReLU(inplace=True), **parts).double()
    corrupted = torch.randn(4, 3, dtype=torch.float64)
    clean = corrupted + 1e-7 * torch.randn(4, 3, dtype=torch.float64)
    rnet = recorder(net, "*", input_data=clean)
    patched, estimated = (
        rnet.sweep(clean, corrupted, lambda out: out[0, 0] - out[1, 2] ** 2, estimate=estimate)
        for estimate in (False, True)
    )
    change, guess = (effects.values - effects.corrupted for effects in (patched, estimated))
    torch.testing.assert_close(guess, change, rtol=1e-5, atol=1e-13)
    assert len(change) == 6


def test_estimates_come_close_to_small_patches() -> None:
    net = gpt2().eval()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    rnet = recorder(net, "transformer.h.?", input_data={"inputs_embeds": torch.randn(2, 5, 16)})
    clean = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    corrupted = {"inputs_embeds": clean + 1e-3 * torch.randn(2, 5, 16)}
    state = trace(net)
    exact = rnet.sweep({"inputs_embeds": clean}, corrupted, logit, "all")
    estimated = rnet.sweep({"inputs_embeds": clean}, corrupted, logit, "all", estimate=True)
    assert not differences(trace(net), state)
    change, guess = exact.values - exact.corrupted, estimated.values - estimated.corrupted
    assert (change - guess).norm() < 0.02 * change.norm()


@pytest.mark.parametrize("positions", [None, np.array([0, 2])])
def test_estimates_inside_a_region_of_checkpointing(positions: Any) -> None:
    def build(is_checkpointed: bool) -> nn.Module:
        torch.manual_seed(1)
        inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

        def forward(net: Any, x: Tensor) -> Any:
            if not is_checkpointed:
                return net.inner(x)
            return checkpoint(net.inner, x, use_reentrant=False)

        return Net(forward, inner=inner)

    found = []
    for is_checkpointed in (False, True):
        rnet = recorder(build(is_checkpointed), "inner.*", input_size=(2, 3))
        found.append(rnet.sweep(X, Y, lambda out: out[0, 1] ** 2, positions, estimate=True).values)
    assert torch.equal(*found)
    assert len({*found[0].flatten().tolist()}) > 2


def test_the_recorder_stays_as_it_is() -> None:
    rnet = recorder(chain(), "0", "2", input_size=(2, 3))
    rnet(X)
    kept = {label: value.clone() for label, value in rnet.activations.items()}
    rnet.sweep(Y, X, weighed)
    rnet.sweep(Y, X, torch.sum, estimate=True)
    assert rnet.recording == tuple(kept)
    assert all(torch.equal(rnet.activations[label], kept[label]) for label in kept)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("estimate", [True, False])
def test_gradients_are_on_afterwards_if_they_were_before(grad: bool, estimate: bool) -> None:
    rnet = recorder(chain(), "0", "2", input_size=(2, 3))
    with torch.set_grad_enabled(grad):
        rnet.sweep(Y, X, torch.sum, estimate=estimate)
        assert torch.is_grad_enabled() is grad


def test_nothing_is_left_after_an_error() -> None:
    net = chain()
    rnet = recorder(net, "0", "2", input_size=(2, 3))
    state = trace(net)
    calls = []

    def metric(output: Tensor) -> float:
        calls.append(output)
        if len(calls) == 3:
            raise ZeroDivisionError
        return 0.0

    with pytest.raises(ZeroDivisionError):
        rnet.sweep(X, Y, metric)
    assert not differences(trace(net), state)


def test_other_threads_are_left_alone() -> None:
    net = chain(kind=nn.Linear)
    rnet = recorder(net, "0", "2", input_size=(2, 3))
    wanted, found = net(X), []

    def metric(output: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(net(X)))
        thread.start()
        thread.join()
        return output.sum()

    rnet.sweep(X, Y, metric)
    assert found
    assert all(torch.equal(one, wanted) for one in found)


def test_numbers_that_metrics_may_return() -> None:
    rnet = recorder(chain(), "0", input_size=(2, 3))
    for metric in (
        lambda out: out[0, 0],
        lambda out: out[0, 0].item(),
        lambda out: out[0, 0].numpy(),
        lambda out: out[0].argmax() == 1,
        lambda out: 3,
    ):
        assert rnet.sweep(X, Y, metric).values.dtype == torch.float64


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda out: out[0], r"float32 tensor of shape \(3,\): it must return one real number"),
        (lambda out: out[:1, 0], r"shape \(1,\)"),
        (lambda out: None, "returned None"),
        (lambda out: "0.5", "'0.5'"),
        (lambda out: [1.0], "a list"),
        (lambda out: out.sum() * 1j, "complex"),
        ("accuracy", "metric='accuracy': give a function"),
    ],
)
def test_metrics_that_are_refused(metric: Any, says: str) -> None:
    rnet = recorder(chain(), "0", input_size=(2, 3))
    with pytest.raises(ComparisonError, match=says):
        rnet.sweep(X, Y, metric)


@pytest.mark.parametrize("metric", [lambda out: out.sum().item(), lambda out: out.argmax()])
def test_estimates_need_a_gradient(metric: Any) -> None:
    rnet = recorder(chain(), "0", input_size=(2, 3))
    with pytest.raises(ComparisonError, match="needs the gradient of the metric"):
        rnet.sweep(X, Y, metric, estimate=True)


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        ([3], r"no position 3 in layer 1-1 0 .* \(2, 3\) float32"),
        ([-4], "no position -4"),
        ("last", "positions='last': write"),
        (2, "positions=2: write"),
        ([], "write positions=None"),
        ([1.5], "write positions=None"),
        ([True], "write positions=None"),
    ],
)
@pytest.mark.parametrize("estimate", [False, True])
def test_positions_that_are_refused(positions: Any, says: str, estimate: bool) -> None:
    rnet = recorder(chain(), "0", input_size=(2, 3))
    with pytest.raises(ComparisonError, match=says):
        rnet.sweep(X, Y, torch.sum, positions, estimate=estimate)


def test_runs_that_are_refused() -> None:
    net = chain()
    rnet = Recorder(net, input_size=(2, 3))
    with pytest.raises(ComparisonError, match="choose layers with record"):
        rnet.sweep(X, Y, torch.sum)
    rnet.record("0", calls="any")
    with pytest.raises(ComparisonError, match='calls="any"'):
        rnet.sweep(X, Y, torch.sum)
    rnet.record("0", "2")
    with pytest.raises(ArgumentError, match="estimate"):
        rnet.sweep(X, Y, torch.sum, estimate=1)  # type: ignore[arg-type]  # on purpose
    for estimate in (False, True):
        with pytest.raises(
            ComparisonError, match=r"layer 1-1 0 .*\(2, 3\) float32 .* \(1, 3\) float32"
        ):
            rnet.sweep(X, Y[:1], torch.sum, estimate=estimate)
    with pytest.raises(ComparisonError, match="clean is None"):
        rnet.sweep(None, Y, torch.sum)
    with pytest.raises(ComparisonError, match="leave the block of watch"), rnet.watch():
        rnet.sweep(X, Y, torch.sum)
    flat = recorder(nn.Sequential(nn.Linear(3, 3), nn.Flatten(0)), "0", "1", input_size=(2, 3))
    with pytest.raises(ComparisonError, match=r"no position 0 in layer 1-2 1 .* \(6,\) float32"):
        flat.sweep(X, Y, torch.sum, "all")
    wide = recorder(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5)), "?", input_size=(2, 3))
    with pytest.raises(ComparisonError, match=r"no position 3 in layer 1-1 0 .* \(2, 3\)"):
        wide.sweep(X, Y, torch.sum, "all")
    net[1].compile(backend="eager")
    with pytest.raises(UnsupportedNetError, match="compiled"):
        rnet.sweep(X, Y, torch.sum)


def test_a_layer_that_did_not_run_is_named() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.last(net.first(x) if len(x) > 1 else x)

    rnet = recorder(Net(forward, first=Counted(3, 3), last=Counted(3, 3)), "*", input_size=(2, 3))
    with pytest.raises(FlowError, match=r"1-1 first .*: 1 at labelling, 0 now"):
        rnet.sweep(X[:1], Y, torch.sum)


def test_layers_without_a_gradient_are_named() -> None:
    net = Net(lambda own, x: own.last(own.first(x).detach() + x), first=nn.ReLU(), last=nn.ReLU())
    rnet = recorder(net, "first", input_size=(2, 3))
    with pytest.raises(ComparisonError, match="compute that so from recorded layers"):
        rnet.sweep(X, Y, torch.sum, estimate=True)
    rnet.record("first", "last")
    # Nothing of the metric depends on it, as far as autograd knows.
    effects = rnet.sweep(X, Y, torch.sum, estimate=True)
    assert float(effects["first"]) == effects.corrupted
    assert not effects.values.requires_grad
    inner = Net(lambda own, x: x.argmax(-1))
    rounded = Net(lambda own, x: own.inner(x) + own.last(x).sum(), inner=inner, last=nn.ReLU())
    rnet = recorder(rounded, "inner", "last", input_size=(2, 3))
    with pytest.raises(ComparisonError, match=r"layer 1-1 inner .* is not on autograd's graph"):
        rnet.sweep(X, Y, torch.sum, estimate=True)


def test_results_show_themselves() -> None:
    rnet = recorder(chain(2), "0", "1", input_size=(2, 3))
    effects = rnet.sweep(X, Y, weighed, positions=[0, -1])
    frame = effects.to_frame()
    assert list(frame.columns) == ["name", "type", "position", "metric", "recovered"]
    assert list(frame.index) == ["1-1", "1-1", "1-2", "1-2"]
    assert list(frame["position"]) == [0, -1, 0, -1]
    assert frame["metric"].tolist() == effects.values.flatten().tolist()
    assert "Sweep of 2 layers at 2 positions" in str(effects)
    whole = rnet.sweep(X, Y, weighed)
    assert list(whole.to_frame().columns) == ["name", "type", "metric", "recovered"]
    assert whole.positions is None
    assert whole.values.shape == (2,)
    same = rnet.sweep(X, X, weighed)
    assert "-" in str(same).splitlines()[2]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("positions", [None, [2, -1]])
def test_results_are_drawn(positions: list[int] | None, sign: int) -> None:
    net = chain(2)
    rnet = recorder(net, "0", "1", input_size=(2, 3))
    effects = rnet.sweep(X, Y, lambda out: sign * weighed(out), positions)
    figure = effects.plot(None if positions is None else ["$a_1", "last"])
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    axis = figure.axes[0]
    names = axis.get_xticklabels() if positions is None else axis.get_yticklabels()
    assert [name.get_text() for name in names] == ["1-1 0", "1-2 1"]
    if positions is None:
        tops = [bar.get_y() + bar.get_height() for bar in axis.patches]
        assert tops == pytest.approx(effects.values.tolist())
        assert {bar.get_y() for bar in axis.patches} == {effects.corrupted}
    else:
        assert [name.get_text() for name in axis.get_xticklabels()] == ["$a_1", "last"]
        (image,) = axis.get_images()
        drawn = image.to_rgba([effects.corrupted, effects.clean])
        assert drawn[0, :3].min() > 0.95
        assert drawn[1, 2] > drawn[1, 0]
        with pytest.raises(ArgumentError, match="1 position_names for 2 positions"):
            effects.plot(["a"])


def test_ticks_tell_metrics_apart_that_are_close() -> None:
    rnet = recorder(chain(2), "0", "1", input_size=(2, 3))
    effects = rnet.sweep(X, Y, lambda out: 1e4 + weighed(out) / 100, "all")
    bar = effects.plot().axes[1]
    ticks = bar.get_xticks()
    shown = [float(text.get_text()) for text in bar.get_xticklabels()]
    assert shown == pytest.approx(list(ticks), rel=0, abs=(ticks[-1] - ticks[0]) / 1000)


def test_nothing_finite_is_drawn_all_the_same() -> None:
    rnet = recorder(chain(2), "0", "1", input_size=(2, 3))
    for positions in (None, "all"):
        effects = rnet.sweep(X, Y, lambda out: out.sum() * float("nan"), positions)
        assert effects.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_layers_of_different_lengths_share_positions() -> None:
    rnet = recorder(nn.Sequential(nn.Tanh(), nn.ConstantPad1d((0, 2), 0.0)), "*", input_size=(2, 3))
    clean, corrupted = torch.linspace(-1, 1, 6).reshape(2, 3), torch.zeros(2, 3)
    estimated = rnet.sweep(clean, corrupted, torch.sum, [0, 2], estimate=True)
    # The sum is linear behind both layers: what a patch adds is what the layer returned there.
    added = clean.double().tanh().sum(0)[[0, 2]]
    assert torch.allclose(estimated.values, added.expand(3, 2), atol=1e-6)
    assert torch.allclose(rnet.sweep(clean, corrupted, torch.sum, [0, 2]).values, estimated.values)


SHORTER, LONGER = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(4)).split([2, 5], 1)


class Keep:
    """A hook that appends outputs to a list."""

    def __init__(self, kept: list[Tensor]) -> None:
        self.kept = kept

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.kept.append(output)


@pytest.mark.parametrize(("clean", "corrupted"), [(SHORTER, LONGER), (LONGER, SHORTER)])
def test_positions_from_the_end_of_texts_of_unequal_length(
    clean: Tensor, corrupted: Tensor
) -> None:
    rnet, names = recorder(chain(), "1", "2.1", input_size=(2, 2, 3)), ("1", "2.1")
    hand = ByHand(chain, weighed)
    _, found = hand.run(((clean,), {}))
    effects = rnet.sweep(clean, corrupted, weighed, positions=[-1, 0])
    for name in names:
        wanted = [hand.patched(((corrupted,), {}), (name, 0), found[name, 0], at) for at in (-1, 0)]
        assert effects[name].tolist() == wanted
    estimates = rnet.sweep(
        clean, corrupted, lambda output: output.square().sum(), positions=[-1, 0], estimate=True
    )
    for name in names:
        net, kept = chain(kind=nn.Linear), list[Tensor]()
        net.get_submodule(name).register_forward_hook(Keep(kept))
        net(clean)
        metric = net(corrupted).square().sum()
        other, own = kept
        (slope,) = torch.autograd.grad(metric, own)
        for place, at in enumerate((-1, 0)):
            change = (slope[:, at] * (other[:, at] - own[:, at])).sum().detach()
            assert float(estimates[name][place]) == pytest.approx(
                float(metric.detach() + change), rel=1e-5
            )


@pytest.mark.parametrize("positions", [None, "all", [1], [-6]])
def test_other_positions_of_texts_of_unequal_length(positions: Any) -> None:
    rnet = recorder(chain(), "1", input_size=(2, 2, 3))
    shorter = SHORTER[:, :1]
    said = "no position -6" if positions == [-6] else r"positions=\[-1\]|no position 1"
    with pytest.raises(ComparisonError, match=said):
        rnet.sweep(LONGER, shorter, weighed, positions=positions)


def test_only_the_metric_waits_for_a_device_in_each_run() -> None:
    rnet = recorder(chain(), "*", input_size=(2, 2, 3))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        effects = rnet.sweep(SHORTER, -SHORTER, lambda output: output[0, 0, 0], positions="all")
    waits = [event.name for event in profiler.events() if event.name in WAITS]
    # One is for the weights, at the end, by two operations.
    assert len(waits) <= effects.values.numel() + 3 + 2
