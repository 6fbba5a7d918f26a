"""Whatever ends a collection, or damages its folder: durable samples stay, or it is said why not.

Where the environment variable `SCIO_RECORDER_FULL_CAMPAIGN` is set to something other than `0`,
every byte and call and many more instants are tried.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scio_recorder import RecordingError, open_recording
from scio_recorder.layer import TensorSpec
from scio_recorder.reductions import Fold
from scio_recorder.stores import Disk
from scio_recorder.stores import Job as StoreJob
from scio_recorder.stores.disk import DiskWriter
from scio_recorder.stores.files import RunWriter
from scio_recorder.stores.kept_inputs import pack
from tests.recording.campaign import Job
from tests.recording.nets import assert_same, batches, expected, failing_after, recorder
from tests.stores.disk_format.runs import calls_of
from tests.stores.disk_format.test_faults import failing, problem_of

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
ROOT = Path(__file__).parents[2]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("at_random_instants", 500 if FULL else 50),
        ("at_every_call", 1),
        ("at_every_call_of_a_resume", 1 if FULL else 5),
    ],
)
def test_killed(kind, count, tmp_path):
    command = [sys.executable, "-m", "tests.recording.campaign", kind, str(tmp_path), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
def test_power_is_cut(tmp_path):
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("only root can mount a file system, and Linux has to be able to make one")
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    can_mount = f"mkfs.ext4 -q {image} && mount -o loop {image} {tmp_path}"
    probe = ["unshare", "--mount", "sh", "-c", can_mount]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here, as in most containers")
    # In memory nobody waits for a disk, and what is synced counts as much.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        program = [sys.executable, "-m", "tests.recording.power_campaign", folder]
        command = ["unshare", "--mount", *program, "300" if FULL else "2"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("code", "from_then_on"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "ENOSPC"]
)
def test_any_call_failing(code, from_then_on, tmp_path):
    job = Job(4, 4, 3)
    total = len(calls_of(lambda: job.collect(tmp_path / "clean")))
    raised = 0
    for target in range(total):
        path = tmp_path / str(target)
        with failing(target, code, from_then_on=from_then_on):
            problem = problem_of(lambda path=path: job.collect(path))
        if problem is not None:
            assert problem.errno == code
            assert str(tmp_path) in str(problem)
            raised += 1
        del problem
        assert not alive()
        job.check(path)
        job.collect(path)
        job.check(path, is_complete=True)
    # Closing and removing what nobody needs harm nobody.
    assert raised > total // 3


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("scio-")]


def test_a_slow_disk_holds_the_loop_back_and_drops_nothing(monkeypatch, tmp_path):
    rnet, data = recorder("0", "2.first"), batches(4, 4, 3, 4, 4)
    append, taken, durable, writers = RunWriter.append, [], [], set()

    def slowly(self, *arguments, **keywords):
        # One chunk is being written and one is full: that far the loop comes, and no further.
        most = min(len(durable) + 2, len(data))
        deadline = time.monotonic() + 60
        while len(taken) < most and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(taken) == most
        append(self, *arguments, **keywords)
        writers.add(threading.current_thread())
        durable.append(1)

    monkeypatch.setattr(RunWriter, "append", slowly)
    loader = (taken.append(1) or batch for batch in data)
    recording = rnet.collect(loader, store=Disk(tmp_path / "run", chunk_bytes=1))
    assert_same(recording, expected(rnet, data))
    assert len(durable) == len(data)
    assert len(writers) == 1
    assert threading.current_thread() not in writers
    assert not alive()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ConnectionError])
def test_an_exception_in_the_loop_leaves_whole_commits_and_no_thread(kind, monkeypatch, tmp_path):
    rnet, data = recorder("0", "2.first"), batches(4, 4, 3)
    append, raising = RunWriter.append, threading.Event()

    def late(self, *arguments, **keywords):
        assert raising.wait(300)
        time.sleep(0.02)
        append(self, *arguments, **keywords)

    def loader():
        yield data[0]
        # The first chunk is being written now.
        raising.set()
        raise kind

    monkeypatch.setattr(RunWriter, "append", late)
    with pytest.raises(kind) as caught:
        rnet.collect(loader(), store=Disk(tmp_path / "run", chunk_bytes=1))
    assert not alive()
    assert open_recording(tmp_path / "run", verify=True).num_samples == 4
    # The lock is free, though the exception still refers to all that was under way.
    assert caught.value is not None
    resumed = rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=1), resume=True)
    assert_same(resumed, expected(rnet, data))


def test_after_a_chunk_that_failed_nothing_more_is_written(monkeypatch, tmp_path):
    # The loop has gone on meanwhile: what is staged by then must not follow the gap.
    rnet, data = recorder("0", "2.first"), batches(4, 4, 4, 4)
    append, numbers = RunWriter.append, []

    def failing_once(self, *arguments, **keywords):
        numbers.append(1)
        if len(numbers) == 2:
            raise RecordingError("the disk is full")
        append(self, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "append", failing_once)
        loader = failing_after(data, 3, ConnectionError)
        with pytest.raises((RecordingError, ConnectionError)):
            rnet.collect(loader, store=Disk(tmp_path / "run", chunk_bytes=100))
    assert len(numbers) == 2
    assert open_recording(tmp_path / "run").sample_ids == list(range(4))
    resumed = rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=1), resume=True)
    assert_same(resumed, expected(rnet, data))


def test_the_state_is_that_of_the_samples_committed_with_it(monkeypatch, tmp_path):
    # The accumulator that was handed over is added to while its chunk is being written.
    rnet, data = recorder("0", "3"), batches(4, 4, 4)
    calls, reduced_twice = [], threading.Event()

    def add(total: Any, activation: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        added = activation.sum(0) if total is None else total.add_(activation.sum(0))
        if len(calls) == 2:
            reduced_twice.set()
        return added

    append, states = RunWriter.append, []

    def late(self, *arguments, state, **keywords):
        assert reduced_twice.wait(300)
        append(self, *arguments, state=state, **keywords)
        states.append(state.tensors[0].clone())

    monkeypatch.setattr(RunWriter, "append", late)
    store = Disk(tmp_path / "run", chunk_bytes=1)
    rnet.collect(data, store=store, reduce={"3": Fold(add, merge=torch.add)})
    sums = [batch.sum(0) for batch in expected(rnet, data)[1, 4].split(4)]
    assert torch.equal(states[0], sums[0])
    assert torch.equal(states[1], sums[0] + sums[1])
    assert torch.equal(states[2], sums[0] + sums[1] + sums[2])


def begun(path: Path) -> tuple[DiskWriter, Callable[[], None]]:
    """Return a writer, and what hands a chunk over to it."""
    job = StoreJob(recorder("0").architecture, ((1, 1),), None, lambda: {"layers": ["1-1"]})
    writer = Disk(path, chunk_bytes=1).open(job)
    column = writer.column((1, 1), TensorSpec((2,), torch.float32), torch.ones(4, 2))

    def commit() -> None:
        column.place(writer.start, 4).fill_(1)
        writer.commit(range(4), dict)

    return writer, commit


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_a_failure_is_raised_at_every_later_call(monkeypatch, tmp_path, seconds):
    def fail(*arguments, **keywords):
        time.sleep(seconds)
        raise RecordingError("the disk is gone")

    writer, commit = begun(tmp_path / "run")
    monkeypatch.setattr(RunWriter, "append", fail)
    commit()
    for call in (commit, commit, lambda: writer.finish(dict)):
        with pytest.raises(RecordingError, match="gone"):
            call()
    assert not alive()


def test_a_state_is_copied_when_it_is_packed():
    state = {"sum": torch.ones(2), "parts": [torch.ones(1)]}
    packed = pack(state)
    state["sum"].zero_()
    state["parts"][0].zero_()
    assert [tensor.tolist() for tensor in packed.tensors] == [[1, 1], [1]]


def test_a_forked_process_writes_nothing_and_does_not_wait(tmp_path):
    writer, commit = begun(tmp_path / "run")
    commit()
    with warnings.catch_warnings():
        # The child calls nothing that takes locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(RecordingError, match="another process opened it"):
                commit()
            writer.abandon(None)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    commit()
    writer.abandon(None)
    assert open_recording(tmp_path / "run").num_samples == 8
