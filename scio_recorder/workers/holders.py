"""The progress of workers that fill a recording in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.description import complete_ranks, recordings_inside
from scio_recorder.stores.disk_format.medium import Medium, accessing
from scio_recorder.workers.leases import holder_of, lease_name, machine, newest_leases
from scio_recorder.workers.parts import agreed


@dataclass(frozen=True)
class Holder:
    """The holder of a part, as its lease describes it.

    Parameters
    ----------
    part : int
        The number of the part.
    host : str
        The machine's name.
    pid : int
        The process.
    since : float
        When it took the part, in seconds of the epoch, by that machine's clock.
    is_gone : bool
        Whether the process is known to have ended, so that another one can take the part.
    parts_per_second, samples_per_second : float
        Its work so far, divided by the time that it has worked.
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
        The number of parts, and of complete ones.
    holders : list of Holder
        One for each part that is taken.
    """

    num_parts: int
    num_done: int
    holders: list[Holder]

    @property
    def samples_per_second(self) -> float:
        """The samples that all present workers together record in a second."""
        return sum(one.samples_per_second for one in self.holders if not one.is_gone)

    @property
    def seconds_left(self) -> float | None:
        """The time that present workers need for the rest; None before one has completed a part."""
        rate = sum(one.parts_per_second for one in self.holders if not one.is_gone)
        return (self.num_parts - self.num_done) / rate if rate else None


def progress_of(medium: Medium) -> Progress:
    """Return the progress of a recording that is filled in parts or by ranks.

    Raises
    ------
    RecordingError
        There is no recording.
    """
    begun = agreed(medium)
    if begun is None:
        raise RecordingError(
            f"{medium.path} holds no recording, and no recording in parts has begun there"
            f"{recordings_inside(medium.path)}"
        )
    with accessing(medium.path):
        newest, done = newest_leases(medium), set(complete_ranks(medium))
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
    """Return a number from a holder's description, which is not trusted: 0 if it is invalid."""
    value = said.get(key)
    return value if isinstance(value, int | float) and 0 <= value < math.inf else 0.0
