"""Datasets that are collected into a bucket, and every request at which that can go wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from scio_recorder import open_recording
from scio_recorder.command_line import main
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.reductions import Covariance
from scio_recorder.stores import Disk
from tests.object_store import FAULTS, Traffic, environment, impatient_store, objects
from tests.recording.nets import assert_same, batches, expected, recorder
from tests.stores.disk_format.by_the_book import read_run

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
ROOT = Path(__file__).parents[2]
DATA = batches(3, 2, 4, 1)
NUM_SAMPLES = 10
REDUCE = {"3": Covariance()}


@pytest.fixture(scope="module")
def store() -> Iterator[tuple[str, Traffic]]:
    with impatient_store() as found:
        yield found


@pytest.fixture
def traffic(store) -> Iterator[Traffic]:
    found = store[1]
    found.clear()
    yield found
    found.fate = lambda number, method, path: ""


@pytest.fixture
def place(request, store) -> str:
    return f"bucket/{request.node.name.replace('[', '-').replace(']', '')}"


@pytest.fixture
def rnet() -> Any:
    return recorder("0", "2.first", "2/add_", "3")


def collect(rnet: Any, place: str, data: Any = DATA, **keywords: Any) -> Any:
    # A chunk holds one batch.
    given = {"store": Disk(f"s3://{place}", chunk_bytes=1), "reduce": REDUCE, "progress": False}
    return rnet.collect(data, **{**given, **keywords})


def check(rnet: Any, recording: Any, data: Any = DATA) -> None:
    wanted = expected(rnet, data)
    reduced = wanted.pop(rnet.architecture.resolve("3"))
    assert recording.complete
    assert list(recording.sample_ids) == list(range(sum(map(len, data))))
    for label, samples in wanted.items():
        assert torch.equal(recording[label][:], samples)
    torch.testing.assert_close(
        recording["3"].covariance, torch.cov(reduced.double().T), check_dtype=False
    )


def test_a_url_is_a_store(store, place, rnet, tmp_path):
    recording = rnet.collect(DATA, store=f"s3://{place}", progress=False)
    assert_same(recording, expected(rnet, DATA))
    recording = open_recording(f"s3://{place}/", verify=True)
    assert recording.path == f"s3://{place}"
    assert_same(recording, expected(rnet, DATA))
    for name, content in objects(store[0], place).items():
        (tmp_path / name).write_bytes(content)
        assert not [
            secret for secret in environment(store[0]).values() if secret.encode() in content
        ]
    assert read_run(tmp_path)[0] == list(range(NUM_SAMPLES))
    assert_same(open_recording(tmp_path), expected(rnet, DATA))
    with pytest.raises(RecordingError, match="already holds a recording"):
        rnet.collect(DATA, store=f"s3://{place}", progress=False)
    recording.save(f"s3://{place}-saved")
    saved = open_recording(f"s3://{place}-saved")
    assert_same(saved, expected(rnet, DATA))
    assert saved.made_with == recording.made_with
    assert recording.made_with["torch"] == torch.__version__


@pytest.mark.campaign
def test_at_every_request_something_goes_wrong(traffic, place, rnet):
    def all_of_it(name: str) -> None:
        interrupted = iter([*DATA[:2], RuntimeError()])

        def until() -> Iterator[torch.Tensor]:
            for batch in interrupted:
                if isinstance(batch, RuntimeError):
                    raise batch
                yield batch

        with pytest.raises(RuntimeError):
            collect(rnet, name, until())
        check(rnet, collect(rnet, name, resume=True))
        check(rnet, open_recording(f"s3://{name}", verify=True))

    all_of_it(f"{place}/clean")
    number_of_requests = traffic.number
    cases = [(number, fault) for number in range(number_of_requests) for fault in FAULTS]
    for at, fault in cases if FULL else random.Random(0).sample(cases, len(FAULTS)):
        traffic.clear()
        traffic.fate = lambda number, *request, at=at, fault=fault: fault if number == at else ""
        all_of_it(f"{place}/{at}-{fault}")
        assert traffic.number >= number_of_requests


@pytest.mark.campaign
def test_when_the_store_has_gone_what_is_durable_stays(traffic, place, rnet):
    paths = []
    traffic.fate = lambda number, method, path: paths.append(path) or ""
    collect(rnet, f"{place}/clean")
    # The recording is complete once its manifest stands; only leftovers are removed after that.
    manifest = next(at for at, path in enumerate(paths) if "manifest" in path)
    numbers = range(0, len(paths), 1 if FULL else 6)
    for at in sorted({*numbers, manifest, len(paths) - 1}):
        traffic.clear()
        traffic.fate = lambda number, *request, at=at: "cut" if number >= at else ""
        if at <= manifest:
            with pytest.raises(RecordingError, match="requests have failed"):
                collect(rnet, f"{place}/{at}")
        else:
            assert collect(rnet, f"{place}/{at}").complete
        traffic.fate = lambda number, method, path: ""
        check(rnet, collect(rnet, f"{place}/{at}", resume=True))


@pytest.mark.campaign
@pytest.mark.parametrize("in_parts", [False, True])
def test_without_permission_nothing_runs(traffic, place, rnet, in_parts):
    traffic.fate = lambda number, method, path: "denied" if method == "PUT" else ""

    def unused(*part: int) -> Any:
        raise AssertionError("nothing may run")
        yield

    given = (rnet.collect_parts, unused, 3) if in_parts else (rnet.collect, unused())
    collects, *arguments = given
    with pytest.raises(RecordingError, match=r"no permission.*AccessDenied") as caught:
        collects(*arguments, store=f"s3://{place}", progress=False)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__context__ is None
    traffic.fate = lambda number, method, path: "denied"
    with pytest.raises(RecordingError, match="no permission"):
        open_recording(f"s3://{place}")


@pytest.mark.campaign
def test_no_such_bucket(store, rnet):
    for use in (open_recording, lambda url: rnet.collect(DATA, store=url, progress=False)):
        with pytest.raises(RecordingError, match=r"no such bucket|holds no recording"):
            use("s3://no-such-bucket/run")
    with pytest.raises(CollectError, match="s3://BUCKET/RUN"):
        rnet.collect(DATA, store="ftp://bucket/run")


@pytest.mark.campaign
def test_parts(traffic, place, rnet):
    dice = random.Random(0)
    traffic.fate = lambda number, method, path: dice.choice(FAULTS) if dice.random() < 0.1 else ""
    recording = rnet.collect_parts(
        lambda part: DATA[part : part + 1],
        len(DATA),
        store=Disk(f"s3://{place}", chunk_bytes=1),
        reduce=REDUCE,
        sample_ids=lambda batch: [int(torch.cat(DATA).eq(row).all(1).nonzero()) for row in batch],
        progress=False,
    )
    check(rnet, recording)
    check(rnet, open_recording(f"s3://{place}", verify=True))
    assert {path for path in Counter(one.path for one in traffic.requests) if "lease" in path}


@pytest.mark.campaign
def test_rows_in_any_order_are_asked_for_at_once(traffic, place, rnet):
    recording = rnet.collect(DATA, store=Disk(f"s3://{place}", chunk_bytes=1), progress=False)
    waiting = threading.Barrier(len(DATA), timeout=300)

    def wait_for_others(number: int, method: str, path: str) -> str:
        waiting.wait()
        return ""

    traffic.fate = wait_for_others
    wanted = expected(rnet, DATA)[rnet.architecture.resolve("0")]
    order = torch.randperm(NUM_SAMPLES)
    assert torch.equal(recording["0"][order], wanted[order])


@pytest.mark.campaign
def test_workers_killed_at_random_moments():
    command = [sys.executable, "-m", "tests.workers.parts_campaign", "s3", "500" if FULL else "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("workers", [0, 2])
def test_loading_in_processes(place, rnet, workers):
    recording = rnet.collect(DATA, store=Disk(f"s3://{place}", chunk_bytes=1), progress=False)
    loader = DataLoader(
        recording.loader("0", batch_size=2, shuffle=True),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        timeout=600 if workers else 0,
    )
    rows = torch.cat(list(loader))
    wanted = expected(rnet, DATA)[rnet.architecture.resolve("0")]
    assert torch.equal(rows.sort(0).values, wanted.sort(0).values)


@pytest.mark.campaign
def test_commands(place, rnet, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = "from tests.recording.nets import plain_net, batches\ndata = batches(3, 2)\n"
    Path("of_buckets.py").write_text(module)
    given = ["--input-size", "2,4", "--data", "of_buckets:data", "--layers", "*"]
    assert not main(["collect", "of_buckets:plain_net", *given, "--store", f"s3://{place}"])
    for command in ("inspect", "verify", "report", "status"):
        assert not main([command, f"s3://{place}"])
    shown = capsys.readouterr().out
    assert "5 samples, complete" in shown
    assert "all checksums match" in shown
    assert "1 of 1 parts" in shown
    assert Path(f"{place.rpartition('/')[2]}.html").is_file()
    assert main(["inspect", f"s3://{place}-no"])
    assert main(["compare", f"s3://{place}", f"s3://{place}"]) == 0
