"""Rank errors within half a percent, whatever the data, the split and the order of merging."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions import Quantiles
from scio_recorder.reductions.distributions import _read
from tests.reductions.parts import Plan, plans, reduce_in_parts

Q = [0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0]
COUNT = 60_000

SHAPES: dict[str, Callable[[int], Tensor]] = {
    "sorted": lambda count: torch.arange(count).float(),
    "reversed": lambda count: -torch.arange(count).float(),
    "random": torch.randn,
    "constant": lambda count: torch.full((count,), 3.5),
    "ties": lambda count: torch.randint(0, 4, (count,)).float(),
    "mostly zero": lambda count: torch.randn(count).relu() * (torch.rand(count) > 0.9),
    "heavy tails": lambda count: torch.randn(count) / torch.rand(count) ** 3,
    "infinite": lambda count: torch.where(torch.rand(count) < 0.3, torch.inf, torch.randn(count)),
    "zigzag": lambda count: torch.arange(count).float() * (-1) ** torch.arange(count),
    "organ pipe": lambda count: -(torch.arange(count) - count / 2).abs(),
}


def rank_errors(result: Tensor, values: Tensor) -> np.ndarray:
    """Return how far, in shares of all values, each q lies outside the ranks of its result."""
    ordered = np.sort(values.double().numpy())
    found = result.double().numpy()
    below = np.searchsorted(ordered, found, side="left") / len(ordered)
    upto = np.searchsorted(ordered, found, side="right") / len(ordered)
    q = np.array(Q)
    return np.maximum(0, np.maximum(below - q, q - upto))


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=4)
@given(plan=plans(COUNT))
def test_rank_error_over_all_values(name: str, plan: Plan) -> None:
    torch.manual_seed(0)
    values = SHAPES[name](COUNT)
    result = reduce_in_parts(lambda: Quantiles(Q), values, plan).compute()
    assert rank_errors(result, values).max() <= 0.005
    assert result[0] == values.min()
    assert result[-1] == values.max()


@settings(max_examples=6)
@given(plan=plans(30_000))
def test_rank_error_of_each_feature(plan: Plan) -> None:
    torch.manual_seed(0)
    values = torch.stack([make(30_000) for make in SHAPES.values()], dim=1)
    result = reduce_in_parts(lambda: Quantiles(Q, feature_dim=1), values, plan).compute()
    assert result.shape == (len(Q), len(SHAPES))
    for feature in range(len(SHAPES)):
        assert rank_errors(result[:, feature], values[:, feature]).max() <= 0.005


@settings(max_examples=10)
@given(order=st.permutations(range(24)))
def test_rank_error_of_many_full_reductions_merged_in_any_order(order: list[int]) -> None:
    # Each has two levels and a rest, so that merging carries through several levels.
    values = torch.arange(24 * 9000).float()
    merged = Quantiles(Q, feature_dim=1)
    for start in order:
        one = Quantiles(Q, feature_dim=1)
        one.update(values[start * 9000 : (start + 1) * 9000].unsqueeze(1))
        merged.merge(one)
    assert rank_errors(merged.compute().squeeze(1), values).max() <= 0.005


def test_stated_bound_holds_for_every_rank() -> None:
    # N / block = 32, s = 2048: (2 + 5) / 4096 of N.
    count = 32 * 4096
    values = torch.randperm(count).float()
    q = torch.linspace(0, 1, 2001)
    quantiles = Quantiles(q.tolist(), feature_dim=1)
    quantiles.update(values.unsqueeze(1))
    error = (quantiles.compute().squeeze(1) - q * (count - 1)).abs().max() / count
    assert error <= 7 / 4096


def test_merging_with_itself_keeps_the_ranks() -> None:
    values = torch.randn(3 * 4096 + 100)
    quantiles = Quantiles(Q, feature_dim=1)
    quantiles.update(values.unsqueeze(1))
    quantiles.merge(quantiles)
    assert rank_errors(quantiles.compute().squeeze(1), values).max() <= 0.005
    summaries = quantiles.state_dict()["summaries"]
    assert sum(2**level for level, one in enumerate(summaries) if one.numel()) == 6


def test_thinning_takes_the_middle_of_each_group_from_both_sides() -> None:
    ordered = torch.arange(32.0).unsqueeze(0)
    quantiles = Quantiles(0.5)
    assert quantiles._thin(ordered, 16).tolist() == [[8.0, 24.0]]
    assert quantiles._thin(ordered, 16).tolist() == [[7.0, 23.0]]
    assert quantiles._thin(ordered[:, :4], 2).tolist() == [[1.0, 3.0]]
    assert quantiles._thin(ordered[:, :4], 2).tolist() == [[0.0, 2.0]]


def test_a_heavy_value_sits_in_the_middle_of_its_ranks() -> None:
    # Of ranks 0 to 5, 20 stands for 3 to 5 and 10 for 0 to 2.
    # The ends are 4 and 26.
    values, weights = np.array([20.0, 10.0, 4.0, 26.0]), np.array([3.0, 3.0])
    result = _read(values, weights, np.array([0.0, 0.1, 0.2, 0.5, 0.8, 1.0]))
    np.testing.assert_allclose(result, [4.0, 7.0, 10.0, 15.0, 20.0, 26.0])


def test_memory_grows_with_the_logarithm() -> None:
    quantiles = Quantiles([0.5], feature_dim=1)
    for _ in range(64):
        quantiles.update(torch.randn(4096, 1))
    kept = sum(summary.numel() for summary in quantiles.state_dict()["summaries"])
    assert kept == 2048  # 64 blocks make one summary of level 6


def test_values_keep_coming_after_a_result() -> None:
    values = torch.arange(10_000.0)
    quantiles = Quantiles(Q, feature_dim=-1)
    for part in values.unsqueeze(1).split(700):
        quantiles.update(part)
        quantiles.compute()
    assert rank_errors(quantiles.compute().squeeze(1), values).max() <= 0.005


def test_a_wider_dtype_halfway() -> None:
    quantiles = Quantiles([1.0])
    quantiles.update(torch.zeros(2, 2))
    quantiles.update(torch.full((1, 2), 1 + 1e-12, dtype=torch.float64))
    assert quantiles.compute().tolist() == [1 + 1e-12]


@pytest.mark.parametrize("q", [[], [1.1], -0.1, [float("nan")], None, "median"])
def test_impossible_quantiles(q: Any) -> None:
    with pytest.raises(CollectError, match="from 0 to 1"):
        Quantiles(q)
