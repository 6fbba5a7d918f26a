"""A default device that is not where the data is, as after `torch.set_default_device`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder
from scio_recorder.postprocessors import Ablate, At, Heads
from scio_recorder.reductions import Covariance, Moments
from tests.oracle import differences, freeze

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 1, 0, 1, 0])


def make_recorder() -> Recorder:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    rnet = Recorder(net, input_data=X, verbose=0)
    rnet.record("0", "1")
    return rnet


def collected(rnet: Recorder, **options: Any) -> Any:
    return rnet.collect([X[:4], X[4:]], progress=False, **options)


def covariance(rnet: Recorder, folder: Path) -> Any:
    reduce = [Covariance(), Moments()]
    recording = rnet.collect([X], store=None, reduce=reduce, progress=False)
    return [tuple(result) for result in recording["0"]]


def covariance_by_class(rnet: Recorder, folder: Path) -> Any:
    reduce = Covariance(by=lambda batch: CLASSES)
    return rnet.collect([X], store=None, reduce=reduce, progress=False)["0"].covariance


def page(rnet: Recorder, folder: Path) -> Any:
    written = collected(rnet, store="host").report(folder / "page.html")
    return len(written.read_text(encoding="utf-8"))


def nothing_of_each_sample(rnet: Recorder, folder: Path) -> Any:
    return collected(rnet, store="host", transform=lambda value, batch: value[:, :0])["0"]


def shuffled(rnet: Recorder, folder: Path) -> Any:
    loader = collected(rnet, store="host").loader("0", batch_size=4, shuffle=True)
    return [*loader, loader.state_dict()]


def effects(rnet: Recorder, folder: Path) -> Any:
    return rnet.sweep(X, X + 1, lambda output: output.sum()).values


def estimated_effects(rnet: Recorder, folder: Path) -> Any:
    return rnet.sweep(X, X + 1, lambda output: output.sum(), estimate=True).values


def places(rnet: Recorder, folder: Path) -> Any:
    chosen = {"0": At((..., [0, 2]), Ablate()), "1": Heads(2, [1], Ablate())}
    return rnet(X, activation_postproc=chosen)


@pytest.mark.parametrize(
    "use",
    [
        covariance,
        covariance_by_class,
        page,
        nothing_of_each_sample,
        shuffled,
        effects,
        estimated_effects,
        places,
    ],
)
def test_results_do_not_depend_on_the_default_device(
    use: Callable[[Recorder, Path], Any], tmp_path: Path
) -> None:
    rnet = make_recorder()
    folders = tmp_path / "one", tmp_path / "other"
    for folder in folders:
        folder.mkdir()
    truth = use(rnet, folders[0])
    # Whatever is made there by mistake has no values, and can't be computed with.
    with torch.device("meta"):
        found = use(rnet, folders[1])
    assert differences(freeze(found), freeze(truth)) == []
    assert not isinstance(found, Tensor) or found.device.type == "cpu"
