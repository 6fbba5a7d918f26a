"""Parts of a recording by actors of Ray, on a small cluster of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import CollectError, Recorder, RecordingError, open_recording

ray = pytest.importorskip("ray")
from scio_recorder.integrations.ray import collect_parts  # noqa: E402 - which needs ray

pytestmark = pytest.mark.filterwarnings(
    # What Ray says of itself, and leaves open.
    "ignore::FutureWarning:ray",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    options = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    before = signal.getsignal(signal.SIGTERM)
    ray.init(num_cpus=2, **options)
    yield
    ray.shutdown()
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
    with pytest.raises(CollectError, match="need a store that all of them see, and Host"):
        collect_parts(make_recorder, make_batches, 3, **{**options, "store": "host"})
    with pytest.raises(CollectError, match="num_workers"):
        collect_parts(make_recorder, make_batches, 3, **{**options, "num_workers": 0})
    with pytest.raises(LookupError, match="no such part"):
        collect_parts(make_recorder, failing, 3, **options)
    with pytest.raises(RecordingError, match=r"all actors have died.*same call goes on"):
        collect_parts(make_recorder, dying, 3, **options)
    check(collect_parts(make_recorder, make_batches, 3, **options), 3)
