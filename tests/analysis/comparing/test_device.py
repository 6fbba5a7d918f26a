"""What a comparison asks of a device: waits, operations and memory, counted on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

from scio_recorder import Recorder, compare
from scio_recorder.analysis.comparing import measures
from tests.zoo.base import Net

# They return a value to Python, so a device is waited for.
WAITS = {f"aten::{name}" for name in ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")}


def counted(events: Any) -> tuple[int, int]:
    """Count waits, and operations that Python calls; what these call inside is a part of them."""
    operations = [event for event in events if event.name.startswith("aten::")]
    is_inside = {id(child) for event in operations for child in event.cpu_children}
    waits = sum(event.name in WAITS for event in operations)
    return waits, sum(id(event) not in is_inside for event in operations)


def gpt2() -> nn.Module:
    sizes = {"n_layer": 12, "n_embd": 8, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).eval()


def chain() -> nn.Module:
    layers = [layer for _ in range(32) for layer in (nn.Linear(8, 8), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Embedding(50, 8), *layers)


@pytest.mark.parametrize(
    ("make", "differs"),
    [
        (chain, False),
        (chain, True),
        pytest.param(gpt2, False, marks=pytest.mark.campaign),
        pytest.param(gpt2, True, marks=pytest.mark.campaign),
    ],
)
@torch.no_grad()
def test_waits_and_operations_of_a_batch(make: Callable[[], nn.Module], differs: bool) -> None:
    net, ids = make(), torch.arange(12).view(2, 6)
    other = copy.deepcopy(net)
    if differs:
        # All later layers differ.
        next(other.parameters()).add_(0.01)
    profiler = profile(activities=[ProfilerActivity.CPU])

    def batches() -> Iterator[Tensor]:
        yield ids
        profiler.start()
        yield ids + 1
        profiler.stop()

    sides = [Recorder(each, input_data=ids) for each in (net, other)]
    difference = compare(*sides, batches(), progress=False)
    assert (difference.first is not None) is differs
    waits, operations = counted(profiler.events())
    with profile(activities=[ProfilerActivity.CPU]) as bare:
        net(ids)
        other(ids)
    of_nets = counted(bare.events())
    assert waits - of_nets[0] <= 40
    assert operations - of_nets[1] <= 12 * len(difference)


def most_bytes(profiler: Any) -> int:
    """Return the largest number of bytes that were held beyond those at the start."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(changes))


@pytest.mark.campaign
def test_memory_beyond_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measures._PIECE, "cpu", 1 << 14)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    batch = torch.randn(1 << 12, 64)
    sides = [Recorder(each, input_data=batch[:1]) for each in (net, copy.deepcopy(net))]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        assert compare(*sides, [batch] * 2, progress=False).first is None
    # A copy of what each network receives and each of nine layers returns; and what the second
    # network holds, while it runs: what it receives and eight layers return.
    wanted = (2 * (1 + 9) + 9) * batch.nbytes
    weights = 2 * 8 * 65 * 64 * 4
    assert wanted <= most_bytes(profiler) <= wanted + weights + (1 << 20)


def test_a_write_that_is_not_counted_begins_in_a_later_batch() -> None:
    def late(net: Any, x: Tensor) -> Any:
        """Write to what an inner module has returned, uncounted, if that is not zero."""
        hidden = net.second(net.first(x))
        hidden.numpy()[...] += net.writes * (hidden.numpy() > 0)
        return net.third(hidden)

    parts = {"first": nn.ReLU(), "second": nn.Identity(), "third": nn.Identity()}
    nets = (Net(late, writes=writes, **parts) for writes in (False, True))
    sides = [Recorder(net, input_size=(2, 3)) for net in nets]
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    difference = compare(*sides, [zeros, ones, ones], progress=False)
    assert [layer.num_different for layer in difference.values()] == [0, 0, 12, 12]
    # What layers received in the second batch is not known, and is in the third.
    assert difference["second"].inputs_equal is None
    assert difference["third"].inputs_equal is None
    first = difference.first
    assert (first.layer.name, first.inputs_equal, first.sample_id) == ("", True, 4)


def test_a_write_that_is_counted_changes_what_a_layer_receives() -> None:
    def written(net: Any, x: Tensor) -> Any:
        hidden = net.second(net.first(x))
        hidden.add_(net.shift)
        return net.third(hidden)

    parts = {"first": nn.ReLU(), "second": nn.Linear(3, 3), "third": nn.Sigmoid()}
    nets = (Net(written, shift=shift, **parts) for shift in (0.0, 1.0))
    sides = [Recorder(net, input_size=(2, 3)) for net in nets]
    difference = compare(*sides, [torch.ones(2, 3)], progress=False)
    assert not difference["second"].differs
    assert difference["third"].inputs_equal is False
    assert (difference.first.layer.name, difference.first.inputs_equal) == ("", True)


def test_what_operations_receive_is_compared() -> None:
    def code(net: Any, x: Tensor) -> Tensor:
        return (x * net.factor).exp().sin()

    sides = [Recorder(Net(code, factor=factor), input_size=(2, 3)) for factor in (2.0, 3.0)]
    sides[0].record("/exp", "/sin")
    difference = compare(*sides, [torch.ones(2, 3)], progress=False)
    assert {name: difference[name].inputs_equal for name in ("/exp:0", "/sin:0")} == {
        "/exp:0": False,
        "/sin:0": False,
    }
    sides[0].record("/mul", "/exp")
    first = compare(*sides, [torch.ones(2, 3)], progress=False).first
    assert (first.layer.name, first.inputs_equal) == ("/mul:0", True)
