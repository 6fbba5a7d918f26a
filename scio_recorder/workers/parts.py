"""Collecting a dataset in parts, which any number of processes take, and their progress.

Each process does the same: it takes a part that no other has, runs the network over it as `collect`
does, resuming an abandoned one, and gives the part back. Processes send each other nothing, and
none waits for another before all parts that can be taken are done.
"""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

from scio_recorder import Recording
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import CollectError, RecorderError, RecordingError
from scio_recorder.layer import counted
from scio_recorder.lowlevel import (
    Capture,
    Collection,
    CollectOptions,
    Feed,
    InStep,
    LayerOptions,
    caught_as,
    opened,
    raise_of_caller,
    several,
)
from scio_recorder.stores import Disk, Store, as_store
from scio_recorder.stores.files import (
    MAX_RANKS,
    EmptyPartError,
    Medium,
    RunReader,
    WriteRight,
    accessing,
    as_read,
    check_empty,
    check_settings,
    complete_ranks,
    holds_recording,
    medium_at,
    read_description,
    refuse_repeated_ids,
)
from scio_recorder.tensors import whole
from scio_recorder.workers.leases import (
    PREFIX,
    Claims,
    Lease,
    holder_of,
    holding,
    is_gone,
    lease_name,
    machine,
    newest_leases,
    seconds,
)
from scio_recorder.workers.samplers import refuse_split

# Seconds between two looks for a part: an eighth of the time waited so far, within these bounds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


def check_make_batches(make_batches: Any) -> None:
    """Refuse anything but a function; the error is also a TypeError."""
    if not callable(make_batches):
        text = (
            f"make_batches is a {type(make_batches).__name__}: give a function that takes the "
            "number of a part and returns its batches"
        )
        raise caught_as(CollectError, TypeError(text), text)


def check_begun(medium: Medium, num_parts: int, header: dict[str, Any]) -> None:
    """Refuse a place where there is something else than the beginning of these parts."""
    if not holds_recording(medium.path):
        check_empty(medium)
        return
    description = read_description(medium)
    if description.world_size != num_parts:
        raise RecordingError(
            f"{medium.path} is a recording in {counted(description.world_size, 'part')}, and "
            f"num_parts is {num_parts} here: give the same number, or choose another folder"
        )
    check_settings(medium.path, description.header, as_read(header))


def seen_by_others(store: Store) -> Disk:
    """Return a store that other processes see; raise for one that they don't."""
    if not isinstance(store, Disk):
        raise CollectError(
            f"collect_parts needs a store that other processes see, which {type(store).__name__} "
            'is not: write store="disk:PATH", or store="s3://BUCKET/RUN"'
        )
    if store.is_shared:
        raise CollectError(
            "collect_parts decides which process writes what: leave rank= and world_size= out of "
            "Disk(...)"
        )
    return store


@contextmanager
def _naming_part(part: int) -> Iterator[None]:
    """Let an error inside the block name the part of the dataset in which it happened."""
    try:
        yield
    except RecorderError as error:
        error.args = (f"part {part}: {error}",)
        raise
    except Exception as error:
        error.add_note(f"This happened in part {part}.")
        raise


def _check_mergeable(layers: LayerOptions) -> None:
    """Refuse reductions whose states for different parts of the data can't be merged."""
    for label, reductions in layers.reductions.items():
        for reduction in several(reductions):
            if reduction.why_not_merged is not None:
                raise CollectError(
                    f"layer {layers.architecture[label]} can't be reduced in parts: "
                    f"{reduction.why_not_merged}"
                )


