"""What every reduction does alike: state, resets, merging, refusals, no references."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from scio_recorder import reductions
from scio_recorder.errors import CollectError, RecorderError
from scio_recorder.reductions import (
    Alive,
    Covariance,
    Digest,
    Fold,
    Histogram,
    Last,
    Max,
    Mean,
    Min,
    Moments,
    Quantiles,
)
from tests.reductions.parts import offset_normal


def total(accumulator: Any, activation: Tensor) -> Any:
    """Accumulate in one of every kind of container that can be stored."""
    if accumulator is None:
        accumulator = {"sum": (activation.sum(0),), 2: [0, None, "rows"]}
    else:
        accumulator["sum"] = (accumulator["sum"][0] + activation.sum(0),)
    accumulator[2][0] += len(activation)
    return accumulator


def join(one: Any, two: Any) -> Any:
    return {"sum": (one["sum"][0] + two["sum"][0],), 2: [one[2][0] + two[2][0], None, "rows"]}


def masked(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.masked.masked_tensor(tensor, tensor > 0)


def by(batch: Any) -> Any:
    return batch


Make = Callable[..., Any]
MAKES: dict[str, Make] = {
    "Alive": Alive,
    "Alive of channels": lambda **options: Alive(1, (9999.0, 10001.0), **options),
    "Min": Min,
    "Max": Max,
    "Mean": Mean,
    "Last": Last,
    "Digest": Digest,
    "Moments": Moments,
    "Covariance": Covariance,
    "Covariance of channels": lambda **options: Covariance(1, **options),
    "Histogram": lambda **options: Histogram(5, **options),
    "Histogram in a range": lambda **options: Histogram(5, range=(9999.0, 10001.0), **options),
    "Quantiles": lambda **options: Quantiles([0.1, 0.6], **options),
    "Quantiles of channels": lambda **options: Quantiles([0.1, 0.6], 1, **options),
    "Fold": lambda **options: Fold(total, merge=join, **options),
}
DATA = offset_normal(12, 3, 2)
LABELS = ["a", "b", "a", "a", "b", "c"] * 2

every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
plain_and_by_class = pytest.mark.parametrize("options", [{}, {"by": by}], ids=["all", "by class"])


def reduced(make: Make, options: dict[str, Any], parts: int = 2) -> Any:
    reduction = make(**options)
    size = len(DATA) // parts
    for start in range(0, len(DATA), size):
        reduction.update(DATA[start : start + size], LABELS[start : start + size])
    return reduction


def assert_same(one: Any, two: Any) -> None:
    """Compare results bit for bit, and their structure."""
    leaves, structure = pytree.tree_flatten(one)
    others, other_structure = pytree.tree_flatten(two)
    assert structure == other_structure
    for leaf, other in zip(leaves, others, strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, Tensor) else leaf == other


def test_comparison_notices_a_difference() -> None:
    with pytest.raises(AssertionError):
        assert_same({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 2.0])})


def write(state: dict[str, Any], folder: Path) -> None:
    """Store a state as a program without pickle would: tensors aside, the rest as JSON."""
    tensors: dict[str, Tensor] = {}

    def replace(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[str(len(tensors))] = value
            return {"tensor": str(len(tensors) - 1)}
        if type(value) is dict:
            assert all(type(key) is str for key in value)
            return {key: replace(item) for key, item in value.items()}
        if type(value) is list:
            return [replace(item) for item in value]
        assert type(value) in (int, float, bool, str), value
        return value

    (folder / "state.json").write_text(json.dumps(replace(state)))
    save_file(tensors, folder / "state.safetensors")


def read(folder: Path) -> Any:
    tensors = load_file(folder / "state.safetensors")

    def restore(value: dict[str, Any]) -> Any:
        return tensors[value["tensor"]] if list(value) == ["tensor"] else value

    return json.loads((folder / "state.json").read_text(), object_hook=restore)


@every
@plain_and_by_class
def test_state_survives_a_file_and_goes_on(make: Make, options: Any, tmp_path: Path) -> None:
    reduction = reduced(make, options)
    write(reduction.state_dict(), tmp_path)
    restored = make(**options)
    restored.update(torch.zeros(1, 7, 7), ["z"])  # must leave no trace
    restored.load_state_dict(read(tmp_path))
    assert_same(restored.compute(), reduction.compute())
    for each in (reduction, restored):
        each.update(DATA[:5], LABELS[:5])
    assert_same(restored.compute(), reduction.compute())


@every
@plain_and_by_class
def test_a_recipe_makes_what_reads_the_state(make: Make, options: Any) -> None:
    reduction = reduced(make, options)
    recipe = json.loads(json.dumps(reduction.recipe))
    restored = getattr(reductions, recipe.pop("kind")).from_recipe(**recipe)
    restored.load_state_dict(reduction.state_dict())
    assert_same(restored.compute(), reduction.compute())


@every
@plain_and_by_class
def test_a_state_of_nothing(make: Make, options: Any, tmp_path: Path) -> None:
    write(make(**options).state_dict(), tmp_path)
    restored = reduced(make, options)
    restored.load_state_dict(read(tmp_path))
    with pytest.raises(CollectError, match="no samples"):
        restored.compute()


@every
@plain_and_by_class
def test_a_state_is_a_snapshot(make: Make, options: Any) -> None:
    reduction = reduced(make, options)
    before = reduction.compute()
    state = reduction.state_dict()
    reduction.update(DATA + 5, LABELS)
    restored = make(**options)
    restored.load_state_dict(state)
    assert_same(restored.compute(), before)
    pytree.tree_map_only(Tensor, torch.Tensor.zero_, state)
    assert_same(restored.compute(), before)


@every
def test_a_state_of_another_construction(make: Make) -> None:
    state = reduced(make, {}).state_dict()
    for other in (make(by=by), Histogram(6), Covariance(2), Quantiles(0.5, 2)):
        with pytest.raises(CollectError, match="can't be loaded"):
            other.load_state_dict(state)


@every
@plain_and_by_class
def test_nothing_seen(make: Make, options: Any) -> None:
    reduction = make(**options)
    with pytest.raises(RecorderError, match=r"no samples yet; call update"):
        reduction.compute()
    reduction.update(DATA[:0], [])
    with pytest.raises(RecorderError, match=r"no samples yet"):
        reduction.compute()
    reduction.merge(make(**options))
    with pytest.raises(RecorderError, match=r"no samples yet"):
        reduction.compute()


@every
@plain_and_by_class
def test_empty_batches_change_nothing(make: Make, options: Any) -> None:
    reduction = reduced(make, options)
    before = reduction.compute()
    reduction.update(DATA[:0], [])
    assert_same(reduction.compute(), before)


@every
@plain_and_by_class
def test_reset_and_fresh(make: Make, options: Any) -> None:
    reduction = reduced(make, options)
    first = reduction.compute()
    fresh = reduction.fresh()
    for each in (fresh, reduction):
        each.reset()
        with pytest.raises(CollectError, match="no samples"):
            each.compute()
        for start in (0, 6):
            each.update(DATA[start : start + 6], LABELS[start : start + 6])
        assert_same(each.compute(), first)


@every
@plain_and_by_class
def test_nothing_given_is_referenced_or_changed(make: Make, options: Any) -> None:
    reduction = make(**options)
    given = DATA.clone()
    reduction.update(given, LABELS)
    assert torch.equal(given, DATA)
    expected = copy.deepcopy(reduction.compute())
    given.zero_()
    assert_same(reduction.compute(), expected)
    pytree.tree_map_only(Tensor, torch.Tensor.zero_, reduction.compute())
    assert_same(reduction.compute(), expected)


@every
@plain_and_by_class
def test_merging_leaves_the_other_as_it_was(make: Make, options: Any) -> None:
    for ours in (make(**options), reduced(make, options)):
        other = reduced(make, options)
        before = other.compute()
        ours.merge(other)
        ours.update(DATA - 1, LABELS)
        assert_same(other.compute(), before)


@every
@plain_and_by_class
def test_merging_with_itself_counts_everything_twice(make: Make, options: Any) -> None:
    reduction, twice = reduced(make, options), reduced(make, options)
    twice.merge(reduced(make, options))
    reduction.merge(reduction)
    assert_same(reduction.compute(), twice.compute())


@every
def test_gradients_and_modes_of_the_caller(make: Make) -> None:
    expected = reduced(make, {}).compute()
    reduction = make()
    with torch.inference_mode():
        reduction.update(DATA[:6] + 0)
    reduction.update(DATA[6:].clone().requires_grad_() + 0)
    with torch.inference_mode():
        result = reduction.compute()
        reduction.state_dict()
    assert_same(result, expected)
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            assert not leaf.is_inference()
            assert not leaf.requires_grad


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
def test_what_is_no_batch_of_samples(make: Make, activation: Any, parts: list[str]) -> None:
    with pytest.raises(CollectError) as caught:
        make().update(activation)
    assert all(part in str(caught.value) for part in parts)


@every
def test_complex_values(make: Make) -> None:
    data = torch.randn(12, 3, 2, dtype=torch.complex64)
    reduction = make()
    if isinstance(reduction, Mean):
        reduction.update(data)
        exact = data.to(torch.complex128).mean(0).to(torch.complex64)
        torch.testing.assert_close(reduction.compute(), exact, rtol=1e-6, atol=1e-7)
    elif isinstance(reduction, Last | Fold | Digest):
        reduction.update(data)
    else:
        with pytest.raises(CollectError, match="complex"):
            reduction.update(data)


SHAPED = [Min, Max, Mean, Moments, Covariance]


@pytest.mark.parametrize("make", SHAPED)
def test_samples_of_another_shape(make: Make) -> None:
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


@pytest.mark.parametrize("make", [Alive, Covariance, lambda dim: Quantiles([0.5], dim)])
@pytest.mark.parametrize("dim", [0, 3, -3, -4, 1.5, "x"])
def test_impossible_feature_dim(make: Make, dim: Any) -> None:
    with pytest.raises(CollectError, match=rf"feature_dim={dim}.*\(12, 3, 2\)"):
        make(dim).update(DATA)


@pytest.mark.parametrize("make", [Alive, Covariance, lambda dim: Quantiles([0.5], dim)])
def test_samples_without_positions_are_none(make: Make) -> None:
    reduction, other = make(1), make(1)
    reduction.update(torch.ones(3, 3, 0))
    with pytest.raises(CollectError, match="no samples yet"):
        reduction.compute()
    for each in (reduction, other):
        each.update(DATA)
    assert_same(reduction.compute(), other.compute())


@pytest.mark.parametrize("make", [Covariance, lambda dim: Quantiles([0.5], dim)])
@pytest.mark.parametrize(("dim", "shape"), [(None, (3, 0)), (None, (3, 4, 0)), (1, (3, 0, 4))])
def test_samples_without_values(make: Make, dim: int | None, shape: tuple[int, ...]) -> None:
    with pytest.raises(CollectError, match="hold no values: leave the layer out"):
        make(dim).update(torch.ones(shape))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sign_that_is_not_applied_yet(make: Make, dtype: torch.dtype) -> None:
    data = DATA.to(dtype)
    later, now = make(), make()
    later.update(torch._neg_view(data))
    now.update(-data)
    assert_same(later.compute(), now.compute())


@pytest.mark.parametrize("make", [Alive, Covariance, lambda dim: Quantiles([0.5], dim)])
def test_another_number_of_features(make: Make) -> None:
    reduction = make(1)
    reduction.update(DATA)
    with pytest.raises(CollectError, match=r"\(4,\).*\(3,\)"):
        reduction.update(torch.ones(2, 4, 2))


@every
def test_merging_what_was_constructed_differently(make: Make) -> None:
    for other in (make(by=by), Histogram(6), Covariance(2)):
        with pytest.raises(CollectError, match="construct both with the same arguments"):
            make().merge(other)


@pytest.mark.parametrize("make", [Min, Max, Mean, Moments])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_as_in_torch(make: Make, odd: float) -> None:
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


def test_one_sample_has_no_variance() -> None:
    moments = Moments()
    moments.update(torch.ones(1, 2))
    assert moments.compute().variance.isnan().all()
    assert moments.compute().mean.tolist() == [1.0, 1.0]


def test_every_public_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "subjects" / "reductions.md").read_text()
    assert [name for name in reductions.__all__ if f"`{name}" not in page] == []
