"""Workers that are killed at random moments while they fill a recording in parts.

A program of its own, ``python -m tests.workers.parts_campaign FOLDER COUNT [SEED]``, that forks:
see `tests.recording.campaign`. ``s3`` in place of the folder is a bucket, on a server at which
every 50th request goes wrong; a lease lasts for a second there.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch

from scio_recorder import RecordingError, open_recording
from scio_recorder.reductions import Covariance, Mean
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import bucket
from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.disk_format.description import is_url
from scio_recorder.workers import leases
from scio_recorder.workers.leases import STALE_AFTER
from tests.object_store import Traffic, at_random, by_hand, environment, object_store
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

    def collect(self, place: str) -> None:
        while True:
            # Some don't wait for others, and come again.
            waits = random.SystemRandom().random() < 0.5
            try:
                # A chunk holds one batch.
                found = self.rnet.collect_parts(
                    lambda part: self.data[part],
                    NUM_PARTS,
                    store=Disk(place, chunk_bytes=1),
                    reduce=REDUCE,
                    progress=False,
                    wait=waits,
                )
            except RecordingError as error:
                # Who is slower than a lease lasts is told so, and can try again.
                if not (is_url(place) and re.search("lease of part|another writer", str(error))):
                    raise
            else:
                assert found.complete or not waits
                if found.complete:
                    return

    def check(self, place: str) -> None:
        found = open_recording(place, verify=True)
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
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def succeeded(child: int) -> bool:
    return not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def serve(dice: random.Random) -> int:
    """Start a server whose requests go wrong now and then; leases last a second."""
    ours, theirs = os.pipe()

    def work() -> None:
        traffic = Traffic()
        with object_store(traffic) as url:
            # Nothing tries this request again.
            by_hand(url, "PUT", "/bucket")
            traffic.fate = at_random(dice, 0.02)
            os.write(theirs, url.encode())
            time.sleep(1e6)

    child = forked(work)
    os.environ.update(environment(os.read(ours, 100).decode()))
    hasten_leases()
    bucket._FIRST_PAUSE /= 50
    # As long as a lease: whoever meets silence loses what it holds.
    bucket._SECONDS = 1
    return child


def hasten_leases() -> None:
    names = ("RENEWED_EVERY", "TRUSTED_FOR", "STALE_AFTER", "TAKEN_WITHIN", "_LOOKS_EVERY")
    for name in names:
        setattr(leases, name, getattr(leases, name) / 50)


def killed(parts: Parts, place: str, length: float, dice: random.Random) -> int:
    """Fill a recording while two workers are killed, and return how many were at work then."""
    kills, work = 0, lambda: parts.collect(place)
    workers = [forked(work) for _ in range(2)]
    for _ in range(2):
        time.sleep(dice.uniform(0, length))
        victim = workers.pop(dice.randrange(len(workers)))
        os.kill(victim, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1])
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        # Somebody else comes late, and takes over what has been left.
        workers.append(forked(work))
    for worker in workers:
        assert succeeded(worker), place
    return kills


def main() -> None:
    folder, count, *seed = sys.argv[1:]
    torch.set_num_threads(1)
    # No power is lost here, and waiting for the disk would take minutes.
    system.fsync = lambda descriptor: os.fstat(descriptor) and None
    dice, parts = random.Random(int(seed[0]) if seed else 0), Parts()
    server = serve(dice) if folder == "s3" else None
    root = "s3://bucket" if server else folder
    begun = time.monotonic()
    assert succeeded(forked(lambda: parts.collect(f"{root}/clean")))
    length = time.monotonic() - begun
    kills = 0
    try:
        for attempt in range(int(count)):
            place, started = f"{root}/{attempt}", time.monotonic()
            kills += killed(parts, place, length, dice)
            # The locks of the dead are free at once; at a bucket leases run out.
            assert server or time.monotonic() - started < STALE_AFTER
            assert succeeded(forked(lambda place=place: parts.check(place))), place
            shutil.rmtree(place, ignore_errors=True)
            if attempt % 10 == 9:
                print(f"{attempt + 1} recordings, {kills} workers killed", flush=True)
    finally:
        if server:
            os.kill(server, signal.SIGKILL)
    # Of a few, all workers may have been done before: that depends on who else is at work.
    assert int(count) < 20 or kills > int(count) // 2, kills
    print(f"{count} recordings, {kills} workers killed: no sample lost, doubled or wrong")


if __name__ == "__main__":
    main()
