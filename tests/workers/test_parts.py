"""Any number of processes take parts of a dataset: every sample once, whoever did what."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
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

from scio_recorder import Tokens, open_recording
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.layer import text_of
from scio_recorder.reductions import Fold, Histogram, Mean, Moments
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.disk_format.description import chunk_name
from scio_recorder.stores.files import RunWriter
from tests.recording.nets import assert_same, batches, expected, recorder
from tests.stores.disk_format.by_the_book import put_together, read_run, take_apart

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
ROOT = Path(__file__).parents[2]
# Samples in each batch of each part; one part is empty.
SIZES = ((3, 2), (4, 1, 2), (), (5,), (1, 1, 1), (2,))
NUM_PARTS = len(SIZES)
IDS = [f"{part}-{i}" for part in range(NUM_PARTS) for i in range(sum(SIZES[part]))]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch) -> None:
    # No power is lost here, and waiting for the disk would take minutes.
    monkeypatch.setattr(system, "fsync", lambda descriptor: os.fstat(descriptor) and None)


def data_of(part: int) -> list[tuple[torch.Tensor, list[str]]]:
    names = iter(f"{part}-{i}" for i in range(sum(SIZES[part])))
    data = batches(*SIZES[part], seed=part)
    return [(batch, [next(names) for _ in batch]) for batch in data]


def seeded(*selectors: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return recorder(*selectors, **options)


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


@pytest.mark.parametrize("part", [0, NUM_PARTS - 1])
def test_what_is_complete_is_not_given_for_data_of_another_length(tmp_path, part):
    fill(tmp_path, rnet=seeded("0"))
    with pytest.raises(CollectError, match=f"part {part}: .*it holds . samples already, and"):
        fill(
            tmp_path,
            lambda one: data_of(one) + data_of(3) * (one == part),
            rnet=seeded("0"),
        )


def test_what_is_written_is_what_the_format_says(tmp_path):
    fill(tmp_path)
    ids, found = read_run(tmp_path)
    assert ids == IDS
    recording = open_recording(tmp_path)
    for label in recording:
        assert torch.equal(found[text_of(label)], recording[label][:])


def test_damage_to_what_tells_of_commits_is_noticed(tmp_path):
    fill(tmp_path, rnet=seeded("0"))
    file = tmp_path / "manifest-00001.safetensors"
    whole, dice = file.read_bytes(), random.Random(0)
    for position in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(RecordingError, match=file.name):
            open_recording(tmp_path)
    file.write_bytes(whole)
    # A commit that the manifest lists is read when it is used, and has to be that very one.
    chunk = tmp_path / chunk_name(1, 0)
    chunk.unlink()
    shutil.copy(tmp_path / chunk_name(1, 1), chunk)
    with pytest.raises(RecordingError, match=chunk.name):
        open_recording(tmp_path)["0"][:]
    with pytest.raises(RecordingError, match=chunk.name):
        open_recording(tmp_path, verify=True)


def test_a_commit_that_is_in_order_and_not_the_one_that_was_listed(tmp_path):
    fill(tmp_path, rnet=seeded("0"))
    chunk = tmp_path / chunk_name(1, 0)
    parts = take_apart(chunk.read_bytes())
    other = parts._replace(content={**parts.content, "ids": ["1-0", "1-1", "1-2", "9-9"]})
    chunk.unlink()
    chunk.write_bytes(put_together(other))
    with pytest.raises(RecordingError, match="not the commit that the manifest lists"):
        open_recording(tmp_path)["0"][:]


def test_what_two_holders_of_a_part_leave_never_counts_behind_its_end(tmp_path):
    fill(tmp_path, rnet=seeded("0"))
    shutil.copy(tmp_path / chunk_name(1, 1), tmp_path / chunk_name(1, 3))
    assert list(open_recording(tmp_path, verify=True).sample_ids) == IDS


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


class Broken(Exception):  # noqa: N818 - it is thrown by no fault of anybody
    pass


@pytest.mark.campaign
def test_killed_at_random_moments(tmp_path):
    count = 250 if FULL else 3
    command = [sys.executable, "-m", "tests.workers.parts_campaign", str(tmp_path), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_exception_gives_the_part_back_and_what_is_durable_stays(tmp_path):
    def broken(part: int) -> Any:
        yield from data_of(part)[:1]
        if part == 1:
            raise Broken
        yield from data_of(part)[1:]

    with pytest.raises(Broken):
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


def test_reductions_are_those_of_one_process(tmp_path):
    reduce = {
        "0": [Moments(), Moments(by=lambda batch: [name[0] for name in batch[1]])],
        "3": Fold(lambda total, a: (total or 0) + a.double().sum(), merge=lambda a, b: a + b),
    }
    recording = fill(tmp_path, rnet=seeded("0", "3"), reduce=reduce)
    everything = [pair for part in range(NUM_PARTS) for pair in data_of(part)]
    alone = seeded("0", "3").collect(everything, reduce=reduce)
    for ours, theirs in zip(recording["0"][0], alone["0"][0], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert list(recording["0"][1]) == list(alone["0"][1])
    torch.testing.assert_close(recording["3"], alone["3"])
    torch.testing.assert_close(open_recording(tmp_path)["0"][0].mean, alone["0"][0].mean)


def test_rows_of_all_parts(tmp_path):
    rnet = seeded("0")
    data = {part: batches(2, 3, seed=part) for part in range(3)}

    def batches_of(part: int) -> Any:
        return [{"input": x.unsqueeze(1).repeat(1, 3, 1), "mask": mask(len(x))} for x in data[part]]

    def mask(length: int) -> torch.Tensor:
        return torch.arange(3).expand(length, 3) <= torch.arange(length).unsqueeze(1) % 3

    keywords = {"rows": Tokens(mask="mask"), "to_inputs": lambda batch: batch["input"]}
    recording = fill(tmp_path, batches_of, rnet, num_parts=3, sample_ids=None, **keywords)
    everything = [batch for part in range(3) for batch in batches_of(part)]
    alone = rnet.collect(everything, **keywords)
    assert torch.equal(recording["0"][:], alone["0"])
    assert torch.equal(recording.rows["sample"][:], alone.rows["sample"])
    assert torch.equal(recording.rows["position"][:], alone.rows["position"])


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


def test_an_id_twice_is_an_error_and_what_is_durable_stays(tmp_path):
    def ids(batch: Any) -> list[str]:
        return [name.replace("3-0", "1-6") for name in batch[1]]

    with pytest.raises(CollectError, match="'1-6', in part 1 and part 3"):
        fill(tmp_path, sample_ids=ids)
    assert open_recording(tmp_path, verify=True).num_samples == len(IDS)
    with pytest.raises(CollectError, match="'1-6'"):
        fill(tmp_path, sample_ids=ids)


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


def test_mean_of_a_part_that_two_have_worked_on(tmp_path):
    def broken(part: int) -> Any:
        yield from data_of(part)[:1]
        raise Broken

    for _ in range(2):
        with pytest.raises(Broken):
            fill(tmp_path, broken, seeded("0"), reduce=Mean())
    recording = fill(tmp_path, rnet=seeded("0"), reduce=Mean())
    everything = [pair for part in range(NUM_PARTS) for pair in data_of(part)]
    torch.testing.assert_close(recording["0"], seeded("0").collect(everything, reduce=Mean())["0"])


# What fails in one of many parts says in which one, and in which batch of it.

BAD = 2


def good(part: int) -> list[torch.Tensor]:
    return batches(2, 2, seed=part)


def no_batches(part: int) -> list[torch.Tensor]:
    return good(part) if part != BAD else [][part]


def iterator(part: int) -> Iterator[torch.Tensor]:
    yield good(part)[0]
    if part == BAD:
        raise Broken("boom")
    yield good(part)[1]


def too_wide(part: int) -> list[torch.Tensor]:
    return good(part) if part != BAD else [good(part)[0], torch.zeros(2, 5)]


def no_batch(part: int) -> Any:
    return good(part) if part != BAD else [good(part)[0], 7]


def in_this_part(activation: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return activation[:, :2] if torch.equal(batch, good(BAD)[1]) else activation


def in_all_of_it(activation: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return activation[:, :2] if any(torch.equal(batch, one) for one in good(BAD)) else activation


@pytest.mark.parametrize(
    ("make_batches", "options", "kinds", "words"),
    [
        (no_batches, {}, (CollectError, IndexError), [f"make_batches({BAD})", "IndexError"]),
        (iterator, {}, (CollectError, Broken), ["batch 1", "Broken: boom"]),
        (too_wide, {}, (CollectError, RuntimeError), ["batch 1", "1-1 0 (Linear)", "[2, 5]"]),
        (no_batch, {}, (CollectError,), ["batch 1", "to_inputs"]),
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

    def stops(part: int) -> Any:
        yield named(part)[0]
        raise Broken

    with pytest.raises(Broken):
        rnet.collect_parts(stops, 1, store=store, sample_ids=lambda batch: batch[1])
    with pytest.raises(CollectError, match=r"part 0: sample 0 .* '010', but was '000'") as caught:
        rnet.collect_parts(
            lambda part: named(part)[::-1], 1, store=store, sample_ids=lambda batch: batch[1]
        )
    assert "resum" not in str(caught.value)
    with pytest.raises(CollectError, match=r"part 0: .* holds 2 samples already, and 0 came"):
        rnet.collect_parts(lambda part: [], 1, store=store, sample_ids=lambda batch: batch[1])
    assert list(open_recording(tmp_path).sample_ids) == ["000", "001"]
