"""Detectors of pytorch-ood, fitted and scored from recordings, against their own loops over a net.

pytorch-ood, and the torchvision that it imports, are in the extra ``ood``, which the development
environment leaves out. Where they lie in a folder of their own::

    PYTHONPATH=$PWD:FOLDER pytest -n 0 tests/analysis/test_pytorch_ood.py
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Recording
from scio_recorder.analysis.scores import mahalanobis
from scio_recorder.command_line.demo import digit_net, load_digits, train
from scio_recorder.reductions import Covariance
from scio_recorder.reductions.covariance import CovarianceResult
from tests.project.pages import run_page

HERE = Path(__file__)
PAGE = HERE.parents[2] / "docs/how-to/out-of-distribution.md"

pytestmark = pytest.mark.skipif(
    find_spec("pytorch_ood") is None,
    reason="needs pytorch-ood: PYTHONPATH=$PWD:FOLDER pytest -n 0 " + "/".join(HERE.parts[-3:]),
)

SIZE = 100
Loader = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module", autouse=True)
def _torchvision_is_imported() -> None:
    """Import torchvision, also where it was built for another torch.

    Torchvision's wheels on PyPI are built for CUDA. Beside a torch without it their compiled
    operators are not there, and the import fails as soon as it describes one. No detector uses
    them, so they are declared.
    """
    while True:
        try:
            importlib.import_module("torchvision")
            return
        except RuntimeError as error:
            missing = re.match(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            DECLARED.append(torch.library.Library("torchvision", "FRAGMENT"))
            DECLARED[-1].define(f"{missing[1]}() -> ()")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]


# An operator is declared for as long as the library that declares it is referred to.
DECLARED: list[torch.library.Library] = []


class Trained(NamedTuple):
    """A net that knows the digits 0 to 6, batches of those and of others, and what it returned."""

    net: nn.Sequential
    known: Loader
    unknown: Loader
    train: Recording
    test: Recording

    @property
    def labels(self) -> Tensor:
        return torch.cat([labels for _, labels in self.known])

    def until(self, layer: str) -> nn.Sequential:
        """Return the net up to a layer."""
        names = [name for name, _ in self.net.named_children()]
        return self.net[: names.index(layer) + 1]


@pytest.fixture(scope="module")
def trained() -> Trained:
    torch.manual_seed(0)
    digits, net = load_digits(), digit_net(7)
    train(net, digits.train, epochs=4)
    net.requires_grad_(False)
    known, unknown = (
        list(zip(split.images.split(SIZE), split.labels.split(SIZE), strict=True))
        for split in (digits.train, digits.unknown)
    )
    rnet = Recorder(net, input_size=(1, 1, 8, 8))
    rnet.record("stem", "body", "embed", "classify", inputs=True)
    return Trained(net, known, unknown, rnet.collect(known), rnet.collect(unknown))


def penultimate(recording: Recording) -> Tensor:
    """Return what the last layer was given."""
    return torch.cat([call.args[0] for call in recording.inputs["classify"]])


# What detectors of features are constructed with, beside the encoder.
SETTINGS: dict[str, Callable[[nn.Linear], dict[str, Any]]] = {
    "Mahalanobis": lambda last: {},
    "RMD": lambda last: {},
    "GMM": lambda last: {},
    "KNN": lambda last: {"k": 10},
    "ViM": lambda last: {"d": 16, "w": last.weight, "b": last.bias},
    "DICE": lambda last: {"p": 0.7, "w": last.weight, "b": last.bias},
    "SHE": lambda last: {"head": last},
    "NNGuide": lambda last: {"head": last},
    "fDBD": lambda last: {"head": last},
    "NCI": lambda last: {"head": last},
    "PNML": lambda last: {"head": last},
    "LTS": lambda last: {"head": last},
}
OF_LOGITS = ["MaxSoftmax", "MaxLogit", "EnergyBased", "Entropy", "GEN", "KLMatching", "OpenMax"]
OF_LOGITS += ["TemperatureScaling"]


@pytest.mark.parametrize("name", SETTINGS)
def test_from_features(trained: Trained, name: str) -> None:
    from pytorch_ood import detector

    kind, settings = getattr(detector, name), SETTINGS[name](trained.net.classify)
    own = kind(trained.until("relu"), **settings).fit(trained.known)
    ours = kind(None, **settings)
    ours.fit_features(penultimate(trained.train), trained.labels)
    same_scores(trained, own, lambda rows: ours.predict_features(rows), penultimate(trained.test))


@pytest.mark.parametrize("name", OF_LOGITS)
def test_from_logits(trained: Trained, name: str) -> None:
    from pytorch_ood import detector

    own = getattr(detector, name)(trained.net).fit(trained.known)
    ours = getattr(detector, name)(None)
    ours.fit_logits(trained.train["classify"], trained.labels)
    same_scores(trained, own, lambda rows: ours.predict_logits(rows), trained.test["classify"])


@pytest.mark.parametrize("name", ["ReAct", "VRA", "ASH", "SCALE", "RankFeat"])
def test_from_feature_maps(trained: Trained, name: str) -> None:
    from pytorch_ood import detector

    rest = trained.net[3:]
    own = getattr(detector, name)(trained.until("body"), rest).fit(trained.known)
    ours = getattr(detector, name)(None, rest)
    if ours.requires_fit:
        ours.fit_feature_maps(trained.train["body"], trained.labels)
    same_scores(trained, own, lambda rows: ours.predict_feature_maps(rows), trained.test["body"])


def test_from_several_layers(trained: Trained) -> None:
    from pytorch_ood.detector import MultiMahalanobis

    layers = [trained.net.stem, trained.net[1:3]]
    own, ours = MultiMahalanobis(layers).fit(trained.known), MultiMahalanobis(layers)
    # Its own loop averages maps when it is fitted.
    names = ("stem", "body")
    ours.fit_structured([trained.train[name].mean((2, 3)) for name in names], trained.labels)
    recorded = [trained.test[name].split(SIZE) for name in names]
    for (images, _), *maps in zip(trained.unknown, *recorded, strict=True):
        assert torch.equal(ours.predict_structured(maps), own.predict(images))


def same_scores(
    trained: Trained, own: Any, predict: Callable[[Tensor], Tensor], rows: Tensor
) -> None:
    """Compare bit for bit; batch by batch, since products are rounded by the size of a batch."""
    spread = []
    for (images, _), part in zip(trained.unknown, rows.split(SIZE), strict=True):
        with torch.no_grad():
            expected = own.predict(images)
        assert torch.equal(predict(part), expected)
        spread.append(expected.std())
    assert min(spread) > 0


@pytest.fixture
def _in_float64() -> Iterator[None]:
    """Let detectors, which fit in the default dtype, fit without rounding to speak of."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def statistics(trained: Trained, layer: str, by_class: bool) -> CovarianceResult:
    """Return what one pass over the known images keeps, in which no feature is."""
    rnet = Recorder(trained.net, input_size=(1, 1, 8, 8))
    rnet.record(layer)
    recording = rnet.collect(
        trained.known,
        store=None,
        transform=lambda activation, batch: activation.double(),
        reduce=Covariance(by=(lambda batch: batch[1]) if by_class else None),
    )
    result: CovarianceResult = recording[layer]
    return result


