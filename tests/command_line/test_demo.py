"""The demonstration: scores against scikit-learn and NumPy, honest splits, the printed table."""

from __future__ import annotations

import copy
import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn import metrics
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.analysis.scores import mahalanobis
from scio_recorder.command_line.demo import (
    FEATURE_LAYERS,
    LOGITS_LAYER,
    Digits,
    Score,
    detect,
    detection_page,
    digit_net,
    energy,
    load_digits,
    quality,
    run_demo,
    train,
)
from scio_recorder.reductions.covariance import CovarianceResult


def truth(known: Tensor, unknown: Tensor) -> tuple[np.ndarray, np.ndarray]:
    labels = np.concatenate([np.ones(len(known)), np.zeros(len(unknown))])
    return labels, torch.cat([known, unknown]).numpy()


def within_classes(features: Tensor, labels: Tensor) -> CovarianceResult:
    """Each class's mean and the covariance that they share, by NumPy in float64."""
    rows, classes = features.double().numpy(), labels.numpy()
    means = {int(one): rows[classes == one].mean(axis=0) for one in np.unique(classes)}
    away = rows - np.stack([means[int(one)] for one in classes])
    counts = {one: int((classes == one).sum()) for one in means}
    pooled = torch.from_numpy(away.T @ away / (len(rows) - len(means)))
    return CovarianceResult(counts, {k: torch.from_numpy(v) for k, v in means.items()}, pooled)


def test_quality_by_hand() -> None:
    known = torch.arange(20.0)  # 19 of 20 are at least 1
    auroc, fpr = quality(known, torch.tensor([0.5, 1.0, 7.0, 30.0]))
    assert auroc == pytest.approx((19 + 18.5 + 12.5 + 0) / 80)
    assert fpr == 0.75


def test_scores_of_logits() -> None:
    logits = torch.randn(50, 7, dtype=torch.float64) * 5
    exponentials = np.exp(logits.numpy())
    np.testing.assert_allclose(energy(logits), np.log(exponentials.sum(axis=1)), rtol=1e-12)


def test_scores_of_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, -1000.0]])
    assert energy(logits).tolist() == pytest.approx([1000, -1000 + np.log(2)])


@pytest.fixture(scope="module")
def digits() -> Digits:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return load_digits()


@pytest.fixture(scope="module")
def net(digits: Digits) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = digit_net(7)
        train(net, digits.train, epochs=1)
    return net


def recorder(net: nn.Sequential) -> Recorder:
    # A copy: the net is shared by tests, and hooks stay for as long as their recorder.
    rnet = Recorder(copy.deepcopy(net), input_size=(1, 1, 8, 8))
    rnet.record(*FEATURE_LAYERS, LOGITS_LAYER)
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
    for split in digits[:2]:
        assert split.labels.unique().tolist() == list(range(7))
    sizes = np.array([len(split.labels) for split in digits[:2]])
    np.testing.assert_allclose(sizes / sizes.sum(), [0.8, 0.2], atol=0.002)


def test_detection_by_hand(digits: Digits, net: nn.Sequential) -> None:
    """Every row again, from modules called one after another and scikit-learn's measures."""

    def stages(images: Tensor) -> tuple[Tensor, Tensor]:
        body = net[:3](images)
        return body.mean(dim=(2, 3)), net[3:6](body)

    def scored(images: Tensor) -> dict[tuple[str, str], Tensor]:
        body, embedded = stages(images)
        return {
            ("energy", "logits"): energy(net.classify(embedded.relu())),
            ("Mahalanobis", "body"): -mahalanobis(body, statistics[0]),
            ("Mahalanobis", "embed"): -mahalanobis(embedded, statistics[1]),
        }

    with torch.no_grad():
        reference = stages(digits.train.images)
        statistics = [within_classes(rows, digits.train.labels) for rows in reference]
        known, unknown = scored(digits.test.images), scored(digits.unknown.images)
    results = detect(recorder(net), digits)
    assert [(row.name, row.layer) for row in results] == list(known)
    for row in results:
        labels, values = truth(known[row.name, row.layer], unknown[row.name, row.layer])
        fprs, tprs, _ = metrics.roc_curve(labels, values, drop_intermediate=False)
        # Float32 features differ in the last bits between the two orders of summing.
        assert row.auroc == pytest.approx(metrics.roc_auc_score(labels, values), abs=1e-4)
        assert row.fpr_at_95_tpr == pytest.approx(fprs[np.argmax(tprs >= 0.95)], abs=0.004)


