"""The right of one worker to write one part, for as long as it renews it.

NOTE [How a part is held]

Who holds a part has put an object ``lease-PART-NUMBER`` where there was none of this name. It puts
one of the next number every 15 s. Nobody compares clocks: others take a part over, by putting the
number that comes next, once its newest number has been the same for 60 s of *their* clock. Of all
who put a number one succeeds. A holder that has not renewed for 45 s of *its* clock writes nothing
more, and when it finds that somebody else has put the next number it knows that it holds no longer.

A worker may be stopped between looking and acting, for however long. What decides is therefore the
commit, which is put under the next number of its part where there is none: of two who believe that
they hold a part, the second to commit fails. A manifest counts as it is: a commit that comes behind
it was never reported durable, since whoever put it looks at its lease again before it reports.

Objects that are removed can be put again. So number 0, by which a part is taken that nobody has,
stays until the part is given back, and so do the two newest; and a number is put to take a part
over only within 10 s of the look that showed the one before, in which no holder gets farther.
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
# Those that put a lease under a name are asked who they are, which is a few words.
_MAX_BYTES = 4096
_TRIES = 3
_LOOKS_EVERY = 3.0


def lease_name(part: int, number: int) -> str:
    """Return the name of a lease."""
    return f"{PREFIX}{part:05d}-{number:08d}"


def seconds() -> float:
    """Return the time of a clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@cache
def machine() -> str:
    """Return what tells this machine from others, as long as it is not started again."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return socket.gethostname()


def holder_of(medium: Medium, name: str) -> dict[str, Any]:
    """Return what a lease says about who holds it: nothing if it has gone, or says nothing."""
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
        Of which part it is, and the number of its first object.
    holder : callable
        Returns what others are told about the holder.
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
        # Whether somebody else has held the part and gone.
        self.is_inherited = number > 0
        self._medium, self._holder, self._clock = medium, holder, clock
        self._token, self._since = uuid.uuid4().hex, time.time()
        self._numbers = [number]
        # A renewal counts from before its request was made: nobody can have seen it earlier.
        self._renewed_at = clock()
        self._why_lost: str | None = None
        # Renewing, in another thread, and giving back exclude each other.
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Put the first object; return whether this holds the part now."""
        return self._put(self._numbers[0])

    def renew(self) -> None:
        """Renew the lease if that is due, or note that it is lost; what fails is tried again."""
        with self._lock:
            now = self._clock()
            age = now - self._renewed_at
            if age < RENEWED_EVERY or not self._numbers or self._why_lost:
                return
            if age > TRUSTED_FOR:
                self._why_lost = f"was not renewed for {age:.0f} s"
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

        A commit is checked before and after it: one that was overtaken is not reported.
        """
        age = self._clock() - self._renewed_at
        if self._why_lost is None and age > TRUSTED_FOR:
            self._why_lost = f"was not renewed for {age:.0f} s"
        if self._why_lost is not None:
            raise RecordingError(
                f"{self._medium.path}: the lease of part {self.part} {self._why_lost}, so another "
                "worker may hold that part now, and this one writes no more of it; durable data "
                "stays: call collect_parts again to go on"
            )

    def give_back(self) -> None:
        """Let others take the part, at once."""
        with self._lock:
            # What is lost belongs to others. The newest goes first: what is left where this is
            # killed meanwhile is older, and no lease that begins anew has a smaller number.
            if self._why_lost is None and self._clock() - self._renewed_at <= TRUSTED_FOR:
                for number in reversed(self._numbers):
                    self._unlink(number)
            self._numbers.clear()

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
        # What stays makes others wait, and does no other harm.
        with suppress(OSError):
            self._medium.unlink(lease_name(self.part, number))


class Keeper:
    """Renews the lease that is held, from a thread, as long as a ``with`` block lasts."""

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
        """Hold a lease for the length of the block."""
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
