"""Scores from statistics alone: against scikit-learn, and layers of numbers worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn import covariance, decomposition
from torch import Tensor, nn

from scio_recorder import CollectError, Recorder
from scio_recorder.analysis.scores import discriminant, mahalanobis, residual
from scio_recorder.reductions import Covariance
from scio_recorder.reductions.covariance import CovarianceResult


def statistics_of(features: Tensor, labels: Tensor | None = None) -> CovarianceResult:
    reduction = Covariance(by=None if labels is None else lambda batch: batch)
    batches = features if labels is None else labels
    for part, batch in zip(features.split(32), batches.split(32), strict=True):
        reduction.update(part, batch)
    result: CovarianceResult = reduction.compute()
    return result


def test_mahalanobis_is_scikit_learns() -> None:
    train, labels = torch.randn(200, 5) * 3, torch.arange(200) % 4 + 10
    train = (train + labels[:, None]).double()
    features = torch.randn(30, 5) * 4 + 11
    means = {int(k): train[labels == k].numpy().mean(axis=0) for k in (10, 11, 12, 13)}
    centred = train.numpy() - np.stack([means[int(k)] for k in labels])
    estimate = covariance.EmpiricalCovariance(assume_centered=True).fit(centred)
    distances = [estimate.mahalanobis(features.double().numpy() - mean) for mean in means.values()]
    result = mahalanobis(features, statistics_of(train, labels))
    assert result.dtype == torch.float64
    # Theirs divides by the number of rows, ours by the degrees of freedom.
    np.testing.assert_allclose(result * 200 / 196, np.min(distances, axis=0), rtol=1e-9)


def test_discriminant_is_the_classifier_of_normal_distributions() -> None:
    train, labels = torch.randn(200, 5).double() * 3, torch.arange(200) % 7 // 3
    train += labels[:, None]
    features = (torch.randn(30, 5) * 4).double()
    classes = [train[labels == k].numpy() for k in range(3)]
    centred = np.concatenate([rows - rows.mean(axis=0) for rows in classes])
    shared = centred.T @ centred / (200 - 3)
    joint = [
        stats.multivariate_normal(rows.mean(axis=0), shared).logpdf(features) + np.log(len(rows))
        for rows in classes
    ]
    result = discriminant(features, statistics_of(train, labels))
    np.testing.assert_allclose(result, special.log_softmax(np.transpose(joint), axis=1), rtol=1e-9)


def test_what_is_no_result_for_one_layer_is_an_error() -> None:
    rnet = Recorder(nn.Linear(3, 2), input_size=(1, 3))
    rnet.record("")
    recording: Any = rnet.collect([torch.randn(4, 3)], reduce=Covariance(), progress=False)
    scored: Any = rnet.collect([torch.randn(4, 3)], progress=False)
    for score, statistics in itertools.product((mahalanobis, discriminant), (recording, [None])):
        with pytest.raises(CollectError, match=r"not a (Recording|list): .* recording\[label\]"):
            score(torch.ones(1, 2), statistics)
    with pytest.raises(CollectError, match=r"needs Covariance\(\.\.\.\)\.principal\(k\)"):
        residual(torch.ones(1, 2), recording[0, 1])
    with pytest.raises(CollectError, match=r"features, a tensor, .* not a Recording"):
        mahalanobis(scored, recording[0, 1])


def test_a_discriminant_needs_classes() -> None:
    with pytest.raises(CollectError, match=r"Covariance\(by=\.\.\.\)"):
        discriminant(torch.ones(1, 2), statistics_of(torch.randn(10, 2)))


def test_without_classes_it_is_the_distance_to_the_only_mean() -> None:
    train, features = torch.randn(100, 6).double() @ torch.randn(6, 6).double(), torch.randn(9, 6)
    estimate = covariance.EmpiricalCovariance().fit(train.numpy())
    expected = estimate.mahalanobis(features.double().numpy())
    result = mahalanobis(features, statistics_of(train))
    np.testing.assert_allclose(result * 100 / 99, expected, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 1e-3, 7.0])
def test_a_unit_that_always_says_the_same_is_passed_over(dtype: torch.dtype, value: float) -> None:
    train, labels = torch.randn(100, 3, dtype=dtype), torch.arange(100) % 2
    features = torch.randn(10, 3, dtype=dtype)
    constant = torch.full((100, 1), value, dtype=dtype)
    result = mahalanobis(
        torch.cat([features, constant[:10] + 1], dim=1),
        statistics_of(torch.cat([train, constant], dim=1), labels),
    )
    expected = mahalanobis(features, statistics_of(train, labels))
    # Sums of another width are rounded elsewhere.
    torch.testing.assert_close(
        result, expected, rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=0
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_direction_that_only_rounding_varies_in_is_passed_over(seed: int) -> None:
    torch.manual_seed(seed)
    train, labels = torch.randn(100, 3), torch.arange(100) % 2
    mixed = torch.cat([train, train @ torch.tensor([[0.3], [0.7], [-1.1]])], dim=1)
    statistics = statistics_of(mixed, labels)
    across = torch.tensor([0.3, 0.7, -1.1, -1.0])
    inputs = mixed[:10]
    found = mahalanobis(inputs + across, statistics)
    torch.testing.assert_close(found, mahalanobis(inputs, statistics), rtol=1e-3, atol=1e-3)


def test_small_distances_from_far_means_are_kept() -> None:
    base = torch.randn(60, 4).double()
    base -= base.mean(0)
    train, labels = torch.cat([base - 1e4, base + 1e4]), torch.arange(120) // 60
    features = 1e4 + 1e-4 * torch.randn(50, 4).double()
    estimate = np.linalg.inv(base.T @ base * 2 / 118)
    offsets = features.numpy() - 1e4
    expected = np.einsum("nf,fg,ng->n", offsets, estimate, offsets)
    result = mahalanobis(features, statistics_of(train, labels))
    # The offsets themselves are known to 1e-16 * 1e4 / 1e-4.
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_residual_is_what_scikit_learns_components_leave() -> None:
    train = (torch.randn(300, 8) @ torch.randn(8, 8) + 5).double()
    features = torch.randn(20, 8).double()
    fitted = decomposition.PCA(n_components=3).fit(train.numpy())
    back = fitted.inverse_transform(fitted.transform(features.numpy()))
    result = residual(features, statistics_of(train).principal(3))
    np.testing.assert_allclose(result, np.linalg.norm(features.numpy() - back, axis=1), rtol=1e-9)


@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 4, 2)])
def test_features_of_another_shape_are_an_error(shape: tuple[int, ...]) -> None:
    statistics = statistics_of(torch.randn(20, 4))
    for score, fitted in ((mahalanobis, statistics), (residual, statistics.principal(2))):
        with pytest.raises(CollectError, match=r"statistics of 4 features .*: give \[samples, 4\]"):
            score(torch.zeros(shape), fitted)
        with pytest.raises(CollectError, match="features, and these are complex"):
            score(torch.zeros(3, 4, dtype=torch.complex64), fitted)


@pytest.mark.parametrize("shape", [(5, 4, 2, 3), (5, 4), (5, 4, 6)])
def test_statistics_of_flattened_maps_are_refused(shape: tuple[int, ...]) -> None:
    maps = torch.randn(80, 4, 2, 3)
    flattened, by_position = Covariance(), Covariance(feature_dim=1)
    flattened.update(maps)
    by_position.update(maps)
    found = flattened.compute()
    for score, statistics in ((mahalanobis, found), (residual, found.principal(2))):
        with pytest.raises(CollectError, match=r"^statistics of 24 .*Covariance\(feature_dim=1\)"):
            score(torch.zeros(shape), statistics)
    # What the message says to write.
    pooled = maps[:5].mean((2, 3))
    assert mahalanobis(pooled, by_position.compute()).shape == (5,)
    assert mahalanobis(maps[:5].flatten(1), found).shape == (5,)


def test_too_few_samples_are_an_error() -> None:
    one_each = statistics_of(torch.randn(3, 4), torch.arange(3))
    with pytest.raises(CollectError, match="two in one class"):
        mahalanobis(torch.zeros(2, 4), one_each)
