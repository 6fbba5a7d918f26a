"""The right of one worker to write one part, for as long as it renews it.

NOTE [How a part is held]

The holder of a part has put an object ``lease-PART-NUMBER`` under an unused name. It puts one with
the next number every 15 s. Nobody compares clocks: others take a part over, by putting the next
number, once its newest number has been the same for 60 s of *their* clock. If several put a number,
one succeeds. A holder that has not renewed for 45 s of *its* clock writes nothing more. If it finds
that another worker has put the next number, it knows that it has lost the part.

A worker may be stopped for any time between looking and acting. So the commit decides, which is put
under the next unused number of its part: if two workers believe that they hold a part, the second
to commit fails. A manifest counts as it is: a commit behind it was never reported durable, since
its writer checks its lease again before it reports.

Objects that were removed can be put again. So number 0, with which a free part is taken, stays
until the part is given back, and so do the two newest. And a number is put to take a part over only
within 10 s of the look that showed the one before, too short for a holder to renew twice.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Self

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.jsons import dump, expect, parse
from scio_recorder.stores.disk_format.medium import Medium

RENEWED_EVERY = 15.0
TRUSTED_FOR = 45.0
STALE_AFTER = 60.0
TAKEN_WITHIN = 10.0

PREFIX = "lease-"
# The most bytes of a lease: it describes its holder in a few words.
_MAX_BYTES = 4096
_TRIES = 3
_LOOKS_EVERY = 3.0


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
        with medium.open(name) as file:
            said = parse(file.read(0, _MAX_BYTES))
        return expect(said, dict)
    except (OSError, ValueError):
        return {}


class Lease:
    """The right to write a part; made by `take`.

    Parameters
    ----------
    medium : Medium
        Where the recording is.
    part, number : int
        The part, and the number of the lease's first object.
    holder : callable
        Returns the facts about the holder that others can read.
    clock : callable
        Returns seconds.
    """

    def __init__(
        self,
        medium: Medium,
        part: int,
        number: int,
        holder: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self.part = part
        # Whether an earlier holder of the part is gone.
        self.is_inherited = number > 0
        self._medium, self._holder, self._clock = medium, holder, clock
        self._token, self._since = uuid.uuid4().hex, time.time()
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
        content = dump({**self._holder(), "token": self._token, "since": self._since})
        for left in reversed(range(_TRIES)):
            try:
                self._medium.claim(name, content)
            except FileExistsError:
                # It may be ours: a request can succeed without an answer.
                return holder_of(self._medium, name).get("token") == self._token
            except OSError:
                if not left:
                    raise
            else:
                return True
        return False

    def _unlink(self, number: int) -> None:
        # A remaining object makes others wait, and does no other harm.
        with suppress(OSError):
            self._medium.unlink(lease_name(self.part, number))


class Keeper:
    """Renews the held lease, from a thread, inside a ``with`` block."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="scio-lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def holding(self, lease: Lease) -> Iterator[None]:
        """Hold a lease inside the block."""
        self._lease = lease
        try:
            yield
        finally:
            self._lease = None
            lease.give_back()

    def _renew(self) -> None:
        while not self._ended.wait(_LOOKS_EVERY):
            lease = self._lease
            if lease is not None:
                lease.renew()
