"""Several ranks begin one recording: stopped anywhere, none of them keeps the others from it."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format.description import holds_recording, medium_at
from scio_recorder.stores.disk_format.medium import FormatError
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.tensor_file import TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter, WriteRight
from scio_recorder.workers.leases import Lease
from tests.stores.disk_format.runs import calls_of, intercepted, killed_at
from tests.stores.disk_format.test_faults import failing, problem_of
from tests.stores.disk_format.test_two_writers import interleaved, system_calls

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
LAYERS = {"x": TensorInfo((), torch.int64)}


def begin(path: Path, rank: int) -> RunWriter:
    return RunWriter.create(path, layers=LAYERS, header={}, world_size=2, rank=rank)


def fill(path: Path, rank: int) -> None:
    is_begun = False
    if holds_recording(path):
        with RunReader(path, rank=rank) as reader:
            if reader.complete:
                return
            is_begun = reader.is_begun
    with RunWriter.resume(path, rank=rank) if is_begun else begin(path, rank) as writer:
        if not writer.durable:
            writer.append({"x": torch.tensor([rank])}, [rank])
        writer.finish()


def check(path: Path) -> None:
    with RunReader(path, verify=True) as reader:
        assert reader.complete
        assert reader.read("x", 0, 2).tolist() == [0, 1]
        assert list(reader.sample_ids) == [0, 1]
    for rank in range(2):
        with RunReader(path, rank=rank) as part:
            assert part.complete
            assert part.read("x", 0, 1).tolist() == [rank]


@pytest.mark.campaign
@pytest.mark.parametrize("is_joining", [False, True])
def test_killed_at_every_system_call(tmp_path, is_joining):
    def prepared(path: Path) -> Path:
        if is_joining:
            fill(path, 0)
        return path

    counted = prepared(tmp_path / "count")
    total = len(calls_of(lambda: fill(counted, 1)))
    assert total > 30
    for target in range(total):
        path = prepared(tmp_path / str(target))
        killed_at(target, lambda reports, path=path: fill(path, 1))
        fill(path, 0)
        fill(path, 1)
        check(path)
        shutil.rmtree(path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_any_call_failing(tmp_path, code):
    total = len(calls_of(lambda: fill(tmp_path / "count", 1)))
    for target in range(total):
        path = tmp_path / str(target)
        with failing(target, code, from_then_on=code == errno.ENOSPC):
            problem = problem_of(lambda path=path: fill(path, 1))
        assert problem is None or (problem.errno == code and str(tmp_path) in str(problem))
        del problem
        fill(path, 0)
        fill(path, 1)
        check(path)


@pytest.mark.parametrize("has_finished", [False, True])
def test_a_writer_that_begins_after_its_part_has_passed_on_is_told_so(tmp_path, has_finished):
    clock = [0.0]
    medium = medium_at(tmp_path)

    def taken(number: int) -> Lease:
        lease = Lease(medium, 1, number, {}, lambda: clock[0])
        assert lease.take()
        return lease

    def begin_part(lease: Lease) -> RunWriter:
        return RunWriter.create(
            tmp_path,
            layers=LAYERS,
            header={},
            world_size=2,
            rank=1,
            right=WriteRight(lease.check, lease.is_inherited),
        )

    first = taken(0)
    clock[0] += 100
    second = taken(1)
    with begin_part(second) as writer:
        writer.append({"x": torch.tensor([1])}, [1])
        if has_finished:
            writer.finish()
    with pytest.raises(RecordingError, match="lease of part 1 was not renewed for 100 s"):
        begin_part(first)
    with pytest.raises(FormatError, match="already holds samples of rank 1"):
        begin_part(second)


@pytest.mark.campaign
def test_opened_while_another_has_stopped_anywhere_and_goes_on_anywhere(tmp_path):
    # Each call of the one with some calls of the other, or with all of them.
    def prepared(name: str) -> Path:
        with RunWriter.create(tmp_path / name, layers=LAYERS, header={}, world_size=2):
            return tmp_path / name

    counted = prepared("count")
    num_filling = len(calls_of(lambda: fill(counted, 1)))
    num_opening = len(calls_of(lambda: RunReader(counted).close()))
    dice = random.Random(0)
    for stop in range(num_filling):
        for go_on_at in range(num_opening) if FULL else dice.sample(range(num_opening), 3):
            path = prepared(f"{stop}-{go_on_at}")
            interleaved(
                system_calls,
                lambda path=path: fill(path, 1),
                stop,
                lambda path=path: RunReader(path).close(),
                go_on_at,
            )
            fill(path, 0)
            check(path)
            shutil.rmtree(path)


def test_of_two_who_create_at_once_the_second_joins(tmp_path):
    total = len(calls_of(lambda: fill(tmp_path / "count", 0)))
    for target in range(total):
        path = tmp_path / str(target)

        def act(number, name, go_on, arguments, target=target, path=path):
            if number == target:
                fill(path, 1)
            return go_on()

        with intercepted(act):
            fill(path, 0)
        check(path)


@pytest.mark.parametrize("lost", ["before", "after"])
def test_a_writer_that_has_lost_its_right_writes_or_reports_nothing(tmp_path, lost):
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == lost_at:
            raise FormatError("the right is lost")

    lost_at = 0
    with RunWriter.create(tmp_path, layers=LAYERS, header={}, right=WriteRight(check)) as writer:
        writer.append({"x": torch.tensor([0])}, [0])
        # Before and after each file.
        assert calls == 2
        lost_at = 3 if lost == "before" else 4
        with pytest.raises(FormatError, match="the right is lost"):
            writer.append({"x": torch.tensor([1])}, [1])
        assert writer.durable == 1
    # What was put before the loss was noticed is there, and was not reported.
    assert len(list(tmp_path.glob("chunk-*"))) == (1 if lost == "before" else 2)
    assert not list(tmp_path.glob("lock-*"))
