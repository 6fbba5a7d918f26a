"""Killed at any instant, or robbed of power: every sample reported durable is still there.

Two campaigns kill a writer: at each of its system calls, and at random instants. The second makes
20 attempts, or 2000 where the environment variable `SCIO_RECORDER_FULL_CAMPAIGN` is set to
something other than `0`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from scio_recorder.stores.disk_format.description import holds_recording
from scio_recorder.stores.disk_format.reader import Packed, RunReader
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.runs import (
    Reports,
    calls_of,
    check_contents,
    finish_and_check,
    in_child,
    intercepted,
    killed_at,
    write_rest,
)

CAMPAIGN = pytest.mark.campaign
NUM_KILLS = 2000 if os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0" else 20


@pytest.mark.parametrize(
    ("torn", "step"),
    [(False, 12), pytest.param(False, 1, marks=CAMPAIGN), pytest.param(True, 1, marks=CAMPAIGN)],
    ids=["at a few calls", "between calls", "inside a write"],
)
def test_killed_at_every_system_call(tmp_path, torn, step):
    names = calls_of(lambda: write_rest(tmp_path / "count", []))
    assert names.count("write") > 10
    for target in [i for i, name in enumerate(names) if name == "write" or not torn][::step]:
        path = tmp_path / str(target)
        durable = killed_at(target, lambda reports, path=path: write_rest(path, reports), torn=torn)
        survived(path, durable)
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.campaign
def test_killed_at_random_instants(tmp_path):
    dice = random.Random(0)
    counts = []
    for attempt in range(NUM_KILLS):
        path = tmp_path / str(attempt)

        def work(reports: Reports, path: Path = path) -> None:
            write_rest(path, reports, finish=False, step=2)

        def kill(child: int, reading: int) -> bytes:
            # After a random number of commits and then at a random instant, so that a slow disk
            # does not have all writers killed before they began.
            reports = [os.read(reading, 8) for _ in range(dice.randrange(12))]
            time.sleep(dice.uniform(0, 0.005))
            os.kill(child, signal.SIGKILL)
            return b"".join(reports)

        durable, status = in_child(work, kill)
        assert status == -signal.SIGKILL
        if holds_recording(path):
            first = check_contents(path)
            assert first >= durable
            # A second writer goes on and is killed as well.
            durable, status = in_child(work, kill)
            assert status == -signal.SIGKILL
            counts.append(check_contents(path))
            assert counts[-1] >= max(first, durable)
        shutil.rmtree(path, ignore_errors=True)
    assert max(counts) > 9, "killed too early to have tested anything"


def survived(path: Path, durable: int) -> None:
    if holds_recording(path):
        assert check_contents(path) >= durable
    else:
        assert durable == 0
    finish_and_check(path)


class PowerLossError(BaseException):
    """Ends a run, whatever it catches."""


class Disk:
    """What a disk holds for certain: files and folders as they were when last synced."""

    def __init__(self, root: Path, last_call: int) -> None:
        self.root = root
        self.last_call = last_call
        self.synced: dict[int, bytes | dict[str, int]] = {}
        self.paths: dict[int, str] = {}

    def act(self, number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if number >= self.last_call:
            raise PowerLossError
        if name == "fsync":
            self.sync(arguments[0])
        return go_on()

    def sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        # The descriptors of files are for writing only.
        path = f"/proc/self/fd/{descriptor}"
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                self.synced[status.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            with open(path, "rb") as stream:
                self.synced[status.st_ino] = stream.read()

    def restore(self, target: Path) -> None:
        """Build the folder as it is found when the power is back."""
        target.mkdir()
        self._restore(target, self.synced.get(self.root.stat().st_ino, {}))

    def _restore(self, folder: Path, entries: Any) -> None:
        for name, inode in entries.items():
            content = self.synced.get(inode, b"")
            (folder / name).write_bytes(content)


@pytest.mark.campaign
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_power_lost_at_every_system_call(tmp_path):
    num_calls = len(calls_of(lambda: write_rest(tmp_path / "count", [])))
    for target in range(num_calls + 1):
        path, found = tmp_path / f"lost-{target}", tmp_path / f"found-{target}"
        path.mkdir()
        disk = Disk(path, target)
        durable = [0]
        with intercepted(disk.act):
            try:
                write_rest(path, durable)
                durable.append(9)
            except PowerLossError:
                assert target < num_calls
        disk.restore(found)
        survived(found, durable[-1])
        if target >= num_calls:
            assert (found / "manifest-00000.safetensors").exists()
        shutil.rmtree(path)
        shutil.rmtree(found)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux's /proc")
def test_power_lost_where_there_are_no_layers(tmp_path):
    (tmp_path / "lost").mkdir()
    disk = Disk(tmp_path / "lost", 10**6)
    with intercepted(disk.act):
        writer = RunWriter.create(tmp_path / "lost", layers={}, header={})
        writer.append({}, [1, 2], state=Packed({"seen": 2}, []))
    disk.restore(tmp_path / "found")
    writer.abort()
    with RunReader(tmp_path / "found") as reader:
        assert list(reader.sample_ids) == [1, 2]
        assert reader.read_state() == Packed({"seen": 2}, [])
