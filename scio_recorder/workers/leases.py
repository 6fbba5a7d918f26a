"""The right of one worker to write one part, and the choice of the part that it takes next.

NOTE [How a part is held]

The holder of a part has put an object ``lease-PART-NUMBER`` under an unused name. It puts one with
the next number every 15 s. Others take a part over, by putting the next number, once its newest one
is 60 s old. No clocks of two machines are compared: the store says when it got that number, and
when it got an object that the worker has put just now. A time in the future says nothing; then a
worker waits until it has seen the number for 60 s. If several put a number, one succeeds. A holder
that has not renewed for 45 s of *its* clock writes nothing more. If it finds that another worker
has put the next number, it knows that it has lost the part.

A worker may be stopped for any time between looking and acting. So the commit decides, which is put
under the next unused number of its part: if two workers believe that they hold a part, the second
to commit fails. A manifest counts as it is: a commit behind it was never reported durable, since
its writer checks its lease again before it reports.

Objects that were removed can be put again. So number 0, with which a free part is taken, stays
until the part is given back, and so do the two newest. And a number is put to take a part over only
within 10 s of the look that showed the one before, too short for a holder to renew twice.
"""

from __future__ import annotations

import math
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

from scio_recorder.errors import RecordingError
from scio_recorder.stores.files import Medium, complete_ranks, dump, expect, manifest_name, parse

RENEWED_EVERY = 15.0
TRUSTED_FOR = 45.0
STALE_AFTER = 60.0
TAKEN_WITHIN = 10.0

PREFIX = "lease-"
# The most bytes of a lease: it describes its holder in a few words.
_MAX_BYTES = 4096
_LOOKS_EVERY = 3.0
# Names are searched all at once, one in each line: there may be 100,000, and workers look often.
_LEASE_NAMES = re.compile(r"^lease-(\d{5,6})-(\d{8})$", re.ASCII | re.MULTILINE)
# After so many parts that others were faster to take, listing the leases again is cheaper than
# trying further parts. One more counts for each thousand parts, which cost a request to list.
_MAX_FAILURES = 8


def lease_name(part: int, number: int) -> str:
    """Return the name of a lease."""
    return f"{PREFIX}{part:05d}-{number:08d}"


def seconds() -> float:
    """Return the time of a clock that also runs while the machine sleeps, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@cache
def machine() -> str:
    """Return an id of this machine that lasts until it is restarted."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()


def holder_of(medium: Medium, name: str) -> dict[str, Any]:
    """Return a lease's facts about its holder: empty if it is gone or unreadable."""
    try:
        content = bytearray(_MAX_BYTES)
        with medium.reading(name) as read_at:
            size = read_at(0, memoryview(content)).num_bytes
        return expect(parse(bytes(content[:size])), dict)
    except (OSError, ValueError):
        return {}


def is_gone(medium: Medium, name: str) -> bool:
    """Whether the holder of a lease, a process of this machine, is known to have ended."""
    return medium.is_abandoned(name) and holder_of(medium, name).get("machine") == machine()


