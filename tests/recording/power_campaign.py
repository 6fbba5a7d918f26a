"""Power cuts: a file system stops at a random instant, and only what was synced is there later.

A program of its own for root on Linux, ``unshare --mount python -m tests.recording.power_campaign
FOLDER COUNT [SEED] [KIND]``. A file in the folder holds a file system, of kind ext4 or xfs. It is
shut down without writing what the system still has in memory, as by a power cut, and mounted again.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from scio_recorder.stores.files import holds_recording
from tests.recording.campaign import Job, in_child
from tests.workers.parts_campaign import Parts, forked, hasten_leases, succeeded

# EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN, without a flush of the journal.
_SHUTDOWN, _NO_FLUSH = 0x8004587D, struct.pack("I", 2)
# The smallest file system that XFS makes; the file has holes.
_NUM_BYTES = 300 << 20


class Plug:
    """A file system whose power can be cut."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._image, self.folder = folder / "image", folder / "mounted"
        with self._image.open("wb") as file:
            file.truncate(_NUM_BYTES)
        subprocess.run([f"mkfs.{kind}", "-q", self._image], check=True)
        self.folder.mkdir()
        self._mount()

    def cut(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY)
        fcntl.ioctl(descriptor, _SHUTDOWN, _NO_FLUSH)
        os.close(descriptor)

    def restore(self) -> None:
        self.close()
        self._mount()

    def close(self) -> None:
        subprocess.run(["umount", self.folder], check=True)

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.folder], check=True)


def proved(plug: Plug) -> None:
    """Show that a cut loses what is not synced, and nothing else."""
    for name in ("synced", "unsynced"):
        with (plug.folder / name).open("wb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            if name == "synced":
                os.fsync(file.fileno())
    plug.cut()
    plug.restore()
    (found,) = (path for path in plug.folder.iterdir() if path.is_file())
    assert found.read_bytes() == bytes(1 << 16)
    assert found.name == "synced"


def one_process(job: Job, plug: Plug, path: Path, dice: random.Random, length: float) -> int:
    """Cut the power of a run and of the one that resumes it; return how many ended too early."""
    last, too_early = 0, 0
    for _ in range(2):

        def cut(child: int, reading: int, last: int = last) -> bytes:
            # After a random number of commits, and then at a random instant of the next.
            reports = b"".join(os.read(reading, 8) for _ in range(dice.randint(0, 12 - last // 4)))
            time.sleep(dice.uniform(0, length / 12))
            os.set_blocking(reading, False)
            with suppress(BlockingIOError):
                reports += os.read(reading, 1 << 10)
            plug.cut()
            # A process that outlives the cut hears of no error from XFS, and reports what is lost.
            os.set_blocking(reading, True)
            while os.read(reading, 1 << 10):
                pass
            return reports

        durable, status = in_child(lambda: job.collect(path), cut)
        too_early += status == 0
        plug.restore()
        found = job.check(path)
        assert found >= max(last, durable), (path, found, last, durable)
        last = found
    _, status = in_child(lambda: job.collect(path))
    assert status == 0, path
    job.check(path, is_complete=True)
    return too_early


def two_workers(parts: Parts, plug: Plug, path: Path, dice: random.Random, length: float) -> int:
    """Cut the power of two workers, which fill a recording in parts; the same is returned."""

    def quietly() -> None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the process ends with it
        parts.collect(str(path))

    workers = [forked(quietly) for _ in range(2)]
    time.sleep(dice.uniform(0, length))
    plug.cut()
    ended = [succeeded(worker) for worker in workers]
    plug.restore()
    assert succeeded(forked(lambda: parts.collect(str(path)))), path
    assert succeeded(forked(lambda: parts.check(str(path)))), path
    return all(ended)


def timed(work: Callable[[], object]) -> float:
    begun = time.monotonic()
    assert succeeded(forked(work))
    return time.monotonic() - begun


def main() -> None:
    folder, count, *options = sys.argv[1:]
    seed, kind = [*options, *("0", "ext4")[len(options) :]]
    torch.set_num_threads(1)
    dice = random.Random(int(seed))
    job, parts = Job(*[4] * 12, 3), Parts()
    plug = Plug(Path(folder), kind)
    # A claim that was cut in half is waited for as long as a lease lasts.
    hasten_leases()
    try:
        proved(plug)
        clean = plug.folder / "clean", plug.folder / "parts"
        lengths = [
            timed(lambda: job.collect(clean[0])),
            timed(lambda: parts.collect(str(clean[1]))),
        ]
        assert all(map(holds_recording, clean))
        too_early = cuts = 0
        for attempt in range(int(count)):
            path = plug.folder / str(attempt)
            if attempt % 2:
                too_early += two_workers(parts, plug, path, dice, lengths[1])
            else:
                too_early += one_process(job, plug, path, dice, lengths[0])
            cuts += 1 + (attempt % 2 == 0)
            shutil.rmtree(path)
            if attempt % 10 == 9:
                print(f"{attempt + 1} recordings, {cuts} cuts", flush=True)
    finally:
        plug.close()
    # Of a few, all may have come late.
    assert cuts < 20 or too_early < cuts // 2, f"{too_early} of {cuts} had ended before the cut"
    print(f"{count} recordings, {cuts} cuts, {too_early} of them after the end: nothing was lost")


if __name__ == "__main__":
    main()
