"""How far those have come who fill a recording in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.beginning import agreed
from scio_recorder.stores.disk_format.claims import complete_parts, newest_leases
from scio_recorder.stores.disk_format.lease import holder_of, lease_name, machine
from scio_recorder.stores.disk_format.medium import Medium, accessing


@dataclass(frozen=True)
class Holder:
    """The holder of a part, as its lease describes it.

    Parameters
    ----------
    part : int
        Which part.
    host : str
        The machine's name.
    pid : int
        The process.
    since : float
        When it took the part, in seconds of the epoch, by that machine's clock.
    is_gone : bool
        Whether the process is known to have ended, so that another one can take the part.
    parts_per_second, samples_per_second : float
        What it has done so far, over how long it has been at work.
    """

    part: int
    host: str
    pid: int
    since: float
    is_gone: bool
    parts_per_second: float
    samples_per_second: float


@dataclass(frozen=True)
class Progress:
    """The complete parts, and the holders of the others.

    Parameters
    ----------
    num_parts, num_done : int
        How many parts there are, and how many of them are complete.
    holders : list of Holder
        One for each part that somebody has taken.
    """

    num_parts: int
    num_done: int
    holders: list[Holder]

    @property
    def samples_per_second(self) -> float:
        """How many samples are recorded a second, by all who are at work."""
        return sum(one.samples_per_second for one in self.holders if not one.is_gone)

    @property
    def seconds_left(self) -> float | None:
        """How long the rest takes those who are at work; None before one has completed a part."""
        rate = sum(one.parts_per_second for one in self.holders if not one.is_gone)
        return (self.num_parts - self.num_done) / rate if rate else None


def progress_of(medium: Medium) -> Progress:
    """Look how far a recording has come that is filled in parts, or by ranks.

    Raises
    ------
    RecordingError
        There is none.
    """
    begun = agreed(medium)
    if begun is None:
        raise RecordingError(
            f"{medium.path} holds no recording, and no recording in parts has begun there"
        )
    with accessing(medium.path):
        newest, done = newest_leases(medium), set(complete_parts(medium))
    holders = [_holder(medium, part, newest[part]) for part in sorted(newest) if part not in done]
    return Progress(begun["parts"], len(done), [one for one in holders if one is not None])


def _holder(medium: Medium, part: int, number: int) -> Holder | None:
    name = lease_name(part, number)
    said = holder_of(medium, name)
    if not said:
        return None
    seconds = _number(said, "seconds")
    return Holder(
        part,
        str(said.get("host")),
        int(_number(said, "pid")),
        _number(said, "since"),
        said.get("machine") == machine() and medium.is_abandoned(name),
        _number(said, "parts") / seconds if seconds else 0.0,
        _number(said, "samples") / seconds if seconds else 0.0,
    )


def _number(said: dict[str, Any], key: str) -> float:
    """Return a number that a holder says, which anybody may have written: 0 if it is none."""
    value = said.get(key)
    return value if isinstance(value, int | float) and 0 <= value < math.inf else 0.0
