"""Many workers take many parts, in one process and within minutes: a clock and a medium of our own.

``python -m tests.workers.simulation WORKERS PARTS [SEED] [leaving]`` runs `Claims` and `Lease` as
they are; with ``leaving``, workers don't wait for parts that others hold, and new ones come later.
No clock of a machine is right. Every request takes a while, in which other workers go on. Now and
then one fails before or after it has acted, or takes longer than a lease lasts, or its worker dies
in it.
"""

from __future__ import annotations

import heapq
import random
import sys
import threading
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.description import chunk_name, manifest_name
from scio_recorder.stores.disk_format.medium import Medium, ReadAt, Stamp
from scio_recorder.workers.leases import RENEWED_EVERY, STALE_AFTER, Claims, Lease

PAUSE = 2.0
LOOKS_EVERY = 3.0
# Beyond the time after which a lease can be taken: pauses, and requests that are slow.
SLACK = 30.0
# Names that one request lists.
PAGE = 1000


class Killed(BaseException):
    """Ends a worker wherever it is."""


@dataclass
class Faults:
    """How often a request goes wrong, and how long a part takes."""

    fails: float = 0.005
    has_no_answer: float = 0.005
    stalls: float = 0.0005
    kills: float = 0.0005
    seconds: tuple[float, float] = (5.0, 60.0)


