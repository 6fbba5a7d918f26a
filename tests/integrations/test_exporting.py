"""Exports hold, bit for bit, what the recording holds, as other libraries read it by themselves."""

from __future__ import annotations

import errno
import json
import sys
import weakref
from urllib.parse import quote

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
import torch
import zarr
from torch import nn

from scio_recorder import Recorder, RecordingError, open_recording
from scio_recorder.errors import ArgumentError
from scio_recorder.integrations import exporting
from scio_recorder.reductions import Mean
from scio_recorder.stores import Disk
from tests.recording.nets import batches, recorder

FORMS = ["arrow", "datasets", "zarr"]
DTYPES = [
    *(torch.float16, torch.float32, torch.float64, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex32, torch.complex64, torch.complex128),
]
SHAPES = [(), (4,), (2, 3), (2, 1, 3), (1, 2, 1, 3, 2), (1, 2, 1, 1, 3, 2)]


def random_bits(dtype, *shape):
    """Return tensors of all sorts of numbers, NaNs with any payload, zeros of both signs."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    raw = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def recorded(data, store="host", **options):
    """Return a recording of some rows, whatever they are, collected in unequal batches."""
    rnet = Recorder(nn.Sequential(nn.Identity()), input_size=(1, 1))
    rnet.record("0")

    def rows(_, batch):
        start = int(batch[0, 0]) if len(batch) else 0
        return data[start : start + len(batch)]

    numbers = torch.arange(float(len(data))).view(-1, 1).split(3)
    return rnet.collect(numbers, store=store, transform=rows, **options)


def export(recording, form, path):
    """Return what the library reads of an export: a table, a dataset or a group."""
    if form == "arrow":
        return recording.to_arrow().read_all()
    getattr(recording, f"to_{form}")(path)
    if form == "datasets":
        return datasets.load_from_disk(str(path)).with_format("arrow")[:]
    return zarr.open_group(str(path), mode="r")


def read(exported, name):
    """Return a column as an array [samples, ...] of NumPy."""
    if isinstance(exported, zarr.Group):
        return exported[quote(name, safe="")][:]
    column = exported[name].combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        shape = (len(column), *column.type.shape)
    else:
        shape = np.array(column.to_pylist()).shape
    while isinstance(column, pa.ExtensionArray) or pa.types.is_nested(column.type):
        column = column.storage if isinstance(column, pa.ExtensionArray) else column.flatten()
    return column.to_numpy(zero_copy_only=False).reshape(shape).copy()


def bits(tensor):
    """Return a tensor's bytes."""
    return tensor[:].contiguous().view(-1).view(torch.uint8)


def assert_exported(exported, name, wanted):
    """Compare bits, of what was widened after narrowing it again."""
    found = torch.from_numpy(read(exported, name))
    if wanted.is_complex() and not found.is_complex():
        found = torch.complex(found[..., 0], found[..., 1])
    if wanted.dtype == torch.bool and not isinstance(exported, zarr.Group):
        assert found.dtype == torch.uint8
        found = found.view(torch.bool)
    assert found.shape == wanted.shape
    if found.dtype == wanted.dtype:
        assert torch.equal(bits(found), bits(wanted))
        return
    wide = {True: torch.complex64, False: torch.float32}[wanted.is_complex()]
    assert found.dtype == wide
    found, wanted = (torch.view_as_real(t) if t.is_complex() else t for t in (found, wanted))
    nans = found.isnan()
    assert torch.equal(nans, wanted.to(torch.float32).isnan())
    narrow = found.to(wanted.dtype)
    unsigned = torch.uint8 if wanted.dtype.itemsize == 1 else torch.int16
    assert torch.equal(narrow.view(unsigned)[~nans], wanted.view(unsigned)[~nans])
    if wanted.dtype == torch.bfloat16:
        # Of bfloat16, NaNs are recorded bits too: the upper half of each number.
        assert torch.equal((found.view(torch.int32) >> 16).short(), wanted.view(torch.int16))