class Lease:
    """The right to write a part; made by `take`.

    Parameters
    ----------
    medium : Medium
        Where the recording is.
    part, number : int
        The part, and the number of the lease's first object.
    holder : mapping
        The facts about the holder that others can read.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        medium: Medium,
        part: int,
        number: int,
        holder: Mapping[str, Any],
        clock: Callable[[], float],
    ) -> None:
        self.part = part
        # Whether an earlier holder of the part is gone.
        self.is_inherited = number > 0
        self._medium, self._clock = medium, clock
        self._token = uuid.uuid4().hex
        self._content = dump({**holder, "token": self._token, "since": time.time()})
        self._numbers = [number]
        # A renewal counts from the time before its request: nobody can have seen it earlier.
        self._renewed_at = clock()
        self._why_lost: str | None = None
        # Renewing, which another thread does, and giving back exclude each other.
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Put the first object; return whether this holds the part now."""
        return self._put(self._numbers[0])

    def renew(self) -> None:
        """Renew the lease if that is due, or note that it is lost; failures are retried later."""
        with self._lock:
            now = self._clock()
            is_due = now - self._renewed_at >= RENEWED_EVERY
            if not (is_due and self._numbers and self._is_held()):
                return
            newest = self._numbers[-1] + 1
            try:
                if not self._put(newest):
                    self._why_lost = "was taken over by another worker"
                    return
            except OSError:
                return
            self._renewed_at = now
            self._numbers.append(newest)
            # See the NOTE.
            while len(self._numbers) > 3:
                self._unlink(self._numbers.pop(1))

    def check(self) -> None:
        """Raise `RecordingError` unless this surely holds the part.

        Checks come before and after a commit, so an overtaken one is not reported.
        """
        if not self._is_held():
            raise RecordingError(
                f"{self._medium.path}: the lease of part {self.part} {self._why_lost}, so another "
                "worker may hold that part now, and this one writes no more of it; durable data "
                "stays: call collect_parts again to go on"
            )

    def give_back(self) -> None:
        """Let others take the part, at once."""
        with self._lock:
            # A lost part belongs to others. The newest object goes first: if this is killed
            # meanwhile, older ones remain, and no new lease has a smaller number.
            if self._is_held():
                for number in reversed(self._numbers):
                    self._unlink(number)
            self._numbers.clear()

    def _is_held(self) -> bool:
        """Whether this surely holds the part; if not, note why."""
        age = self._clock() - self._renewed_at
        if self._why_lost is None and age > TRUSTED_FOR:
            self._why_lost = f"was not renewed for {age:.0f} s"
        return self._why_lost is None

    def _put(self, number: int) -> bool:
        name = lease_name(self.part, number)
        try:
            self._medium.claim(name, self._content)
        except FileExistsError:
            # It may be ours: a request can succeed without an answer.
            return holder_of(self._medium, name).get("token") == self._token
        except FileNotFoundError:
            # Whoever finds all parts complete clears their leases away.
            if not self._medium.has(manifest_name(self.part)):
                raise
            return False
        return True

    def _unlink(self, number: int) -> None:
        # A remaining object only makes others wait.
        with suppress(OSError):
            self._medium.unlink(lease_name(self.part, number))


