"""What recording and its upper rooms need beside the network, as torch's allocator counts it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from scio_recorder import Recorder, compare, reductions
from scio_recorder.analysis.guarding import finite
from scio_recorder.nets.state import untouched

LAYERS, ROWS, WIDTH = 8, 512, 128
OUTPUT = ROWS * WIDTH * 4
WEIGHTS = LAYERS * WIDTH * (WIDTH + 1) * 4
# Numbers such as flags, and what a summary takes.
LITTLE = OUTPUT // 8


def peak(step: Callable[[], object]) -> int:
    """Return the bytes that a step holds at most, beyond those of before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = highest = 0
    for _, change in sorted(changes):
        held += change
        highest = max(highest, held)
    return highest


def guard(rnet: Recorder, x: Tensor) -> None:
    with rnet.guard(gradients=False):
        rnet.net(x)


def collect(rnet: Recorder, x: Tensor) -> None:
    rnet.collect([x, x], store=None, reduce=reductions.Mean(), progress=False)


def sweep(rnet: Recorder, x: Tensor) -> None:
    rnet.sweep(x, -x, lambda output: output.sum())


# What is done, with how many layers, after how many passes, and the bounds in bytes beyond a pass.
NEEDS: dict[str, tuple[Callable[[Recorder, Tensor], object], int, int, tuple[int, int]]] = {
    "wrapping": (
        lambda rnet, x: Recorder(rnet.net, input_data=x, verbose=0),
        *(0, 0),
        (WEIGHTS, WEIGHTS + OUTPUT + LITTLE),  # and a copy of the input
    ),
    "operations": (
        lambda rnet, x: rnet.operations() and None,
        *(0, 0),
        (WEIGHTS, WEIGHTS + 3 * OUTPUT + LITTLE),
    ),
    "a first pass": (lambda rnet, x: rnet(x), LAYERS, 0, (LAYERS * OUTPUT, 2 * LAYERS * OUTPUT)),
    "later passes": (
        lambda rnet, x: rnet(x),
        *(LAYERS, 2),
        ((LAYERS - 2) * OUTPUT, LAYERS * OUTPUT),
    ),
    # Of the first 64 MiB of a pass it can count what is not finite.
    "guard": (guard, 0, 0, (0, LAYERS * OUTPUT + LITTLE)),
    "guard of more": (guard, 0, 0, (0, 2 * OUTPUT + LITTLE)),
    "collecting a mean": (collect, LAYERS, 1, (0, 2 * OUTPUT + LITTLE)),  # rows in float64
    # Clean outputs of all layers, and what is put back after each run.
    "sweep": (sweep, LAYERS, 1, (LAYERS * OUTPUT, WEIGHTS + (LAYERS + 4) * OUTPUT + LITTLE)),
}


@pytest.mark.parametrize("what", NEEDS)
@torch.no_grad()
def test_no_step_needs_more_than_is_said(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "guard of more":
        monkeypatch.setattr(finite, "_KEPT_BYTES", 2 * OUTPUT)
    step, num_layers, num_passes, (least, most) = NEEDS[what]
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).eval()
    x: Any = torch.randn(ROWS, WIDTH)
    rnet = Recorder(net, input_data=x, verbose=0)
    rnet.record(*map(str, range(num_layers)))
    for _ in range(num_passes):
        rnet(x)
    # The records of a pass go when the next one begins.
    rnet(x, dont_record=True)
    bare = peak(lambda: net(x))
    assert bare == 2 * OUTPUT
    assert least <= peak(lambda: step(rnet, x)) - bare <= most


def test_local_errors_take_large_weights_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(LAYERS))).bfloat16()
    port = copy.deepcopy(net)
    port[3].weight.data[0] *= 2
    x = torch.randn(4, 4 * WIDTH).bfloat16()
    sides = [Recorder(each, input_data=x, verbose=0) for each in (net, port)]
    found: list[Any] = []

    def step() -> None:
        found.append(compare(*sides, [x], local=True, progress=False))

    of_one = 4 * (4 * WIDTH) ** 2
    assert peak(step) > LAYERS * of_one
    # As if the network took more than 1 GiB.
    monkeypatch.setattr(untouched, "CLONED_BYTES", 1 << 20)
    assert peak(step) < 6 * of_one  # with what moving one at random takes, most with torch 2.8
    whole, in_turn = ({at: vars(x) for at, x in each.local.items()} for each in found)
    assert whole == in_turn
    assert [fault.layer.name for fault in found[1].faults] == ["3"]