@pytest.mark.parametrize(
    ("dtype", "form", "store"),
    [
        (dtype, FORMS[(number + turn) % 3], ("host", "disk")[(number + turn) % 2])
        for number, dtype in enumerate(DTYPES)
        for turn in range(2 if dtype in (torch.bfloat16, torch.bool, torch.complex32) else 1)
    ],
    ids=str,
)
def test_every_dtype(dtype, form, store, tmp_path):
    data = random_bits(dtype, 7, 300)
    recording = recorded(data, f"disk:{tmp_path}/run" if store == "disk" else store)
    assert torch.equal(bits(recording["0"]), bits(data))
    exported = export(recording, form, tmp_path / "out")
    assert_exported(exported, "1-1_0", data)
    assert read(exported, "sample_id").tolist() == list(range(7))


@pytest.mark.parametrize(
    ("shape", "form", "dtype", "rows"),
    [
        (shape, form, (torch.float32, torch.complex64, torch.bool)[(number + turn) % 3], 5)
        for number, shape in enumerate(SHAPES)
        for turn, form in enumerate(FORMS)
        if (number + turn) % 2 == 0 or number < 3
    ]
    + [((2, 3), form, torch.float32, 0) for form in FORMS],
    ids=str,
)
def test_every_shape(shape, form, dtype, rows, tmp_path):
    data = random_bits(dtype, 5, *shape)[:rows]
    exported = export(recorded(data), form, tmp_path / "out")
    if isinstance(exported, zarr.Group):
        assert exported["1-1_0"].shape == data.shape
    else:
        assert len(exported) == rows
    if rows:
        assert_exported(exported, "1-1_0", data)


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_values_are_refused(form, tmp_path):
    with pytest.raises(ArgumentError, match=r"layer 1-1 0 .*has no values"):
        export(recorded(torch.ones(5, 2, 0)), form, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_parts_put_together_are_the_whole(form, tmp_path, monkeypatch):
    rnet, data = recorder(), batches(5, 7, 5)
    monkeypatch.setattr(exporting, "PART_BYTES", 400)
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 64)
    recording = rnet.collect(data)
    exported = export(recording, form, tmp_path / "out")
    if form == "arrow":
        assert exported["sample_id"].num_chunks > 5
    for label in recording:
        layer = recording.architecture[label]
        name = f"{layer.label}_{layer.name}" if layer.name else str(layer.label)
        assert_exported(exported, name, recording[label])
    names = list(exported) if form == "zarr" else exported.column_names
    assert len(names) == len(recording) + 1
    assert read(exported, "sample_id").tolist() == list(range(17))


def test_arrow_shares_the_memory_of_the_recording():
    recording = recorded(torch.randn(6, 4))
    array = recording.to_arrow().read_next_batch().column("1-1_0").to_numpy_ndarray()
    assert np.shares_memory(array, recording["0"].numpy())


def test_a_reader_goes_to_parquet_and_back(tmp_path):
    recording = recorded(random_bits(torch.float32, 7, 2, 3))
    pyarrow.dataset.write_dataset(recording.to_arrow(), tmp_path / "out", format="parquet")
    dataset = pyarrow.dataset.dataset(tmp_path / "out")
    assert_exported(dataset.to_table(columns=["1-1_0"]), "1-1_0", recording["0"])


def test_datasets_are_read_in_every_format(tmp_path):
    data = random_bits(torch.float32, 5, 2, 3).nan_to_num()
    dataset = recorded(data).to_datasets(tmp_path / "out")
    assert torch.equal(dataset.with_format("torch")[:]["1-1_0"], data)
    assert np.array_equal(dataset.with_format("numpy")[1:3]["1-1_0"], data[1:3].numpy())
    assert dataset[4]["1-1_0"] == data[4].tolist()
    assert dataset.features["1-1_0"] == datasets.Array2D((2, 3), "float32")
    wide = recorded(torch.randn(5, 2, 3, dtype=torch.float64))
    precise = wide.to_datasets(tmp_path / "wide").with_format("torch", dtype=torch.float64)
    assert torch.equal(precise[:]["1-1_0"], wide["0"])
    mapped = dataset.map(lambda row: {"twice": row["sample_id"] * 2})
    assert mapped[:]["twice"] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_keep_their_sign_and_their_file(zero, tmp_path):
    data = torch.full((4, 2), zero)
    exported = export(recorded(data), "zarr", tmp_path / "out")
    assert_exported(exported, "1-1_0", data)
    assert exported["1-1_0"].nchunks_initialized == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", [["b", "a", "ä"], [7, -(1 << 62), 8]], ids=["texts", "numbers"])
