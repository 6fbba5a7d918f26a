"""Figures of two tensors beside NumPy in float64, and what counts as equal."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scio_recorder import Recorder, compare
from scio_recorder.analysis.comparing import measures
from scio_recorder.analysis.comparing.measures import Tolerance, differ, measure, measure_all
from scio_recorder.errors import ComparisonError

NAN, INF = math.nan, math.inf
ODD = [0.0, -0.0, 1.0, -2.5, 1e-38, 3e38, NAN, INF, -INF]


def numbers(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    array: np.ndarray[Any, np.dtype[np.float64]] = tensor.double().reshape(-1).numpy()
    return array


def draw(dtype: torch.dtype) -> Tensor:
    values = torch.randn(5, 40) * 10
    return values > 0 if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("tolerance", [(0.0, 0.0), (1e-3, 0.0), (0.0, 0.1), (1e-2, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_what_is_different_is_as_in_numpy(
    tolerance: tuple[float, float], dtype: torch.dtype
) -> None:
    pairs = torch.tensor(list(itertools.product(ODD, ODD)), dtype=torch.float64).to(dtype)
    near = torch.randn(500, 1).to(dtype)
    more = torch.cat([near, near + torch.logspace(-7, 1, 500)[:, None].to(dtype)], dim=1)
    one, two = torch.cat([pairs, more]).unbind(1)
    rtol, atol = tolerance
    wanted = ~np.isclose(numbers(two), numbers(one), rtol=rtol, atol=atol, equal_nan=True)
    if not (rtol or atol):
        # Bit for bit, but for NaNs.
        wanted |= np.signbit(numbers(one)) != np.signbit(numbers(two))
        wanted &= ~(np.isnan(numbers(one)) & np.isnan(numbers(two)))
    figures = measure(one, two, Tolerance(rtol, atol))
    assert figures.num_different == wanted.sum()
    assert figures.first == int(wanted.argmax())


def test_numbers_that_begin_at_any_place_in_memory() -> None:
    one, two = torch.arange(9.0), torch.arange(9.0)
    two[7] = 0.0
    for start in range(4):
        figures = measure(one[start : start + 4], two[4 - start : 8 - start], Tolerance())
        wanted = one[start : start + 4] != two[4 - start : 8 - start]
        assert figures.num_different == int(wanted.sum())


@pytest.mark.parametrize("piece", [7, 64, 1 << 16])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.bool, torch.int64]
)
def test_figures_are_numpys(
    piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(measures._PIECE, "cpu", piece)
    one, other = draw(dtype), draw(dtype)
    two = torch.where(torch.rand(5, 40) < 0.5, one, other)
    a, b = numbers(one), numbers(two)
    figures = measure(one, two, Tolerance())
    assert (figures.num_elements, figures.num_different) == (200, (a != b).sum())
    assert figures.max_abs == abs(a - b).max()
    assert figures.first == (a != b).argmax()
    with np.errstate(divide="ignore", invalid="ignore"):
        assert figures.max_rel == np.nan_to_num(abs(a - b) / abs(a), nan=0.0, posinf=INF).max()
    error = np.linalg.norm(a - b) / np.linalg.norm(a)
    assert figures.relative_error == pytest.approx(error, rel=1e-12)
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert figures.cosine == pytest.approx(cosine, rel=1e-12)


@pytest.mark.parametrize(
    ("one", "two", "max_abs", "max_rel", "num_different"),
    [
        ([NAN, 1.0], [NAN, 1.0], 0.0, 0.0, 0),
        ([INF, -INF], [INF, -INF], 0.0, 0.0, 0),
        ([NAN, 1.0], [0.0, 1.0], INF, INF, 1),
        ([0.0, 1.0], [NAN, 1.0], INF, INF, 1),
        ([INF, 1.0], [-INF, 1.0], INF, INF, 1),
        ([0.0, 1.0], [-0.0, 1.0], 0.0, 0.0, 1),
        ([0.0, 1.0], [1e-30, 1.0], 1.0000000031710769e-30, INF, 1),
        ([], [], 0.0, 0.0, 0),
    ],
)
def test_numbers_that_are_none(
    one: Any, two: Any, max_abs: float, max_rel: float, num_different: int
) -> None:
    figures = measure(torch.tensor(one), torch.tensor(two), Tolerance())
    found = (figures.max_abs, figures.max_rel, figures.num_different)
    assert found == (max_abs, max_rel, num_different)
    assert figures.relative_error == (INF if max_abs == INF else pytest.approx(max_abs, abs=1e-29))
    assert not math.isnan(figures.cosine)


@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(atol=0.1)])
def test_many_pairs_at_once_have_figures_of_their_own(
    tolerance: Tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(measures._PIECE, "cpu", 64)
    near = [
        torch.randn(shape) for shape in [(5,), (5,), (3, 7), (5,), (200,), (3, 7), (0,), (200,)]
    ]
    pairs = [(one, one.clone()) for one in near]
    pairs[1][1][2] += 0.05
    pairs[2][1][1:] += 1
    pairs[4][1][77] = NAN
    pairs[5][0][0], pairs[5][1][0] = NAN, NAN
    pairs[7][1][[3, 150]] = INF
    pairs += [(one, one.to(torch.bfloat16)) for one in (near[0], torch.arange(4.0))]
    pairs.append((torch.arange(9), torch.arange(9) + 1))
    pairs += [(torch.tensor(1.0), torch.tensor(other)) for other in (1.0, 3.0, NAN)]
    # The bits of a NaN count for nothing.
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    pairs.append((nans, nans.flip(0)))
    all_figures, all_differ = measure_all(pairs, tolerance), differ(pairs, tolerance)
    for figures, differs, (one, two) in zip(all_figures, all_differ, pairs, strict=True):
        same = np.isclose(numbers(two), numbers(one), rtol=0, atol=tolerance.atol, equal_nan=True)
        assert (figures.num_elements, figures.num_different) == (one.numel(), (~same).sum())
        assert figures.first == (None if same.all() else int(same.argmin()))
        assert differs is not bool(same.all())


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.uint16, torch.complex64]
)
def test_tensors_differ_in_every_dtype(dtype: torch.dtype) -> None:
    one, two = torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 4.0]).to(dtype)
    assert differ([(one, two), (one, one.clone())], Tolerance()) == [True, False]
    assert differ([(one, two), (one, two)], Tolerance(atol=3.0)) == [False, False]
    if dtype is not torch.uint8 and dtype is not torch.uint16:
        other = torch.tensor([1.0, NAN]).to(dtype)
        assert differ([(other, two), (two, other)], Tolerance()) == [True, True]


def test_a_cosine_whose_sums_overflow_is_not_known() -> None:
    large = torch.full((3,), 1e200, dtype=torch.float64)
    assert math.isnan(measure(large, -large, Tolerance()).cosine)


def test_nans_of_other_bits_are_equal() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all()
    assert measure(nans, nans.flip(0), Tolerance()).num_different == 0


def test_two_dtypes_are_compared_as_numbers() -> None:
    one = torch.tensor([0.0, 1.0, 1.00390625, NAN])
    two = torch.tensor([-0.0, 1.0, 1.0, NAN], dtype=torch.bfloat16)
    figures = measure(one, two, Tolerance())
    assert (figures.num_different, figures.max_abs) == (1, 0.00390625)
    assert measure(torch.arange(3), torch.arange(3.0), Tolerance()).num_different == 0


def test_integers_beyond_float64_that_differ_do_so_by_one() -> None:
    one = torch.tensor([2**62 + 1, 5])
    figures = measure(one, torch.tensor([2**62, 5]), Tolerance())
    assert (figures.num_different, figures.max_abs) == (1, 1.0)


def test_complex_numbers() -> None:
    single = torch.zeros(1, 2, dtype=torch.complex128)[:, ::2]
    assert single.stride(1) == 2
    assert measure(single, single + 3j, Tolerance()).max_abs == 3
    one, two = torch.randn(2, 50, dtype=torch.complex64)
    two[:10] = one[:10]
    a, b = one.to(torch.complex128).numpy(), two.to(torch.complex128).numpy()
    figures = measure(one, two, Tolerance())
    assert figures.num_different == 40
    assert figures.max_abs == pytest.approx(abs(a - b).max(), rel=1e-12)
    error = np.linalg.norm(a - b) / np.linalg.norm(a)
    assert figures.relative_error == pytest.approx(error, rel=1e-12)
    assert measure(one.conj(), one.conj(), Tolerance()).num_different == 0
    assert measure(one, one.conj(), Tolerance()).num_different == 50


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", [Tensor.to_sparse, channels_last])
def test_other_layouts(make: Any) -> None:
    one = torch.randn(2, 3, 4, 5).relu()
    two = one.clone()
    two[1, 2, 3, 4] += 1
    figures = measure(make(one), two, Tolerance())
    assert (figures.num_different, figures.first) == (1, 119)


@pytest.mark.parametrize("given", [{"rtol": -1.0}, {"atol": NAN}, {"rtol": "1"}, {"atol": True}])
def test_tolerances_that_are_none(given: dict[str, Any]) -> None:
    rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    with pytest.raises(ComparisonError, match=r"give a number from 0 on"):
        compare(rnet, rnet, [torch.ones(1, 2)], **given)