class Clock:
    """Lets one of many threads run at a time, in the order of a time that only waiting moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, threading.Lock]] = []
        self._number = 0
        self.ended = threading.Event()

    def start(self, work: Callable[[], object], at: float) -> None:
        turn = self._queued(at)

        def run() -> None:
            turn.acquire()
            try:
                work()
            finally:
                self._next()

        threading.Thread(target=run, daemon=True).start()

    def sleep(self, seconds: float) -> None:
        turn = self._queued(self.now + seconds)
        self._next()
        turn.acquire()

    def _queued(self, at: float) -> threading.Lock:
        turn = threading.Lock()
        turn.acquire()
        self._number += 1
        heapq.heappush(self._queue, (at, self._number, turn))
        return turn

    def _next(self) -> None:
        if not self._queue:
            self.ended.set()
            return
        at, _, turn = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        turn.release()

    def run(self) -> None:
        self._next()
        self.ended.wait()


@dataclass
class World:
    """What all workers see, and what is to be found out about it."""

    num_parts: int
    faults: Faults
    dice: random.Random
    # Whether workers wait for parts that others hold. Otherwise they end, and others come later.
    waits: bool = True
    # The most seconds by which the clock of a worker's machine is wrong.
    skew: float = 0.0
    clock: Clock = field(default_factory=Clock)
    files: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    # Names by what they begin with, as they are asked for, sorted.
    kinds: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    requests: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    # When a lease of a part was put or removed last.
    touched: dict[int, float] = field(default_factory=dict)
    undone: set[int] = field(default_factory=set)
    durable: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def num_chunks(self, part: int) -> int:
        return 1 + part % 3 % 2

    def put(self, name: str, content: bytes) -> None:
        if name in self.files:
            raise FileExistsError(name)
        self.files[name] = content
        self.times[name] = self.clock.now
        self._touch(name)

    def remove(self, name: str) -> None:
        if self.files.pop(name, None) is None:
            raise FileNotFoundError(name)
        self._touch(name)

    def _touch(self, name: str) -> None:
        kind, dash, rest = name.partition("-")
        names = self.kinds[kind + dash]
        if name in self.files:
            insort(names, name)
        else:
            del names[bisect_left(names, name)]
        if kind == "manifest":
            self.undone.discard(int(rest[:5]))
        if kind == "lease" and rest[0].isdigit():
            self.touched[int(rest.partition("-")[0])] = self.clock.now


class Bucket(Medium):
    """A store of objects as one worker sees it."""

    path = "bucket"
    is_open = True

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_dead = False
        # When a request took long last, and whether one failed since that was asked.
        self.stalled_at = 0.0
        self.has_failed = False

    def close(self) -> None:
        pass

    @contextmanager
    def _request(self, kind: str, number: int = 1) -> Iterator[None]:
        world, dice, faults = self.world, self.world.dice, self.world.faults
        if self.is_dead:
            raise Killed
        world.requests[kind] += number
        fate = dice.random() / number
        self._wait(fate < faults.stalls / 2)
        if fate < faults.fails:
            world.events["requests that failed"] += 1
            self.has_failed = True
            raise TimeoutError
        yield
        self._wait(faults.stalls / 2 < 1 - fate < faults.stalls)
        if 1 - fate < faults.has_no_answer:
            world.events["requests without an answer"] += 1
            self.has_failed = True
            raise TimeoutError

    def _wait(self, stalls: bool) -> None:
        world = self.world
        world.events["stalls"] += stalls
        slow = world.dice.uniform(20, 200) if stalls else 0
        world.clock.sleep(world.dice.uniform(0.005, 0.05) + slow)
        if stalls:
            self.stalled_at = world.clock.now
        if world.dice.random() < world.faults.kills / 2:
            world.events["deaths"] += 1
            self.is_dead = True
            raise Killed

    def names(self, prefix: str = "") -> list[str]:
        return sorted(self.times(prefix))

    def times(self, prefix: str) -> dict[str, float]:
        found = self.world.kinds[prefix]
        pages = 1 + len(found) // PAGE

        def listed() -> dict[str, float]:
            with self._request(f"list {prefix}", pages):
                # The list that is seen is one of an instant. The store's clock is set as it likes.
                return {name: self.world.times[name] + 1e6 for name in found}

        return retried(listed)

    @contextmanager
    def reading(self, name: str, stamp: Any = None) -> Iterator[ReadAt]:
        def read_at(offset: int, out: memoryview) -> Stamp:
            content = self._content(name)
            piece = content[offset : offset + len(out)]
            out[: len(piece)] = piece
            return Stamp(len(content), None)

        yield read_at

    def _content(self, name: str) -> bytes:
        def read() -> bytes:
            with self._request("read"):
                if name not in self.world.files:
                    raise FileNotFoundError(name)
                return self.world.files[name]

        return retried(read)

    def has(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            self._content(name)
            return True
        return False

    def put(self, name: str, owner: str, write: Any) -> Any:
        """Put an object, and know it again where the answer was lost, as a store has to."""
        content = f"{owner} {self.world.dice.random()}".encode()

        def putting() -> None:
            with self._request("commit"):
                if self.world.files.get(name) != content:
                    self.world.put(name, content)

        retried(putting)

    def claim(self, name: str, content: bytes) -> None:
        """Put an object, and know it again where the answer was lost, as a store has to."""

        def putting() -> None:
            with self._request("claim"):
                if name in mine and self.world.files.get(name) == content:
                    return
                self.world.put(name, content)
                mine.add(name)

        mine: set[str] = set()
        retried(putting)

    def unlink(self, name: str) -> None:
        with self._request("remove"):
            self.world.remove(name)


def retried(request: Callable[[], Any]) -> Any:
    while True:
        try:
            return request()
        except TimeoutError:
            continue


@dataclass
class Worker:
    """Does what a process does in `collect_parts`, but for the network."""

    world: World
    name: str

    def run(self) -> None:
        world = self.world
        self.bucket = Bucket(world)
        try:
            if self._take_all():
                return
        except (Killed, TimeoutError) as error:
            world.events["workers that gave up"] += not isinstance(error, Killed)
        # Another one is started some time later, under a new name.
        later = world.clock.now + world.dice.uniform(1, 100)
        world.clock.start(Worker(world, f"{self.name}'").run, later)

    def _take_all(self) -> bool:
        """Take parts to the end; return whether all of them are complete."""
        world = self.world
        ahead = world.dice.uniform(-world.skew, world.skew)
        claims = Claims(
            self.bucket,
            world.num_parts,
            {"machine": self.name},
            clock=lambda: world.clock.now + ahead,
            generator=random.Random(world.dice.random()),
        )
        while not claims.is_finished:
            lease = claims.take()
            if lease is None:
                self._check_left()
                if not world.waits:
                    world.events["workers that did not wait"] += 1
                    return False
                world.clock.sleep(PAUSE)
                continue
            try:
                self._do(lease)
                claims.note_done(lease.part)
            except RecordingError:
                world.events["leases that were lost"] += 1
            finally:
                lease.give_back()
        return True

    def _check_left(self) -> None:
        """Note whether this leaves a part of which nobody has been heard for long."""
        world = self.world
        for part in world.undone:
            heard = world.touched.get(part, 0.0)
            waiting = world.clock.now - max(heard, self.bucket.stalled_at)
            if waiting > STALE_AFTER + SLACK:
                world.problems.append(f"{self.name} leaves part {part} after {waiting:.0f} s")

    def _do(self, lease: Lease) -> None:
        world, part = self.world, lease.part
        number = 0
        while self.bucket.has(chunk_name(part, number)):
            number += 1
        total = world.num_chunks(part)
        for own in range(number, total):
            self._compute(lease, world.dice.uniform(*world.faults.seconds) / total)
            self._commit(lease, chunk_name(part, own))
            world.durable.add(chunk_name(part, own))
        self._commit(lease, manifest_name(part))

    def _compute(self, lease: Lease, seconds: float) -> None:
        world = self.world
        until, pause = world.clock.now + seconds, RENEWED_EVERY
        while (left := until - world.clock.now) > 0:
            world.clock.sleep(min(left, pause))
            self.bucket.has_failed = False
            lease.renew()
            # As a thread does that looks every few seconds whether there is something to renew.
            pause = LOOKS_EVERY if self.bucket.has_failed else RENEWED_EVERY
        world.events["chunks computed"] += 1

    def _commit(self, lease: Lease, name: str) -> None:
        lease.check()
        try:
            self.bucket.put(name, self.name, None)
        except FileExistsError as error:
            self.world.events["commits that came second"] += 1
            raise RecordingError("another was first") from error
        lease.check()


def simulate(
    num_workers: int, num_parts: int, seed: int, faults: Faults | None = None, **options: Any
) -> World:
    """Run to the end, and return what has become of it."""
    threading.stack_size(256 << 10)
    world = World(num_parts, faults or Faults(), random.Random(seed), **options)
    world.undone = set(range(num_parts))
    for number in range(num_workers):
        world.clock.start(Worker(world, f"worker {number}").run, world.dice.uniform(0, 30))
    world.clock.run()
    threading.stack_size(0)
    return world


def check(world: World) -> None:
    """Nothing is lost, done twice or waited for in vain."""
    assert not world.problems, world.problems[:5]
    parts = range(world.num_parts)
    chunks = {chunk_name(p, n) for p in parts for n in range(world.num_chunks(p))}
    assert set(world.kinds["chunk-"]) == chunks >= world.durable
    assert world.kinds["manifest-"] == [manifest_name(part) for part in parts]
    # Only those who died or stood still have computed anything in vain, the last chunk each.
    events = world.events
    in_vain = events["chunks computed"] - len(chunks)
    ends = events["deaths"] + events["workers that gave up"]
    assert in_vain <= ends + events["leases that were lost"]
    assert events["leases that were lost"] <= events["stalls"]


def main() -> None:
    *numbers, mode = sys.argv[1:] if sys.argv[-1] == "leaving" else [*sys.argv[1:], "waiting"]
    num_workers, num_parts, *seed = map(int, numbers)
    options = {"waits": mode == "waiting", "skew": 1e5}
    world = simulate(num_workers, num_parts, *(seed or [0]), **options)
    check(world)
    least = sum(map(world.num_chunks, range(num_parts)))
    print(
        f"{num_workers} workers, {num_parts} parts: {world.clock.now:,.0f} s of their time,", end=""
    )
    print(f" {time.process_time():.0f} s of ours; nothing lost, twice or waited for in vain")
    print(f"{dict(world.events)}, of which {least} had to be computed")
    for kind, number in sorted(world.requests.items()):
        print(f"{kind}: {number / num_parts:.2f} a part")
    print(f"all requests: {sum(world.requests.values()) / num_parts:.2f} a part")


if __name__ == "__main__":
    main()