def test_sample_ids(ids, form, tmp_path):
    recording = recorded(torch.ones(3, 2), sample_ids=lambda batch: [ids[int(i)] for i in batch])
    exported = export(recording, form, tmp_path / "out")
    assert read(exported, "sample_id").tolist() == ids


@pytest.mark.parametrize("form", FORMS)
def test_metadata_say_what_was_recorded(form, tmp_path):
    recording = recorded(random_bits(torch.bfloat16, 3, 2))
    exported = export(recording, form, tmp_path / "out")
    if form == "arrow":
        about = json.loads(exported.schema.metadata[b"scio_recorder"])
    elif form == "datasets":
        about = json.loads(datasets.load_from_disk(str(tmp_path / "out")).info.description)
    else:
        about = exported.attrs["scio_recorder"]
    layer = {"label": "1-1", "name": "0", "type": "Identity", "dtype": "bfloat16", "shape": [2]}
    assert about == {
        "complete": True,
        "fingerprint": recording.architecture.fingerprint,
        "layers": {"1-1_0": layer},
    }


@pytest.mark.parametrize("form", FORMS)
def test_names_of_calls_and_of_odd_modules(form, tmp_path):
    net = nn.Sequential()
    net.add_module("a/ü *", nn.Sequential(nn.Identity(), nn.Identity()))
    net[0][1] = net[0][0]
    rnet = Recorder(net, input_size=(1, 2))
    rnet.record("*")
    exported = export(rnet.collect([torch.ones(1, 2)]), form, tmp_path / "out")
    # In the order in which calls return.
    names = ["2-1_a/ü *.0", "2-2_a/ü *.0", "1-1_a/ü *", "0-1"]
    if form == "zarr":
        names = [name.replace("/ü *", "%2F%C3%BC%20%2A") for name in names]
        assert sorted(exported.array_keys()) == sorted([*names, "sample_id"])
        assert list(exported.attrs["scio_recorder"]["layers"]) == names
    else:
        assert exported.column_names == ["sample_id", *names]


class Source:
    """Stands for `to_array`: counts bytes that are alive, and fails at a call if told so."""

    def __init__(self, monkeypatch, fails_at=None, error=None):
        self._read, self._fails_at, self._error = exporting.to_array, fails_at, error
        self.calls, self.total, self.alive, self.most = 0, 0, 0, 0
        monkeypatch.setattr(exporting, "to_array", self)

    def __call__(self, samples):
        array = self._read(samples)
        if array.ndim > 1 and array.size:
            self.calls += 1
            if self.calls == self._fails_at:
                raise self._error
            self.total += array.nbytes
            self._count(array.nbytes)
            weakref.finalize(array, self._count, -array.nbytes)
        return array

    def _count(self, num_bytes):
        self.alive += num_bytes
        self.most = max(self.most, self.alive)


@pytest.mark.parametrize("form", FORMS)
def test_no_more_than_a_part_is_held(form, tmp_path, monkeypatch):
    recording = recorded(torch.randn(600, 64), Disk(tmp_path / "run", chunk_bytes=1 << 14))
    part = 1 << 13
    monkeypatch.setattr(exporting, "PART_BYTES", part)
    monkeypatch.setattr(exporting, "CHUNK_BYTES", part)
    source = Source(monkeypatch)
    if form == "arrow":
        reader = recording.to_arrow()
        assert not source.calls
        for _ in range(10):
            reader.read_next_batch()
        assert source.calls == 10
        while source.total < recording["0"].nbytes:
            reader.read_next_batch()
    else:
        getattr(recording, f"to_{form}")(tmp_path / "out")
    assert source.total == recording["0"].nbytes
    # Zarr writes on a thread of its own, which lets go of a part a little after the call returns.
    assert 0 < source.most <= (2 * part if form == "zarr" else part)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("form", ["datasets", "zarr"])
