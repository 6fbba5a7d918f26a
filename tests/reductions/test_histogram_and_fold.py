"""What only histograms and folds do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions import Fold, Histogram, Last


def test_range_of_the_first_batch() -> None:
    first, second = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 2.0], [9.0, 8.0]])
    histogram = Histogram(4)
    histogram.update(first)
    histogram.update(second)
    counts, edges, below, above = histogram.compute()
    assert edges.tolist() == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert counts.tolist() == [1, 0, 1, 1]
    assert (below, above) == (1, 2)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e30])
def test_range_of_a_constant_first_batch(value: float) -> None:
    histogram = Histogram(3)
    histogram.update(torch.full((2, 2), value, dtype=torch.float64))
    counts, edges, below, above = histogram.compute()
    assert (edges.diff() > 0).all()
    assert counts.tolist() == [0, 4, 0]
    assert (below, above) == (0, 0)


def test_a_state_of_a_version_that_did_not_count_nans() -> None:
    older, restored = Histogram(2, range=(0.0, 1.0)), Histogram(2, range=(0.0, 1.0))
    older.update(torch.tensor([0.1, 0.9, 7.0]))
    state = older.state_dict()
    assert state.pop("nans").tolist() == [0]
    restored.load_state_dict(state)
    restored.update(torch.tensor([0.2]))
    counts, _, below, above = restored.compute()
    assert (counts.tolist(), below, above) == ([2, 1], 0, 1)


def test_infinite_values_lie_outside() -> None:
    histogram = Histogram(2)
    histogram.update(torch.tensor([-torch.inf, 0.0, 1.0, torch.inf, torch.inf]))
    counts, edges, below, above = histogram.compute()
    assert edges.tolist() == [0.0, 0.5, 1.0]
    assert (counts.tolist(), below, above) == ([1, 1], 1, 2)


def test_many_values_of_another_layout() -> None:
    values = torch.randn(70, 40, 50).transpose(1, 2)
    histogram = Histogram(11, range=(-2.0, 2.0))
    histogram.update(values)
    exact = np.histogram(values.double().numpy(), 11, range=(-2.0, 2.0))[0]
    assert histogram.compute().counts.tolist() == exact.tolist()


@pytest.mark.parametrize(
    "samples", [torch.full((2,), torch.nan), torch.full((2,), torch.inf), torch.ones(2, 0)]
)
def test_no_range_in_the_first_batch(samples: Tensor) -> None:
    with pytest.raises(CollectError, match=r"no finite value; give range=\(low, high\)"):
        Histogram(3).update(samples)


@pytest.mark.parametrize("range_", [(1.0, 1.0), (2.0, 1.0), (0.0, float("inf")), 10, (1.0,)])
def test_impossible_ranges(range_: Any) -> None:
    with pytest.raises(CollectError, match="low < high"):
        Histogram(3, range=range_)


@pytest.mark.parametrize("fn", [None, 3, len])
def test_a_fold_needs_a_function_of_two_arguments(fn: Any) -> None:
    with pytest.raises(CollectError, match=r"\(accumulator, activation\)"):
        Fold(fn)


@pytest.mark.parametrize("bins", [0, -1, 2.5])
def test_impossible_bins(bins: int) -> None:
    with pytest.raises(CollectError, match=r"bins=.*from 1 on"):
        Histogram(bins)


def test_merging_unequal_ranges() -> None:
    one, two = Histogram(2), Histogram(2)
    one.update(torch.tensor([0.0, 1.0]))
    two.update(torch.tensor([0.0, 2.0]))
    with pytest.raises(CollectError, match=r"\(0.0, 2.0\).*\(0.0, 1.0\).*range="):
        one.merge(two)


def keep_all(accumulator: list[Tensor] | None, activation: Tensor) -> list[Tensor]:
    return [*(accumulator or []), activation]


def test_fold_may_keep_what_it_is_given() -> None:
    fold = Fold(keep_all)
    activation = torch.ones(2, 1)
    for value in (1.0, 2.0):
        fold.update(activation.fill_(value))
    assert [kept.tolist() for kept in fold.compute()] == [[[1.0], [1.0]], [[2.0], [2.0]]]


def test_fold_without_merge() -> None:
    one, two = Fold(keep_all), Fold(keep_all)
    two.update(torch.ones(1))
    one.merge(two)  # nothing to join with
    assert len(one.compute()) == 1
    with pytest.raises(CollectError, match=r"keep_all.*Fold\(fn, merge=function\)"):
        one.merge(two)


def test_fold_whose_merge_returns_what_it_was_given() -> None:
    def add(accumulator: Tensor | None, activation: Tensor) -> Tensor:
        return activation if accumulator is None else accumulator.add_(activation)

    one, two = Fold(add, merge=lambda _, theirs: theirs), Fold(add)
    one.update(torch.ones(1))
    two.update(torch.ones(1))
    one.merge(two)
    one.update(torch.ones(1))
    assert (one.compute().item(), two.compute().item()) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("accumulator", "part"),
    [(object(), "object"), ({b"key": 3}, "bytes"), ([{1}], "set")],
    ids=["object", "key", "set"],
)
def test_fold_whose_accumulator_cannot_be_stored(accumulator: Any, part: str) -> None:
    fold = Fold(lambda _, __: accumulator)
    fold.update(torch.ones(1))
    with pytest.raises(CollectError) as caught:
        fold.state_dict()
    assert part in str(caught.value)


def test_fold_whose_function_returns_nothing() -> None:
    one, two = (Fold(lambda _, __: None, merge=lambda _, __: None) for _ in range(2))
    for fold in (one, two):
        fold.update(torch.ones(1))
    one.merge(two)
    two.load_state_dict(one.state_dict())
    assert one.compute() is None
    assert two.compute() is None


def test_fold_copies_objects_of_any_kind() -> None:
    def count(numbers: Counter[float] | None, activation: Tensor) -> Counter[float]:
        numbers = Counter() if numbers is None else numbers
        numbers.update(activation.tolist())
        return numbers

    one, two = (Fold(count, merge=lambda own, others: own + others) for _ in range(2))
    two.update(torch.ones(2))
    one.merge(two)
    one.update(torch.ones(1))
    assert (one.compute(), two.compute()) == (Counter({1.0: 3}), Counter({1.0: 2}))


def test_fold_shares_its_functions_with_fresh_ones() -> None:
    class Counter:
        calls = 0

        def __call__(self, accumulator: int | None, activation: Tensor) -> int:
            self.calls += 1
            return (accumulator or 0) + len(activation)

    counter = Counter()
    fold = Fold(counter)
    fold.fresh().update(torch.ones(3))
    assert counter.calls == 1


def test_last_takes_any_shape_and_merges_as_the_later_one() -> None:
    one, two = Last(), Last()
    one.update(torch.ones(2, 3))
    one.update(torch.ones(1, 2))
    assert one.compute().shape == (1, 2)
    two.update(torch.zeros(4))
    one.merge(two)
    assert torch.equal(one.compute(), torch.zeros(4))


def test_a_state_over_another_range_is_not_loaded() -> None:
    state = Histogram(2, range=(0.0, 1.0))
    state.update(torch.tensor([0.1, 0.9]))
    other = Histogram(2, range=(0.0, 2.0))
    with pytest.raises(CollectError, match=r"bins=2, range=\[0.0, 2.0\]\), .* when the state"):
        other.load_state_dict(state.state_dict())
