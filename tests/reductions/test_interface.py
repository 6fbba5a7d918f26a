"""Every reduction by the shipped tests, beside results in float64; and what all refuse alike."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from scio_recorder import reductions
from scio_recorder.errors import CollectError, RecorderError
from scio_recorder.reductions import (
    Alive,
    AliveResult,
    Covariance,
    CovarianceResult,
    Digest,
    Fold,
    Histogram,
    HistogramResult,
    Last,
    Max,
    Mean,
    Min,
    Moments,
    MomentsResult,
    Quantiles,
    Reduction,
    TopK,
    TopKResult,
)
from scio_recorder.testing import ReductionTests
from scio_recorder.testing.undisturbed import assert_same
from tests.reductions.parts import offset_normal


def floats_for(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.int64) else torch.float32


def by(batch: Any) -> Any:
    return batch


def ids(batch: Any) -> Any:
    return batch["ids"] if isinstance(batch, dict) else range(len(batch))


class OurReductionTests(ReductionTests):
    kind: Callable[..., Reduction]
    arguments: tuple[Any, ...] = ()

    def make(self, **options: Any) -> Reduction:
        return self.kind(*self.arguments, **options)

    def others(self) -> list[Reduction]:
        others = [Histogram(6), Covariance(2), Quantiles(0.5, 2), TopK(4, ids)]
        return [*super().others(), *others]

    def test_a_recipe_makes_what_reads_the_state(self) -> None:
        for options in self._options():
            reduction = self._reduced(**options)
            recipe = json.loads(json.dumps(reduction.recipe))
            restored = getattr(reductions, recipe.pop("kind")).from_recipe(**recipe)
            restored.load_state_dict(reduction.state_dict())
            assert_same(restored.compute(), reduction.compute())

    def test_nothing_seen(self) -> None:
        for options in self._options():
            reduction, restored = self.make(**options), self._reduced(**options)
            restored.load_state_dict(reduction.state_dict())
            other = self.make(**options)
            reduction.merge(other)
            other.update(self.samples()[:0], {"labels": [], "ids": []})
            for each in (reduction, restored, other):
                with pytest.raises(RecorderError, match=r"no samples yet; call update"):
                    each.compute()


class TestMin(OurReductionTests):
    kind, tolerance = Min, 0.0

    def expected(self, samples: Tensor) -> Any:
        return samples.amin(0)


class TestMax(OurReductionTests):
    kind, tolerance = Max, 0.0

    def expected(self, samples: Tensor) -> Any:
        return samples.amax(0)


class TestMean(OurReductionTests):
    kind = Mean
    dtypes = (*OurReductionTests.dtypes, torch.complex64)

    def expected(self, samples: Tensor) -> Any:
        if samples.is_complex():
            return samples.to(torch.complex128).mean(0).to(samples.dtype)
        return samples.double().mean(0).to(floats_for(samples.dtype))


class TestMoments(OurReductionTests):
    kind = Moments

    def expected(self, samples: Tensor) -> Any:
        variance, mean = torch.var_mean(samples.double(), 0)
        dtype = floats_for(samples.dtype)
        return MomentsResult(len(samples), mean.to(dtype), variance.to(dtype))


class TestAlive(OurReductionTests):
    kind, tolerance = Alive, 0.0

    def expected(self, samples: Tensor) -> Any:
        return self.of_units(samples.flatten(1), None)

    def of_units(self, values: Tensor, at_bound: Tensor | None) -> AliveResult:
        numbers, dtype = values.double(), floats_for(values.dtype)
        return AliveResult(
            len(values),
            (numbers > 0).double().mean(0),
            (numbers == numbers[0]).all(0) & torch.tensor(len(values) > 1),
            at_bound,
            numbers.abs().amax(0).to(dtype),
        )


class TestAliveOfChannels(TestAlive):
    arguments = (1, (0.0, 8.0))

    def expected(self, samples: Tensor) -> Any:
        values = samples.movedim(1, -1).reshape(-1, samples.shape[1])
        at_bound = (values.double() <= 0.08) | (values.double() >= 7.92)
        return self.of_units(values, at_bound.double().mean(0))


class TestCovariance(OurReductionTests):
    kind, tolerance = Covariance, 1e-5

    def rows(self, samples: Tensor) -> Tensor:
        return samples.double().flatten(1)

    def expected(self, samples: Tensor) -> Any:
        rows, dtype = self.rows(samples), floats_for(samples.dtype)
        return CovarianceResult(len(rows), rows.mean(0).to(dtype), rows.T.cov().to(dtype))

    def expected_by_class(self, samples: Tensor, labels: list[str]) -> Any:
        """Pooled within classes: divided by all rows less the number of classes."""
        each = super().expected_by_class(samples, labels)
        counts = {label: result.count for label, result in each.items()}
        scatter = sum(result.covariance * (result.count - 1) for result in each.values())
        pooled = scatter / (sum(counts.values()) - len(counts))
        return CovarianceResult(counts, {label: one.mean for label, one in each.items()}, pooled)


class TestCovarianceOfChannels(TestCovariance):
    arguments = (1,)

    def rows(self, samples: Tensor) -> Tensor:
        return samples.double().movedim(1, -1).flatten(0, 1)


class TestHistogramInARange(OurReductionTests):
    kind, tolerance = Histogram, 0.0
    # Integers lie on these edges, where rounding would show.
    arguments = (6, (0.0, 6.0))

    def expected(self, samples: Tensor) -> Any:
        return self.histogram(samples, 0.0, 6.0)

    def histogram(self, samples: Tensor, low: float, high: float) -> HistogramResult:
        values = samples.double().numpy()
        counts, edges = np.histogram(values, self.arguments[0], range=(low, high))
        below, above = int((values < low).sum()), int((values > high).sum())
        return HistogramResult(torch.tensor(counts), torch.tensor(edges), below, above)


class TestHistogram(TestHistogramInARange):
    arguments = (5,)
    # The range is that of the first batch.
    can_merge = False

    def samples(self, dtype: torch.dtype = torch.float32) -> Tensor:
        samples = super().samples(dtype)
        samples[0, 0] = torch.stack([samples.amin(), samples.amax()])
        return samples

    def expected(self, samples: Tensor) -> Any:
        return self.histogram(samples, float(samples[0].amin()), float(samples[0].amax()))

    def expected_by_class(self, samples: Tensor, labels: list[str]) -> Any:
        first, rest = samples[:1], samples
        bounds = float(first.amin()), float(first.amax())
        return {
            label: self.histogram(rest[torch.tensor([one == label for one in labels])], *bounds)
            for label in sorted(set(labels))
        }


class TestQuantiles(OurReductionTests):
    kind, arguments = Quantiles, ([0.1, 0.6],)

    def expected(self, samples: Tensor) -> Any:
        q = torch.tensor([0.1, 0.6], dtype=torch.float64)
        return samples.double().quantile(q).to(floats_for(samples.dtype))


class TestQuantilesOfChannels(TestQuantiles):
    arguments = ([0.1, 0.6], 1)

    def expected(self, samples: Tensor) -> Any:
        q = torch.tensor([0.1, 0.6], dtype=torch.float64)
        values = samples.double().movedim(1, -1).flatten(0, 1)
        return values.quantile(q, dim=0).to(floats_for(samples.dtype))


class TestTopK(OurReductionTests):
    kind, tolerance, arguments = TopK, 0.0, (3, ids)

    def units(self, samples: Tensor) -> Any:
        return samples.double().flatten(1).T.numpy()

    def expected(self, samples: Tensor) -> Any:
        return self.largest(samples, np.arange(len(samples)))

    def largest(self, samples: Tensor, numbers: Any) -> TopKResult:
        """Sort everything by value, number and position."""
        units = self.units(samples)
        num_positions = units.shape[1] // len(samples)
        numbers = numbers.repeat(num_positions)
        positions = np.tile(np.arange(num_positions), len(samples))
        order = np.array([np.lexsort((positions, numbers, -unit))[:3] for unit in units])
        values = torch.tensor(np.take_along_axis(units, order, 1)).to(floats_for(samples.dtype))
        return TopKResult(values, torch.tensor(numbers[order]), torch.tensor(positions[order]))

    def expected_by_class(self, samples: Tensor, labels: list[str]) -> Any:
        places = {label: np.flatnonzero(np.array(labels) == label) for label in sorted({*labels})}
        return {label: self.largest(samples[where], where) for label, where in places.items()}


class TestTopKOfChannels(TestTopK):
    arguments = (3, ids, 1)

    def units(self, samples: Tensor) -> Any:
        return samples.double().movedim(1, 0).flatten(1).numpy()


class TestDigest(OurReductionTests):
    kind, is_ordered = Digest, True

    def expected(self, samples: Tensor) -> Any:
        seed = xxhash.xxh3_64_intdigest(f"{samples.dtype}{list(samples.shape[1:])}".encode())
        rows = [bytes(row.contiguous().view(-1).view(torch.uint8).tolist()) for row in samples]
        digests = [xxhash.xxh3_64_intdigest(row, seed) for row in rows]
        return torch.tensor([one - 2**64 if one >= 2**63 else one for one in digests])


def total(accumulator: Any, activation: Tensor) -> Any:
    """Accumulate in one of every kind of container that can be stored."""
    if accumulator is None:
        accumulator = {"sum": (activation.double().sum(0),), 2: [0, None, "rows"]}
    else:
        accumulator["sum"] = (accumulator["sum"][0] + activation.double().sum(0),)
    accumulator[2][0] += len(activation)
    return accumulator


def join(one: Any, two: Any) -> Any:
    return {"sum": (one["sum"][0] + two["sum"][0],), 2: [one[2][0] + two[2][0], None, "rows"]}


class TestFold(OurReductionTests):
    arguments = (total, join)
    # The accumulator may be anything, and is given to the user's function.
    kind, checks_states = Fold, False

    def expected(self, samples: Tensor) -> Any:
        return {"sum": (samples.double().sum(0),), 2: [len(samples), None, "rows"]}


class TestLast(OurReductionTests):
    kind, checks_states = Last, False
    # What the last batch is depends on where data is cut: see the tests of classes.
    test_merging_in_any_order = test_merging_class_by_class = test_collected_and_resumed = None

    def expected(self, samples: Tensor) -> Any:
        return samples


TESTS = OurReductionTests.__subclasses__()
TESTS += [kind for parent in TESTS for kind in parent.__subclasses__()]
MAKES: dict[str, Callable[..., Any]] = {kind.__name__[4:]: kind().make for kind in TESTS}
DATA = offset_normal(12, 3, 2)
LABELS = ["a", "b", "a", "a", "b", "c"] * 2

every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def test_every_reduction_is_tested() -> None:
    kinds = {type(make()).__name__ for make in MAKES.values()}
    no_reductions = {"Reduction", "PrincipalSpace"}
    assert kinds == {name for name in reductions.__all__ if "Result" not in name} - no_reductions


@every
def test_merging_with_itself_counts_everything_twice(make: Any) -> None:
    for options in ({}, {"by": by}):
        reduction, twice, other = make(**options), make(**options), make(**options)
        for each in (reduction, twice, other):
            each.update(DATA, LABELS)
        twice.merge(other)
        reduction.merge(reduction)
        assert_same(reduction.compute(), twice.compute())


def masked(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.masked.masked_tensor(tensor, tensor > 0)


@every
@pytest.mark.parametrize(
    ("activation", "parts"),
    [
        (torch.tensor(1.0), ["dimension 0"]),
        ((torch.ones(2),), ["tuple", "transform="]),
        (torch.eye(2).to_sparse(), ["sparse", "transform="]),
        (masked(torch.eye(2)), ["masked", "transform="]),
    ],
    ids=["no dimension", "tuple", "sparse", "masked"],
)
def test_what_is_no_batch_of_samples(make: Any, activation: Any, parts: list[str]) -> None:
    with pytest.raises(CollectError) as caught:
        make().update(activation)
    assert all(part in str(caught.value) for part in parts)


@every
def test_complex_values(make: Any) -> None:
    reduction = make()
    data = torch.randn(12, 3, 2, dtype=torch.complex64)
    if isinstance(reduction, Mean | Last | Fold | Digest):
        reduction.update(data.real if isinstance(reduction, Fold) else data)
    else:
        with pytest.raises(CollectError, match="complex"):
            reduction.update(data)


@pytest.mark.parametrize("make", [Min, Max, Mean, Moments, Covariance])
def test_samples_of_another_shape(make: Any) -> None:
    reduction = make()
    reduction.update(DATA)
    before = reduction.compute()
    with pytest.raises(CollectError) as caught:
        reduction.update(torch.ones(4, 5))
    assert all(part in str(caught.value) for part in ("(5,)", "(3, 2)", "transform="))
    other = make()
    other.update(torch.ones(4, 5))
    with pytest.raises(CollectError):
        reduction.merge(other)
    assert_same(reduction.compute(), before)


of_features = pytest.mark.parametrize(
    "make", [Alive, Covariance, lambda dim: Quantiles([0.5], dim)]
)


@of_features
@pytest.mark.parametrize("dim", [0, 3, -3, -4])
def test_impossible_feature_dim(make: Any, dim: Any) -> None:
    with pytest.raises(CollectError, match=rf"feature_dim={dim}.*\(12, 3, 2\)"):
        make(dim).update(DATA)


@of_features
@pytest.mark.parametrize("dim", [1.0, "x", True])
def test_a_feature_dim_that_is_no_whole_number(make: Any, dim: Any) -> None:
    with pytest.raises(CollectError, match=rf"feature_dim={dim!r}: give a whole number"):
        make(dim)
    assert type(make(torch.tensor(1)).recipe["feature_dim"]) is int


@of_features
def test_samples_without_positions_are_none(make: Any) -> None:
    reduction, other = make(1), make(1)
    reduction.update(torch.ones(3, 3, 0))
    with pytest.raises(CollectError, match="no samples yet"):
        reduction.compute()
    for each in (reduction, other):
        each.update(DATA)
    assert_same(reduction.compute(), other.compute())
    with pytest.raises(CollectError, match=r"\(4,\).*\(3,\)"):
        reduction.update(torch.ones(2, 4, 2))


@pytest.mark.parametrize("make", [Covariance, lambda dim: Quantiles([0.5], dim)])
@pytest.mark.parametrize(("dim", "shape"), [(None, (3, 0)), (None, (3, 4, 0)), (1, (3, 0, 4))])
def test_samples_without_values(make: Any, dim: int | None, shape: tuple[int, ...]) -> None:
    with pytest.raises(CollectError, match="hold no values: leave the layer out"):
        make(dim).update(torch.ones(shape))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sign_that_is_not_applied_yet(make: Any, dtype: torch.dtype) -> None:
    data = DATA.to(dtype)
    later, now = make(), make()
    later.update(torch._neg_view(data), LABELS)
    now.update(-data, LABELS)
    assert_same(later.compute(), now.compute())


def test_what_was_constructed_differently() -> None:
    with pytest.raises(CollectError, match="construct both with the same arguments"):
        Mean().merge(Mean(by=by))
    with pytest.raises(CollectError, match="can't be loaded into Mean"):
        Mean().load_state_dict(Moments().state_dict())


@pytest.mark.parametrize("make", [Min, Max, Mean, Moments])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_as_in_torch(make: Any, odd: float) -> None:
    data = torch.randn(9, 4)
    data[4, 1] = odd
    one, two = make(), make()
    one.update(data[:3])
    two.update(data[3:])
    one.merge(two)
    result = one.compute()
    if make is Moments:
        torch.testing.assert_close(result.mean, data.mean(0), equal_nan=True)
        torch.testing.assert_close(result.variance, data.var(0), equal_nan=True)
    else:
        exact = {Min: data.amin(0), Max: data.amax(0), Mean: data.mean(0)}[make]
        torch.testing.assert_close(result, exact, equal_nan=True)


@pytest.mark.parametrize("make", [lambda: Histogram(1, (0.0, 1.0)), lambda: Quantiles(0.5)])
@pytest.mark.parametrize("count", [2, 2**16])
def test_a_nan_is_refused_when_the_result_is_read(make: Any, count: int) -> None:
    reduction, restored, other = make(), make(), make()
    reduction.update(torch.zeros(2))
    reduction.update(torch.cat([torch.tensor([1.0, torch.nan, torch.nan]), torch.ones(count)]))
    restored.load_state_dict(reduction.state_dict())
    other.update(torch.zeros(2**16 - 1))
    other.merge(reduction)
    for each in (reduction, restored, other):
        with pytest.raises(CollectError, match=r"was given .*nan.*transform=") as caught:
            each.compute()
        shown = f"2 nan among {count + 5 + (each is other) * (2**16 - 1)} values"
        assert shown in str(caught.value) or "which has no rank" in str(caught.value)


@pytest.mark.parametrize("make", [Min, Max, Alive])
def test_what_torch_computes_nothing_of_in_a_dtype(make: Any) -> None:
    with pytest.raises(CollectError, match=r"float8_e5m2.*activation\.float"):
        make().update(torch.ones(2, 3).to(torch.float8_e5m2))


def test_a_digest_of_the_smallest_numbers_with_a_nan() -> None:
    digest = Digest()
    digest.update(torch.tensor([[1.0], [torch.nan], [torch.nan]]).to(torch.float8_e4m3fn))
    first, *others = digest.compute().tolist()
    assert first != others[0] == others[1]


def test_one_sample_has_no_variance() -> None:
    moments = Moments()
    moments.update(torch.ones(1, 2))
    assert moments.compute().variance.isnan().all()
    assert moments.compute().mean.tolist() == [1.0, 1.0]


def test_every_public_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "subjects" / "reductions.md").read_text()
    assert [name for name in reductions.__all__ if f"`{name}" not in page] == []
