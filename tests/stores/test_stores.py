"""Every store gives, bit for bit, what the layers returned; and plans, by which one is chosen."""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import pickle
import stat
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn

from scio_recorder import CollectError, Recorder, RecordingError, Tokens, open_recording
from scio_recorder.layer import TensorSpec
from scio_recorder.stores import Column, Device, Disk, Host
from scio_recorder.stores import memory as planning
from scio_recorder.stores.disk_format import folder, tensor_file
from scio_recorder.stores.disk_format.tensor_file import BLOCK_BYTES
from scio_recorder.stores.memory import HostBuffer
from scio_recorder.testing import StoreTests
from tests.recording.nets import Pair, assert_same, batches, expected, recorder, recorder_of


def inferred(x):
    with torch.inference_mode():
        return x + 1


class OurStoreTests(StoreTests):
    # What ``recording.store`` says.
    kind = "host"
    forms = StoreTests.forms | {
        "inference": inferred,
        "lazily negated without gaps": torch._neg_view,
        "lazily zero": lambda x: torch._efficientzerotensor(x.shape),
        "lazily copied": torch._lazy_clone,
    }

    def test_operations_and_the_kind_of_the_store(self, tmp_path):
        rnet, data = recorder(), batches(4, 4, 2)
        recording = rnet.collect(data, store=self.make_store(tmp_path))
        assert_same(recording, expected(rnet, data))
        assert recording.store == self.kind


class TestHost(OurStoreTests):
    def make_store(self, path):
        return Host(pin_memory=False)


class TestDevice(OurStoreTests):
    def make_store(self, path):
        return Device()


class TestDisk(OurStoreTests):
    kind = "disk"

    def make_store(self, path):
        return f"disk:{path}/run"


class TestSmallChunks(OurStoreTests):
    kind = "disk"

    def make_store(self, path):
        return Disk(path / "run", chunk_bytes=200)


def test_grads_modes_and_hooks_stay_as_they_are():
    rnet, data = recorder(), batches(3, 2)
    rnet.train()
    seen = []
    rnet.net[0].register_forward_hook(
        lambda module, args, output: seen.append((module.training, output.requires_grad))
    )
    assert torch.is_grad_enabled()
    recording = rnet.collect(data)
    assert torch.is_grad_enabled()
    assert seen == [(True, False)] * 2
    assert not recording["1-1"].requires_grad


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_tensors_are_ordinary_whatever_mode_collects(mode, tmp_path):
    rnet, data = recorder("1-1"), batches(3, 2)
    wanted = expected(rnet, data)
    with mode():
        recordings = [rnet.collect(data), rnet.collect(data, store=f"disk:{tmp_path}/run")]
        lazy = recordings[1]["1-1"]
        copies = [copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))]
    with torch._C.DisableTorchFunctionSubclass():  # code in C++ sees the tensors themselves
        assert not any(one.is_inference() for one in copies)
    for recording in recordings:
        assert_same(recording, wanted)
        assert not recording["1-1"][:].is_inference()
        torch.ones(6, requires_grad=True).mul(recording["1-1"]).sum().backward()


def address(recording, label="1-1"):
    return recording[label].data_ptr()


def test_a_host_is_used_again_only_where_nobody_holds_it():
    rnet, host = recorder("1-1"), Host()
    first = rnet.collect(batches(3, 2), store=host)
    at = address(first)
    del first
    second = rnet.collect(batches(3, 2, seed=1), store=host)
    assert address(second) == at

    wanted = second["1-1"].clone()
    third = rnet.collect(batches(3, 2, seed=2), store=host)
    assert address(third) != at
    assert torch.equal(second["1-1"], wanted)


@pytest.mark.parametrize(
    "hold",
    [
        lambda recording: recording["1-1"],
        lambda recording: recording["1-1"][2:4, ::2],
        lambda recording: recording["1-1"].numpy()[1:],
        lambda recording: recording.to_numpy()[1, 1],
        lambda recording: memoryview(recording["1-1"].numpy()),
    ],
    ids=["tensor", "view", "array", "to_numpy", "memoryview"],
)
def test_a_host_spares_what_is_held_of_a_recording(hold):
    rnet, host = recorder("1-1"), Host()
    held = hold(rnet.collect(batches(3, 2), store=host))
    before = np.asarray(held).copy()
    rnet.collect(batches(3, 2, seed=1), store=host)
    rnet.collect(batches(30, 20, seed=1), store=host)
    assert np.array_equal(np.asarray(held), before)


