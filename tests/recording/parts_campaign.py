"""Workers that are killed at random moments while they fill a recording in parts.

A program of its own, ``python -m tests.recording.parts_campaign FOLDER COUNT [SEED]``, that forks:
see `tests.recording.campaign`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from scio_recorder import open_recording
from scio_recorder.reductions import Covariance, Mean
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import system
from scio_recorder.stores.disk_format.lease import STALE_AFTER
from tests.recording.nets import batches, expected, recorder

NUM_PARTS = 6
REDUCE = {"3": [Mean(), Covariance()]}


class Parts:
    """A net, parts of unequal length, and what must come out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rnet = recorder("0", "2.first", "3")
        self.data = [batches(*[3] * (1 + part % 3 * 2), seed=part) for part in range(NUM_PARTS)]
        everything = [batch for part in self.data for batch in part]
        clean = expected(self.rnet, everything)
        self.samples = {key: clean[self.rnet.architecture.resolve(key)] for key in ("0", "2.first")}
        self.reduced = self.rnet.collect(everything, reduce=REDUCE, progress=False)["3"]
        self.ids = [
            part * 10**12 + i
            for part in range(NUM_PARTS)
            for i in range(sum(map(len, self.data[part])))
        ]

    def collect(self, path: Path) -> None:
        # A chunk holds one batch.
        self.rnet.collect_parts(
            lambda part: self.data[part],
            NUM_PARTS,
            store=Disk(path, chunk_bytes=1),
            reduce=REDUCE,
            progress=False,
        )

    def check(self, path: Path) -> None:
        found = open_recording(path, verify=True)
        assert found.complete
        assert list(found.sample_ids) == self.ids
        for key, samples in self.samples.items():
            assert torch.equal(found[key][:], samples), key
        for one, other in zip(found["3"], self.reduced, strict=True):
            torch.testing.assert_close(one, other)


def forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def main() -> None:
    folder, count, *seed = sys.argv[1:]
    torch.set_num_threads(1)
    # No power is lost here, and waiting for the disk would take minutes.
    system.fsync = lambda descriptor: os.fstat(descriptor) and None
    dice, parts = random.Random(int(seed[0]) if seed else 0), Parts()
    clean = Path(folder) / "clean"
    begun = time.monotonic()
    os.waitpid(forked(lambda: parts.collect(clean)), 0)
    length = time.monotonic() - begun
    kills = in_time = 0
    for attempt in range(int(count)):
        path = Path(folder) / str(attempt)
        work = lambda path=path: parts.collect(path)  # noqa: E731 - what each of them does
        started = time.monotonic()
        workers = [forked(work) for _ in range(2)]
        for _ in range(2):
            time.sleep(dice.uniform(0, length))
            victim = workers.pop(dice.randrange(len(workers)))
            os.kill(victim, signal.SIGKILL)
            _, status = os.waitpid(victim, 0)
            was_killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            assert was_killed or not os.waitstatus_to_exitcode(status)
            kills += was_killed
            # Somebody else comes late, and takes over what has been left.
            workers.append(forked(work))
        for worker in workers:
            _, status = os.waitpid(worker, 0)
            assert not os.waitstatus_to_exitcode(status), f"attempt {attempt}: {status}"
        # The locks of the dead are free at once.
        in_time += time.monotonic() - started < STALE_AFTER
        parts.check(path)
        shutil.rmtree(path)
    assert in_time == int(count)
    assert kills > int(count) // 2, kills
    print(f"{count} recordings, {kills} workers killed: no sample lost, doubled or wrong")


if __name__ == "__main__":
    main()