@contextmanager
def holding(lease: Lease) -> Iterator[None]:
    """Hold a lease inside the block: renew it from a thread, and give it back at the end."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_LOOKS_EVERY):
            lease.renew()

    thread = threading.Thread(target=renew, name="scio-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        lease.give_back()


def newest_leases(names: Iterable[str]) -> dict[int, int]:
    """Return the number of the newest lease of each part that was taken."""
    # The newest of a part comes last.
    leases = _LEASE_NAMES.findall("\n".join(sorted(names)))
    return {int(part): int(number) for part, number in leases}


class _Newest(NamedTuple):
    """The newest lease of a part, and its age in seconds at the latest look."""

    number: int
    age: float


class Claims:
    """Takes parts for one worker.

    Each worker takes free parts in a random order of its own. So workers rarely meet, and a part
    costs the same few requests however many there are.

    Parameters
    ----------
    medium : Medium
        Where the recording is.
    num_parts : int
        The number of its parts.
    holder : mapping
        The facts about this worker that others can read.
    clock : callable
        Returns seconds.
    generator : random.Random, optional
        Chooses the order of the parts.
    """

    def __init__(
        self,
        medium: Medium,
        num_parts: int,
        holder: Mapping[str, Any],
        *,
        clock: Callable[[], float] = seconds,
        generator: random.Random | None = None,
    ) -> None:
        self._medium, self._holder, self._clock = medium, holder, clock
        self._generator = generator or random.Random()
        self.num_parts = num_parts
        # Parts known to be complete, and those that were free at the latest look.
        self._done: set[int] = set()
        self._free: list[int] = []
        self._leases: dict[int, _Newest] = {}
        # When this worker first saw a lease from the future, by its name and its time.
        self._seen: dict[tuple[str, float], float] = {}
        self._failures = 0
        self._look()

    @property
    def num_done(self) -> int:
        """The number of parts known to be complete."""
        return len(self._done)

    @property
    def is_finished(self) -> bool:
        """Whether all parts are complete."""
        return self.num_done == self.num_parts

    def take(self) -> Lease | None:
        """Return a lease of a part that is not complete; None if none can be taken now."""
        lease = self._take_free()
        if lease is None and not self.is_finished:
            # Some may have been given back meanwhile, or their holders may be gone.
            self._look_at_leases()
            lease = self._take_free() or self._take_over()
        return lease

    def note_done(self, part: int) -> None:
        """Note that a part is complete."""
        self._done.add(part)

    def clear_away(self) -> None:
        """Remove the leases that killed workers have left, if all parts are complete."""
        for name in self._medium.names(PREFIX):
            with suppress(OSError):
                self._medium.unlink(name)

    def _take_free(self) -> Lease | None:
        while self._free:
            lease = self._try(self._free.pop(), 0)
            if lease is not None:
                return lease
            self._failures += 1
            if self._failures > _MAX_FAILURES + self.num_parts // 1000:
                self._look()
        return None

    def _take_over(self) -> Lease | None:
        """Take a part from a worker that is gone."""
        # Workers that wait for the same parts try them in different orders.
        for part, newest in self._generator.sample(list(self._leases.items()), len(self._leases)):
            if newest.age >= STALE_AFTER or is_gone(self._medium, lease_name(part, newest.number)):
                lease = self._try(part, newest.number + 1)
                if self._clock() - self._looked_at > TAKEN_WITHIN:
                    # The look may be too old; see the NOTE.
                    if lease is not None:
                        lease.give_back()
                    return None
                if lease is not None:
                    return lease
        return None

    def _try(self, part: int, number: int) -> Lease | None:
        """Take a part, unless it is complete or another worker is faster."""
        # This comes before a lease: most parts that others were faster to take are complete by now.
        if self._is_done(part):
            return None
        lease = Lease(self._medium, part, number, self._holder, self._clock)
        if not lease.take():
            return None
        if self._is_done(part):
            lease.give_back()
            return None
        return lease

    def _is_done(self, part: int) -> bool:
        if self._medium.has(manifest_name(part)):
            self.note_done(part)
        return part in self._done

    def _look(self) -> None:
        """List the complete parts and the leases."""
        self._failures = 0
        self._done.update(part for part in complete_ranks(self._medium) if part < self.num_parts)
        self._look_at_leases()

    def _look_at_leases(self) -> None:
        """List the newest lease of each part, with its age by the clock of the store."""
        now, times = self._times()
        self._leases = {
            part: _Newest(number, self._age(lease_name(part, number), now, times))
            for part, number in newest_leases(times).items()
            if part < self.num_parts and part not in self._done
        }
        taken = self._done | self._leases.keys()
        self._free = [part for part in range(self.num_parts) if part not in taken]
        self._generator.shuffle(self._free)

    def _age(self, name: str, now: float, times: Mapping[str, float]) -> float:
        """Return for how long a lease has not been renewed, at least."""
        age = now - times[name]
        if -math.inf < age < 0:
            # An object that was removed and put again has another time.
            age = self._looked_at - self._seen.setdefault((name, times[name]), self._looked_at)
        return age

    def _times(self) -> tuple[float, dict[str, float]]:
        """Return the time by the clock of the store, and when each lease was put."""
        name = f"{PREFIX}clock-{uuid.uuid4().hex}"
        try:
            # Whoever finds all parts complete clears it away, perhaps before it is in place.
            with suppress(FileNotFoundError):
                self._medium.claim(name, b"")
            self._looked_at = self._clock()
            times = self._medium.times(PREFIX)
        finally:
            with suppress(OSError):
                self._medium.unlink(name)
        return times.get(name, -math.inf), times