def test_a_failure_leaves_nothing(form, error, tmp_path, monkeypatch):
    recording = recorded(torch.randn(60, 4))
    monkeypatch.setattr(exporting, "PART_BYTES", 1 << 10)
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 1 << 7)
    Source(monkeypatch, 3, error)
    wanted = RecordingError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted) as caught:
        getattr(recording, f"to_{form}")(tmp_path / "out")
    if wanted is RecordingError:
        assert "out: full" in str(caught.value)
        assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_damage_is_no_export(form, tmp_path):
    data = torch.randn(60, 4)
    recorded(data, f"disk:{tmp_path}/run")
    wanted = data.numpy().tobytes()
    (file,) = [file for file in (tmp_path / "run").iterdir() if wanted in file.read_bytes()]
    raw = bytearray(file.read_bytes())
    raw[raw.index(wanted) + 100] ^= 1
    file.write_bytes(raw)
    recording = open_recording(tmp_path / "run")
    with pytest.raises(RecordingError, match="run"):
        export(recording, form, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("form", ["datasets", "zarr"])
def test_what_is_there_stays(form, tmp_path):
    recording = recorded(torch.ones(3, 2))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    for name in ("folder", "file", "link"):
        with pytest.raises(RecordingError, match=f"{name} exists already"):
            getattr(recording, f"to_{form}")(tmp_path / name)
    with pytest.raises(RecordingError, match="missing/out: No such file"):
        getattr(recording, f"to_{form}")(tmp_path / "missing" / "out")
    for path in ("", "s3://bucket/run", "a\0b", 3, None):
        with pytest.raises(ArgumentError, match="name a folder"):
            getattr(recording, f"to_{form}")(path)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("form", ["datasets", "zarr"])
def test_exports_have_the_permissions_of_others(form, tmp_path):
    export(recorded(torch.ones(3, 2)), form, tmp_path / "out")
    (tmp_path / "other").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}


@pytest.mark.parametrize("form", FORMS)
def test_reduced_layers_are_left_out(form, tmp_path):
    rnet = recorder("1-1", "3")
    some = rnet.collect(batches(3), reduce={"1-1": Mean()})
    exported = export(some, form, tmp_path / "some")
    names = sorted(exported) if form == "zarr" else exported.column_names[::-1]
    assert names == ["1-4_3", "sample_id"]
    none = rnet.collect(batches(3), reduce=Mean())
    with pytest.raises(ArgumentError, match="every layer was reduced"):
        export(none, form, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("form", FORMS)
def test_a_dtype_that_nothing_holds_is_named(form, tmp_path):
    data = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    try:
        data.clone()
    except NotImplementedError:
        pytest.skip("this version of torch can't copy what nothing holds")
    recording = recorded(data)
    with pytest.raises(ArgumentError, match=r"1-1 0 .* dtype float4_e2m1fn_x2, .*transform="):
        export(recording, form, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_package_names_the_extra(form, tmp_path, monkeypatch):
    recording = recorded(torch.ones(3, 2))
    package = "pyarrow" if form == "arrow" else form
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{package}.*pip install -e .\.\[{form}\]"):
        export(recording, form, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_at_which_other_libraries_stop_are_escaped(tmp_path, name):
    net = nn.Sequential()
    net.add_module(name, nn.ReLU())
    rnet = Recorder(net, input_size=(1, 2))
    rnet.record("1-1")
    recording = rnet.collect([torch.ones(3, 2)], progress=False)
    wanted = "1-1_" + {"a\0b": r"a\x00b", "\ud800": r"\ud800"}[name]
    assert recording.to_arrow().read_all()[wanted].to_pylist() == [[1, 1]] * 3
    assert recording.to_datasets(tmp_path / "set")[wanted] == [[1, 1]] * 3
    assert quote(wanted, safe="") in recording.to_zarr(tmp_path / "zarr")
