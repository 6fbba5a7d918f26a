"""What a recording was made with: kept wherever it lies, shown, and compared on resuming."""

from __future__ import annotations

import importlib.metadata
import pickle
import platform
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare, open_recording
from scio_recorder.errors import CollectWarning, RecordingError
from scio_recorder.recording import collection, options
from scio_recorder.reductions import Digest, Mean
from tests.recording.nets import interrupt, recorder_of

BATCHES = [torch.ones(2, 3), torch.zeros(2, 3)]


@pytest.mark.parametrize("module", [None, ""])
def test_a_class_without_a_module_is_collected(module: str | None) -> None:
    kind = type("Made", (nn.Module,), {"forward": lambda self, x: x * 2, "__module__": module})
    rnet = recorder_of(kind(), "0-1", input_size=(1, 3))
    assert torch.equal(rnet.collect(BATCHES)["0-1"], 2 * torch.cat(BATCHES))


class Net(nn.Sequential):
    """A net of a package, as those of transformers are."""

    __module__ = "madenets.models.small"

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self[0].weight.data = self[0].weight.data.double()
        self[0].bias.data = self[0].bias.data.double()
        self.config = SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self[1](self[0](x.double()).float())
        return result


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("madenets")
    monkeypatch.setitem(vars(made), "__version__", "4.5.6")
    monkeypatch.setitem(sys.modules, "madenets", made)
    options._version.cache_clear()
    return made


def recorder() -> Recorder:
    return recorder_of(Net().eval(), "0", "1", input_size=(2, 3))


def test_versions_net_and_time_are_kept_wherever_a_recording_lies(
    package: ModuleType, tmp_path: Path
) -> None:
    rnet, start = recorder(), datetime.now(UTC) - timedelta(seconds=1)
    own = rnet.collect(BATCHES)
    reduced = rnet.collect(BATCHES, reduce=Mean(), store=None)
    disk = rnet.collect(BATCHES, store=f"disk:{tmp_path / 'disk'}")
    with rnet.collecting(store="host") as others:
        rnet.net(BATCHES[0])
    for recording in (own, reduced, disk, others.recording):
        found = dict(recording.made_with)
        assert start <= datetime.fromisoformat(found.pop("time")) <= datetime.now(UTC)
        assert found == {
            "scio_recorder": importlib.metadata.version("scio-recorder"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "madenets": "4.5.6",
            "net": "madenets.models.small.Net",
            "dtypes": ["float32", "float64"],
            "devices": ["cpu"],
            "attention": "sdpa",
            "training": False,
        }
    assert open_recording(tmp_path / "disk").made_with == disk.made_with
    for recording in (own, disk):
        saved = tmp_path / f"saved {recording.path is None}"
        recording.save(saved)
        assert open_recording(saved).made_with == recording.made_with
    with pytest.raises(TypeError):
        own.made_with["torch"] = "0"  # type: ignore[index]  # that is the mistake


def test_a_net_of_no_package_without_attention() -> None:
    class Own(nn.ReLU):
        __module__ = "__main__"

        @property
        def config(self) -> Any:
            raise RuntimeError("not yet")

    rnet = recorder_of(nn.ReLU(), "*", input_size=(2, 3))
    recording = rnet.collect(BATCHES)
    assert recording.made_with["net"] == "torch.nn.modules.activation.ReLU"
    assert pickle.loads(pickle.dumps(recording)).made_with == recording.made_with
    found = options.made_with(Own())
    assert found["net"].startswith("__main__.")
    assert found["training"] is True
    assert {"dtypes", "devices"} <= found.keys()
    assert found["dtypes"] == found["devices"] == []
    assert not {"attention", "__main__"} & found.keys()


# -- resuming --------------------------------------------------------------------------------------


def begin(rnet: Recorder, path: Path) -> None:
    interrupt(rnet, BATCHES, f"disk:{path}", 1, progress=False)


@pytest.mark.parametrize("name", ["torch", "madenets"])
def test_resuming_with_another_version_warns_and_names_both(
    name: str, package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnet, version = recorder(), options._version
    monkeypatch.setattr(options, "_version", lambda one: "9.8" if one == name else version(one))
    begin(rnet, tmp_path)
    begun = open_recording(tmp_path).made_with
    monkeypatch.setattr(options, "_version", version)
    now = {"torch": torch.__version__, "madenets": "4.5.6"}[name]
    with pytest.warns(CollectWarning) as caught:
        whole = rnet.collect(BATCHES, store=f"disk:{tmp_path}", resume=True, progress=False)
    (text,) = (str(one.message) for one in caught)
    assert f'begun with {name} "9.8", and goes on with {name} "{now}"' in text
    # It says what it was begun with, also in the process that has ended it.
    assert whole.made_with == open_recording(tmp_path).made_with == begun
    whole.save(tmp_path / "saved")
    assert open_recording(tmp_path / "saved").made_with == begun
    assert whole.num_samples == 4


def without(monkeypatch: pytest.MonkeyPatch, value: Any = None) -> None:
    """Let recordings be described as those of earlier versions are, or with another value."""
    described_now = collection.Collection.settings

    def described(self: Any, **options: Any) -> Any:
        others = {k: v for k, v in described_now(self, **options).items() if k != "made_with"}
        return others if value is None else {**others, "made_with": value}

    monkeypatch.setattr(collection.Collection, "settings", described)


def test_recordings_of_earlier_versions_open_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnet = recorder()
    with monkeypatch.context() as patch:
        without(patch)
        begin(rnet, tmp_path / "run")
        assert rnet.collect(BATCHES).made_with == {}
    old = open_recording(tmp_path / "run")
    assert old.made_with == {}
    old.save(tmp_path / "saved")
    assert open_recording(tmp_path / "saved").made_with == {}
    old.report(tmp_path / "page.html")
    assert "Made with" not in (tmp_path / "page.html").read_text("utf-8")
    whole = rnet.collect(BATCHES, store=f"disk:{tmp_path / 'run'}", resume=True, progress=False)
    assert (whole.num_samples, whole.made_with) == (4, {})


@pytest.mark.parametrize("forged", [[1], "torch", 3])
def test_a_forged_description_is_refused(
    forged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, forged)
    begin(recorder(), tmp_path)
    with pytest.raises(RecordingError, match="contradicts itself"):
        open_recording(tmp_path)


# -- showing ---------------------------------------------------------------------------------------


def test_it_is_shown(package: ModuleType, tmp_path: Path) -> None:
    rnet = recorder()
    recording = rnet.collect(BATCHES)
    recording.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    for text in (f"torch {torch.__version__}", "madenets 4.5.6", "dtypes float32 + float64"):
        assert text in page


def test_comparisons_name_what_differs(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnet, version = recorder(), options._version
    same = rnet.collect(BATCHES, reduce=Digest(), store=None)
    monkeypatch.setattr(options, "_version", lambda one: "1.0" if one == "torch" else version(one))
    other = rnet.collect(BATCHES)
    monkeypatch.setattr(options, "_version", version)
    assert "Made with" not in str(compare(same, rnet, BATCHES))
    difference = compare(other, same)
    assert difference.first is None
    wanted = f"Made with torch 1.0 (reference) and torch {torch.__version__} (candidate)."
    assert str(difference).splitlines()[-1] == wanted
    difference.report(tmp_path / "page.html")
    assert "Reference made with" in (tmp_path / "page.html").read_text("utf-8")
    other._made_with = {**same.made_with, "torch": "\x1b[31m2"}
    assert "torch \\x1b[31m2" in str(compare(other, same)).splitlines()[-1]
