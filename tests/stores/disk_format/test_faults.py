"""Every system call of a short run fails once, or from then on, and nothing durable is lost."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.description import holds_recording
from scio_recorder.stores.disk_format.medium import FormatError
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.runs import (
    CHUNKS,
    HEADER,
    LAYERS,
    NUM_SAMPLES,
    calls_of,
    check_complete,
    check_contents,
    finish_and_check,
    intercepted,
    make_run,
    rows,
    start,
    state_after,
    write_rest,
)

# What a full disk still allows.
HARMLESS_WHEN_FULL = {"close", "flock", "fstat", "list_names", "read_into", "status_of"}
HARMLESS_WHEN_FULL |= {"unlink", "rename_new", "fsync"}


def failing(target: int, code: int, *, from_then_on: bool = False) -> Any:
    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "close":
            go_on()
        full = from_then_on and number > target and name not in HARMLESS_WHEN_FULL
        if full and (name != "open_file" or arguments[1] & os.O_CREAT):
            raise OSError(code, os.strerror(code))
        if number == target:
            raise OSError(code, os.strerror(code))
        return None if name == "close" else go_on()

    return intercepted(act)


def outcomes(
    folder: Path, write: Callable[[Path], object], read: Callable[[Path], Any]
) -> set[Any]:
    """Return what ``read`` gives after ``write`` has failed at each of its calls in turn."""
    results = set()
    for stop in range(len(calls_of(lambda: write(folder / "whole")))):
        path = folder / str(stop)
        with suppress(OSError), failing(stop, errno.ENOSPC):
            write(path)
        if holds_recording(path):
            results.add(read(path))
    return results


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()


@pytest.fixture(scope="module")
def num_calls(tmp_path_factory) -> int:
    folder = tmp_path_factory.mktemp("count")
    return len(calls_of(lambda: write_rest(folder / "run", [])))


@pytest.mark.parametrize(
    ("code", "from_then_on", "step"),
    [
        (errno.ENOSPC, True, 3),
        pytest.param(errno.ENOSPC, True, 1, marks=pytest.mark.campaign),
        pytest.param(errno.EIO, False, 1, marks=pytest.mark.campaign),
        pytest.param(errno.ENOSPC, False, 1, marks=pytest.mark.campaign),
        pytest.param(errno.EDQUOT, True, 1, marks=pytest.mark.campaign),
    ],
)
def test_any_call_failing_in_a_write(tmp_path, num_calls, code, from_then_on, step):
    assert num_calls > 60
    # What earlier tests left behind may be closed meanwhile.
    gc.collect()
    before = descriptors()
    raised, targets = 0, range(0, num_calls, step)
    for target in targets:
        path = tmp_path / str(target)
        durable = [0]
        with failing(target, code, from_then_on=from_then_on):
            problem = problem_of(lambda path=path, durable=durable: write_rest(path, durable))
        if problem is not None:
            raised += 1
            assert problem.errno == code
            assert str(tmp_path) in str(problem)
            del problem
        assert descriptors() <= before
        if holds_recording(path):
            assert check_contents(path) >= durable[-1]
        else:
            assert durable == [0]
        finish_and_check(path)
        shutil.rmtree(path)
    # Closing and removing what nobody needs harm nobody.
    assert raised > len(targets) // 2


def test_any_call_failing_in_a_read(tmp_path):
    path = make_run(tmp_path / "run")
    count = len(calls_of(lambda: check_complete(path)))
    assert count > 40
    for target in range(count):
        with failing(target, errno.EIO):
            problem = problem_of(lambda: check_complete(path))
        assert problem is None or "Input/output error" in str(problem)
    check_complete(path)


def problem_of(work: Callable[[], None]) -> FormatError | RecordingError | None:
    try:
        work()
    except (FormatError, RecordingError) as error:
        return error
    return None


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.campaign), 7])
def test_calls_that_take_or_give_less_than_asked(tmp_path, most):
    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "write":
            return os.pwrite(arguments[0], arguments[1][:most], arguments[2])
        if name == "read_into":
            return os.preadv(arguments[0], [arguments[1][0][:most]], arguments[2])
        return go_on()

    with intercepted(act):
        check_complete(make_run(tmp_path / "run"))
    check_complete(tmp_path / "run")


def test_a_file_whose_sync_failed_is_written_again_as_another_one(tmp_path):
    failed, inodes = [], []

    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "fsync":
            inodes.append(os.fstat(arguments[0]).st_ino)
            if not failed:
                failed.append(number)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go_on()

    with start(tmp_path / "run") as writer, intercepted(act):
        with pytest.raises(FormatError, match="Input/output error"):
            writer.append(rows(0, 3), range(3))
        writer.append(rows(0, 3), range(3))
    assert failed
    (chunk,) = tmp_path.glob("run/chunk-*")
    # The file again, and the folder.
    assert len(inodes) == 3
    assert inodes[1] == chunk.stat().st_ino
    assert not list(tmp_path.glob("run/*.tmp"))
    assert check_contents(tmp_path / "run", with_state=False) == 3


def test_a_full_disk_can_be_waited_out(tmp_path):
    def full(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "write" and len(arguments[1]) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return go_on()

    path = tmp_path / "run"
    with start(path) as writer:
        writer.append(rows(0, 3), range(3), state=state_after(3))
        for _ in range(2):
            with intercepted(full), pytest.raises(FormatError, match="No space left"):
                writer.append(rows(3, 9), range(3, 9), state=state_after(9))
        assert writer.durable == check_contents(path) == 3
        writer.append(rows(3, 9), range(3, 9), state=state_after(9))
        writer.finish()
    check_complete(path)


def test_found_commits_are_made_durable_before_they_count(tmp_path):
    # Their writer may have been killed between the rename and the sync of the folder.
    synced = []

    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "fsync":
            synced.append(stat.S_ISDIR(os.fstat(arguments[0]).st_mode))
        return go_on()

    path = tmp_path / "run"
    with start(path) as writer:
        writer.append(rows(0, 3), range(3))
    with intercepted(act), start(path) as writer:
        assert writer.durable == 3
        assert synced == [True]


def test_what_may_be_there_or_not_is_not_committed_twice(tmp_path):
    # The sync of the folder fails: the commit has its name, and may lose it with the power.
    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return go_on()

    path = tmp_path / "run"
    with start(path) as writer:
        writer.append(rows(0, 3), range(3), state=state_after(3))
        with intercepted(act), pytest.raises(FormatError, match="Input/output"):
            writer.append(rows(3, 5), range(3, 5))
        assert writer.durable == 3
        for stop in (9, 5):
            with pytest.raises(FormatError, match=r"is there already.*continue after it"):
                writer.append(rows(3, stop), range(3, stop))
        assert writer.durable == 3
    with start(path) as writer:
        assert writer.durable == 5
        writer.append(rows(5, 9), range(5, 9), state=state_after(9))
        writer.finish()
    check_complete(path)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.campaign), "after"])
def test_an_interrupt_never_commits_twice(tmp_path, when):
    # Ctrl-C, at each call of one commit; the caller carries on with the same writer.
    def interrupting(target: int) -> Any:
        def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
            if when == "after":
                result = go_on()
            if number == target:
                raise KeyboardInterrupt
            return result if when == "after" else go_on()

        return intercepted(act)

    refused = 0
    for target in range(40):
        path = tmp_path / str(target)
        with start(path) as writer:
            writer.append(rows(0, 3), range(3), state=state_after(3))
            try:
                with interrupting(target):
                    writer.append(rows(3, 9), range(3, 9), state=state_after(9))
            except KeyboardInterrupt:
                try:
                    writer.append(rows(3, 9), range(3, 9), state=state_after(9))
                except FormatError:
                    refused += 1
        finish_and_check(path)
    assert refused


@pytest.mark.parametrize("point", ["open_file", "rename_new"])
def test_finishing_can_be_tried_again(tmp_path, point):
    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == point and "manifest" in str(arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return go_on()

    path = tmp_path / "run"
    with start(path) as writer:
        for first, last in CHUNKS:
            writer.append(rows(first, last), range(first, last), state=state_after(last))
        with intercepted(act), pytest.raises(FormatError, match="No space left"):
            writer.finish()
        with pytest.raises(FormatError, match="finished"):
            writer.append(rows(0, 1), [0])
        writer.finish()
    assert (path / "manifest-00000.safetensors").exists()
    check_complete(path)


def test_what_is_synced_before_what(tmp_path):
    events: list[str] = []
    names: dict[int, str] = {}

    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "open_file":
            descriptor = go_on()
            names[descriptor] = str(arguments[0]).rsplit("/", 1)[-1]
            return descriptor
        if name == "write":
            events.append(f"write {names[arguments[0]]}")
        elif name == "fsync":
            events.append(f"sync {names[arguments[0]]}")
        elif name == "rename_new":
            events.append(f"rename to {arguments[1]}")
        return go_on()

    path = tmp_path / "run"
    chunk = "chunk-00000-00000000.safetensors"
    with intercepted(act), RunWriter.create(path, layers=LAYERS, header=HEADER) as writer:
        assert f"sync {tmp_path.name}" in events
        created = events.index("rename to recording.safetensors")
        assert [plain(event) for event in events[created - 1 : created + 2]] == [
            "sync recording.safetensors.tmp",
            "rename to recording.safetensors",
            "sync run",
        ]
        events.clear()
        writer.append(rows(0, NUM_SAMPLES), range(NUM_SAMPLES), state=state_after(NUM_SAMPLES))
    kept = [plain(event) for event in events]
    assert [event for event in kept if not event.startswith("write")] == [
        "sync state.tmp",
        "rename to state",
        "sync run",
        f"sync {chunk}.tmp",
        f"rename to {chunk}",
        "sync run",
    ]
    assert {event for event in kept if event.startswith("write")} == {
        "write state.tmp",
        f"write {chunk}.tmp",
    }


def plain(event: str) -> str:
    """Leave out what differs from time to time."""
    event = re.sub(r"state-00000-[0-9a-f]{16}\.safetensors", "state", event)
    return re.sub(r"\.00000-[0-9a-f]{16}\.tmp", ".tmp", event)


def test_a_reader_needs_no_more_than_reading(tmp_path):
    path = make_run(tmp_path / "run")

    def act(number: int, name: str, go_on: Any, arguments: tuple[Any, ...]) -> Any:
        reading = {"open_file", "fstat", "read_into", "close", "list_names", "status_of"}
        assert name in reading
        if name == "open_file":
            writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            assert not arguments[1] & writing
        return go_on()

    with intercepted(act), RunReader(path) as reader:
        assert reader.read("label", 0, 9).tolist() == [i * i for i in range(9)]