@dataclass
class Parts:
    """The work of one process on a recording in parts.

    Parameters
    ----------
    capture : Capture
        Runs passes of the network.
    make_batches : callable
        ``part -> batches``.
    num_parts : int
        The number of parts.
    asked : CollectOptions
        The options of each part.
    run : callable
        ``collection, progress -> Recording``: runs the net on all batches.
    """

    capture: Capture
    make_batches: Callable[[int], Iterable[Any]]
    num_parts: int
    asked: CollectOptions
    run: Callable[[Collection, AbstractContextManager[Advance]], Recording]

    def __post_init__(self) -> None:
        self.num_parts = whole("num_parts", self.num_parts, 1)
        if self.num_parts > MAX_RANKS:
            raise CollectError(f"num_parts={self.num_parts}: give {MAX_RANKS} at most")
        check_make_batches(self.make_batches)
        self._store = seen_by_others(as_store(self.asked.store))
        if not InStep(self.capture.net).is_alone:
            raise CollectError(
                "several processes run each pass of this net together, but each would take other "
                "parts: write collect(..., store=Disk(path, rank=rank, world_size=world_size)) "
                "in all of them"
            )
        self._weights: str | None = None

    def collect(self, *, wait: bool) -> Recording:
        """Take parts until none is left that can be taken, and return the recording."""
        pattern = self._collection((), 0)
        _check_mergeable(pattern.layers)
        settings = pattern.job(pattern.settings(is_shared=True)).shared_settings()
        self._weights = settings["weights"]
        header = {"architecture": self.capture.architecture.to_dict(), **settings}
        holder = {"machine": machine(), "host": socket.gethostname(), "pid": os.getpid()}
        bar = progress_bar("collecting parts", self.num_parts, is_wanted=self.asked.progress)
        with (
            terminable(),
            closing(medium_at(self._store.path, makes_it=True)) as self._medium,
            bar as self._advance,
        ):
            path = self._medium.path
            with accessing(path):
                self._medium.check_writable(0)
                check_begun(self._medium, self.num_parts, header)
                claims = Claims(self._medium, self.num_parts, holder, clock=seconds)
            if claims.is_finished:
                self._check_complete()
            self._take_all(claims, wait=wait)
            if claims.is_finished:
                with accessing(path):
                    claims.clear_away()
        reader = RunReader(path)
        if reader.complete:
            refuse_repeated_ids(path, reader.run)
        return opened(reader, pattern.layers.reductions)

    def _take_all(self, claims: Claims, *, wait: bool) -> None:
        shown, busy_at, empty = 0, time.monotonic(), set[int]()
        while not claims.is_finished:
            with accessing(self._medium.path):
                lease = claims.take()
            self._advance(0, 0, claims.num_done - shown)
            shown = claims.num_done
            if lease is not None:
                with holding(lease):
                    is_done = self._do(claims, lease)
                if is_done:
                    busy_at = time.monotonic()
                    continue
                empty.add(lease.part)
                if len(empty) == self.num_parts:
                    raise CollectError(
                        f"all {self.num_parts} parts are empty: make_batches(part) gave no batch "
                        "to run the net on"
                    )
            elif not wait and holds_recording(self._medium.path):
                return
            pause = max(_FIRST_PAUSE, (time.monotonic() - busy_at) / 8)
            time.sleep(min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.0))

    def _do(self, claims: Claims, lease: Lease) -> bool:
        """Collect a part; return False if it is empty and there is no recording yet."""
        try:
            with _naming_part(lease.part):
                self._run(lease.part, self._batches(lease.part), lease)
        except EmptyPartError:
            return False
        claims.note_done(lease.part)
        return True

    def _check_complete(self) -> None:
        """Refuse data of another length if all was complete before, by the first and last part."""
        for part in sorted({0, self.num_parts - 1}):
            try:
                batches = self.make_batches(part)
            except Exception:
                # The data may be gone by now, but the recording is there.
                continue
            with _naming_part(part):
                self._run(part, batches, None)

    def _batches(self, part: int) -> Iterable[Any]:
        try:
            return self.make_batches(part)
        except Exception as error:
            raise_of_caller(f"make_batches({part})", error)

    def _run(self, part: int, batches: Iterable[Any], lease: Lease | None) -> None:
        refuse_split(batches, part)
        right = None if lease is None else WriteRight(lease.check, lease.is_inherited)
        self._store = self._store.part(part, self.num_parts, right)
        self.run(self._collection(batches, part), nullcontext(self._count))

    def _collection(self, batches: Iterable[Any], part: int) -> Collection:
        asked = replace(self.asked, store=self._store)
        return Collection(self.capture, Feed(batches, asked, part), weights=self._weights)

    def _count(self, samples: int, num_bytes: int) -> None:
        self._advance(samples, num_bytes, 0)


class Holder(NamedTuple):
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
    """

    part: int
    host: str
    pid: int
    since: float
    is_gone: bool


class Progress(NamedTuple):
    """The number of parts and of complete ones, and the holders of the others."""

    num_parts: int
    num_done: int
    holders: list[Holder]


def progress_of(medium: Medium) -> Progress:
    """Return the progress of a recording that is filled in parts or by ranks.

    Raises
    ------
    RecordingError
        There is no recording, or nothing of it is durable yet.
    """
    num_parts = read_description(medium).world_size
    with accessing(medium.path):
        newest, done = newest_leases(medium.names(PREFIX)), set(complete_ranks(medium))
    holders = []
    for part in sorted(newest.keys() - done):
        name = lease_name(part, newest[part])
        # It may have been given back since.
        if said := holder_of(medium, name):
            pid, since = int(_number(said, "pid")), _number(said, "since")
            facts = part, str(said.get("host")), pid, since
            holders.append(Holder(*facts, is_gone(medium, name)))
    return Progress(num_parts, len(done), holders)


def _number(said: dict[str, Any], key: str) -> float:
    """Return a number from a holder's description, which is not trusted: 0 if it is invalid."""
    value = said.get(key)
    return value if isinstance(value, int | float) and 0 <= value < math.inf else 0.0


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM leave the block by a `SystemExit`, so that pending data is saved.

    Otherwise the process would end at once. The caller's own handler stays in charge, and threads
    other than the main one never see a signal.

    Examples
    --------
    >>> import os
    >>> try:
    ...     with terminable():
    ...         os.kill(os.getpid(), signal.SIGTERM)
    ... except SystemExit as error:
    ...     error.code
    143
    """
    is_ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    # Schedulers may send it again while pending data is being saved.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The status that shells report for a process that the signal has ended.
    raise SystemExit(128 + signal.SIGTERM)
