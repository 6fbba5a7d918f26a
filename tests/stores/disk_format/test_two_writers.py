"""A writer stops anywhere and goes on anywhere, while another goes on with its rank."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scio_recorder.stores.disk_format.bucket import Bucket
from scio_recorder.stores.disk_format.description import chunk_name
from scio_recorder.stores.disk_format.medium import FormatError
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.writer import RunWriter, WriteRight
from tests.object_store import impatient_store
from tests.stores.disk_format.runs import (
    HEADER,
    LAYERS,
    finish_and_check,
    intercepted,
    rows,
    state_after,
)

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
# As after a pause of any length: neither notices that the other holds the right now.
RIGHT = WriteRight(lambda: None, is_inherited=True)
Steps = Callable[[Callable[[str], None]], AbstractContextManager[None]]


def begin(path: str) -> RunWriter:
    return RunWriter.create(path, layers=LAYERS, header=HEADER, right=RIGHT)


def first(path: str, last: int) -> None:
    """Write up to a sample, or finish after the last one."""
    with begin(path) as writer:
        for start, end in ((0, 1), (1, 3), (3, 9)):
            if end <= last:
                writer.append(rows(start, end), range(start, end), state=state_after(end))
        if last == 9:
            writer.finish()


def second(path: str) -> None:
    """Go on to the end; each commit that is reported is there, with its state."""
    with RunWriter.resume(path, right=RIGHT) as writer:
        for number in range(writer.durable, 9, 2):
            last = min(number + 2, 9)
            writer.append(rows(number, last), range(number, last), state=state_after(last))
            assert durable_with_state(path) > number
        writer.finish()


def durable_with_state(path: str) -> int:
    try:
        with RunReader(path) as reader:
            state = reader.read_state()
    except FormatError as error:
        raise AssertionError(f"{path} can't be read") from error
    assert state == state_after(reader.num_samples)
    return reader.num_samples


def unless_the_other_was_faster(work: Callable[[str], None], path: str) -> None:
    try:
        work(path)
    except FormatError as error:
        # The unfinished file of one may be removed once the manifest of the other stands.
        if not any(text in str(error) for text in ("is there already", "is complete", "No such")):
            raise


@contextmanager
def system_calls(at_each: Callable[[str], None]) -> Iterator[None]:
    def act(number: int, name: str, go_on: Callable[[], Any], arguments: Any) -> Any:
        at_each(str(arguments[1]) if name == "rename_new" else name)
        return go_on()

    with intercepted(act):
        yield


@contextmanager
def requests(at_each: Callable[[str], None]) -> Iterator[None]:
    make, put = Bucket.make, Bucket._put

    def making(self: Bucket, *arguments: Any) -> Any:
        at_each("request")
        return make(self, *arguments)

    def putting(self: Bucket, name: str, *arguments: Any) -> None:
        at_each(name)
        put(self, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "make", making)
        patch.setattr(Bucket, "_put", putting)
        yield


def steps_of(steps: Steps, work: Callable[[], object]) -> list[str]:
    names: list[str] = []
    with steps(names.append):
        work()
    return names


def interleaved(
    steps: Steps,
    stopping: Callable[[], object],
    stop: int,
    other: Callable[[], object],
    at: int,
    *,
    prefix: str = "",
) -> None:
    """Let one thread stop at a step, until the other is about to take one of its own.

    Then the first goes on to its end, and after it the other. Steps of the other are counted if
    their names have the prefix.
    """
    stopped, going_on = threading.Event(), threading.Event()
    counts: Counter[bool] = Counter()
    problems: list[BaseException] = []

    def work() -> None:
        try:
            stopping()
        except BaseException as error:
            problems.append(error)
        finally:
            stopped.set()

    thread = threading.Thread(target=work)
    # A writer writes in threads of its own, too.
    starters: dict[threading.Thread, threading.Thread] = {}
    start = threading.Thread.start

    def starting(started: threading.Thread) -> None:
        starters[started] = threading.current_thread()
        start(started)

    def at_each(name: str) -> None:
        current = threading.current_thread()
        is_first = thread in (current, starters.get(current))
        counts[is_first] += is_first or name.startswith(prefix)
        if is_first and counts[True] == stop + 1:
            stopped.set()
            assert going_on.wait(300)
        elif not is_first and counts[False] == at + 1:
            going_on.set()
            thread.join(300)

    with steps(at_each), pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", starting)
        thread.start()
        assert stopped.wait(300)
        try:
            other()
        finally:
            going_on.set()
            thread.join(300)
    assert not thread.is_alive()
    assert not problems, problems


def meanwhile(steps: Steps, path: str, last: int, stop: int, put: int) -> None:
    """Let the first writer stop, until the second one is about to put one of its chunks.

    Its state is in place then.
    """
    stopping = partial(unless_the_other_was_faster, partial(first, last=last), path)
    other = partial(unless_the_other_was_faster, second, path)
    interleaved(steps, stopping, stop, other, put, prefix="chunk-")


def check_all(steps: Steps, place_of: Callable[[object], str], most: int) -> None:
    for last in (1, 3, 9):
        names = steps_of(steps, partial(first, place_of(f"first-{last}"), last))
        # The steps behind a commit, with what may be removed there; all of them in the campaign.
        stops = [
            number
            for number in range(names.index(chunk_name(0, 0)) + 1, len(names))
            if FULL or any(name.startswith("chunk-") for name in names[number - 6 : number])
        ]
        # The second writer puts five chunks, or fewer.
        cases = [(last, stop, put) for stop in stops for put in range(5)]
        for case in cases if FULL else random.Random(0).sample(cases, min(most, len(cases))):
            path = place_of(case)
            meanwhile(steps, path, *case)
            finish_and_check(path)


@pytest.mark.parametrize("most", [10, pytest.param(30, marks=pytest.mark.campaign)])
def test_in_a_folder(most: int, tmp_path: Path) -> None:
    def place_of(name: object) -> str:
        (tmp_path / str(name)).mkdir(exist_ok=True)
        return f"{tmp_path}/{name}"

    check_all(system_calls, place_of, most)


@pytest.mark.parametrize("most", [1, pytest.param(10, marks=pytest.mark.campaign)])
def test_in_a_bucket(most: int) -> None:
    with impatient_store():
        check_all(requests, lambda name: f"s3://bucket/{name}", most)
