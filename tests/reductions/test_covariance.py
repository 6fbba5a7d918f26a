"""Principal spaces, the buffer's corners, and modes that would spoil a product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions import Covariance, CovarianceResult
from scio_recorder.reductions.covariance import _add_product
from scio_recorder.tensors.properties import float32_products_are_exact
from tests.reductions.parts import offset_normal


def covariance_of(*batches: Tensor, feature_dim: int | None = None) -> CovarianceResult:
    covariance = Covariance(feature_dim)
    for batch in batches:
        covariance.update(batch)
    result = covariance.compute()
    assert isinstance(result, CovarianceResult)
    return result


def scaled_data(dtype: torch.dtype = torch.float64) -> Tensor:
    """Return 50 rows with distinct singular values, far from the origin."""
    mixing = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    scales = torch.tensor([9.0, 7, 5, 3, 2, 1], dtype=torch.float64)
    return (torch.randn(50, 6, dtype=torch.float64) * scales @ mixing + 20).to(dtype)


@pytest.mark.parametrize("k", [0, 2, 6])
def test_principal_space_is_that_of_the_centred_data(k: int) -> None:
    data = scaled_data()
    mean, basis, residual_basis, residual = covariance_of(data[:20], data[20:]).principal(k)
    _, singular, vectors = torch.linalg.svd(data - data.mean(0))
    torch.testing.assert_close(mean, data.mean(0))
    torch.testing.assert_close(residual, singular[k:])
    # Directions have no sign, so their outer products are compared.
    torch.testing.assert_close(basis.T @ basis, vectors[:k].T @ vectors[:k])
    torch.testing.assert_close(residual_basis.T @ residual_basis, vectors[k:].T @ vectors[k:])
    rows = torch.cat([basis, residual_basis])
    torch.testing.assert_close(rows @ rows.T, torch.eye(6, dtype=torch.float64))
    for found, exact in zip(rows, vectors, strict=True):
        assert abs(found @ exact) == pytest.approx(1.0)


def test_principal_space_in_float32() -> None:
    data = scaled_data(torch.float32)
    space = covariance_of(data).principal(3)
    exact = torch.linalg.svdvals((data - data.mean(0)).double())
    assert {field.dtype for field in space} == {torch.float32}
    torch.testing.assert_close(
        space.residual_singular_values.double(), exact[3:], rtol=1e-5, atol=0
    )


def test_principal_space_of_fewer_rows_than_features() -> None:
    data = scaled_data()[:4]
    space = covariance_of(data).principal(0)
    exact = torch.linalg.svdvals(data - data.mean(0))
    # An eigenvalue's error of 1e-16 of the largest shows as its root in a singular value.
    near_zero = 1e-7 * float(exact[0])
    torch.testing.assert_close(
        space.residual_singular_values,
        torch.cat([exact, torch.zeros(2)]),
        rtol=1e-9,
        atol=near_zero,
    )


@pytest.mark.parametrize("k", [-1, 7, 2.0])
def test_principal_space_of_impossible_size(k: Any) -> None:
    with pytest.raises(CollectError, match=f"k={k}.*from 0 "):
        covariance_of(scaled_data()).principal(k)


def test_principal_space_of_one_sample() -> None:
    result = covariance_of(torch.ones(1, 3))
    assert result.covariance.isnan().all()
    with pytest.raises(CollectError, match="at least two samples"):
        result.principal(1)


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last], ids=["strided", "channels_last"]
)
def test_blocks_end_in_the_middle_of_a_sample(layout: torch.memory_format) -> None:
    # 3 x 1600 positions of 256 features, in blocks of 1024 rows.
    maps = offset_normal(3, 256, 40, 40).contiguous(memory_format=layout)
    rows = maps.movedim(1, -1).reshape(-1, 256).double()
    exact = np.cov(rows.numpy().T)
    result = covariance_of(maps[:2], maps[2:], feature_dim=1)
    assert result.count == 4800
    assert np.abs(result.covariance.double().numpy() - exact).max() <= 1e-6 * exact.max()


def test_sequences_of_unequal_length() -> None:
    long, short = torch.randn(4, 7, 3), torch.randn(2, 5, 3)
    rows = torch.cat([long.reshape(-1, 3), short.reshape(-1, 3)]).double()
    result = covariance_of(long, short, feature_dim=-1)
    torch.testing.assert_close(result.covariance.double(), torch.cov(rows.T), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
@pytest.mark.parametrize("row", [0, 200])
def test_nan_and_infinity_stay_in_their_feature(odd: float, row: int) -> None:
    data = torch.randn(300, 70)
    data[row, 5] = odd
    exact = torch.cov(data.double().T)
    exact[5, :] = exact[:, 5] = torch.nan
    result = covariance_of(data[:100], data[100:]).covariance
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_wider_dtype_halfway() -> None:
    data = offset_normal(30, 4)
    result = covariance_of(data[:10], data[10:].double())
    assert result.covariance.dtype == torch.float64
    exact = torch.cov(data.double().T)
    torch.testing.assert_close(result.covariance, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precision_that_the_user_gave_up_for_the_network(precision: str) -> None:
    rows = offset_normal(600, 256, ratio=0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        exact = [float32_products_are_exact(torch.device(kind)) for kind in ("cpu", "cuda")]
        total = torch.zeros(256, 256, dtype=torch.float64)
        _add_product(total, rows)
    finally:
        torch.set_float32_matmul_precision(before)
    assert exact == [precision == "highest"] * 2
    # Not every CPU multiplies in bfloat16; what shows everywhere is float64 in its place.
    error = (total - rows.double().T @ rows.double()).triu().abs().max()
    assert (error < 1e-9) == (precision != "highest")


def test_autocast() -> None:
    data = offset_normal(600, 256)
    exact = np.cov(data.double().numpy().T)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = covariance_of(data[:300], data[300:]).covariance
    assert np.abs(result.double().numpy() - exact).max() <= 1e-6 * exact.max()
