"""Active, dead and saturated units, beside counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scio_recorder.errors import CollectError
from scio_recorder.reductions import Alive
from tests.recording.nets import recorder_of

torch.manual_seed(0)
DATA = torch.randn(24, 6, 3).tanh()
DATA[:, 0] = 0
DATA[:, 1] = -0.25
DATA[:23, 2] = 0.995
DATA[:, 3] = -torch.rand(24, 3) - 0.001


def test_dead_and_saturated_channels() -> None:
    alive = Alive(1, (-1, 1))
    for part in DATA.split(7):
        alive.update(part)
    result = alive.compute()
    assert result.dead.tolist() == [True, True, False, False, False, False]
    assert result.saturated is not None
    assert result.saturated.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("bounds", "expected"), [((None, 6), [False, True]), ((0, None), [True, False])]
)
def test_one_bound_is_enough(bounds: Any, expected: list[bool]) -> None:
    alive = Alive(bounds=bounds)
    alive.update(torch.tensor([[0.0, 6.0], [0.0, 5.99]]))
    result = alive.compute()
    assert result.saturated is not None
    assert result.saturated.tolist() == expected


def test_of_one_value_nobody_knows_whether_it_is_dead() -> None:
    alive = Alive()
    alive.update(torch.zeros(1, 2))
    assert not alive.compute().dead.any()
    alive.update(torch.zeros(1, 2))
    assert alive.compute().dead.all()


def test_nan_is_not_dead() -> None:
    alive = Alive()
    alive.update(torch.tensor([[torch.nan, torch.inf], [torch.nan, torch.inf]]))
    result = alive.compute()
    assert not result.dead.any()
    assert result.max_abs.isnan().tolist() == [True, False]
    assert result.at_bound is result.saturated is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (None, 6.0)], ids=str)
def test_bounds_are_not_rounded_to_the_dtype_of_the_values(dtype: torch.dtype, bounds: Any) -> None:
    values = torch.linspace(-1, 6, 5000).to(dtype).unique()[None]
    alive = Alive(bounds=bounds)
    alive.update(values)
    low, high = bounds
    width = 0.01 * (high - (low or 0))
    far = [value > high - width * 1.000001 for value in values[0].tolist()]
    near = [low is not None and value < low + width * 1.000001 for value in values[0].tolist()]
    at_bound = alive.compute().at_bound
    assert at_bound is not None
    assert at_bound.bool().tolist() == [one or other for one, other in zip(far, near, strict=True)]


@pytest.mark.parametrize("bounds", [(1, -1), (None, None), (0, 0), "ab", (1,), ("low", "high")])
def test_bounds_that_are_none_are_refused(bounds: Any) -> None:
    with pytest.raises(CollectError, match="give two numbers"):
        Alive(bounds=bounds)


def test_the_table_of_a_recording_knows_them() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Tanh())
    with torch.no_grad():
        net[0].bias[:] = torch.tensor([-100.0, 1.0, 1.0, -100.0])
        net[2].bias[:] = torch.tensor([90.0, 0.0, 0.0, 0.0, 0.0])
    rnet = recorder_of(net, "1", "2", "3", input_size=(1, 3), verbose=0)
    batches = [torch.randn(8, 3) for _ in range(3)]
    frame = rnet.collect(batches, reduce={"2": Alive()}, progress=False).to_frame()
    relu, linear, tanh = (frame.loc[label] for label in ("1-2", "1-3", "1-4"))
    assert (relu["units"], relu["dead"]) == (4, 2)
    assert (tanh["units"], tanh["dead"], tanh["saturated"]) == (5, 1, 1)
    assert (linear["units"], linear["dead"]) == (5, 0)
    with torch.no_grad():
        outputs = torch.cat([net[:2](batch) for batch in batches])
    assert relu["max_abs"] == pytest.approx(float(outputs.abs().max()))


def test_more_samples_than_single_precision_counts() -> None:
    alive = Alive()
    alive.update(torch.ones(2**24 + 3, 1))
    assert alive.compute().active.item() == 1


def test_samples_of_one_value_are_one_unit() -> None:
    alive = Alive()
    alive.update(torch.tensor([0.0, -2.0, 1.0]))
    alive.update(torch.tensor([1.0]))
    result = alive.compute()
    assert (result.count, result.active.tolist(), result.max_abs.tolist()) == (4, [0.5], [2.0])