@pytest.mark.usefixtures("_in_float64")
def test_mahalanobis_from_statistics(trained: Trained) -> None:
    from pytorch_ood.detector import Mahalanobis

    train, test = trained.train["embed"].double(), trained.test["embed"].double()
    expected = Mahalanobis(None).fit_features(train, trained.labels)
    found = statistics(trained, "embed", by_class=True)
    degrees = len(train) - len(found.mean)
    ours = Mahalanobis(None)
    ours.mu = torch.stack(list(found.mean.values()))
    ours.precision = torch.linalg.inv(found.covariance * degrees + 1e-6 * torch.eye(64))
    scores = expected.predict_features(test)
    torch.testing.assert_close(ours.predict_features(test), scores, rtol=1e-9, atol=0)
    # Theirs adds 1e-6 to variances that it does not divide, and takes the half.
    distances = mahalanobis(trained.test["embed"], found)
    torch.testing.assert_close(distances / (2 * degrees), scores, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("_in_float64")
def test_rmd_from_statistics(trained: Trained) -> None:
    from pytorch_ood.detector import RMD

    train, test = trained.train["embed"].double(), trained.test["embed"].double()
    scores = RMD(None).fit_features(train, trained.labels).predict_features(test)
    total = 0.0
    for by_class, degrees in ((True, len(train) - 7), (False, 1 - len(train))):
        total += mahalanobis(test, statistics(trained, "embed", by_class)) / degrees
    torch.testing.assert_close(total, scores, rtol=1e-5, atol=1e-9)


@pytest.mark.usefixtures("_in_float64")
def test_vim_from_statistics(trained: Trained) -> None:
    from pytorch_ood.detector import ViM

    last = copy.deepcopy(trained.net.classify).double()
    train, test = penultimate(trained.train).double(), penultimate(trained.test).double()
    settings = {"d": 16, "w": last.weight, "b": last.bias}
    expected = ViM(None, **settings).fit_features(train, trained.labels)
    found = statistics(trained, "relu", by_class=False)
    ours = ViM(None, **settings)
    # The covariance about ViM's origin in place of the mean.
    offset = found.mean - ours.u
    about = found.covariance * (1 - 1 / len(train)) + offset.outer(offset)
    basis = found._replace(covariance=about).principal(16).residual_basis
    ours.principal_subspace = basis.T.float()
    rest = ((train - ours.u) @ basis.T).norm(dim=1)
    ours.alpha = (last(train).amax(1).mean() / rest.mean()).item()
    scores = expected.predict_features(test)
    # ViM rounds all to float32, and the directions at the edge of the space vary nearly alike.
    rounding = 2e-3 * scores.std().item()
    torch.testing.assert_close(ours.predict_features(test), scores, rtol=0, atol=rounding)
    assert ours.alpha == pytest.approx(expected.alpha, rel=1e-4)


def test_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(PAGE, PAGE.read_text(encoding="utf-8").replace("```python no-run", "```python"))
