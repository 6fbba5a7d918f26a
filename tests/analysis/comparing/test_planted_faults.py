"""Faults planted in real architectures are named at their modules, and nothing else is.

Twenty-four faults are planted in six architectures, and 400 in 34 where the environment variable
`SCIO_RECORDER_FULL_CAMPAIGN` is set to something other than `0`::

    SCIO_RECORDER_FULL_CAMPAIGN=1 pytest -n 0 tests/analysis/comparing/test_planted_faults.py
"""

from __future__ import annotations

import copy
import os
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare
from tests.analysis.comparing.planting import FAULTS, plant
from tests.zoo.base import Case, Inputs
from tests.zoo.transformers import CASES, pixels

pytestmark = pytest.mark.campaign
FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
NUM_FAULTS = 400 if FULL else 24


def unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    net: nn.Module = diffusers.UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=8,
        dropout=0.1,
    )
    return net


def noisy_image(seed: int) -> Inputs:
    ((image,), _) = pixels(8)(seed)
    return (), {"sample": image, "timestep": torch.tensor(seed + 3)}


BY_NAME = {case.name: case for case in CASES}
ARCHITECTURES = [BY_NAME[name] for name in ("gpt2", "vit", "t5", "resnet", "mamba")]
ARCHITECTURES += [Case("unet", unet, noisy_image)]
if FULL:
    ARCHITECTURES += [case for case in CASES if case.static_flow and case not in ARCHITECTURES]


@cache
def original(number: int) -> tuple[nn.Module, Recorder, list[Inputs]]:
    """Return a net in which every weight counts, its recorder, and two batches."""
    case = ARCHITECTURES[number]
    net = case.fresh().eval().requires_grad_(False)
    for module in net.modules():
        for parameter in module.parameters(recurse=False):
            parameter.add_(torch.randn(parameter.shape) * 0.1)
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    inputs = [case.inputs(seed) for seed in (1, 2)]
    return net, Recorder(copy.deepcopy(net), input_data=as_batch(inputs[0])), inputs


def as_batch(inputs: Inputs) -> Tensor | dict[str, Any]:
    args, kwargs = inputs
    return args[0] if args else kwargs


@pytest.mark.parametrize("number", range(NUM_FAULTS))
def test_a_planted_fault_is_named_at_its_module(number: int) -> None:
    net, reference, inputs = original(number % len(ARCHITECTURES))
    draw = random.Random(number)
    wanted = list(FAULTS)[(number + number // len(ARCHITECTURES)) % len(FAULTS)]
    # Not every architecture has buffers, say: another kind of fault is planted then.
    kinds = [wanted, *draw.sample(list(FAULTS), len(FAULTS))]
    planted = next(filter(None, (plant(net, kind, inputs, draw) for kind in kinds)))
    batches = [as_batch(each) for each in inputs]
    candidate = Recorder(planted.net, input_data=batches[0])
    difference = compare(reference, candidate, batches)
    first = difference.first
    assert first is not None, planted[1:]
    assert (first.layer.name, first.inputs_equal) == (planted.maker, True), planted[1:]
    assert difference[first.layer.label].differs


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=lambda n: ARCHITECTURES[n].name)
def test_a_copy_differs_in_nothing(number: int, training: bool) -> None:
    net, _, inputs = original(number)
    batches = [as_batch(each) for each in inputs]
    both = [Recorder(copy.deepcopy(net).train(training), input_data=batches[0]) for _ in range(2)]
    difference = compare(*both, batches)
    assert difference.first is None
    assert len(difference) > 10
    assert not [layer for layer in difference.values() if layer.differs or layer.max_abs != 0]
