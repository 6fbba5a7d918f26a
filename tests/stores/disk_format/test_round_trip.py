"""What is written is read back, bit for bit, and by the safetensors library too."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.tensor_file import TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.runs import LAYERS, make_run, rows, state_after

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
@settings(max_examples=60)
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
            assert reader.layers == layers
            assert list(reader.sample_ids) == list(range(total))
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


def test_the_safetensors_library_reads_every_chunk(tmp_path):
    make_run(tmp_path / "run")
    chunks = sorted((tmp_path / "run").glob("*.safetensors"))
    tables = [safetensors.torch.load_file(chunk) for chunk in chunks]
    data = [table for table in tables if table.keys() == LAYERS.keys()]
    for name, expected in rows(0, 9).items():
        assert torch.equal(torch.cat([table[name] for table in data]), expected)
    states = [table for table in tables if table.keys() == {"0"}]
    assert [float(state["0"]) for state in states] == [36.0]


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


def test_an_empty_recording_can_be_complete(tmp_path):
    with RunWriter.create(tmp_path / "run", layers=LAYERS, header={}) as writer:
        writer.finish()
    with RunReader(tmp_path / "run", verify=True) as reader:
        assert reader.complete
        assert reader.num_samples == 0
        assert reader.read("1-1", 0, 0).shape == (0, 3)
        assert reader.read_state() is None
