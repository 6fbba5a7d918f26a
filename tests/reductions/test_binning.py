"""Values are counted as by a search among NumPy's edges, whatever their type and number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from scio_recorder.reductions.distributions import Bins

INF = float("inf")


def by_hand(values: Tensor, low: float, high: float, count: int) -> list[int]:
    """Search among the edges; the last bin is closed, and NaNs are counted last."""
    edges, numbers = np.linspace(low, high, count + 1), values.double().numpy()
    places = np.searchsorted(edges, numbers, side="right")
    places[numbers == high] = count
    places[np.isnan(numbers)] = count + 2
    return np.bincount(places, minlength=count + 3).tolist()


def awkward(dtype: torch.dtype) -> Tensor:
    """Values on edges and right beside them, zeros of both signs, the smallest and the largest."""
    some = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-300, -1e-300, INF, -INF, 3.0, math.nan])
    edges = torch.from_numpy(np.linspace(-1.0, 3.0, 41)).to(dtype)
    beside = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (-INF, INF)]
    rows = torch.randn(3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([some.to(dtype), edges, *beside, rows.to(dtype), (rows * 1e-3).to(dtype)])


@pytest.mark.parametrize("count", [1, 40, 300])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_counts_are_numpys(dtype: torch.dtype, count: int) -> None:
    values = awkward(dtype)
    for low, high in ((-1.0, 3.0), (0.0, 2.7), (-1e-3, 1e-3), (1e-38, 1e-37)):
        bins = Bins(low, high, count)
        halves = [bins.tally(part) for part in (values[::2], values[1::2])]
        assert torch.equal(values.nan_to_num(), awkward(dtype).nan_to_num())
        assert sum(halves).tolist() == by_hand(values, low, high, count)  # type: ignore[union-attr]


def test_whole_numbers_and_bins_narrower_than_can_be_told_apart() -> None:
    numbers = torch.arange(-3, 9)
    assert Bins(0.0, 5.0, 5).tally(numbers).tolist() == by_hand(numbers, 0.0, 5.0, 5)
    narrow = Bins(1.0, 1.0 + 4e-16, 9).tally(torch.tensor([0.5, 1.0, 1.5]).double())
    assert (int(narrow.sum()), int(narrow[0]), int(narrow[-2])) == (3, 1, 1)


def test_a_range_wider_than_the_largest_number() -> None:
    values = torch.tensor([-1.7e308, -1.0, 0.0, 1.0, 1.7e308], dtype=torch.float64)
    assert Bins(-1.7e308, 1.7e308, 4).tally(values).tolist() == [0, 1, 1, 2, 1, 0, 0]


RANGES = [(1e6, 1e6 + 1e-3), (-1e-30, 3e-30), (-7.3, 1e12), (-3e38, 3e38), (1e-40, 2e-40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("low", "high"), [*RANGES, (3.3, 3.4), (-16.0, 16777216.0)])
@pytest.mark.parametrize("count", [3, 77, 1000])
def test_values_right_beside_edges_far_from_zero(
    low: float, high: float, count: int, dtype: torch.dtype
) -> None:
    edges = torch.from_numpy(np.linspace(low, high, count + 1)).to(dtype)
    beside = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (-INF, INF)]
    ends = torch.tensor([-INF, -1.7e308, -3.4e38, 3.4e38, 1.7e308, INF]).to(dtype)
    values = torch.cat([edges, *beside, ends])
    assert Bins(low, high, count).tally(values).tolist() == by_hand(values, low, high, count)


@pytest.mark.parametrize("number", [1, 7, 96, 3000])
@pytest.mark.parametrize("lanes", [1, 2, 1024])
def test_counters_that_threads_of_an_accelerator_do_not_share(lanes: int, number: int) -> None:
    bins, values = Bins(-1.0, 3.0, 40), awkward(torch.float32)[:number]
    counters = torch.zeros(43, lanes, dtype=torch.int64)
    for _ in range(2):
        bins.count(values, counters)
    assert counters.sum(1).tolist() == [2 * each for each in by_hand(values, -1.0, 3.0, 40)]
    used = math.gcd(number, lanes)
    assert counters.amax() <= max(2, -(-2 * number // used))
    assert not counters[:, used:].any()


def test_a_search_counts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bins, "_is_resolved_in", lambda *_: False)
    values = awkward(torch.float32)
    for low, high, count in ((-1.0, 3.0, 40), (0.0, 2.7, 300), (-1e-3, 1e-3, 1)):
        bins = Bins(low, high, count)
        assert bins.tally(values).tolist() == by_hand(values, low, high, count)


def test_no_value_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bins = Bins(-2.0, 2.0, 50)
    monkeypatch.setattr(torch, "bucketize", None)
    values = torch.randn(1 << 20)
    assert bins.tally(values).tolist() == by_hand(values, -2.0, 2.0, 50)
