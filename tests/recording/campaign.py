"""Collecting in processes that are killed: what is durable stays, and resuming completes it.

A program of its own, ``python -m tests.recording.campaign KIND FOLDER COUNT``, that imports all it
needs and forks: a process in which threads have run can't be forked safely, and starting one for
every kill would take most of the time.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scio_recorder import RecordingError, open_recording
from scio_recorder.recording import Recording
from scio_recorder.reductions import Covariance, Mean
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.files import RunWriter, holds_recording
from tests.recording.nets import batches, expected, failing_after, recorder
from tests.stores.disk_format import runs
from tests.stores.disk_format.runs import calls_of


class Job:
    """A net with in-place operations, a loader, layers that are stored and one that is reduced."""

    def __init__(self, *sizes: int) -> None:
        torch.manual_seed(0)
        self.rnet = recorder("0", "2", "2.first", "2/add_", "3")
        self.data = batches(*sizes)
        self.reduce = {"3": [Mean(), Covariance()]}
        clean = expected(self.rnet, self.data)
        keys = "0", "2", "2.first", "2/add_"
        self.stored = {self.rnet.architecture.resolve(key): key for key in keys}
        self.samples = {key: clean[label] for label, key in self.stored.items()}
        self.reduced = self.rnet.collect(self.data, reduce=self.reduce)["3"]

    def collect(self, path: Path) -> Recording:
        # A chunk holds one batch.
        store = Disk(path, chunk_bytes=1)
        return self.rnet.collect(
            self.data, store=store, reduce=self.reduce, resume=True, progress=False
        )

    def interrupt(self, path: Path, after: int) -> None:
        """Leave what a loader leaves that fails after some batches."""
        loader, store = failing_after(self.data, after), Disk(path, chunk_bytes=1)
        try:
            self.rnet.collect(loader, store=store, reduce=self.reduce, progress=False)
        except InterruptedError:
            return
        raise AssertionError("the loader was not heard")

    def check(self, path: Path, *, is_complete: bool = False) -> int:
        """Compare all that is durable with what layers returned; return how many samples."""
        if not holds_recording(path):
            assert not is_complete
            return 0
        found = open_recording(path, verify=True)
        count = found.num_samples
        assert found.sample_ids == list(range(count))
        for key, samples in self.samples.items() if count else ():
            assert torch.equal(found[key][:], samples[:count]), key
        if is_complete:
            assert found.complete
            assert count == sum(map(len, self.data))
            assert torch.equal(found["3"][0], self.reduced[0])
            # A commit joins the rows seen so far, so that sums are taken in another order.
            torch.testing.assert_close(found["3"][1], self.reduced[1])
        return count


def in_child(
    work: Callable[[], object], meanwhile: Callable[[int, int], bytes] = lambda child, pipe: b""
) -> tuple[int, int]:
    """Run ``work`` in a fork; return how many samples it reported durable, and its exit status.

    ``meanwhile`` is given the process and a pipe, and returns the reports that it has read.
    """
    return runs.in_child(reporting(work), meanwhile)


def reporting(work: Callable[[], object]) -> Callable[[runs.Reports], object]:
    append = RunWriter.append

    def call(reports: runs.Reports) -> None:
        def append_and_report(self: RunWriter, *arguments: Any, **keywords: Any) -> None:
            append(self, *arguments, **keywords)
            reports.append(self.durable)

        RunWriter.append = append_and_report  # type: ignore[method-assign]
        work()

    return call


def finish(job: Job, path: Path) -> None:
    _, status = in_child(lambda: job.collect(path))
    assert status == 0
    job.check(path, is_complete=True)
    shutil.rmtree(path)


def at_random_instants(folder: Path, count: int) -> None:
    """Kill a run and the one that resumes it, each at a random instant of its length."""
    dice, job = random.Random(0), Job(*[4] * 12, 3)
    instants: list[float] = []

    def watch(child: int, reading: int) -> bytes:
        """Note when commits are reported: what comes before the first is no part of them."""
        reports = []
        for _ in range(12):
            reports.append(os.read(reading, 8))
            instants.append(time.monotonic())
        return b"".join(reports)

    in_child(lambda: job.collect(folder / "clean"), watch)
    # The median: a busy machine may stand still anywhere.
    interval = statistics.median(later - one for one, later in itertools.pairwise(instants))
    counts = []
    for attempt in range(count):
        path, last = folder / str(attempt), 0
        for _ in range(2):

            def kill(child: int, reading: int, last: int = last) -> bytes:
                # After a random number of commits, however slow the machine is just now, and then
                # at a random instant of the next.
                commits = range(dice.randint(0, 12 - last // 4))
                reports = [os.read(reading, 8) for _ in commits]
                time.sleep(dice.uniform(0, interval))
                os.kill(child, signal.SIGKILL)
                return b"".join(reports)

            durable, status = in_child(lambda path=path: job.collect(path), kill)
            assert status in (0, -signal.SIGKILL)
            found = job.check(path)
            assert found >= max(last, durable)
            last = found
            counts.append(found)
        finish(job, path)
    # Neither all before they began nor all after they had ended.
    assert len(set(counts)) > min(count // 2, 10), counts
    assert sum(0 < found < 51 for found in counts) > len(counts) // 4, counts
    print(f"{2 * count} kills, after {sorted(set(counts))} durable samples")


def at_every_call(folder: Path, count: int) -> None:
    """Kill a run of three batches at each of its file operations."""
    job = Job(4, 4, 3)
    total = len(calls_of(lambda: job.collect(folder / "clean")))
    assert total > 80, total
    print(f"{total} calls")
    for target in range(total):
        path = folder / str(target)
        killed_at(job, path, target)
        finish(job, path)


def at_every_call_of_a_resume(folder: Path, count: int) -> None:
    """Kill what resumes an interrupted run, at each ``count``-th of its file operations."""
    job = Job(4, 4, 3)
    job.interrupt(folder / "begun", 1)
    shutil.copytree(folder / "begun", folder / "clean")
    total = len(calls_of(lambda: job.collect(folder / "clean")))
    for target in range(0, total, count):
        path = folder / str(target)
        shutil.copytree(folder / "begun", path)
        assert killed_at(job, path, target) >= 4
        finish(job, path)


def killed_at(job: Job, path: Path, target: int) -> int:
    durable = runs.killed_at(target, reporting(lambda: job.collect(path)), torn=True)
    try:
        found = job.check(path)
    except RecordingError as error:
        raise AssertionError(f"killed at call {target}") from error
    assert found >= durable
    return found


def main() -> None:
    kind, folder, count = sys.argv[1:]
    torch.set_num_threads(1)
    # No power is lost here, and waiting for the disk would take minutes.
    system.fsync = lambda descriptor: os.fstat(descriptor) and None
    globals()[kind](Path(folder), int(count))


if __name__ == "__main__":
    main()