def test_a_used_host_grows_and_serves_other_layers():
    rnet, host = recorder("1-1"), Host()
    rnet.collect(batches(3), store=host)
    rnet.record("1-1", "1-4")
    data = batches(9, 9, 2)
    assert_same(rnet.collect(data, store=host), expected(rnet, data))


def test_samples_on_disk_are_a_tensor(tmp_path):
    rnet, data = recorder("1-1"), batches(5, 5, 3)
    lazy = rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=100))["1-1"]
    wanted = expected(rnet, data)[1, 1]
    assert isinstance(lazy, torch.Tensor)
    assert (lazy.shape, lazy.dtype, lazy.ndim, len(lazy)) == (wanted.shape, wanted.dtype, 2, 13)
    assert "on disk" in repr(lazy)
    for index in (
        *(0, -1, 4, slice(3, 9), slice(None, None, 3), slice(9, 3), slice(-2, None), ...),
        *([0, 12, -1], [1, 2, 3, 4], torch.tensor([7]), torch.tensor([], dtype=torch.long)),
        *((slice(2, 6), 1), (3, slice(1, 3)), (torch.tensor([1, 2]), torch.tensor([0, 1])), None),
        torch.arange(13) % 2 == 0,
    ):
        found = lazy[index]
        assert type(found) is torch.Tensor
        assert torch.equal(found, wanted[index]), index
    assert torch.equal(lazy.mean(0), wanted.mean(0))
    assert torch.equal(torch.cat([wanted, lazy]), torch.cat([wanted, wanted]))
    assert torch.equal(lazy @ wanted.T, wanted @ wanted.T)
    assert np.array_equal(lazy.numpy(), wanted.numpy())
    assert np.array_equal(np.asarray(lazy), wanted.numpy())
    assert torch.equal(torch.stack(list(lazy)), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(lazy))[:], wanted)
    for row in (13, -14):
        with pytest.raises(IndexError, match=f"row {row} of 13"):
            lazy[row]
    writes = [
        lambda: lazy.__setitem__(0, 0),
        lambda: lazy.sub_(1),
        lambda: nn.init.zeros_(lazy),
        lambda: torch.add(wanted, 1, out=lazy),
    ]
    for write in writes:
        with pytest.raises(TypeError, match=r"read-only: write to x\[:\]"):
            write()
    # What makes a tensor in memory anyway goes on with that.
    less = lazy
    less -= 1
    assert torch.equal(less, wanted - 1)
    assert torch.equal(nn.functional.relu(lazy, inplace=True), wanted.relu())
    assert torch.equal(lazy[:].sub_(1), less)


@pytest.mark.parametrize("known", [True, False])
def test_saving_a_layer_saves_its_samples_and_no_room_behind_them(known):
    rnet, data = recorder("1-1"), batches(4, 4, 1)
    stored = rnet.collect(data if known else iter(data), store="host")["1-1"]
    assert stored.untyped_storage().nbytes() == stored.nbytes


def test_a_pass_of_the_recorder_itself_goes_on_as_before():
    rnet, data = recorder("1-1"), batches(3, 2)
    rnet(data[0])
    rnet.collect(data)
    assert len(rnet.activations) == 0
    rnet(data[1])
    with torch.no_grad():
        assert torch.equal(rnet.activations["1-1"], rnet.net[0](data[1]))


@pytest.mark.parametrize("store", ["hots", "disk:", 3, Host, "disk"])
def test_no_store(store):
    with pytest.raises(CollectError, match="store"):
        recorder("1-1").collect(batches(2), store=store)


