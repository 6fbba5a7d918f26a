"""A sweep over every layer of every net of the zoo, beside the loop by hand, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scio_recorder import Recorder
from tests.analysis.sweeping import ByHand, weighed
from tests.harness import executed, make_recorder, trace
from tests.oracle import differences, seed_everything, tensors
from tests.zoo import CASES, Case


def given(inputs: tuple[Any, Any]) -> Any:
    args, kwargs = inputs
    return (args, kwargs) if args and kwargs else kwargs or args


def sweepable(case: Case, training: bool) -> tuple[Recorder, ByHand]:
    net = case.fresh().train(training)
    rnet = make_recorder(net, case, training=training, force_static_flow=case.static_flow)
    return rnet, ByHand(case.fresh, weighed, training=training)


# What these modules return in training mode or leave behind, they don't in evaluation mode.
TRAINED = ("batch_norm", "dropout", "spectral", "checkpointed", "random", "counts")
# A patch is off the graph that these nets make for themselves.
DIFFERENTIATING = ("energy_gradient", "leaf_made_inside")
RUNS = [
    pytest.param(case, training, marks=() if number % 8 == 0 else pytest.mark.campaign)
    for number, case in enumerate(CASES)
    for training in (False, True)
    if not case.hooks_change_kernel
    and case.name not in DIFFERENTIATING
    and (not training or case.name.startswith(TRAINED))
]


@pytest.mark.parametrize(
    ("case", "training"), RUNS, ids=lambda value: "train" * value if value in (0, 1) else str(value)
)
def test_sweep_is_the_loop_by_hand(case: Case, training: bool) -> None:
    rnet, hand = sweepable(case, training)
    clean, corrupted = case.inputs(1), case.inputs(2)
    clean_metric, found = hand.run(clean)
    corrupted_metric, _ = hand.run(corrupted)
    keys = {label: (layer.name, layer.call) for label, layer in rnet.architecture.items()}
    rnet.record(
        # Parts of a structure that overlap don't in a patch, and what has no tensor has none.
        *(at for at in executed(rnet) if tensors(found[keys[at]]) and keys[at][0] != "split")
    )
    seed_everything(5)
    before = trace(rnet.net)
    effects = rnet.sweep(given(clean), given(corrupted), weighed)
    assert not differences(trace(rnet.net), before)
    wanted = [hand.patched(corrupted, keys[at], found[keys[at]]) for at in rnet.recording]
    assert effects.labels == rnet.recording
    own = [effects.clean, effects.corrupted, *effects.values.tolist()]
    np.testing.assert_array_equal(own, [clean_metric, corrupted_metric, *wanted])
