"""What is written is read back, bit for bit, and by the safetensors library too."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scio_recorder.stores.disk_format.medium import FormatError
from scio_recorder.stores.disk_format.reader import RunReader, SampleIds, to_ids
from scio_recorder.stores.disk_format.tensor_file import BLOCK_BYTES, TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.runs import LAYERS, intercepted, make_run, rows, state_after

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    *(torch.uint64, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex32, torch.complex64, torch.complex128),
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator).to(torch.uint8)
    data = data % 2 if dtype == torch.bool else data
    return data.view(dtype).view(shape)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tables = st.dictionaries(
    st.text(min_size=1, max_size=6).filter(lambda name: name.isprintable() and name[0] not in "#@"),
    st.builds(TensorInfo, shapes, st.sampled_from(DTYPES)),
    max_size=4,
)


@given(tables, st.lists(st.integers(0, 6), max_size=4), st.integers(0, 2**31), st.data())
@settings(max_examples=40)
def test_any_layers_split_anywhere(layers, sizes, seed, data):
    total = sum(sizes)
    kept = {
        name: random_tensor((total, *spec.shape), spec.dtype, seed + index)
        for index, (name, spec) in enumerate(layers.items())
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with RunWriter.create(path, layers=layers, header={}) as writer:
            start = 0
            for size in sizes:
                chunk = {name: tensor[start : start + size] for name, tensor in kept.items()}
                writer.append(chunk, range(start, start + size))
                start += size
            writer.finish()
        with RunReader(path, verify=True) as reader:
            assert reader.complete
            assert reader.layers == layers
            assert list(reader.sample_ids) == list(range(total))
            assert reader.read_state() is None
            first = data.draw(st.integers(0, total))
            last = data.draw(st.integers(first, total))
            for name, tensor in kept.items():
                found = reader.read(name, first, last)
                assert (found.shape, found.dtype) == (tensor[first:last].shape, tensor.dtype)
                assert bits(found) == bits(tensor[first:last])


@given(
    st.one_of(
        st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=4),
        st.lists(st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=5)),
        st.lists(st.lists(st.text(alphabet='[]{}"\\,', max_size=90), max_size=3), max_size=3),
    )
)
@settings(max_examples=50)
def test_any_sample_ids(chunks):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with RunWriter.create(path, layers={}, header={}) as writer:
            for ids in chunks:
                writer.append({}, ids)
            expected = [value for ids in chunks for value in ids]
            assert writer.durable == len(expected)
        with RunReader(path) as reader:
            assert list(reader.sample_ids) == expected
            assert [reader.sample_ids[i] for i in range(-len(expected), 0)] == expected
            assert reader.sample_ids == expected


def test_dtypes_that_safetensors_lacks_are_kept_as_bytes(tmp_path):
    kept = random_tensor((4, 3), torch.complex128, 1)
    layers = {"x": TensorInfo((3,), torch.complex128)}
    with RunWriter.create(tmp_path / "run", layers=layers, header={}) as writer:
        writer.append({"x": kept}, range(4))
    (chunk,) = tmp_path.glob("run/chunk-*.safetensors")
    raw = safetensors.torch.load_file(chunk)["x"]
    assert (raw.dtype, raw.shape) == (torch.uint8, (4, 3, 16))
    assert bits(raw) == bits(kept)


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.arange(24.0).view(4, 6)[:, ::2],
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(3.0).expand(4, 3),
        lambda: torch.complex(torch.arange(12.0), torch.ones(12)).view(4, 3).conj(),
        lambda: torch.complex(torch.ones(12), torch.arange(12.0)).view(4, 3).conj().imag,
        lambda: torch.arange(12.0, requires_grad=True).view(4, 3) * 2,
    ],
    ids=["strided", "transposed", "expanded", "conjugate", "negative", "with graph"],
)
def test_views_are_written_as_they_read(tmp_path, view):
    tensor = view()
    layers = {"x": TensorInfo(tuple(tensor.shape[1:]), tensor.dtype)}
    with RunWriter.create(tmp_path / "run", layers=layers, header={}) as writer:
        writer.append({"x": tensor}, range(4))
    with RunReader(tmp_path / "run") as reader:
        assert torch.equal(reader.read("x", 0, 4), tensor.detach().clone().resolve_conj())


def test_blocks_at_every_boundary(tmp_path):
    # Rows of 700,000 bytes: nearly every one lies in two blocks.
    kept = random_tensor((7, 350_000), torch.int16, 3)
    layers = {"small": TensorInfo((), torch.uint8), "x": TensorInfo((350_000,), torch.int16)}
    with RunWriter.create(tmp_path / "run", layers=layers, header={}) as writer:
        for first, last in ((0, 4), (4, 7)):
            small = torch.arange(first, last, dtype=torch.uint8)
            writer.append({"small": small, "x": kept[first:last]}, range(first, last))
    for start in range(8):
        for stop in range(start, 8):
            with RunReader(tmp_path / "run") as reader:
                assert torch.equal(reader.read("x", start, stop), kept[start:stop])
                assert reader.read("small", start, stop).tolist() == list(range(start, stop))
                assert torch.equal(reader.read("x", start, stop), kept[start:stop])


def test_state_is_the_last_one_committed_and_takes_bounded_space(tmp_path):
    path = tmp_path / "run"
    layers = {"label": LAYERS["label"]}
    with RunWriter.create(path, layers=layers, header={}) as writer:
        for i in range(20):
            chunk = {"label": rows(i, i + 1)["label"]}
            writer.append(chunk, [i], state=state_after(i + 1))
            with RunReader(path) as reader:
                assert reader.read_state().tensors[0] == sum(range(i + 1))
        writer.append({"label": rows(20, 21)["label"]}, [20])
        assert len(list(path.glob("state-*"))) == 2
    with RunReader(path) as reader:
        assert reader.read_state() == state_after(20)
    with RunWriter.resume(path) as writer:
        writer.finish()
    assert len(list(path.glob("state-*"))) == 1


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
