"""Any number of processes take parts of a dataset: every sample once, whoever did what."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scio_recorder import open_recording
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.layer import text_of
from scio_recorder.reductions import Fold, Histogram, Mean, Moments
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.disk_format.description import chunk_name
from scio_recorder.stores.files import RunWriter
from tests.recording.nets import (
    assert_same,
    batches,
    expected,
    failing_after,
    named_batches,
    recorder,
    seeded,
)
from tests.stores.disk_format.by_the_book import put_together, read_run, take_apart

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
ROOT = Path(__file__).parents[2]
# Samples in each batch of each part; one part is empty.
SIZES = ((3, 2), (4, 1, 2), (), (5,), (1, 1, 1), (2,))
NUM_PARTS = len(SIZES)
IDS = [f"{part}-{i}" for part in range(NUM_PARTS) for i in range(sum(SIZES[part]))]


def data_of(part: int) -> list[tuple[torch.Tensor, list[str]]]:
    return named_batches(part, SIZES[part])


def fill(path: Path, make_batches: Any = data_of, rnet: Any = None, **keywords: Any) -> Any:
    given = {"num_parts": NUM_PARTS, "store": Disk(path, chunk_bytes=1), "progress": False}
    given |= {"sample_ids": lambda batch: batch[1]} | keywords
    return (rnet or seeded()).collect_parts(make_batches, **given)


def check(recording: Any, path: Path, **keywords: Any) -> None:
    data = [batch for part in range(NUM_PARTS) for batch, _ in data_of(part)]
    for one in (recording, open_recording(path, verify=True)):
        assert one.complete
        assert list(one.sample_ids) == IDS
        assert_same(one, expected(seeded(), data))
    # Nothing is left of those who came and went.
    assert not [name for name in os.listdir(path) if name.startswith("lease") or "tmp" in name]


def test_one_process(tmp_path):
    recording = fill(tmp_path / "run")
    check(recording, tmp_path / "run")
    before = sorted(os.listdir(tmp_path / "run"))

    def unused(part: int) -> Any:
        raise AssertionError("all is complete")

    check(fill(tmp_path / "run", unused), tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == before


def test_what_is_written_is_what_the_format_says(tmp_path):
    fill(tmp_path)
    ids, found = read_run(tmp_path)
    assert ids == IDS
    recording = open_recording(tmp_path)
    for label in recording:
        assert torch.equal(found[text_of(label)], recording[label][:])


def test_a_commit_that_is_in_order_and_not_the_one_that_was_listed(tmp_path):
    fill(tmp_path, rnet=seeded("0"))
    chunk = tmp_path / chunk_name(1, 0)
    parts = take_apart(chunk.read_bytes())
    other = parts._replace(content={**parts.content, "ids": ["1-0", "1-1", "1-2", "9-9"]})
    chunk.unlink()
    chunk.write_bytes(put_together(other))
    with pytest.raises(RecordingError, match="not the commit that the manifest lists"):
        open_recording(tmp_path)["0"][:]


def test_ids_by_default_do_not_depend_on_other_parts(tmp_path):
    recording = fill(tmp_path, lambda part: batches(*SIZES[part]), sample_ids=None)
    wanted = [part * 10**12 + i for part in range(NUM_PARTS) for i in range(sum(SIZES[part]))]
    assert list(recording.sample_ids) == wanted


def child(path: Path, dies_at: str | None, barrier: Any) -> None:
    torch.set_num_threads(1)
    rnet = seeded()

    def batches_of(part: int) -> Any:
        for batch, names in data_of(part):
            if names[0] == dies_at:
                # Until the batch before is durable.
                while not (path / chunk_name(part, 0)).exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch, names

    barrier.wait(300)
    fill(path, batches_of, rnet)


def in_processes(path: Path, dying: list[str | None]) -> list[int | None]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(dying))
    workers = [context.Process(target=child, args=(path, at, barrier)) for at in dying]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    return [worker.exitcode for worker in workers]


@pytest.mark.campaign
def test_processes_at_the_same_time(tmp_path):
    path = tmp_path / "run"
    assert in_processes(path, [None, None]) == [0, 0]
    check(open_recording(path), path)


@pytest.mark.campaign
def test_the_part_of_a_dead_process_is_taken_at_once_and_gone_on_with(tmp_path):
    path = tmp_path / "run"
    # Whoever comes to this batch dies; the first one of that part is durable by then.
    assert in_processes(path, ["1-4"]) == [-signal.SIGKILL]
    names = []

    def batches_of(part: int) -> Any:
        names.append(part)
        return data_of(part)

    done = {int(file.name[9:14]) for file in path.glob("manifest-*")}
    assert [file.name for file in path.glob("chunk-00001-*")] == [
        "chunk-00001-00000000.safetensors"
    ]
    # It does not wait until the lease of the dead process is stale.
    check(fill(path, batches_of, wait=False), path)
    assert sorted(names) == sorted(set(range(NUM_PARTS)) - done)


@pytest.mark.campaign
def test_killed_at_random_moments(tmp_path):
    count = 250 if FULL else 3
    command = [sys.executable, "-m", "tests.workers.parts_campaign", str(tmp_path), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_exception_gives_the_part_back_and_what_is_durable_stays(tmp_path):
    def broken(part: int) -> Any:
        return failing_after(data_of(part), 1) if part == 1 else data_of(part)

    with pytest.raises(InterruptedError):
        fill(tmp_path, broken)
    assert not list(tmp_path.glob("lease-*"))
    found = open_recording(tmp_path)
    assert not found.complete
    assert "1-0" in list(found.sample_ids)
    check(fill(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("stop", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_gives_the_part_back_and_what_was_seen_is_durable(tmp_path, stop, error):
    # Jobs in the background ignore Ctrl-C, and tests may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def stopped(part: int) -> Any:
        yield from data_of(part)[:1]
        if part == 1:
            os.kill(os.getpid(), stop)
        yield from data_of(part)[1:]

    try:
        with pytest.raises(error):
            fill(tmp_path, stopped)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.glob("lease-*"))
    assert "1-3" in list(open_recording(tmp_path, verify=True).sample_ids)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    check(fill(tmp_path), tmp_path)


def test_the_callers_own_handler_of_sigterm_stays_in_charge(tmp_path):
    seen: list[int] = []

    def terminated(part: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return data_of(part)

    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        check(fill(tmp_path, terminated), tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert set(seen) == {signal.SIGTERM}


def test_threads_that_come_late_and_start_twice(tmp_path):
    nets, found, errors = [seeded() for _ in range(4)], [], []

    def work(number: int) -> None:
        try:
            time.sleep(0.05 * number)
            found.append(fill(tmp_path / "run", rnet=nets[number]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for recording in found:
        check(recording, tmp_path / "run")


def test_a_folder_that_is_removed_meanwhile_ends_the_work(tmp_path):
    def batches_of(part: int) -> Any:
        shutil.rmtree(tmp_path / "run")
        return data_of(part)

    with pytest.raises(RecordingError, match="No such file"):
        fill(tmp_path / "run", batches_of)


def test_without_waiting_what_others_hold_is_left_to_them(tmp_path):
    def batches_of(part: int) -> Any:
        if part == 1:
            others = fill(tmp_path / "run", wait=False)
            assert not others.complete
            assert list(others.sample_ids) == [name for name in IDS if name[0] != "1"]
        yield from data_of(part)

    check(fill(tmp_path / "run", batches_of), tmp_path / "run")


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"num_parts": 0}, ValueError, "num_parts"),
        ({"num_parts": 100_001}, CollectError, "100000 at most"),
        ({"make_batches": [1]}, CollectError, "give a function"),
        ({"store": "host"}, CollectError, "other processes see"),
        ({"store": None}, CollectError, "other processes see"),
        ({"reduce": Histogram(3)}, CollectError, "give range="),
        ({"reduce": Fold(lambda a, b: b)}, CollectError, "can't be reduced in parts"),
    ],
)
def test_bad_arguments(tmp_path, keywords, error, message):
    given = {"make_batches": data_of, "store": Disk(tmp_path / "run")} | keywords
    with pytest.raises(error, match=message):
        fill(tmp_path, **given)
    assert not (tmp_path / "run").exists()


def test_a_store_of_one_rank_is_refused(tmp_path):
    with pytest.raises(CollectError, match="leave rank= and world_size="):
        fill(tmp_path, store=Disk(tmp_path / "run", rank=1, world_size=NUM_PARTS))


def test_another_net_other_settings_and_other_parts_are_refused_before_anything_runs(tmp_path):
    def batches_of(part: int) -> Any:
        # Another comes once something is durable: the first of three batches.
        for number, batch in enumerate(data_of(part)):
            if number == 2 and not come:
                come.append(part)
                refused()
            yield batch

    come: list[int] = []

    def unused(part: int) -> Any:
        raise AssertionError("this must not run")

    def refused() -> None:
        other = seeded()
        with torch.no_grad():
            other.net[0].weight.add_(1)
        with pytest.raises(RecordingError, match="weights"):
            fill(tmp_path, unused, other)
        with pytest.raises(RecordingError, match="layers"):
            fill(tmp_path, unused, seeded("0"))
        with pytest.raises(RecordingError, match="in 6 parts, and num_parts is 5 here"):
            fill(tmp_path, unused, num_parts=5)

    fill(tmp_path, batches_of)
    refused()
    check(open_recording(tmp_path), tmp_path)


def test_who_began_with_other_settings_before_anything_was_durable_commits_nothing(tmp_path):
    def batches_of(part: int) -> Any:
        # All else is done meanwhile.
        if not (tmp_path / "recording.safetensors").exists():
            fill(tmp_path, wait=False)
        yield from data_of(part)

    with pytest.raises(RecordingError, match="layers"):
        fill(tmp_path, batches_of, seeded("0"))
    check(fill(tmp_path), tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RecordingError, match=r"not empty: it holds 'thesis\.tex'"):
        fill(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    seeded().collect(data_of(0), store=f"disk:{tmp_path}/one", sample_ids=lambda b: b[1])
    with pytest.raises(RecordingError, match="in 1 part, and num_parts is 6"):
        fill(tmp_path / "one")


def test_numbers_in_one_part_and_names_in_another(tmp_path):
    def ids(batch: Any) -> Any:
        return [int(name[2:]) if name[0] == "1" else name for name in batch[1]]

    recording = fill(tmp_path, sample_ids=ids)
    wanted = [int(name[2:]) if name[0] == "1" else name for name in IDS]
    assert list(recording.sample_ids) == list(open_recording(tmp_path).sample_ids) == wanted

    def twice(batch: Any) -> Any:
        return [int(name[2:]) for name in batch[1]] if batch[1][0] == "5-0" else ids(batch)

    with pytest.raises(CollectError, match="two samples have the id 0, in part 1 and part 5"):
        fill(tmp_path / "twice", sample_ids=twice)
    # One part is what one process gives.
    with pytest.raises(CollectError, match="integers and strings are mixed"):
        fill(tmp_path / "mixed", sample_ids=lambda b: [7] if b[1] == ["1-4"] else b[1])


def test_all_parts_empty(tmp_path):
    with pytest.raises(CollectError, match="all 3 parts are empty"):
        fill(tmp_path, lambda part: [], num_parts=3)
    assert not list(tmp_path.glob("lease-*"))


@pytest.mark.parametrize("stops_in", ["before", "during"])
def test_a_lease_that_expires_at_a_commit(tmp_path, monkeypatch, stops_in):
    # This process stands still for longer than its lease holds, and another goes on meanwhile.
    clock = [0.0]
    monkeypatch.setattr("scio_recorder.workers.parts.seconds", lambda: clock[0])
    append, stopped = RunWriter.append, []

    def late(self: RunWriter, tensors: Any, ids: Any, **keywords: Any) -> None:
        if next(iter(ids)) == "1-4" and not stopped:
            stopped.append(1)
            clock[0] += 100
            if stops_in == "during":
                clock[0] -= 100
                put = self._medium.put

                def putting(*arguments: Any) -> Any:
                    done = put(*arguments)
                    clock[0] += 100
                    return done

                self._medium.put = putting
        append(self, tensors, ids, **keywords)

    monkeypatch.setattr(RunWriter, "append", late)
    with pytest.raises(RecordingError, match="lease of part 1 was not renewed for 100 s"):
        fill(tmp_path / "run")
    assert open_recording(tmp_path / "run", verify=True).num_samples >= 4
    check(fill(tmp_path / "run"), tmp_path / "run")


def test_a_lease_that_expires_at_a_commit_whose_file_has_been_cleared_away(tmp_path, monkeypatch):
    # Whoever takes a part over removes what the one before had begun to put.
    clock = [0.0]
    monkeypatch.setattr("scio_recorder.workers.parts.seconds", lambda: clock[0])
    rename = system.rename_new

    def late(old: str, new: str, folder: int) -> None:
        if new == chunk_name(1, 1) and not clock[0]:
            clock[0] += 100
            os.unlink(old, dir_fd=folder)
        rename(old, new, folder)

    monkeypatch.setattr(system, "rename_new", late)
    with pytest.raises(RecordingError, match="lease of part 1 was not renewed for 100 s"):
        fill(tmp_path / "run")
    check(fill(tmp_path / "run"), tmp_path / "run")


def test_reductions_of_parts_of_which_two_have_worked_on_one(tmp_path):
    def broken(part: int) -> Any:
        return failing_after(data_of(part), 1)

    total = Fold(lambda total, a: (total or 0) + a.double().sum(), merge=lambda a, b: a + b)
    by_part = Moments(by=lambda batch: [name[0] for name in batch[1]])
    reduce = {"0": [Mean(), by_part], "3": total}
    for _ in range(2):
        with pytest.raises(InterruptedError):
            fill(tmp_path, broken, seeded("0", "3"), reduce=reduce)
    recording = fill(tmp_path, rnet=seeded("0", "3"), reduce=reduce)
    data = [batch for part in range(NUM_PARTS) for batch, _ in data_of(part)]
    first, last = (samples.double() for samples in expected(seeded("0", "3"), data).values())
    mean, moments = recording["0"]
    torch.testing.assert_close(mean.double(), first.mean(0), rtol=1e-6, atol=1e-7)
    sizes = {str(part): sum(sizes) for part, sizes in enumerate(SIZES) if sizes}
    assert {key: one.count for key, one in moments.items()} == sizes
    torch.testing.assert_close(recording["3"], last.sum())
    assert torch.equal(open_recording(tmp_path)["0"][0], mean)


# What fails in one of many parts says in which one, and in which batch of it.

BAD = 2


def good(part: int) -> list[torch.Tensor]:
    return batches(2, 2, seed=part)


def no_batches(part: int) -> list[torch.Tensor]:
    return good(part) if part != BAD else [][part]


def iterator(part: int) -> Iterator[torch.Tensor]:
    yield good(part)[0]
    if part == BAD:
        raise InterruptedError("boom")
    yield good(part)[1]


def in_this_part(activation: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return activation[:, :2] if torch.equal(batch, good(BAD)[1]) else activation


def in_all_of_it(activation: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return activation[:, :2] if any(torch.equal(batch, one) for one in good(BAD)) else activation


@pytest.mark.parametrize(
    ("make_batches", "options", "kinds", "words"),
    [
        (no_batches, {}, (CollectError, IndexError), [f"make_batches({BAD})", "IndexError"]),
        (iterator, {}, (CollectError, InterruptedError), ["batch 1", "InterruptedError: boom"]),
        (
            good,
            {"transform": in_this_part},
            (CollectError,),
            ["batch 1", "1-1 0 (Linear)", "(6,)", "(2,)", "transform"],
        ),
        (
            good,
            {"transform": in_all_of_it},
            (CollectError, RecordingError),
            ["batch 0", "1-1 0 (Linear)", "(6,)", "(2,)", "transform"],
        ),
        (good, {"sample_ids": lambda batch: ["a", "a"]}, (CollectError,), ["batch 0", "'a'"]),
    ],
)
def test_what_fails_names_the_part_and_the_batch(tmp_path, make_batches, options, kinds, words):
    # One after the other: of the first two parts, the shape of samples is known.
    rnet, store = recorder("0"), Disk(tmp_path, chunk_bytes=1)
    with pytest.raises(kinds[0]) as caught:
        rnet.collect_parts(make_batches, 5, store=store, **options)
    error = caught.value
    assert all(isinstance(error, kind) for kind in kinds)
    told = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert "part " in str(error).partition(":")[0]
    for word in words:
        assert word in told, told
    assert "resum" not in told
    # It goes from process to process as it is.
    assert str(pickle.loads(pickle.dumps(error))) == str(copy.copy(error)) == str(error)


def test_samples_that_differ_when_a_part_is_gone_on_with(tmp_path):
    rnet, store = recorder("0"), Disk(tmp_path, chunk_bytes=1)

    def named(part: int) -> Any:
        return [
            (batch, [f"{part}{at}{row}" for row in range(2)]) for at, batch in enumerate(good(part))
        ]

    with pytest.raises(InterruptedError):
        rnet.collect_parts(
            lambda part: failing_after(named(part), 1),
            1,
            store=store,
            sample_ids=lambda batch: batch[1],
        )
    with pytest.raises(CollectError, match=r"part 0: sample 0 .* '010', but was '000'") as caught:
        rnet.collect_parts(
            lambda part: named(part)[::-1], 1, store=store, sample_ids=lambda batch: batch[1]
        )
    assert "resum" not in str(caught.value)
    with pytest.raises(CollectError, match=r"part 0: .* holds 2 samples already, and 0 came"):
        rnet.collect_parts(lambda part: [], 1, store=store, sample_ids=lambda batch: batch[1])
    assert list(open_recording(tmp_path).sample_ids) == ["000", "001"]
