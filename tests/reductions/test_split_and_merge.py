"""Splitting anywhere and merging in any order gives the one-shot result in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scio_recorder.reductions import (
    Covariance,
    Fold,
    Histogram,
    Max,
    Mean,
    Min,
    Moments,
    Quantiles,
)
from tests.reductions.parts import Plan, offset_normal, plans, reduce_in_parts

COUNT = 40
MAPS = offset_normal(COUNT, 3, 4, 2)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
]
WIDE = {torch.float64, torch.int64}

few = settings(max_examples=40)


def data_of(dtype: torch.dtype) -> Tensor:
    values = torch.randn(COUNT, 5, generator=torch.Generator().manual_seed(2)) * 3 + 4
    return (values > 4) if dtype == torch.bool else values.abs().to(dtype)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in WIDE else torch.float32


def assert_near(result: Tensor, exact: Tensor, scale: Tensor | float = 1.0) -> None:
    assert result.shape == exact.shape
    assert ((result.double() - exact).abs() <= 1e-6 * scale).all()


@few
@given(plan=plans(COUNT), dtype=st.sampled_from(DTYPES))
def test_extrema_are_exact_and_keep_the_dtype(plan: Plan, dtype: torch.dtype) -> None:
    data = data_of(dtype)
    assert torch.equal(reduce_in_parts(Min, data, plan).compute(), data.amin(0))
    assert torch.equal(reduce_in_parts(Max, data, plan).compute(), data.amax(0))


@few
@given(plan=plans(COUNT), dtype=st.sampled_from(DTYPES))
def test_mean_and_moments_of_any_dtype(plan: Plan, dtype: torch.dtype) -> None:
    data = data_of(dtype)
    variance, mean = torch.var_mean(data.double(), 0)
    result = reduce_in_parts(Moments, data, plan).compute()
    assert result.count == COUNT
    assert result.mean.dtype == result.variance.dtype == result_dtype(dtype)
    assert_near(result.mean, mean, mean.abs())
    assert_near(result.variance, variance, variance)
    alone = reduce_in_parts(Mean, data, plan).compute()
    assert alone.dtype == result_dtype(dtype)
    assert_near(alone, mean, mean.abs())


@few
@given(plan=plans(COUNT))
def test_moments_far_from_zero(plan: Plan) -> None:
    variance, mean = torch.var_mean(MAPS.double(), 0)
    result = reduce_in_parts(Moments, MAPS, plan).compute()
    assert_near(result.mean, mean, mean)
    assert_near(result.variance, variance, variance)
    assert_near(reduce_in_parts(Mean, MAPS, plan).compute(), mean, mean)


def one_shot(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.cov(rows.double().T)
    deviations = exact.diag().sqrt()
    return rows.double().mean(0), exact, deviations.unsqueeze(1) * deviations


@few
@given(plan=plans(COUNT), feature_dim=st.sampled_from([None, 1, 2, -1]))
def test_covariance_far_from_zero(plan: Plan, feature_dim: int | None) -> None:
    rows = MAPS.movedim(feature_dim, -1).flatten(0, -2) if feature_dim else MAPS.flatten(1)
    mean, exact, scale = one_shot(rows)
    result = reduce_in_parts(lambda: Covariance(feature_dim), MAPS, plan).compute()
    assert result.count == len(rows)
    assert_near(result.mean, mean, mean)
    assert_near(result.covariance, exact, scale)
    assert torch.equal(result.covariance, result.covariance.T)


@few
@given(plan=plans(COUNT), dtype=st.sampled_from(DTYPES))
def test_covariance_of_any_dtype(plan: Plan, dtype: torch.dtype) -> None:
    data = data_of(dtype)
    _, exact, scale = one_shot(data)
    result = reduce_in_parts(Covariance, data, plan).compute()
    assert result.mean.dtype == result.covariance.dtype == result_dtype(dtype)
    assert_near(result.covariance, exact, scale)


@few
@given(plan=plans(COUNT), dtype=st.sampled_from(DTYPES), bins=st.integers(1, 9))
def test_histogram_is_that_of_numpy(plan: Plan, dtype: torch.dtype, bins: int) -> None:
    data = data_of(dtype)
    values = data.double().numpy()
    # Integer data lie on these edges, where rounding would show.
    result = reduce_in_parts(lambda: Histogram(bins, range=(0.0, 6.0)), data, plan).compute()
    counts, edges = np.histogram(values, bins, range=(0.0, 6.0))
    assert result.counts.tolist() == counts.tolist()
    assert result.edges.tolist() == edges.tolist()
    assert (result.below, result.above) == ((values < 0).sum(), (values > 6).sum())


@few
@given(plan=plans(COUNT), dtype=st.sampled_from(DTYPES))
def test_quantiles_of_little_data_are_exact(plan: Plan, dtype: torch.dtype) -> None:
    data = data_of(dtype)
    q = [0.0, 0.13, 0.5, 0.9, 1.0]
    exact = torch.tensor(q, dtype=torch.float64)
    overall = reduce_in_parts(lambda: Quantiles(q), data, plan).compute()
    each = reduce_in_parts(lambda: Quantiles(q, feature_dim=1), data, plan).compute()
    assert overall.dtype == each.dtype == result_dtype(dtype)
    assert_near(overall, torch.quantile(data.double(), exact), 10)
    assert_near(each, torch.quantile(data.double(), exact, dim=0), 10)


@few
@given(plan=plans(COUNT))
def test_fold_merges_with_the_given_function(plan: Plan) -> None:
    def total(accumulator: Tensor | None, activation: Tensor) -> Tensor:
        added = activation.double().sum(0)
        return added if accumulator is None else accumulator.add_(added)

    fold = reduce_in_parts(lambda: Fold(total, merge=torch.add), MAPS, plan)
    torch.testing.assert_close(fold.compute(), MAPS.double().sum(0))


def test_every_batch_alone_and_far_more_rows_than_a_block() -> None:
    data = offset_normal(2500, 70)
    mean, exact, scale = one_shot(data)
    covariance, moments = Covariance(), Moments()
    for sample in data.split(7):
        covariance.update(sample)
        moments.update(sample)
    assert_near(covariance.compute().covariance, exact, scale)
    assert_near(covariance.compute().mean, mean, mean)
    assert_near(moments.compute().variance, exact.diag(), exact.diag())


@pytest.mark.parametrize("make", [Moments, Covariance], ids=["moments", "covariance"])
def test_a_first_batch_unlike_the_rest(make: type[Moments] | type[Covariance]) -> None:
    data = torch.cat([torch.zeros(1, 3), offset_normal(3000, 3)])
    _, exact, scale = one_shot(data)
    reduction = make()
    for batch in (data[:1], data[1:]):
        reduction.update(batch)
    result = reduction.compute()
    if isinstance(reduction, Covariance):
        assert_near(result.covariance, exact, scale)
    else:
        assert_near(result.variance, exact.diag(), exact.diag())


@pytest.mark.parametrize("make", [Mean, Moments, Covariance, lambda: Quantiles([0.5])])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_merging_two_dtypes_gives_the_wider_one(make, dtypes):
    first, second = make(), make()
    first.update(MAPS.to(dtypes[0]))
    second.update(MAPS.to(dtypes[1]))
    first.merge(second)
    result = first.compute()
    values = [result] if isinstance(result, Tensor) else result[1:]
    assert {value.dtype for value in values} == {torch.float64}
