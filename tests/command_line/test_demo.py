"""The demonstration: scores against scikit-learn and NumPy, honest splits, the printed table."""

from __future__ import annotations

import copy
import io
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sklearn import covariance, metrics, neighbors
from torch import Tensor

from scio_recorder import Recorder
from scio_recorder.command_line.demo import run_demo
from scio_recorder.command_line.demo.detection import (
    FEATURE_LAYERS,
    RECTIFIED_LAYER,
    Result,
    detect,
)
from scio_recorder.command_line.demo.digits import Digits, load_digits
from scio_recorder.command_line.demo.network import DigitNet, accuracy, train
from scio_recorder.command_line.demo.scores import (
    auroc,
    energy,
    fpr_at_tpr,
    mahalanobis,
    max_softmax,
    nearest_neighbours,
)

# Few distinct values, so that ties within and between the groups are common.
scores = st.lists(st.integers(-3, 3), min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


def truth(known: Tensor, unknown: Tensor) -> tuple[np.ndarray, np.ndarray]:
    labels = np.concatenate([np.ones(len(known)), np.zeros(len(unknown))])
    return labels, torch.cat([known, unknown]).numpy()


@settings(deadline=None)  # the first example imports, and the machine may be busy
@given(scores, scores)
def test_auroc_is_scikit_learns(known: Tensor, unknown: Tensor) -> None:
    expected = metrics.roc_auc_score(*truth(known, unknown))
    assert auroc(known, unknown) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None)
@given(scores, scores, st.sampled_from([0.05, 0.5, 0.9, 0.95, 1.0]))
def test_fpr_is_scikit_learns(known: Tensor, unknown: Tensor, tpr: float) -> None:
    fprs, tprs, _ = metrics.roc_curve(*truth(known, unknown), drop_intermediate=False)
    expected = fprs[np.argmax(tprs >= tpr - 1e-9)]
    assert fpr_at_tpr(known, unknown, tpr) == pytest.approx(expected, abs=1e-12)


def test_fpr_by_hand() -> None:
    known = torch.arange(20.0)  # 19 of 20 are at least 1
    assert fpr_at_tpr(known, torch.tensor([0.5, 1.0, 7.0, 30.0])) == 0.75
    assert fpr_at_tpr(known, torch.tensor([0.5, 1.0, 7.0, 30.0]), tpr=1.0) == 1.0


@pytest.mark.parametrize("measure", [auroc, fpr_at_tpr])
@pytest.mark.parametrize("bad", [torch.tensor([]), torch.tensor([1.0, float("nan")])])
def test_measures_refuse_what_is_no_score(measure: object, bad: Tensor) -> None:
    good = torch.ones(2)
    with pytest.raises(ValueError, match="id_scores"):
        measure(bad, good)
    with pytest.raises(ValueError, match="ood_scores"):
        measure(good, bad)


@pytest.mark.parametrize("tpr", [0, -0.5, 1.01, float("nan")])
def test_fpr_refuses_a_share_out_of_range(tpr: float) -> None:
    with pytest.raises(ValueError, match="tpr"):
        fpr_at_tpr(torch.ones(2), torch.ones(2), tpr)


def test_scores_of_logits() -> None:
    logits = torch.randn(50, 7, dtype=torch.float64) * 5
    exponentials = np.exp(logits.numpy())
    expected = exponentials.max(axis=1) / exponentials.sum(axis=1)
    np.testing.assert_allclose(max_softmax(logits), expected, rtol=1e-12)
    np.testing.assert_allclose(energy(logits), np.log(exponentials.sum(axis=1)), rtol=1e-12)
    at_two = 2 * np.log(np.exp(logits.numpy() / 2).sum(axis=1))
    np.testing.assert_allclose(energy(logits, temperature=2), at_two, rtol=1e-12)


def test_scores_of_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, -1000.0]])
    assert energy(logits).tolist() == pytest.approx([1000, -1000 + np.log(2)])
    assert max_softmax(logits).tolist() == [1.0, 0.5]


def test_mahalanobis_is_scikit_learns() -> None:
    train_features, labels = torch.randn(200, 5) * 3, torch.arange(200) % 4 + 10
    train_features += labels[:, None]
    features = torch.randn(30, 5) * 4 + 11
    means = {
        int(k): train_features[labels == k].double().numpy().mean(axis=0) for k in (10, 11, 12, 13)
    }
    centred = train_features.double().numpy() - np.stack([means[int(k)] for k in labels])
    estimate = covariance.EmpiricalCovariance(assume_centered=True).fit(centred)
    distances = [estimate.mahalanobis(features.double().numpy() - mean) for mean in means.values()]
    result = mahalanobis(features, train_features, labels)
    np.testing.assert_allclose(result, -np.min(distances, axis=0), rtol=1e-9)


def test_mahalanobis_passes_over_a_unit_that_never_fires() -> None:
    train_features, labels = torch.randn(100, 3), torch.arange(100) % 2
    features = torch.randn(10, 3)
    dead = torch.zeros(100, 1)
    result = mahalanobis(
        torch.cat([features, dead[:10]], dim=1), torch.cat([train_features, dead], dim=1), labels
    )
    expected = mahalanobis(features, train_features, labels)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("k", [1, 5])
