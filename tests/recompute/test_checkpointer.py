"""Recomputed activations against those of a plain loop."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from scio_recorder import ActivationCheckpointer, CheckpointConfig, RecomputeError
from scio_recorder.errors import ArgumentError
from tests.oracle import differences, freeze, generator_states, same_bits

LAYERS = nn.ModuleList(
    nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True)) for _ in range(9)
)


def forward(x: Tensor, index: int) -> Tensor:
    return LAYERS[index](x)  # type: ignore[no-any-return]


def plain(x: Tensor, layers: Any) -> dict[int, Tensor]:
    found = {}
    for index in layers:
        x = forward(x, index)
        found[index] = x.detach().clone()
    return found


@settings(max_examples=25)
@given(every=st.integers(1, 10), count=st.integers(1, 9), seed=st.integers(0, 9))
def test_every_activation_comes_back_bit_for_bit(every: int, count: int, seed: int) -> None:
    x, layers = torch.randn(3, 4), range(count)
    checkpointer = ActivationCheckpointer(CheckpointConfig(every=every))
    torch.manual_seed(seed)
    truth = plain(x, layers)
    torch.manual_seed(seed)
    output = checkpointer.checkpointed_forward(x, layers, forward)
    assert same_bits(output, truth[count - 1])
    boundaries = [i for i in layers if i % every == 0]
    assert [i for i in layers if checkpointer.is_checkpoint_layer(i)] == boundaries
    assert checkpointer.num_checkpoints == len(boundaries)
    assert checkpointer.memory_stored_bytes == len(boundaries) * 48
    assert checkpointer.memory_saved_bytes == (count - len(boundaries)) * 48
    before = generator_states()
    for index in layers:
        assert same_bits(
            checkpointer.recompute_from_checkpoint(index, layers, forward), truth[index]
        )
    for index in boundaries:
        assert same_bits(checkpointer.get(index), truth[index])
    assert not differences(generator_states(), before)


def test_all_generators_are_those_of_the_forward() -> None:
    def noisy(x: Tensor, _: int) -> Tensor:
        return x + torch.rand(3) + float(np.random.random()) + random.random()

    checkpointer = ActivationCheckpointer()
    output = checkpointer.checkpointed_forward(torch.zeros(3), range(3), noisy)
    assert torch.equal(checkpointer.recompute_from_checkpoint(2, range(3), noisy), output)


def test_order_is_that_of_the_list() -> None:
    layers = [8, 5, 3, 4, 1]
    checkpointer = ActivationCheckpointer(CheckpointConfig(every=4))
    torch.manual_seed(3)
    truth = plain(torch.ones(2, 4), layers)
    torch.manual_seed(3)
    checkpointer.checkpointed_forward(torch.ones(2, 4), layers, forward)
    calls: list[int] = []

    def counted(x: Tensor, index: int) -> Tensor:
        calls.append(index)
        return forward(x, index)

    assert same_bits(checkpointer.recompute_from_checkpoint(3, layers, counted), truth[3])
    assert same_bits(checkpointer.recompute_from_checkpoint(1, layers, counted), truth[1])
    assert same_bits(checkpointer.recompute_from_checkpoint(4, layers, counted), truth[4])
    assert calls == [5, 3, 1]


def test_what_is_kept_is_out_of_reach_of_in_place_work() -> None:
    def add(x: Tensor, _: int) -> Tensor:
        return x.add_(1)

    checkpointer = ActivationCheckpointer(CheckpointConfig(every=2))
    checkpointer.checkpointed_forward(torch.zeros(2), range(4), add)
    for _ in range(2):
        assert checkpointer.get(0).tolist() == [1, 1]
        assert checkpointer.recompute_from_checkpoint(1, range(4), add).tolist() == [2, 2]
        checkpointer.get(0).zero_()
    given = torch.ones(2)
    checkpointer.save(0, given)
    given.zero_()
    assert checkpointer.get(0).tolist() == [1, 1]


def test_a_new_forward_drops_what_was_kept() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(every=2))
    checkpointer.save(7, torch.ones(2))
    checkpointer.checkpointed_forward(torch.ones(1, 4), [0, 1], forward)
    with pytest.raises(RecomputeError):
        checkpointer.get(7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
def test_mixed_precision_keeps_bfloat16_and_gives_the_dtype_back(dtype: torch.dtype) -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(mixed_precision=True))
    values = torch.tensor([1.0, 3.14159, -100.7]).to(dtype)
    checkpointer.save(0, values)
    kept = checkpointer.get(0)
    assert kept.dtype == dtype
    if dtype.is_floating_point and dtype.itemsize > 2:
        assert same_bits(kept, values.to(torch.bfloat16).to(dtype))
        assert checkpointer.memory_stored_bytes == 6
    else:
        assert same_bits(kept, values)
        assert checkpointer.memory_stored_bytes == 3 * dtype.itemsize


def test_structures_are_kept_whole() -> None:
    def both(x: dict[str, Tensor], _: int) -> dict[str, Tensor]:
        return {"a": x["a"] + x["b"], "b": x["b"] * 2}

    checkpointer = ActivationCheckpointer(CheckpointConfig(every=2))
    start = {"a": torch.ones(2), "b": torch.ones(2)}
    output = checkpointer.checkpointed_forward(start, range(4), both)
    assert not differences(
        freeze(checkpointer.recompute_from_checkpoint(3, range(4), both)), freeze(output)
    )
    assert checkpointer.memory_stored_bytes == checkpointer.memory_saved_bytes == 2 * 16


def test_nothing_kept_holds_the_graph() -> None:
    class Payload:
        pass

    alive: weakref.WeakSet[Payload] = weakref.WeakSet()

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.payload = Payload()
            alive.add(ctx.payload)
            return x * 2

    checkpointer = ActivationCheckpointer(CheckpointConfig(every=1))
    x = torch.ones(2, requires_grad=True)
    checkpointer.checkpointed_forward(x, range(3), lambda x, _: Marked.apply(x))
    gc.collect()
    assert not alive
    assert not checkpointer.get(2).requires_grad


def test_what_is_kept_later_goes_on_with_the_random_numbers_of_the_run() -> None:
    LAYERS.train()
    checkpointer, x = ActivationCheckpointer(CheckpointConfig(every=4)), torch.randn(2, 4)
    torch.manual_seed(3)
    expected = plain(x, range(8))
    torch.manual_seed(3)
    checkpointer.checkpointed_forward(x, range(8), forward)
    checkpointer.save(2, checkpointer.recompute_from_checkpoint(2, range(8), forward))
    assert same_bits(checkpointer.recompute_from_checkpoint(3, range(8), forward), expected[3])


def test_a_limit_is_for_layers_that_are_no_boundaries() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(every=4, max_checkpoints=1))
    checkpointer.save(1, torch.ones(1))
    checkpointer.save(1, torch.zeros(1))
    with pytest.raises(
        RecomputeError, match=r"layer 2 is not a boundary.*every=4.*max_checkpoints=1"
    ):
        checkpointer.save(2, torch.ones(1))
    checkpointer.save(4, torch.ones(1))
    checkpointer.save(8, torch.ones(1))
    assert checkpointer.num_checkpoints == 3
    assert checkpointer.get(1).item() == 0
    checkpointer.checkpointed_forward(torch.ones(1, 4), range(9), forward)
    assert checkpointer.num_checkpoints == 3


def test_what_can_not_be_recomputed_is_a_lookup_error() -> None:
    checkpointer = ActivationCheckpointer(CheckpointConfig(every=4))
    with pytest.raises(LookupError, match="no activation of layer 3 is kept; kept layers: none"):
        checkpointer.get(3)
    with pytest.raises(RecomputeError, match="at or before layer 2"):
        checkpointer.recompute_from_checkpoint(2, range(4), forward)
    checkpointer.checkpointed_forward(torch.ones(1, 4), [1, 2, 3, 4, 5], forward)
    with pytest.raises(RecomputeError, match=r"at or before layer 3; kept layers: \[4\]"):
        checkpointer.recompute_from_checkpoint(3, [1, 2, 3, 4, 5], forward)
    with pytest.raises(RecomputeError, match="layer 9 is not among"):
        checkpointer.recompute_from_checkpoint(9, range(4), forward)
    for run in (checkpointer.recompute_from_checkpoint, checkpointer.checkpointed_forward):
        with pytest.raises(RecomputeError, match=r"layers \[1\] appear more than once"):
            run(1, [0, 1, 1], forward)


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": True}, {"every": 1.5}, {"max_checkpoints": -1}]
)
def test_senseless_configurations_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CheckpointConfig(**options)
    assert ActivationCheckpointer().config == CheckpointConfig(4, None, False)


@pytest.mark.parametrize("layer", [True, -1, 2.0, "2", None])
def test_what_is_no_index_is_refused(layer: Any) -> None:
    with pytest.raises(ArgumentError, match=r"layer=.*give a whole number from 0 on"):
        ActivationCheckpointer().save(layer, torch.ones(2))
