"""A thousand training steps with gradients, a log, or saved tensors moved: memory stays flat."""

from __future__ import annotations

import gc
import mmap
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import Recorder
from scio_recorder.recompute.saved_tensors import SavedTensors
from scio_recorder.tensors.copies import StridedCopy
from tests.zoo.base import Net

STEPS = 1000
STATM = Path("/proc/self/statm")


def resident() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


def network() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True))
    region = Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=True), inner=nn.Tanh())
    return nn.Sequential(first, region, nn.Linear(64, 8))


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:gradients are missing from the log:UserWarning")
@pytest.mark.skipif(not STATM.exists(), reason="needs /proc to see resident memory")
@pytest.mark.parametrize("kind", ["gradients", "track", "saved_tensors"])
def test_a_thousand_steps_leave_memory_flat(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if everything moved to another device and back.
    monkeypatch.setattr(SavedTensors, "shrink", lambda _, tensor: StridedCopy(tensor))
    net = network()
    x = torch.randn(64, 64)
    rnet = Recorder(net, input_data=x, verbose=0)
    handed_over: list[int] = []
    if kind == "gradients":
        rnet.record("*", gradients=True)
        rnet.on_gradients(lambda gradients: handed_over.append(len(gradients)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        block: AbstractContextManager[Any] = nullcontext()
        if kind == "track":
            block = rnet.track()
        elif kind == "saved_tensors":
            block = rnet.saved_tensors("*")
        optimizer.zero_grad()
        with block as events:
            loss = rnet(x).square().mean()
        loss.backward()
        optimizer.step()
        if kind == "track":
            handed_over.append(sum(event.grad for event in events))

    for _ in range(100):
        step()
    grown = []
    for _ in range(3):
        before = resident()
        for _ in range(STEPS):
            step()
        grown.append(resident() - before)
        # One activation is 16 KiB: steps that left one behind would leave 16 MiB, every time. What
        # allocators and other libraries take, they take once.
        if grown[-1] < 6 << 20:
            break
    else:
        pytest.fail(f"a thousand steps left {grown} bytes")
    if kind != "saved_tensors":
        # The log has no gradient of the module inside the region.
        assert set(handed_over) == {6 if kind == "track" else 7}
        assert len(handed_over) == 100 + STEPS * len(grown)
