"""Class by class, against the one-shot result of each class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions import Covariance, Last, Max, Mean, Min, Moments
from tests.reductions.parts import offset_normal

COUNT = 40
DATA = offset_normal(COUNT, 3, 2)
LABELS = [("cat", "dog", "eel")[i * i % 7 % 3] for i in range(COUNT)]


def by(batch: tuple[Tensor, Any]) -> Any:
    return batch[1]


def test_classes_far_from_zero_in_blocks_that_end_inside_batches() -> None:
    data = offset_normal(29000, 2)
    data[::3] += 50
    labels = ["left" if number % 3 else "right" for number in range(len(data))]
    workers = [Covariance(by=by) for _ in range(2)]
    for number, start in enumerate(range(0, len(data), 3001)):
        end = start + 3001
        workers[number % 2].update(data[start:end], (data[start:end], labels[start:end]))
    workers[0].merge(workers[1])
    count, mean, pooled = workers[0].compute()
    scatter = np.zeros((2, 2))
    for label in ("left", "right"):
        own = data[[one == label for one in labels]].double().numpy()
        assert count[label] == len(own)
        np.testing.assert_allclose(mean[label].numpy(), own.mean(0), rtol=1e-6)
        scatter += np.cov(own.T) * (len(own) - 1)
    np.testing.assert_allclose(pooled.numpy(), scatter / (len(data) - 2), rtol=1e-5, atol=1e-5)


def test_means_of_classes_of_which_most_values_are_equal() -> None:
    # Added one after the other, equal values are all rounded to the same side.
    data = (torch.randn(8192, 64) - 1.5).relu()
    labels = [number % 2 for number in range(len(data))]
    covariance = Covariance(by=by)
    covariance.update(data, (data, labels))
    for label, mean in covariance.compute().mean.items():
        values = data[label::2].double()
        assert float(((mean - values.mean(0)) / values.std(0)).abs().max()) < 5e-7


def test_principal_space_within_classes() -> None:
    covariance = Covariance(by=by)
    # Classes far apart: only the spread within each may show.
    data = (
        DATA.flatten(1).double()
        + torch.tensor([100.0 * len(x) * (x == "eel") for x in LABELS])[:, None]
    )
    covariance.update(data, (data, LABELS))
    space = covariance.compute().principal(2)
    classes = [data[[found == label for found in LABELS]] for label in ("cat", "dog", "eel")]
    centred = torch.cat([rows - rows.mean(0) for rows in classes])
    exact = torch.linalg.svdvals(centred)
    torch.testing.assert_close(space.residual_singular_values, exact[2:])
    torch.testing.assert_close(space.mean, data.mean(0))


def test_last_keeps_the_last_samples_of_each_class() -> None:
    last = Last(by=by)
    first, second = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0]])
    last.update(first, (first, [0, 1, 0]))
    last.update(second, (second, [1]))
    assert {label: value.tolist() for label, value in last.compute().items()} == {
        0: [[1.0], [3.0]],
        1: [[4.0]],
    }


@pytest.mark.parametrize(
    ("labels", "keys"),
    [
        (torch.tensor([1, 0, 1]), [0, 1]),
        (np.array([1, 0, 1], dtype=np.uint8), [0, 1]),
        (np.array(["b", "a", "b"]), ["a", "b"]),
        ([np.int64(1), torch.tensor(0), 1], [0, 1]),
        (torch.tensor([1.5, 0.5, 1.5]), [0.5, 1.5]),
        ((1, "one", 1), [1, "one"]),
    ],
    ids=["tensor", "numpy", "numpy strings", "scalars", "floats", "mixed"],
)
def test_keys_are_plain_and_in_order(labels: Any, keys: list[Any]) -> None:
    mean = Mean(by=lambda batch: batch)
    mean.update(torch.ones(3, 2), labels)
    found = list(mean.compute())
    assert found == keys
    assert [type(key) for key in found] == [type(key) for key in keys]


@pytest.mark.parametrize(
    ("labels", "parts"),
    [
        ([0, 1], ["2 labels", "3 samples"]),
        (torch.zeros(4), ["4 labels", "3 samples"]),
        (torch.zeros(3, 1), ["label [0.0]", "numbers"]),
        ([0.0, float("nan"), 1.0], ["nan"]),
        ([0, None, 1], ["label None", "numbers"]),
        (7, ["int", "one label for each"]),
        ("abc", ["str", "one label for each"]),
    ],
    ids=["few", "many", "matrix", "nan", "none", "number", "string"],
)
@pytest.mark.parametrize("make", [Mean, Covariance], ids=["mean", "covariance"])
def test_labels_that_do_not_fit(make: type[Mean], labels: Any, parts: list[str]) -> None:
    reduction = make(by=by)
    with pytest.raises(CollectError) as caught:
        reduction.update(torch.ones(3, 2), (None, labels))
    assert all(part in str(caught.value) for part in parts)
    with pytest.raises(CollectError, match="no samples"):
        reduction.compute()


def test_labels_need_the_batch() -> None:
    with pytest.raises(CollectError, match=r"update\(activation, batch\)"):
        Mean(by=by).update(torch.ones(3, 2))


@pytest.mark.parametrize("make", [Mean, Covariance, Last, Max, Min, Moments])
def test_labels_in_place_of_a_function(make: type[Mean]) -> None:
    with pytest.raises(CollectError, match="by= is a Tensor: give a function of the batch"):
        make(by=torch.zeros(3))  # type: ignore[arg-type]