def test_nearest_neighbours_is_scikit_learns(k: int) -> None:
    train_features, features = torch.randn(60, 8).double(), torch.randn(20, 8).double()
    unit = [
        rows / np.linalg.norm(rows, axis=1)[:, None]
        for rows in (train_features.numpy(), features.numpy())
    ]
    distances, _ = neighbors.NearestNeighbors(n_neighbors=k).fit(unit[0]).kneighbors(unit[1])
    result = nearest_neighbours(features, train_features, k)
    np.testing.assert_allclose(result, -distances[:, -1], rtol=1e-9)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits(generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def net(digits: Digits) -> DigitNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = DigitNet(7)
        train(net, digits, epochs=4, after_epoch=lambda reached: None)
    return net


def recorder(net: DigitNet) -> Recorder:
    # A copy: the net is shared by tests, and hooks stay for as long as their recorder.
    rnet = Recorder(copy.deepcopy(net), input_size=(1, 1, 8, 8))
    rnet.record(*FEATURE_LAYERS, RECTIFIED_LAYER)
    return rnet


def test_splits_share_no_image_and_lose_none(digits: Digits) -> None:
    from sklearn.datasets import load_digits as original

    images = torch.cat([split.images for split in digits])
    labels = torch.cat([split.labels for split in digits])
    ours = {
        (label, *image)
        for label, image in zip(labels.tolist(), (images.flatten(1) * 16).tolist(), strict=True)
    }
    bunch = original()
    theirs = {
        (label, *image)
        for label, image in zip(bunch.target.tolist(), bunch.data.tolist(), strict=True)
    }
    assert ours == theirs
    assert len(labels) == len(bunch.target)
    assert digits.unknown.labels.unique().tolist() == [7, 8, 9]
    for split in digits[:3]:
        assert split.labels.unique().tolist() == list(range(7))
    sizes = np.array([len(split.labels) for split in digits[:3]])
    np.testing.assert_allclose(sizes / sizes.sum(), [0.6, 0.2, 0.2], atol=0.002)


def test_training_keeps_the_best_epoch(digits: Digits) -> None:
    reached: list[float] = []
    net = DigitNet(7)
    best = train(net, digits, epochs=3, after_epoch=reached.append)
    assert len(reached) == 3
    assert best == max(reached) == accuracy(net, digits.validation)


def test_training_looks_at_nothing_else(digits: Digits, net: DigitNet) -> None:
    blind = digits._replace(test=None, unknown=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        again = DigitNet(7)
        train(again, blind, epochs=4, after_epoch=lambda reached: None)
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_detection_by_hand(digits: Digits, net: DigitNet) -> None:
    """Every row again, from modules called one after another and scikit-learn's measures."""

    def stages(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        body = net.body(net.pool(net.stem(images)))
        embedded = net.embed(net.pool(body).flatten(1))
        return body.mean(dim=(2, 3)), embedded, embedded.relu()

    def scored(images: Tensor) -> dict[tuple[str, str], Tensor]:
        body, embedded, rectified = stages(images)
        clipped = net.classify(rectified.clamp(max=limit))
        logits, labels = net.classify(rectified), digits.train.labels
        return {
            ("maximum softmax", "logits"): max_softmax(logits),
            ("energy", "logits"): energy(logits),
            ("energy with ReAct", "relu"): energy(clipped),
            ("Mahalanobis", "body"): mahalanobis(body, reference[0], labels),
            ("10th neighbour", "body"): nearest_neighbours(body, reference[0], 10),
            ("Mahalanobis", "embed"): mahalanobis(embedded, reference[1], labels),
            ("10th neighbour", "embed"): nearest_neighbours(embedded, reference[1], 10),
        }

    with torch.no_grad():
        reference = stages(digits.train.images)
        limit = float(np.percentile(reference[2].numpy(), 90))
        known, unknown = scored(digits.test.images), scored(digits.unknown.images)
    results = list(detect(recorder(net), digits))
    assert [(row.score, row.layer) for row in results] == list(known)
    for row in results:
        labels, values = truth(known[row.score, row.layer], unknown[row.score, row.layer])
        fprs, tprs, _ = metrics.roc_curve(labels, values, drop_intermediate=False)
        # Float32 features differ in the last bits between the two orders of summing.
        assert row.auroc == pytest.approx(metrics.roc_auc_score(labels, values), abs=1e-4)
        assert row.fpr_at_95_tpr == pytest.approx(fprs[np.argmax(tprs >= 0.95)], abs=0.004)


def test_statistics_come_from_the_training_images(digits: Digits, net: DigitNet) -> None:
    expected = list(detect(recorder(net), digits))
    assert list(detect(recorder(net), digits._replace(validation=None))) == expected
    fewer = digits._replace(unknown=type(digits.unknown)(*(part[:1] for part in digits.unknown)))
    for full, row in zip(expected, detect(recorder(net), fewer), strict=True):
        # One unknown image: accepted or not, at a threshold that it had no part in.
        assert row.fpr_at_95_tpr in (0.0, 1.0)
        assert (row.score, row.layer) == (full.score, full.layer)


def run(**options: object) -> tuple[list[Result], str]:
    console = Console(file=io.StringIO(), width=100, **options)
    return run_demo(console, seed=3, epochs=2), console.file.getvalue()


def test_demo_prints_what_it_computes_and_repeats_itself() -> None:
    before = torch.get_rng_state()
    results, text = run()
    assert torch.equal(torch.get_rng_state(), before)
    assert run() == (results, text)
    for row in results:
        cells = rf"{row.score} .*{row.layer} .*{row.auroc:.3f} .*{row.fpr_at_95_tpr:.3f}"
        assert re.search(cells, text), cells
        # Two epochs are enough to be better than chance by far.
        assert 0.7 < row.auroc <= 1
    assert "classify" in text
    assert "\x1b" not in text
    assert text.startswith("Trained on")  # so no progress bar came first


def test_seed_and_progress_bar() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    other = run_demo(console, seed=4, epochs=2)
    assert "validation accuracy" in console.file.getvalue()
    assert other != run()[0]
