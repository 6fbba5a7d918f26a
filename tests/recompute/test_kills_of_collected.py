"""Collecting inputs in processes that are killed: they stay with their samples, and go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scio_recorder import open_recording
from scio_recorder.recording import Recording
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.files import holds_recording
from tests.recording.campaign import Job, finish, in_child
from tests.recording.nets import expected, recorder

ROOT = Path(__file__).parents[2]
KILLS = 8
# Seconds that the loader takes for a batch, so that kills come between commits.
PAUSE = 0.01


class InputsJob(Job):
    """Keeps the inputs of all layers as well, and checks what comes back from them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rnet.record("0", "2", "2.first", "2/add_", "3", inputs=True)
        everything = recorder(net=self.rnet.net)
        truth = expected(everything, self.data)
        label = everything.architecture.resolve("2.second")
        self.inner = truth[label]
        self.received: list[torch.Tensor] = []
        keep = lambda module, args: self.received.append(args[0].clone())  # noqa: E731
        handle = self.rnet.net[2].register_forward_pre_hook(keep)
        with torch.no_grad():
            for batch in self.data:
                self.rnet.net(batch)
        handle.remove()

    def collect(self, path: Path) -> Recording:
        def loader() -> Iterator[torch.Tensor]:
            for batch in self.data:
                time.sleep(PAUSE)
                yield batch

        store = Disk(path, chunk_bytes=1)
        return self.rnet.collect(
            loader(), store=store, reduce=self.reduce, resume=True, progress=False
        )

    def check(self, path: Path, *, is_complete: bool = False) -> int:
        count = super().check(path, is_complete=is_complete)
        if not holds_recording(path) or not count:
            return count
        found = open_recording(path, verify=True)
        inputs: Any = found.inputs["2"]
        assert sum(len(call.args[0]) for call in inputs) == count
        for call, batch in zip(inputs, self.received, strict=is_complete):
            assert torch.equal(call.args[0], batch)
        again = found.recompute(self.rnet, "2.second")["2.second"]
        assert torch.equal(again, self.inner[:count])
        return count


def kill_at_random_instants(folder: Path) -> None:
    dice, job = random.Random(0), InputsJob(4, 4, 4, 4, 4, 3)
    found: list[int] = []
    for attempt in range(KILLS):
        path, last = folder / str(attempt), 0
        for _ in range(2):
            # After some commits, but not the last ones, and then within the next batch.
            commits, delay = dice.randint(0, max(0, 3 - last // 4)), dice.uniform(0, PAUSE)

            def kill(
                child: int, reading: int, commits: int = commits, delay: float = delay
            ) -> bytes:
                reports = b"".join(os.read(reading, 8) for _ in range(commits))
                time.sleep(delay)
                os.kill(child, signal.SIGKILL)
                return reports

            durable, status = in_child(lambda path=path: job.collect(path), kill)
            assert status in (0, -signal.SIGKILL)
            found.append(job.check(path))
            assert found[-1] >= max(last, durable)
            last = found[-1]
        finish(job, path)
    # Most must have hit a run that was under way.
    assert sum(0 < count < 23 for count in found) > KILLS // 2, found


@pytest.mark.campaign
def test_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.recompute.test_kills_of_collected", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path)


def main() -> None:
    torch.set_num_threads(1)
    # No power is lost here, and waiting for the disk would take minutes.
    system.fsync = lambda descriptor: os.fstat(descriptor) and None
    kill_at_random_instants(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
