"""What a pass does beside the network: calls of Python, operations, and requests for values."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2Model

import scio_recorder
from scio_recorder import Recorder
from scio_recorder.reductions import Mean
from tests.zoo.base import Net

PACKAGE = scio_recorder.__path__[0]
# What waits for a GPU.
WAITS = {"aten::equal", "aten::_local_scalar_dense", "aten::nonzero"}
X = torch.arange(6.0).reshape(2, 3)


class Halves(nn.Module):
    """Returns a tuple that holds another one, a constant and nothing."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return x * 2, (x + 1, None), "half", x


class Chain(nn.Module):
    """Calls some layers with tuples, whose first parts it hands on."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Halves() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


def sums(count: int) -> nn.Module:
    """Return a net that adds many numbers in its own code."""
    return Net(lambda _, x: functools.reduce(torch.add, range(count), x))


def calls_in(act: Callable[[], object]) -> Counter[str]:
    """Count the calls of functions of the package, by their names, and of builtins by them."""
    calls: Counter[str] = Counter()

    def see(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE) and event in ("call", "c_call"):
            calls[frame.f_code.co_qualname if event == "call" else "builtin"] += 1

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def recorder(net: nn.Module, x: Any, *selectors: Any, **options: Any) -> Recorder:
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*selectors, **options)
    rnet(x)
    rnet(x)
    return rnet


def test_no_entry_of_a_tuple_is_made_before_one_is_read() -> None:
    few, many = (recorder(Chain(count), X, Halves) for count in (5, 20))
    calls = [calls_in(lambda rnet=rnet: rnet(X)) for rnet in (few, many)]
    added = calls[1] - calls[0]
    # The hook, and the versions of a tuple and of its parts.
    assert added.keys() <= {"ModuleHook.after", "plain_version", "builtin"}
    assert added["ModuleHook.after"] == 15
    assert not [name for name in calls[1] if name.startswith(("HeldTensor", "Recorded"))]


def test_tuples_are_read_as_they_were_returned() -> None:
    rnet = recorder(Chain(2), X, Halves)
    seen: list[Any] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output[0].clone())

    handles = [layer.register_forward_hook(note) for layer in rnet.net.layers]
    rnet(X)
    for handle in handles:
        handle.remove()
    for label, first in zip(rnet.recording, seen, strict=True):
        double, (more, nothing), word, same = rnet.activations[label]
        assert torch.equal(double, first)
        assert torch.equal(more, first / 2 + 1)
        assert (nothing, word) == (None, "half")
        assert torch.equal(same, first / 2)
        assert rnet.activations[label][0] is double
    # What the caller of the network holds is copied: it may write there.
    out = rnet(X)
    before = rnet.activations["layers.1"][0].clone()
    out.zero_()
    assert torch.equal(rnet.activations["layers.1"][0], before)


@pytest.mark.parametrize("place", [0, 1])
def test_a_part_of_a_tuple_that_is_overwritten_later_is_noticed(place: int) -> None:
    class Overwriting(Chain):
        overwrites = False

        def forward(self, x: Tensor) -> Tensor:
            parts = self.layers[0](x)
            if self.overwrites:
                (parts[0] if place == 0 else parts[1][0]).add_(1)
            return x + 1

    rnet = recorder(Overwriting(1), X, "layers.0")
    rnet.net.overwrites = True
    rnet(X)
    with pytest.raises(scio_recorder.errors.MutationError, match=r"layers\.0"):
        _ = rnet.activations["layers.0"]
    rnet(X)
    double, (more, _), *_ = rnet.activations["layers.0"]
    assert torch.equal(double, X * 2)
    assert torch.equal(more, X + 1)


@pytest.mark.parametrize("what", ["plain", "inputs", "post-processor", "the first batch"])
def test_calls_in_a_pass_do_not_grow_with_the_square_of_operations(what: str) -> None:
    totals = []
    for count in (50, 200):
        rnet = recorder(nn.Sequential(sums(count)), X, "*/*", inputs=what == "inputs")
        if what == "the first batch":
            calls = calls_in(lambda r=rnet: r.collect([X], reduce=Mean(), progress=False))
        else:
            options = {"activation_postproc": torch.neg} if what == "post-processor" else {}
            rnet(X, **options)
            calls = calls_in(lambda r=rnet, o=options: r(X, **o))
        totals.append(calls.total())
    assert totals[1] <= 4.1 * totals[0]


@pytest.mark.parametrize(
    ("selectors", "options"),
    [
        (["*"], {}),
        (["*/*"], {}),
        # Weights among inputs are copied: fused optimisers write to them without counting.
        (["*/view", "*/add", "*/pow", "*/tanh"], {"inputs": True}),
        (["h.*.attn"], {"attention": True}),
    ],
    ids=["layers", "operations", "inputs", "attention"],
)
def test_passes_add_no_operation_and_ask_for_no_value(
    selectors: list[str], options: dict[str, bool]
) -> None:
    net, ids = language_model()
    with torch.no_grad():
        rnet = recorder(net, ids, *selectors, **options)
        bare, recorded = operations_in(lambda: net(ids)), operations_in(lambda: rnet(ids))
    assert bare["aten::addmm"] == 8
    assert recorded == bare


def test_attention_is_noted_in_one_step() -> None:
    net, ids = language_model()
    with torch.no_grad():
        rnet = recorder(net, ids, "h.*.attn", attention=True)
        calls = calls_in(lambda: rnet(ids))
        assert calls["_RecordingMode.__torch_function__"]
        assert not calls["_take_inputs"] + calls["Pass.receive"]


def test_inputs_of_layers_are_recorded_without_asking_for_a_value() -> None:
    net, ids = language_model()
    with torch.no_grad():
        rnet = recorder(net, ids, "*", inputs=True)
        added = operations_in(lambda: rnet(ids)) - operations_in(lambda: net(ids))
    # The state in which modules ran is noted, for running them again.
    assert added
    assert not added.keys() & WAITS


def language_model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 10}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False)
    return GPT2Model(config).eval(), torch.arange(6)[None]


def operations_in(act: Callable[[], object]) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        act()
    return Counter(event.name for event in profiled.events() if event.name.startswith("aten::"))


def test_a_copied_layer_costs_one_copy_and_no_comparison() -> None:
    class Outer(nn.Sequential):
        """Returns what its last layer returned."""

    net = nn.Sequential(Outer(nn.Linear(3, 3), nn.Tanh()), nn.ReLU(inplace=True))
    with torch.no_grad():
        rnet = recorder(net, X, "0", "0.1")
        bare, recorded = operations_in(lambda: net(X)), operations_in(lambda: rnet(X))
    added = recorded - bare
    assert added["aten::clone"] == 1
    assert not added.keys() & WAITS
    assert rnet.activations["0"] is rnet.activations["0.1"]
    assert torch.equal(rnet.activations["0"], torch.tanh(net[0][0](X)))


def test_a_watched_pass_copies_only_what_somebody_holds() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        rnet, outputs = recorder(net, X, "*"), list[Tensor]()
        bare = operations_in(lambda: net(X))
        with rnet.watch() as passes:
            added = operations_in(lambda: outputs.append(net(X))) - bare
        # The caller holds the output alone.
        assert added["aten::clone"] == 1
        before = outputs[0].clone()
        outputs[0].zero_()
        assert torch.equal(passes[0]["2"], before)
        assert torch.equal(passes[0]["1"], torch.tanh(net[0](X)))


def test_frames_are_walked_in_the_first_pass_of_a_setting_alone() -> None:
    named = Net(lambda _, x: {"sum": x + 1, "product": x * 2})
    net = nn.Sequential(sums(3), named)
    rnet = Recorder(net, input_data=X, verbose=0)
    rnet.record("*", "*/*")
    walks = [calls_in(lambda: rnet(X))["is_in_compiled_function"] for _ in range(3)]
    assert walks == [5, 0, 0]
    assert torch.equal(rnet.activations["1"]["product"], (X + 3) * 2)


def test_copies_are_not_shared_where_torch_did_not_count_a_write() -> None:
    def outer(net: Any, x: Tensor) -> Any:
        y = net.inner(x)
        y.data.add_(1)
        return y

    net = nn.Sequential(Net(outer, inner=nn.Linear(3, 3)), nn.ReLU(inplace=True))
    rnet = Recorder(net, input_data=X, verbose=0)
    rnet.record("0", "0.inner")
    with torch.no_grad():
        expected = net[0].inner(X)
        for _ in range(3):
            rnet(X)
            assert torch.equal(rnet.activations["0.inner"], expected)
            assert torch.equal(rnet.activations["0"], expected + 1)
