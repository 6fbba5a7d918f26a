"""Recomputing inside the modules of real architectures, of one pass and of two batches.

Each is run once, in training mode (with dropout) or not; in both where the environment variable
`SCIO_RECORDER_FULL_CAMPAIGN` is set to something other than `0`.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from scio_recorder import Recorder
from tests.harness import executed, make_recorder, trace
from tests.oracle import Watch, differences, freeze, leaves
from tests.zoo.base import Case
from tests.zoo.transformers import CASES

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
CHOSEN = [
    pytest.param(
        case,
        training,
        id=f"{case.name}-{'train' if training else 'eval'}",
        marks=[pytest.mark.campaign] * (case.name not in ("gpt2", "vit")),
    )
    for number, case in enumerate(CASES)
    for training in (False, True)
    if FULL or training == bool(number % 2)
]
SEEDS = (1, 2)


def plain(frozen: Any) -> Any:
    """Compare values only: what is recomputed is off the graph."""
    for leaf in leaves(frozen):
        leaf.requires_grad = False
    return frozen


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
@pytest.mark.parametrize(("case", "training"), CHOSEN)
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
