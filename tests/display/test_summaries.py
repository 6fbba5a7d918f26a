"""What is shown of a layer, against NumPy on the whole array."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Recording, reductions
from scio_recorder.display.figure import LayerSummary
from scio_recorder.recording import statistics
from scio_recorder.recording.statistics import summarise

INF = math.inf


def kept(samples: Tensor, net: nn.Module | None = None, **options: object) -> Recording:
    """Return a recording of these samples, collected in batches of three."""
    rnet = Recorder(net or nn.Identity(), input_data=samples[:1])
    rnet.record("0-1")
    return rnet.collect(samples.split(3), progress=False, **options)  # type: ignore[arg-type]


def of(samples: Tensor, net: nn.Module | None = None, **options: object) -> LayerSummary:
    return summarise(kept(samples, net, **options), [(0, 1)], bins=7)[0]


@pytest.fixture(params=[1 << 21, 5], ids=["whole", "pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_PIECE", request.param)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(
    "samples",
    [
        torch.randn(10, 4, 5) * 3 + 1000,
        torch.randn(40, 5, dtype=torch.float64) + 1e7,
        torch.randn(10),
        torch.randn(10, 6).relu(),
        torch.randn(10, 4).bfloat16(),
        torch.arange(40).view(10, 4) - 7,
        torch.arange(40).view(10, 4) % 3 == 0,
        torch.randn(10, 4, dtype=torch.complex64),
        torch.full((10, 2), 0.1),
        torch.tensor([[1e-150, 1e150], [3e150, -1e150]], dtype=torch.float64),
    ],
    ids=[
        *("floats", "far", "0-d", "zeros", "bfloat16", "integers", "booleans", "complex", "equal"),
        "wide",
    ],
)
def test_statistics_and_bars(samples: Tensor) -> None:
    found = of(samples)
    whole = (samples.abs() if samples.is_complex() else samples).double().numpy()
    values, bars = found.values, found.bars
    assert values.mean == pytest.approx(whole.mean(), rel=1e-12)
    spread = whole.astype(np.longdouble).std(ddof=1)
    # Of equal numbers the spread is what rounding of their mean leaves.
    assert values.std == pytest.approx(float(spread), rel=1e-9, abs=1e-12)
    assert (values.low, values.high) == (whole.min(), whole.max())
    assert values.zeros == (whole == 0).mean()
    assert (values.nans, values.infinities) == (0, 0)
    counts, _ = np.histogram(whole, bins=7, range=(bars.low, bars.high))
    assert bars.counts == tuple(counts)
    assert sum(bars.counts) + bars.below + bars.above == whole.size


@pytest.mark.usefixtures("pieces")
def test_values_that_are_not_finite_are_counted_apart() -> None:
    samples = torch.randn(9, 4)
    samples[2, 1] = samples[8, 0] = math.nan
    samples[4, 3] = math.inf
    found = of(samples)
    assert (found.values.nans, found.values.infinities) == (2, 1)
    assert (found.values.mean, found.values.high) == (math.inf, math.inf)
    finite = samples[samples.isfinite()].double().numpy()
    assert found.values.low == finite.min()
    assert (found.bars.below, found.bars.above) == (0, 1)
    assert (found.bars.low, found.bars.high) == (finite.min(), finite.max())
    samples[4, 2] = -math.inf
    drawn = of(samples).finite
    finite = samples[samples.isfinite()].double().numpy()
    assert drawn.mean == pytest.approx(finite.mean())
    assert drawn.std == pytest.approx(finite.std(ddof=1))
    assert (drawn.low, drawn.high) == (finite.min(), finite.max())
    both = of(samples).values
    assert math.isnan(both.mean or 0)
    assert (both.low, both.high) == (-math.inf, math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_finite(value: float) -> None:
    found = of(torch.full((4, 2), value))
    assert found.bars is None
    assert found.notes == ["no finite value"]
    if math.isnan(value):
        assert (found.values.nans, found.values.mean) == (8, None)
    else:
        assert (found.values.infinities, found.values.mean) == (8, value)


def test_no_values() -> None:
    found = of(torch.zeros(4, 0))
    assert (found.bars, found.units, found.values.mean) == (None, None, None)
    assert found.notes == ["no values"]


def test_far_values_do_not_flatten_the_rest() -> None:
    samples = torch.randn(3000, 2)
    samples[7, 0] = -1e4
    found = of(samples)
    whole = samples.double().numpy()
    assert found.bars.low == pytest.approx(whole.mean() - 6 * whole.std(ddof=1))
    assert found.bars.high == whole.max()
    assert (found.bars.below, found.bars.above) == (1, 0)
    assert found.values.low == whole.min()


@pytest.mark.parametrize("kind", ["far", "relu", "bfloat16", "infinities", "outlier", "integers"])
def test_a_large_layer_is_read_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.randn(400, 30, generator=torch.Generator().manual_seed(0))
    samples[300:] *= 1.5
    if kind == "far":
        samples = samples + 1e3
    elif kind == "relu":
        samples = samples.relu()
    elif kind == "bfloat16":
        samples = samples.bfloat16()
    elif kind == "infinities":
        samples[0, 0], samples[1, 1], samples[-1, :2] = INF, math.nan, -INF
    elif kind == "outlier":
        samples[-1, 0] = 30.0
    else:
        samples = (9 * samples).long()
    recording, read = kept(samples), 0
    monkeypatch.setattr("scio_recorder.recording.readable._PART_BYTES", samples.nbytes // 20)
    original = type(recording).parts

    def parts(self: Recording, key: object) -> Iterator[Tensor]:
        nonlocal read
        for part in original(self, key):  # type: ignore[arg-type]
            read += len(part)
            yield part

    monkeypatch.setattr(type(recording), "parts", parts)
    bars = summarise(recording, [(0, 1)], bins=7)[0].bars
    assert read == 2 * len(samples)
    assert bars is not None
    whole = samples[samples.isfinite()].double().numpy()
    reach = 6 * whole.std(ddof=1)
    low, high = max(whole.min(), whole.mean() - reach), min(whole.max(), whole.mean() + reach)
    assert (bars.low, bars.high) == pytest.approx((low, high), rel=1e-12)
    counts, _ = np.histogram(whole, bins=7, range=(bars.low, bars.high))
    assert bars.counts == tuple(counts)
    infinities = int(samples.isneginf().sum()), int(samples.isposinf().sum())
    assert bars.below == (whole < bars.low).sum() + infinities[0]
    assert bars.above == (whole > bars.high).sum() + infinities[1]


@pytest.mark.usefixtures("pieces")
def test_dead_units_are_those_that_never_change() -> None:
    samples = torch.randn(10, 6, 2, 2)
    samples[:, 1], samples[:, 4], samples[:, 5] = 0.0, -0.0, 2.5
    samples[:, 0], samples[:, 2] = math.nan, math.inf
    samples[:9, 3], samples[9, 3] = 0.0, 1e-30
    units = of(samples).units
    assert (units.count, units.zero, units.dead) == (6, 2, 3)


def test_units_of_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.rand(400, 12).atanh()
    samples[:, 1], samples[:, 2], samples[3:, 3], samples[:, 4] = 0.0, 0.5, 9.0, 9.0
    samples[200, 4], samples[::2, 5], samples[399, 2] = 0.0, 9.0, 0.25
    recording = kept(samples, nn.Tanh())
    monkeypatch.setattr("scio_recorder.recording.readable._PART_BYTES", samples.nbytes // 20)
    units = summarise(recording, [(0, 1)], bins=None)[0].units
    assert (units.count, units.zero, units.dead, units.saturated) == (12, 1, 1, 2)


def test_one_sample_says_nothing_of_dead_units() -> None:
    assert of(torch.zeros(1, 3)).units is None
    assert of(torch.zeros(2, 3)).units is not None


class LayerNorm(nn.Identity):
    """Of a type that works on the last dimension."""


class LayerNorm2d(nn.Identity):
    """Of a type of vision models that works on dimension 1."""


class BatchNorm1d(nn.Identity):
    """Of a type with channels first."""


@pytest.mark.parametrize(
    ("shape", "net", "count"),
    [
        ((5,), nn.Identity(), 1),
        ((5, 3), nn.Identity(), 3),
        ((5, 3, 4), nn.Identity(), 4),
        ((5, 3, 4), BatchNorm1d(), 3),
        ((5, 3, 4, 2), nn.Identity(), 3),
        ((5, 3, 4, 2), LayerNorm(), 2),
        ((5, 3, 4, 2), LayerNorm2d(), 3),
        ((5, 3, 4, 2, 2), nn.Identity(), 3),
    ],
)
def test_where_units_lie(shape: tuple[int, ...], net: nn.Module, count: int) -> None:
    units = of(torch.randn(shape), net).units
    assert units.count == count


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(
    ("net", "given", "saturated"),
    [
        (nn.Tanh(), [9.0, -9.0, 0.1], 2),
        (nn.Sigmoid(), [9.0, -9.0, 0.1], 2),
        (nn.Softsign(), [1e3, -1e3, 0.1], 2),
        (nn.Hardsigmoid(), [9.0, -9.0, 0.1], 2),
        (nn.ReLU6(), [9.0, -9.0, 0.1], 1),
        (nn.ReLU(), [9.0, -9.0, 0.1], None),
    ],
)
def test_saturated_units(net: nn.Module, given: list[float], saturated: int | None) -> None:
    units = of(torch.tensor([given] * 20), net).units
    assert units.saturated == saturated


@pytest.mark.parametrize(("inside", "saturated"), [(1, 1), (2, 0)])
def test_saturated_from_95_percent_of_the_values_on(inside: int, saturated: int) -> None:
    samples = torch.full((20, 1), 9.0)
    samples[:inside] = 0.0
    units = of(samples, nn.Tanh()).units
    assert units.saturated == saturated


def test_within_one_percent_of_the_range() -> None:
    # 2 % of the unit above or below 1 are 1 % of the range from -1 to 1.
    edge = math.atanh(0.98)
    samples = torch.tensor([[edge + 1e-3, edge - 1e-3]] * 4)
    units = of(samples, nn.Tanh()).units
    assert units.saturated == 1


def test_reductions_say_what_they_know() -> None:
    samples = torch.randn(11, 3, 4) * 2 + 5
    found = of(
        samples,
        reduce=[
            reductions.Moments(),
            reductions.Min(),
            reductions.Max(),
            reductions.Histogram(6, range=(0.0, 9.0)),
        ],
    )
    whole = samples.double().numpy()
    assert found.kept == "Moments, Min, Max, Histogram"
    assert found.values.mean == pytest.approx(whole.mean(), rel=1e-5)
    assert found.values.std == pytest.approx(whole.std(ddof=1), rel=1e-5)
    assert (found.values.low, found.values.high) == (whole.min(), whole.max())
    assert found.bars.counts == tuple(np.histogram(whole, bins=6, range=(0.0, 9.0))[0])
    assert (found.bars.below, found.bars.above) == ((whole < 0).sum(), (whole > 9).sum())
    assert (found.units, found.values.nans, list(found.notes)) == (None, None, [])


@pytest.mark.parametrize(
    "reduction",
    [
        reductions.Covariance(),
        reductions.Quantiles([0.5]),
        reductions.Moments(by=lambda batch: [0] * len(batch)),
        reductions.Fold(lambda total, activation: activation.sum()),
    ],
    ids=lambda reduction: type(reduction).__name__,
)
def test_reductions_that_are_not_drawn_are_named(reduction: reductions.Reduction) -> None:
    found = of(torch.randn(6, 3), reduce=reduction)
    assert found.values.mean is None
    assert list(found.notes) == [f"{type(reduction).__name__} is not drawn"]


def test_a_reduction_that_saw_nothing_says_so() -> None:
    recording = kept(torch.randn(6, 3), reduce=reductions.Mean())
    reduction = recording.reductions[(0, 1)]
    assert isinstance(reduction, reductions.Reduction)
    reduction.reset()
    (note,) = summarise(recording, [(0, 1)], 5)[0].notes
    assert note.startswith("Mean: ")
    assert "no samples" in note


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "reduction",
    [
        *(reductions.Mean(), reductions.Moments(), reductions.Max(), reductions.Last()),
        *(reductions.Covariance(), reductions.Mean(by=lambda batch: [7] * len(batch))),
        reductions.Fold(lambda total, activation: activation[-1:].double()),
    ],
    ids=["mean", "moments", "max", "last", "covariance", "by", "fold"],
)
def test_results_that_are_not_finite_are_told(
    reduction: reductions.Reduction, value: float
) -> None:
    samples = torch.randn(9, 2)
    samples[-3:, 1] = value
    found = of(samples, reduce=reduction)
    kind = "NaN" if math.isnan(value) else "infinite"
    (warning,) = found.warnings
    assert warning.startswith(f"{type(reduction).__name__}: ")
    assert warning.endswith(f" numbers {kind}")
    assert of(samples[:, :1], reduce=reduction.fresh()).warnings == []


def test_nans_in_a_dtype_without_infinities_are_told() -> None:
    samples = torch.tensor([[1.0, math.nan]]).to(torch.float8_e4m3fn)
    assert of(samples, reduce=reductions.Last()).warnings == ["Last: 1 of 2 numbers NaN"]


def test_one_sample_of_moments_has_a_spread_over_positions() -> None:
    samples = torch.randn(1, 5)
    found = of(samples, reduce=reductions.Moments())
    assert found.values.std == pytest.approx(samples.double().std().item(), rel=1e-6)


def test_what_a_reduction_of_ones_own_says_is_shown() -> None:
    class Told(reductions.Max):
        def overall(self, result: Tensor) -> dict[str, float]:
            return {"high": 3.0, "count": 2.0}

    found = of(torch.ones(4, 2), reduce=Told())
    assert (found.values.high, found.values.low) == (3.0, None)
    assert len(kept(torch.ones(4, 2), reduce=Told()).to_frame()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_samples_on_a_gpu_are_looked_at_there() -> None:
    samples = torch.randn(40, 3, 5).relu()
    samples[0, 0, 0] = math.inf
    there, here = of(samples.cuda(), store="device"), of(samples)
    assert there.bars == here.bars
    assert there.units == here.units
    assert there.values.high == here.values.high
