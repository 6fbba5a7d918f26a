"""Split and merged data far from zero, in many blocks, and of two dtypes, beside float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scio_recorder.reductions import (
    Covariance,
    Mean,
    Moments,
    Quantiles,
)
from tests.reductions.parts import Plan, offset_normal, plans, reduce_in_parts

COUNT = 40
MAPS = offset_normal(COUNT, 3, 4, 2)
few = settings(max_examples=40)


def assert_near(result: Tensor, exact: Tensor, scale: Tensor | float = 1.0) -> None:
    assert result.shape == exact.shape
    assert ((result.double() - exact).abs() <= 1e-6 * scale).all()


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


def test_equal_values_have_no_variance_and_never_a_negative_one() -> None:
    moments, values = Moments(), torch.rand(1000, dtype=torch.float64)
    for _ in range(50):
        # The mean of seven equal values is another one for many of these.
        moments.update(values.expand(7, -1))
    variance = moments.compute().variance
    assert (variance >= 0).all()
    assert (variance <= 1e-30 * values.square()).all()
