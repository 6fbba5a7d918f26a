"""Reading lazily, and within bounds of memory and descriptors."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from scio_recorder.stores.disk_format.medium import FormatError
from scio_recorder.stores.disk_format.reader import RunReader, SampleIds, to_ids
from scio_recorder.stores.disk_format.tensor_file import BLOCK_BYTES, TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.runs import intercepted, make_run, rows


def test_only_the_chunks_that_are_read_are_opened(tmp_path):
    make_run(tmp_path)
    opened = []

    def act(number, name, go_on, arguments):
        if name == "open_file":
            opened.append(arguments[0])
        return go_on()

    with RunReader(tmp_path) as recording, intercepted(act):
        recording.read("1-1", 3, 5)
        recording.read("label", 4, 5)
        recording.read("1-1", 5, 5)
        recording.read("nothing", 0, 9)
    assert set(opened) == {"chunk-00000-00000001.safetensors"}


def test_no_file_stays_open(tmp_path):
    layers = {"x": TensorInfo((), torch.int64)}
    with RunWriter.create(tmp_path, layers=layers, header={}) as writer:
        for i in range(20):
            writer.append({"x": torch.tensor([i])}, [i])
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with RunReader(tmp_path) as recording:
        for i in [*range(20), 3, 3, 19, 0]:
            assert recording.read("x", i, i + 1).item() == i
        # The folder alone.
        if before:
            assert len(os.listdir("/proc/self/fd")) == before + 1
        assert recording.read("x", 0, 20).tolist() == list(range(20))


def test_what_was_read_belongs_to_the_caller(tmp_path):
    make_run(tmp_path)
    with RunReader(tmp_path) as recording:
        first = recording.read("1-1", 0, 9)
        first.zero_()
        assert torch.equal(recording.read("1-1", 0, 9), rows(0, 9)["1-1"])
    assert first.sum() == 0


def test_much_data_is_read_by_two_threads_and_damage_in_any_block_is_seen(tmp_path):
    numbers = torch.arange(9 * BLOCK_BYTES // 8 + 100)
    with RunWriter.create(tmp_path, layers={"x": TensorInfo((), torch.int64)}, header={}) as writer:
        writer.append({"x": numbers}, range(len(numbers)))
        writer.finish()
    with RunReader(tmp_path) as recording:
        assert torch.equal(recording.read("x", 50, len(numbers) - 7), numbers[50:-7])
        assert torch.equal(recording.read("x", 0, len(numbers)), numbers)
    (file,) = tmp_path.glob("chunk-*.safetensors")
    intact = file.read_bytes()
    for block in range(10):
        position = len(intact) - 9 * BLOCK_BYTES - 800 + block * BLOCK_BYTES + 11
        file.write_bytes(intact[:position] + b"?" + intact[position + 1 :])
        before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        with RunReader(tmp_path) as recording, pytest.raises(FormatError, match="checksum"):
            recording.read("x", 0, len(numbers))
        del recording
        # Not only when garbage is collected.
        assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("layer", "start", "stop", "error", "message"),
    [
        *(("1-1", *span, IndexError, "of 9") for span in [(-1, 2), (2, 1), (0, 10), (10, 10)]),
        ("1-2", 0, 1, LookupError, "'1-1', '2-1'"),
    ],
)
def test_what_does_not_exist(tmp_path, layer, start, stop, error, message):
    make_run(tmp_path)
    with RunReader(tmp_path) as recording, pytest.raises(error, match=message):
        recording.read(layer, start, stop)


def test_a_reader_that_is_closed_says_so(tmp_path):
    make_run(tmp_path)
    recording = RunReader(tmp_path)
    recording.close()
    recording.close()
    with pytest.raises(FormatError, match="has been closed; open it again"):
        recording.read("1-1", 0, 1)


def test_a_reader_travels_to_another_process(tmp_path):
    make_run(tmp_path)
    with RunReader(tmp_path) as recording:
        copy = pickle.loads(pickle.dumps(recording))
        with copy:
            assert torch.equal(copy.read("2-1", 1, 9), rows(1, 9)["2-1"])


def test_verify_reports_every_file(tmp_path):
    make_run(tmp_path)
    with RunReader(tmp_path) as recording:
        reports = list(recording.verify())
    files = {path.name: path.stat().st_size for path in tmp_path.glob("[cs]*-*.safetensors")}
    assert {report.name: report.num_bytes for report in reports} == files
    assert [report.problem for report in reports] == [None] * 4


def test_the_path_may_lead_through_links(tmp_path):
    make_run(tmp_path / "there")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    with RunReader(tmp_path / "here") as recording:
        assert recording.complete


def test_consecutive_ids_take_no_memory():
    ids = SampleIds()
    ids.add(to_ids(list(range(5, 5000))))
    assert ids._parts == [range(5, 5000)]
    with pytest.raises(IndexError):
        ids[5000]
    with pytest.raises(ValueError, match="more than"):
        ids.add(range(1 << 48))


def test_ids_are_a_list_to_whoever_wants_one():
    ids = SampleIds()
    ids.add(to_ids([3, 4, 9]))
    ids.add(to_ids([1]))
    assert ids == [3, 4, 9, 1]
    assert ids.tolist() == [3, 4, 9, 1]
    assert torch.tensor(ids).tolist() == [3, 4, 9, 1]
