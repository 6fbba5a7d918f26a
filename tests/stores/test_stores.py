"""Every store gives, bit for bit, what the layers returned."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from scio_recorder import CollectError, Recorder, RecordingError, open_recording
from scio_recorder.layer import TensorSpec
from scio_recorder.stores import Device, Disk, Host
from scio_recorder.stores.buffers import Column, HostBuffer
from tests.recording.nets import assert_same, batches, expected, recorder

SIZES = {"alike": (4, 4, 4), "short end": (4, 4, 1), "unequal": (2, 7, 1, 5), "one": (3,)}


class WrongLength(list):
    """A loader that promises less than it yields."""

    def __len__(self):
        return 1


LOADERS = {"list": list, "generator": iter, "wrong length": WrongLength}


def make_store(name, path):
    stores = {
        "device": lambda: "device",
        "host": lambda: "host",
        "auto": lambda: "auto",
        "object": Host,
        "pageable": lambda: Host(pin_memory=False),
        "device object": Device,
        "disk": lambda: f"disk:{path}/run",
        "small chunks": lambda: Disk(path / "run", chunk_bytes=200),
    }
    return stores[name]()


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "store",
    ["device", "host", "auto", "object", "pageable", "device object", "disk", "small chunks"],
)
def test_stores_agree_with_single_passes(store, sizes, loader, tmp_path):
    rnet, data = recorder(), batches(*SIZES[sizes])
    wanted = expected(rnet, data)
    recording = rnet.collect(LOADERS[loader](data), store=make_store(store, tmp_path))
    assert_same(recording, wanted)
    assert recording.num_samples == sum(SIZES[sizes])
    assert recording.sample_ids == list(range(sum(SIZES[sizes])))
    assert recording.complete
    assert recording.architecture == rnet.architecture
    assert recording.store == ("disk" if store in ("disk", "small chunks") else "host")


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("num_batches", [1, 40])
def test_unknown_length_grows_past_every_guess(store, num_batches, tmp_path):
    rnet, data = recorder("1-1", "2"), batches(*[33] * num_batches)
    wanted = expected(rnet, data)
    assert_same(rnet.collect(iter(data), store=make_store(store, tmp_path)), wanted)


def test_a_layer_called_twice_keeps_both_calls(tmp_path):
    rnet, data = recorder("2.act"), batches(3, 2)
    wanted = expected(rnet, data)
    assert len(wanted) == 2
    assert_same(rnet.collect(data), wanted)


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


DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_layouts_and_empty_shapes_are_kept(dtype, tmp_path):
    # Transposed, so that what the layer returns is not contiguous.
    data = [torch.randn(5, n, 3).mul(3).to(dtype).transpose(0, 1) for n in (2, 4)]
    rnet = Recorder(nn.Identity(), input_data=data[0])
    rnet.record("0-1")
    for store in ("host", f"disk:{tmp_path}/run"):
        recording = rnet.collect(data, store=store)
        assert_same(recording, {(0, 1): torch.cat(data)})
    hollow = [x[:, :0] for x in data]
    recording = rnet.collect(hollow, store=f"disk:{tmp_path}/hollow")
    assert recording["0-1"].shape == (6, 0, 3)
    assert recording["0-1"][:].shape == (6, 0, 3)


def inferred(x):
    with torch.inference_mode():
        return x + 1


# Ways in which the numbers of a tensor can lie in memory, or not lie there.
FORMS = {
    "plain": lambda x: x + 1,
    "differentiable": lambda x: (x + 1).requires_grad_(),
    "inference": inferred,
    "column by column": lambda x: (x + 1).t().contiguous().t(),
    "one row for all": lambda x: x[:1].expand(x.shape),
    "every other": lambda x: torch.cat([x, x], 1)[:, ::2],
    "lazily negated": lambda x: torch.complex(x, x).conj().imag,
    "lazily negated without gaps": torch._neg_view,
    "lazily zero": lambda x: torch._efficientzerotensor(x.shape),
    "lazily copied": torch._lazy_clone,
    "inside": lambda x: torch.cat([x, x])[2 : 2 + len(x)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [3, 1 << 14])
@pytest.mark.parametrize("store", ["host", "device", "small chunks"])
def test_every_form_of_a_tensor_is_kept_after_plain_ones(store, width, form, tmp_path):
    class Net(nn.Module):
        def forward(self, x, form):
            return self.inner(FORMS[form](x))

    net = Net()
    net.inner = nn.Identity()
    data = [torch.randn(4, width) for _ in range(12)]
    forms = ["plain"] * 3 + [form, "plain", form, form] + ["plain"] * 5
    given = [{"x": x, "form": form} for x, form in zip(data, forms, strict=True)]
    rnet = Recorder(net, input_data=given[0])
    rnet.record("1-1")
    wanted = torch.cat([FORMS[one["form"]](one["x"]).detach().clone() for one in given])
    assert_same(rnet.collect(given, store=make_store(store, tmp_path)), {(1, 1): wanted})


def test_nans_are_kept_and_counted(tmp_path):
    data = batches(3, 2)
    data[0][1, 2] = data[1][0, 0] = torch.nan
    rnet = Recorder(nn.Identity(), input_size=(1, 4))
    rnet.record("0-1")
    for store in ("host", f"disk:{tmp_path}/run"):
        recording = rnet.collect(data, store=store)
        assert torch.equal(recording["0-1"][:].isnan(), torch.cat(data).isnan())
        assert recording.num_nans("0-1") == 2
        assert recording.to_frame().loc["0-1", "nan"] == 2


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
    with pytest.raises(TypeError, match="read-only"):
        lazy[0] = 0


def test_samples_on_disk_load_in_batches(tmp_path):
    rnet, data = recorder("1-1"), batches(5, 5, 3)
    lazy = rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=100))["1-1"]
    dataset = torch.utils.data.TensorDataset(lazy)
    loaded = [batch for (batch,) in torch.utils.data.DataLoader(dataset, batch_size=4)]
    assert torch.equal(torch.cat(loaded), expected(rnet, data)[1, 1])


def test_opened_without_the_net(tmp_path):
    rnet, data = recorder(), batches(5, 5, 3)
    wanted = expected(rnet, data)
    made = rnet.collect(data, store=Disk(tmp_path / "run", chunk_bytes=300))
    for verify in (False, True):
        opened = open_recording(tmp_path / "run", verify=verify)
        assert_same(opened, wanted)
        assert opened.architecture == rnet.architecture
        assert opened.sample_ids == made.sample_ids
        assert opened.complete
        assert opened.path == made.path


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
        with pytest.raises(RecordingError, match="names no folder and no bucket") as refused:
            use(place)
        assert "secret" not in str(refused.value)
    assert not any(tmp_path.iterdir())
    recording.save("exp:1")
    assert open_recording(Path("exp:1")).num_samples == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("known", [True, False])
def test_from_a_gpu(known, tmp_path):
    rnet = Recorder(recorder().net.cuda(), input_data=torch.randn(2, 4, device="cuda"))
    rnet.record("*")
    data = [batch.cuda() for batch in batches(*[64] * 20, 3)]
    wanted = expected(rnet, data)
    host = Host()
    for store in ("device", "host", host, host, f"disk:{tmp_path}/{known}"):
        recording = rnet.collect(data if known else iter(data), store=store)
        kind = "cuda" if store == "device" else "cpu"
        assert recording["1-1"].device.type == kind
        assert_same(recording, {k: v if kind == "cuda" else v.cpu() for k, v in wanted.items()})


@pytest.mark.parametrize("is_exact", [True, False])
def test_memory_grows_with_all_that_is_in_it(is_exact):
    rows = torch.arange(3 << 19, dtype=torch.float64).reshape(-1, 1 << 10)
    # Shorter than what comes, as a loader's length may be.
    column = Column(TensorSpec((1 << 10,), torch.float64), HostBuffer(), 100, is_exact)
    for start in range(0, len(rows), 37):
        part = rows[start : start + 37]
        column.place(start, len(part)).copy_(part)
    assert torch.equal(column.close(len(rows)), rows)


def test_memory_that_is_prepared_keeps_what_is_in_it():
    buffer = HostBuffer()
    memory = buffer.reserve(1 << 25)
    memory[: 1 << 20] = 7
    for stop in (9, 1 << 20, 4097, 1 << 25, 1 << 26):
        buffer.prepare(stop)
    assert int(memory[: 1 << 20].min()) == 7
    assert int(memory[1 << 20 :].max()) == 0


def test_no_thread_is_left(tmp_path):
    net, data = nn.Identity(), [torch.ones(2, 3)] * 4

    def threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("scio-")]

    rnet = Recorder(net, input_size=(1, 3), verbose=0)
    rnet.record("0-1")
    for store in ("host", "device", "auto", f"disk:{tmp_path / 'run'}"):
        rnet.collect(data, store=store)
        assert not threads()
        with pytest.raises(TypeError):
            rnet.collect([*data, None], store="host", to_inputs=lambda batch: batch + 1)
        assert not threads()
