"""Parts of a recording by actors of Ray, on a small cluster of this machine."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import CollectError, Recorder, RecordingError, open_recording
from scio_recorder.recording.options import CollectOptions

ray = pytest.importorskip("ray")
from scio_recorder.integrations.ray import _Worker, collect_parts  # noqa: E402 - which needs ray

pytestmark = pytest.mark.filterwarnings(
    # What Ray says of itself, and leaves open.
    "ignore::FutureWarning:ray",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    before = signal.getsignal(signal.SIGTERM)
    ray.init(num_cpus=2, **options)
    yield
    ray.shutdown()
    # Here, where it may warn: what Ray has started and not waited for.
    gc.collect()
    # Ray leaves a handler of its own to all that this process runs afterwards.
    signal.signal(signal.SIGTERM, before)


def functions() -> tuple[Callable[[], Recorder], Callable[[int], list[Tensor]]]:
    """Return functions that actors need no file of tests for."""

    def make_recorder() -> Recorder:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        rnet = Recorder(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), input_size=(1, 3))
        rnet.record("*")
        return rnet

    def make_batches(part: int) -> list[Tensor]:
        return list(torch.arange(12.0).reshape(2, 2, 3) + part)

    return make_recorder, make_batches


def check(recording: Any, num_parts: int) -> None:
    """Compare with what a plain net returns, part after part."""
    make_recorder, make_batches = functions()
    data = torch.cat([batch for part in range(num_parts) for batch in make_batches(part)])
    net = make_recorder().net
    with torch.no_grad():
        for name, module in (("0", net[0]), ("0-1", net)):
            torch.testing.assert_close(recording[name][:], module(data))
    assert recording.complete
    ids = [part * 10**12 + number for part in range(num_parts) for number in range(4)]
    assert list(recording.sample_ids) == ids


@pytest.mark.campaign
@pytest.mark.usefixtures("cluster")
def test_actors_share_the_parts_and_one_dies(tmp_path, monkeypatch):
    make_recorder, make_batches = functions()
    mark = tmp_path / "died"

    def dying(part: int) -> Any:
        yield make_batches(part)[0]
        if part == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield make_batches(part)[1]

    # Actors work elsewhere, and there is room for two only.
    monkeypatch.chdir(tmp_path)
    recording = collect_parts(make_recorder, dying, 5, store="disk:run", num_workers=3)
    check(recording, 5)
    check(open_recording(tmp_path / "run", verify=True), 5)
    assert mark.exists()


@pytest.mark.campaign
@pytest.mark.usefixtures("cluster")
def test_what_goes_wrong(tmp_path):
    make_recorder, make_batches = functions()

    def failing(part: int) -> list[Tensor]:
        if part == 1:
            raise LookupError("no such part of the data")
        return make_batches(part)

    def dying(part: int) -> list[Tensor]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    options = {"store": f"disk:{tmp_path}/run", "num_workers": 1, "max_restarts": 0}
    with pytest.raises(CollectError, match="needs a store that other processes see, which Host"):
        collect_parts(make_recorder, make_batches, 3, **{**options, "store": "host"})
    with pytest.raises(CollectError, match="num_workers"):
        collect_parts(make_recorder, make_batches, 3, **{**options, "num_workers": 0})
    with pytest.raises(LookupError, match="no such part"):
        collect_parts(make_recorder, failing, 3, **options)
    with pytest.raises(RecordingError, match=r"all actors have died.*same call goes on"):
        collect_parts(make_recorder, dying, 3, **options)
    check(collect_parts(make_recorder, make_batches, 3, **options), 3)


def collecting(make_recorder: Any, make_batches: Any, **options: Any) -> None:
    given = {"store": "disk:unused", "num_workers": 1} | options
    collect_parts(make_recorder, make_batches, 3, **given)


def test_wrong_arguments_are_refused_before_there_are_actors(monkeypatch):
    make_recorder, make_batches = functions()

    def unused(*arguments: Any) -> Any:
        raise AssertionError("nothing is sent to actors")

    monkeypatch.setattr(ray, "put", unused)
    for name in ("sampleids", "wait", "resume"):
        with pytest.raises(TypeError, match=name):
            collecting(make_recorder, make_batches, **{name: 1})
    for made in (make_recorder(), None):
        with pytest.raises(CollectError, match=r"make_recorder is a .*give a function"):
            collecting(made, make_batches)
    with pytest.raises(CollectError, match="every=0"):
        collecting(make_recorder, make_batches, every=0)
    with pytest.raises(CollectError, match="make_batches is a list: give a function") as caught:
        collecting(make_recorder, make_batches(0))
    assert isinstance(caught.value, TypeError)


def test_what_makes_no_recorder():
    with pytest.raises(CollectError, match="make_recorder returned a NoneType"):
        _Worker().collect((lambda: None, functions()[1]), 3, CollectOptions())


def test_resources_reach_ray(monkeypatch):
    given = {}

    class Ended(Exception):  # noqa: N818 - it is thrown by no fault of anybody
        pass

    def options(**named):
        given.update(named)
        raise Ended

    monkeypatch.setattr(ray, "remote", lambda kind: SimpleNamespace(options=options))
    with pytest.raises(Ended):
        collecting(*functions(), resources={"GPU": 0.5, "CPU": 2, "disk": 3})
    wanted = {"num_cpus": 2, "num_gpus": 0.5, "memory": None, "resources": {"disk": 3}}
    assert wanted.items() <= given.items()
