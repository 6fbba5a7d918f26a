"""Choosing the part that a worker takes next, among any number of independent workers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from scio_recorder.stores.disk_format.description import INDEX_NAME, manifest_name
from scio_recorder.stores.disk_format.lease import (
    PREFIX,
    RENEWED_EVERY,
    STALE_AFTER,
    TAKEN_WITHIN,
    Lease,
    holder_of,
    lease_name,
    machine,
    seconds,
)
from scio_recorder.stores.disk_format.medium import Medium

# Names are searched all at once, one in each line: there may be 100,000, and workers look often.
_MANIFEST_NAMES = re.compile(r"^manifest-(\d{5})\.safetensors$", re.ASCII | re.MULTILINE)
_LEASE_NAMES = re.compile(r"^lease-(\d{5,6})-(\d{8})$", re.ASCII | re.MULTILINE)
# After this many parts that others were faster to take, and one more for each thousand names, which
# cost a request to list, looking again is cheaper than trying.
_FAILURES = 8
# After this many seconds, a living worker has renewed its lease.
_LATE = 1.5 * RENEWED_EVERY


def complete_parts(medium: Medium) -> list[int]:
    """Return the complete parts."""
    return list(map(int, _MANIFEST_NAMES.findall("\n".join(medium.names("manifest-")))))


def newest_leases(medium: Medium) -> dict[int, int]:
    """Return the number of the newest lease of each part that was taken."""
    # Names are sorted: the newest of a part comes last.
    found = _LEASE_NAMES.findall("\n".join(medium.names(PREFIX)))
    return {int(part): int(number) for part, number in found}


class _Seen(NamedTuple):
    """The newest lease of a part, and when it was first seen."""

    number: int
    since: float


class Claims:
    """Takes parts for one worker.

    A worker goes from part to part, beginning with a random one. It goes to another random one when
    it meets another worker. So workers spread out, and a part costs the same few requests however
    many there are. When all parts are complete, one more thing can be taken: the index of the
    recording, which counts as the part behind the last.

    Parameters
    ----------
    medium : Medium
        Where the recording is.
    num_parts : int
        The number of its parts.
    holder : callable
        ``part ->`` the facts about this worker that others can read.
    clock : callable
        Returns seconds.
    dice : random.Random, optional
        Chooses the first part.
    """

    def __init__(
        self,
        medium: Medium,
        num_parts: int,
        holder: Callable[[int], Mapping[str, Any]],
        *,
        clock: Callable[[], float] = seconds,
        dice: random.Random | None = None,
    ) -> None:
        self._medium, self._holder, self._clock = medium, holder, clock
        self._dice = dice or random.Random()
        self.num_parts = num_parts
        # Parts known to be complete, and parts not worth trying: bytes, which are searched fast.
        self._done = bytearray(num_parts + 1)
        self._busy = bytearray(num_parts + 1)
        self._leases: dict[int, _Seen] = {}
        # Parts that this worker has put off for now.
        self.later: set[int] = set()
        self._at = self._dice.randrange(num_parts)
        self._failures = 0
        self._look()

    @property
    def num_done(self) -> int:
        """The number of parts known to be complete."""
        return self._done.count(1, 0, self.num_parts)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do for any worker."""
        return bool(self._done[self.num_parts])

    def take(self) -> Lease | None:
        """Return a lease of a part that is not complete; None if none can be taken now."""
        lease = self._take_free()
        if lease is None and not self.is_finished:
            # Some may have been given back meanwhile, or their holders may be gone.
            self._look_at_leases()
            lease = self._take_free() or self._take_over()
        return lease

    def done(self, part: int) -> None:
        """Note that a part is complete."""
        self._done[part] = self._busy[part] = 1

    def put_off(self, part: int) -> None:
        """Put a part off until `later` is cleared."""
        self.later.add(part)
        self._busy[part] = 1

    def clear_away(self) -> None:
        """Remove the leases that killed workers have left, if all parts are complete."""
        for name in self._medium.names(PREFIX):
            with suppress(OSError):
                self._medium.unlink(name)

    def _take_free(self) -> Lease | None:
        while (part := self._next_free()) is not None:
            lease = self._try(part, 0)
            if lease is not None:
                self._at = part + 1
                return lease
            self._at = self._dice.randrange(self.num_parts)
            self._failures += 1
            if self._failures > _FAILURES + self.num_parts // 1000:
                self._look()
        return None

    def _next_free(self) -> int | None:
        last = self.num_parts
        at = self._busy.find(0, self._at, last)
        if at < 0:
            at = self._busy.find(0, 0, last)
        if at < 0 and not self._busy[last] and self._done.find(0, 0, last) < 0:
            at = last
        return None if at < 0 else at

    def _take_over(self) -> Lease | None:
        """Take a part from a worker that is gone."""
        for part, seen in self._left_behind():
            if self._clock() - self._looked_at > TAKEN_WITHIN:
                # The look may be too old; see the NOTE on leases.
                return None
            lease = self._try(part, seen.number + 1)
            if lease is not None and self._clock() - self._looked_at <= TAKEN_WITHIN:
                return lease
            if lease is not None:
                lease.give_back()
        return None

    def _left_behind(self) -> Iterator[tuple[int, _Seen]]:
        here = machine()
        found = [item for item in self._leases.items() if not self._done[item[0]]]
        # Workers that wait for the same parts try them in different orders.
        self._dice.shuffle(found)
        for part, seen in found:
            name, age = lease_name(part, seen.number), self._looked_at - seen.since
            if age > _LATE and self._is_done(part):
                # Its holder died or was stopped between its last commit and giving the part back.
                continue
            if age >= STALE_AFTER or (
                self._medium.is_abandoned(name)
                and holder_of(self._medium, name).get("machine") == here
            ):
                yield part, seen

    def _try(self, part: int, number: int) -> Lease | None:
        """Take a part, unless it is complete or another worker is faster."""
        # This comes before a lease: most parts that others were faster to take are complete by now.
        if self._is_done(part):
            return None
        lease = Lease(self._medium, part, number, lambda: self._holder(part), self._clock)
        if not lease.take():
            self._busy[part] = 1
            return None
        if self._is_done(part):
            lease.give_back()
            return None
        return lease

    def _is_done(self, part: int) -> bool:
        name = INDEX_NAME if part == self.num_parts else manifest_name(part)
        if self._medium.has(name):
            self.done(part)
        return bool(self._done[part])

    def _look(self) -> None:
        """List the complete parts and the leases."""
        self._failures = 0
        for part in complete_parts(self._medium):
            if part < self.num_parts:
                self._done[part] = 1
        self._look_at_leases()

    def _look_at_leases(self) -> None:
        self._looked_at = self._clock()
        newest = newest_leases(self._medium)
        # The names had been listed by then, so it may have been the newest since then.
        now, before = self._clock(), self._leases
        self._leases = {}
        self._busy = bytearray(self._done)
        for part, number in newest.items():
            if part > self.num_parts:
                continue
            seen = before.get(part)
            same = seen is not None and seen.number == number
            self._leases[part] = seen if same and seen is not None else _Seen(number, now)
            self._busy[part] = 1
        for part in self.later:
            self._busy[part] = 1