@pytest.mark.parametrize(
    "place",
    [
        None,
        3,
        "",
        b"run",
        "a\0b",
        "disk:run",
        "gcs://bucket/run",
        "https://me:secret@host/run",
        Path("s3://b/r"),
    ],
)
def test_what_is_no_place_makes_no_folder_of_that_name(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recording = recorder().collect(batches(2))
    for use in (open_recording, recording.save, Disk):
        with pytest.raises(
            RecordingError, match=r"names no folder and no bucket|without \"disk:"
        ) as refused:
            use(place)
        assert "secret" not in str(refused.value)
    assert not any(tmp_path.iterdir())
    recording.save("exp:1")
    assert open_recording(Path("exp:1")).num_samples == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("known", [True, False])
def test_from_a_gpu(known, tmp_path):
    rnet = recorder_of(recorder().net.cuda(), "*", input_data=torch.randn(2, 4, device="cuda"))
    data = [batch.cuda() for batch in batches(*[64] * 20, 3)]
    wanted = expected(rnet, data)
    host = Host()
    for store in ("device", "host", host, host, f"disk:{tmp_path}/{known}"):
        recording = rnet.collect(data if known else iter(data), store=store)
        kind = "cuda" if store == "device" else "cpu"
        assert recording["1-1"].device.type == kind
        assert_same(recording, {k: v if kind == "cuda" else v.cpu() for k, v in wanted.items()})


def test_memory_grows_with_all_that_is_in_it():
    rows = torch.arange(3 << 19, dtype=torch.float64).reshape(-1, 1 << 10)
    # Shorter than what comes, as a loader's length may be.
    column = Column(TensorSpec((1 << 10,), torch.float64), HostBuffer(), 100)
    for start in range(0, len(rows), 37):
        part = rows[start : start + 37]
        column.place(start, len(part)).copy_(part)
    assert torch.equal(column.close(len(rows)), rows)


def provides_pages() -> bool:
    """Whether the system provides pages when it is asked to (Linux from 5.14 on)."""
    with contextlib.suppress(AttributeError, OSError):
        mmap.mmap(-1, mmap.PAGESIZE).madvise(23)
        return sys.platform == "linux"
    return False


@pytest.mark.skipif(not provides_pages(), reason="needs Linux 5.14")
def test_pages_are_there_before_a_batch_is_written_and_no_others():
    import resource

    process = psutil.Process()
    column = Column(TensorSpec((1024,), torch.float32), HostBuffer(), 20_000)
    resident = process.memory_info().rss
    place = column.place(0, 1000)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 100
    assert 900 * 4096 < process.memory_info().rss - resident < 2000 * 4096


def test_bytes_come_from_the_shapes_at_labelling():
    rnet = recorder("0", "3")
    plan = rnet.plan(1000)
    assert plan.num_bytes == {(1, 1): 1000 * 6 * 4, (1, 4): 1000 * 3 * 4}
    assert plan.total_bytes == 36000
    assert set(plan.free_bytes) >= {"host", "disk"}
    assert "1-1 0 (Linear)" in str(plan)
    pair = recorder_of(Pair(), "0-1", input_size=(5, 4))
    assert pair.plan(10).total_bytes == 10 * 2 * 4 * 4
    assert type(pair.plan(torch.tensor(10)).total_bytes) is int


def test_what_can_not_be_planned():
    with pytest.raises(CollectError, match="record"):
        Recorder(nn.ReLU(), input_size=(1, 2)).plan(3)
    with pytest.raises(CollectError, match="num_samples"):
        recorder("0").plan(-1)


def test_auto_raises_with_the_plan_where_there_is_no_room(monkeypatch):
    rnet, data = recorder("0", "3"), batches(4, 4, 4)
    monkeypatch.setattr(planning, "_free_host_bytes", lambda: 12 * 36)
    with pytest.raises(CollectError) as caught:
        rnet.collect(data)
    for part in ("12 samples take 432 bytes", "1-4", "host", "not enough", "disk:PATH"):
        assert part in str(caught.value)
    # What is kept decides, not what the layers return.
    assert rnet.collect(data, transform=lambda t, batch: t[:, :1])["0"].shape == (12, 1)
    assert_same(rnet.collect(data, store="host"), expected(rnet, data))
    assert_same(rnet.collect(iter(data)), expected(rnet, data))


def test_auto_plans_for_rows_where_there_are_some(monkeypatch):
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    rnet = recorder_of(net, "0", "1", input_size=(2, 5, 4))
    # Six tokens a batch, which have 6 and 3 numbers; labelled with ten.
    data = [{"input": torch.randn(2, 3, 4)}] * 2
    monkeypatch.setattr(planning, "_free_host_bytes", lambda: 12 * 24)
    with pytest.raises(CollectError) as caught:
        rnet.collect(data, rows=Tokens())
    assert "12 rows take 432 bytes" in str(caught.value)
    monkeypatch.setattr(planning, "_free_host_bytes", lambda: 12 * 100)
    assert rnet.collect(data, rows=Tokens())["1"].shape == (12, 3)


class Claiming:
    """A loader that claims a length and gives one batch."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(batches(20))


@pytest.mark.parametrize("length", [10**13, 10**16, 10**18])
def test_more_than_any_machine_has(length):
    rnet = recorder("0", "3")
    with pytest.raises(CollectError) as caught:
        rnet.collect(Claiming(length), store="auto")
    # The layer that comes later is in the plan too.
    for part in (f"{20 * length} samples", "1-1", "1-4", "not enough", "disk:PATH"):
        assert part in str(caught.value)
    for store in ("host", "device"):
        with pytest.raises(CollectError, match=r"no room for layer 1-1.*B can't.*disk:PATH"):
            rnet.collect(Claiming(length), store=store)


class Bounded(planning._Memory):
    """Memory that can't become more than it was at first."""

    made = 0

    def __new__(cls, *arguments, **keywords):
        cls.made += 1
        if cls.made > 2:
            raise OSError(12, "Cannot allocate memory")
        return super().__new__(cls, *arguments, **keywords)

    def resize(self, size):
        if size > len(self):
            raise OSError(12, "Cannot allocate memory")
        super().resize(size)


def test_memory_that_ends_while_a_recording_grows(monkeypatch):
    rnet = recorder("0", "3")
    monkeypatch.setattr(planning, "_Memory", Bounded)
    with pytest.raises(CollectError, match="no room for layer 1-1"):
        rnet.collect(iter(batches(*[4] * 20)), store="host")


def test_snapshots_do_not_follow_the_net():
    rnet = recorder("0")
    snapshot = rnet.parameters_snapshot()
    before = {f"_net.0.{k}": v.clone() for k, v in rnet.net[0].named_parameters()}
    with torch.no_grad():
        rnet.net[0].weight.zero_()
    assert snapshot.keys() == before.keys()
    assert all(torch.equal(snapshot[k], before[k]) for k in before)


def test_a_working_directory_that_was_deleted_has_a_disk(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    rnet = recorder_of(nn.Linear(2, 3), "", input_size=(1, 2))
    batches = [torch.ones(4, 2)]
    assert torch.equal(rnet.collect(batches, progress=False)[0, 1], rnet.net(batches[0]))


def test_copies_checksums_and_writes_overlap(tmp_path, monkeypatch):
    chunks, blocks = 4, 3
    begun, changed = Counter(), threading.Condition()
    write, checksum = folder.write_at, tensor_file.checksum

    def begin(stage):
        with changed:
            begun[stage] += 1
            changed.notify_all()
            return begun[stage]

    def until(stage, number):
        with changed:
            assert changed.wait_for(lambda: begun[stage] >= number, timeout=30), stage

    def copying(activation, batch):
        begin("copy")
        return activation

    def digesting(data):
        if len(data) == BLOCK_BYTES:
            begin("checksum")
        return checksum(data)

    def writing(descriptor, offset, data):
        if len(data) == BLOCK_BYTES:
            number = begin("write")
            # A slow disk: it goes on when the next block is digested, and the next batch copied.
            until("checksum", number + (number % blocks > 0))
            until("copy", min(chunks, (number - 1) // blocks + 2))
        write(descriptor, offset, data)

    monkeypatch.setattr(folder, "write_at", writing)
    monkeypatch.setattr(tensor_file, "checksum", digesting)
    rnet = recorder_of(nn.Identity(), "0-1", input_size=(1, blocks, BLOCK_BYTES // 4))
    data = [torch.full((1, blocks, BLOCK_BYTES // 4), float(i)) for i in range(chunks)]
    store = Disk(tmp_path / "run", chunk_bytes=blocks * BLOCK_BYTES)
    recording = rnet.collect(data, store=store, transform=copying)
    assert begun == {"copy": chunks, "checksum": chunks * blocks, "write": chunks * blocks}
    monkeypatch.undo()
    assert torch.equal(recording["0-1"][:], torch.cat(data))


def test_copies_go_on_while_the_disk_makes_a_chunk_durable(tmp_path, monkeypatch):
    chunks, num_bytes = 4, 1 << 16
    begun, changed = Counter(), threading.Condition()
    fsync = folder.fsync

    def begin_and_wait(stage, other, ahead):
        with changed:
            begun[stage] += 1
            changed.notify_all()
            wanted = min(begun[stage] + ahead, chunks)
            assert changed.wait_for(lambda: begun[other] >= wanted, timeout=30), stage

    def copying(activation, batch):
        # That of the next chunk begins only while one is made durable.
        begin_and_wait("copy", "sync", -1)
        return activation

    def syncing(descriptor):
        status = os.fstat(descriptor)
        # A folder of many names is as large, and is synced as well.
        if stat.S_ISREG(status.st_mode) and status.st_size > num_bytes:
            # A slow disk: it goes on when that copy has begun.
            begin_and_wait("sync", "copy", 1)
        fsync(descriptor)

    monkeypatch.setattr(folder, "fsync", syncing)
    rnet = recorder_of(nn.Identity(), "0-1", input_size=(1, num_bytes // 4))
    data = [torch.full((1, num_bytes // 4), float(i)) for i in range(chunks)]
    rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=num_bytes), transform=copying)
    assert begun == {"copy": chunks, "sync": chunks}
