"""Passes that are post-processed while they are collected, and passes that stop early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import (
    PostprocessorError,
    RecomputeError,
    Recorder,
    RecordingError,
    open_recording,
)
from scio_recorder.reductions import Max
from scio_recorder.stores import Disk
from tests.recording.nets import batches, interrupt, recorder_of


class Chain(nn.Module):
    """Three layers with room behind them, counting how far passes come."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.last = nn.Linear(5, 3)
        self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.block(self.first(x)))
        self.ends += 1
        return out


def chain(*selectors: Any, **options: Any) -> Recorder:
    torch.manual_seed(3)
    rnet = Recorder(Chain().eval(), input_size=(2, 4))
    rnet.record(*selectors, **options)
    return rnet


def clipped(net: Chain, data: list[Tensor]) -> dict[str, Tensor]:
    """Compose what layers return where `first` is clipped and the output of `block` is doubled."""
    found: dict[str, list[Tensor]] = {"first": [], "block.0": [], "block": [], "last": []}
    with torch.no_grad():
        for x in data:
            found["first"].append(net.first(x))
            found["block.0"].append(net.block[0](found["first"][-1].clamp(max=0.1)))
            found["block"].append(net.block[1](found["block.0"][-1]))
            found["last"].append(net.last(found["block"][-1] * 2))
    return {name: torch.cat(values) for name, values in found.items()}


POSTS = {"first": lambda t: t.clamp(max=0.1), "block": lambda t: t * 2}


@pytest.mark.parametrize("store", ["host", "device", "disk"])
@pytest.mark.parametrize("inputs", [False, True])
def test_passes_are_post_processed(store, inputs, tmp_path):
    rnet, data = chain("first", "block", "last", inputs=inputs), batches(4, 4, 3, 4)
    given = Disk(tmp_path / "run", chunk_bytes=100) if store == "disk" else store
    recording = rnet.collect(data, store=given, activation_postproc=POSTS)
    wanted = clipped(rnet.net, data)
    for name in ("first", "block", "last"):
        assert torch.equal(recording[name][:], wanted[name])
    if inputs:
        (given_to_last,) = recording.inputs["last"][0].args
        assert torch.equal(given_to_last, wanted["block"][:4] * 2)


def test_one_for_all_layers_a_list_and_in_place():
    rnet, data = chain("first", "block"), batches(4, 3)
    doubled = rnet.collect(data, activation_postproc=lambda t: t * 2)
    listed = rnet.collect(data, activation_postproc=[lambda t: t * 2] * 2)
    in_place = rnet.collect(data, activation_postproc=lambda t: t.mul_(2))
    with torch.no_grad():
        first = [rnet.net.first(x) for x in data]
        block = [rnet.net.block(x * 2) for x in first]
    for recording in (doubled, listed):
        assert torch.equal(recording["first"], torch.cat(first))
        assert torch.equal(recording["block"], torch.cat(block))
    # As in a pass that is recorded: it is not given a copy.
    assert torch.equal(in_place["first"], torch.cat(first) * 2)
    assert torch.equal(in_place["block"], torch.cat(block) * 2)


def test_a_resume_asks_for_the_post_processors_again(tmp_path):
    rnet, data = chain("first", "block", "last"), batches(4, 4, 3, 4)
    store = Disk(tmp_path / "run", chunk_bytes=100)
    interrupt(rnet, data, store, 2, activation_postproc=POSTS)
    others = [None, {"first": torch.neg}, {"block": torch.neg}, torch.neg]
    for other in others:
        with pytest.raises(RecordingError, match="postprocessors"):
            rnet.collect(data, store=store, activation_postproc=other, resume=True)
    recording = rnet.collect(
        data, store=store, activation_postproc=POSTS, stop_early=True, resume=True
    )
    wanted = clipped(rnet.net, data)
    assert recording.complete
    for name in ("first", "block", "last"):
        assert torch.equal(recording[name][:], wanted[name])


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_what_ran_post_processed_runs_so_again(kind, tmp_path):
    rnet, data = chain("0-1", "first", "block", inputs=True), batches(4, 3)
    recording = rnet.collect(data, activation_postproc={"first": POSTS["first"]})
    if kind == "disk":
        recording.save(tmp_path / "run")
        recording = open_recording(tmp_path / "run")
    rnet.record()
    with torch.no_grad():
        inner = [rnet.net.block[0](rnet.net.first(x).clamp(max=0.1)) for x in data]
        last = [rnet.net.last(rnet.net.block[1](x)) for x in inner]
    again = {"first": POSTS["first"]}
    found = recording.recompute(rnet, "last", "block.0", activation_postproc=again)
    assert torch.equal(found["block.0"], torch.cat(inner))
    assert torch.equal(found["last"], torch.cat(last))
    for other in (None, {"block": torch.neg}):
        with pytest.raises(RecomputeError, match="activation_postproc"):
            recording.recompute(rnet, "last", activation_postproc=other)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([torch.neg], PostprocessorError),
        ({"last": torch.neg}, PostprocessorError),
        (3, PostprocessorError),
        ({"first": 3}, PostprocessorError),
    ],
)
def test_post_processors_that_can_not_be_assigned(given, error, tmp_path):
    rnet = chain("first", "block")
    with pytest.raises(error):
        rnet.collect(batches(2), store=f"disk:{tmp_path}/run", activation_postproc=given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("store", ["host", "disk", None])
@pytest.mark.parametrize("inputs", [False, True])
def test_passes_stop_behind_the_last_recorded_layer(store, inputs, tmp_path):
    rnet, data = chain("first", "block.0", inputs=inputs), batches(4, 4, 3)
    given = f"disk:{tmp_path}/run" if store == "disk" else store
    reduce = Max() if store is None else None
    rnet.net.ends = 0
    recording = rnet.collect(data, store=given, reduce=reduce, stop_early=True)
    assert rnet.net.ends == 0
    wanted = [rnet.net.first(x).detach() for x in data]
    inner = [rnet.net.block[0](x).detach() for x in wanted]
    for name, values in (("first", wanted), ("block.0", inner)):
        whole = torch.cat(values)
        assert torch.equal(recording[name][:], whole.amax(0) if store is None else whole)
    rnet.collect(data)
    assert rnet.net.ends == 3


class Force(nn.Module):
    """Differentiates in its forward, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.energy(x).sum(), x)
        return -gradient


@pytest.mark.parametrize("store", ["host", "device", "disk"])
@pytest.mark.parametrize("options", [{}, {"transform": lambda t, batch: t * 2}, {"reduce": Max()}])
def test_layers_that_run_with_gradients_on(store, options, tmp_path):
    torch.manual_seed(3)
    rnet = recorder_of(Force().eval(), "*", input_size=(2, 4))
    data = batches(4, 4, 4, 3)
    given = f"disk:{tmp_path}/run" if store == "disk" else store
    recording = rnet.collect(data, store=given, **options)
    inner = torch.cat([rnet.net.energy[0](x).detach() for x in data])
    outer = torch.cat([rnet.net(x) for x in data])
    for name, wanted in (("energy.0", inner), ("0-1", outer)):
        if "transform" in options:
            wanted = wanted * 2
        found = recording[name][:]
        assert torch.equal(found, wanted.amax(0) if "reduce" in options else wanted)
        assert not found.requires_grad