def run(**options: object) -> tuple[list[Score], str]:
    console = Console(file=io.StringIO(), width=100, **options)
    return run_demo(console, seed=3, epochs=2), console.file.getvalue()


def test_demo_prints_what_it_computes_and_repeats_itself() -> None:
    before = torch.get_rng_state()
    results, text = run()
    assert torch.equal(torch.get_rng_state(), before)
    again, same_text = run()
    assert same_text == text
    assert [row[:4] for row in again] == [row[:4] for row in results]
    for row in results:
        cells = rf"{row.name} .*{row.layer} .*{row.auroc:.3f} .*{row.fpr_at_95_tpr:.3f}"
        assert re.search(cells, text), cells
        # Two epochs are enough to be better than chance by far.
        assert 0.7 < row.auroc <= 1
    assert "classify" in text
    assert "\x1b" not in text
    assert text.startswith("Trained on")  # so no progress bar came first


@pytest.mark.campaign
def test_the_seed_decides() -> None:
    console = Console(file=io.StringIO(), width=100)
    scores = run_demo(console, seed=4, epochs=2)
    assert [row[:4] for row in scores] != [row[:4] for row in run()[0]]


def test_the_page_shows_the_scores_of_both_and_some_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    known = torch.randn(40, generator=generator, dtype=torch.float64) + 2
    unknown = torch.randn(30, generator=generator, dtype=torch.float64)
    images = torch.zeros(40, 1, 2, 3)
    images[:, 0, 1, 2] = 0.5
    scores = [
        Score("distance", "body", 0.25, 0.5, known, unknown),
        Score("energy", "logits", *quality(known, unknown), known, unknown),
    ]
    page = detection_page(scores, images, images[:30], 7)
    assert "<title>Known and unknown digits</title>" in page
    auroc = metrics.roc_auc_score(*truth(known, unknown))
    assert f"{100 * auroc:.1f} of 100 pairs" in page
    assert f"energy of logits: auroc {auroc:.3f}" in page.lower()
    assert page.count('<rect x="2" y="1"') == len(re.findall('aria-label="A digit"', page))
    # All that pass where 95 of 100 known ones do.
    passing = (unknown >= known.sort().values[2]).sum().item()
    assert len(re.findall('aria-label="A digit"', page)) == 12 + 12 + min(passing, 12)

    values = np.concatenate([known.numpy(), unknown.numpy()])
    low, high = np.quantile(values, 0.01), values.max()
    figures = re.findall("<figure class=.*?</figure>", page, re.DOTALL)
    assert len(figures) == 4
    shares = [
        np.histogram(np.maximum(kind, low), 32, (low, high))[0] / len(kind)
        for kind in (known.numpy(), unknown.numpy())
    ]
    for figure, share in zip(figures, shares * 2, strict=True):
        heights = [float(height) for height in re.findall(r'height="([^"]*)"', figure)]
        np.testing.assert_allclose(heights, share / max(map(max, shares)) * 100, atol=1e-9)
        line = float(re.search(r'<line x1="([^"]*)"', figure)[1])
        threshold = known.sort().values[2].item()  # 38 of 40 are at least this
        assert line == pytest.approx(float((threshold - low) / (high - low) * 100))
        for place, text in re.findall(r'left: ([^"]*)%">([^<]*)<', figure):
            assert float(text) == pytest.approx(low + float(place) / 100 * (high - low), abs=1e-6)
