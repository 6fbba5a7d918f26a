"""Rows that are not samples: through every store, and sample by sample."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from scio_recorder import open_recording
from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.recording.readable import RowsOfSamples
from scio_recorder.reductions import Mean
from scio_recorder.stores import Device, Disk, Host
from scio_recorder.stores.files import DiskTensor
from tests.recording.rows import (
    ALL_PASSES,
    GENERATED,
    NARROW,
    PADDED,
    WIDE,
    Pass,
    expected,
    ids_of,
    recorder,
    write,
)

STORES = ["device", "host", "auto", "object", "disk", "small chunks"]


def make_store(name, path):
    made = {
        "object": Host,
        "disk": lambda: f"disk:{path}/run",
        "small chunks": lambda: Disk(path / "run", chunk_bytes=100),
    }
    return made.get(name, lambda: name)()


def check(recording, passes, ids=None):
    """Compare all of a recording with what the passes had, sample by sample as well."""
    wanted, ids = expected(passes), ids_of(passes) if ids is None else ids
    assert recording.sample_ids == ids
    assert (recording.num_samples, recording.num_rows) == (len(ids), len(wanted["sample"]))
    assert list(recording.rows) == ["sample", "position", "token"]
    for key, tensor in wanted.items():
        found = recording.rows[key] if isinstance(key, str) else recording[key]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[:], tensor)
    for label in (WIDE, NARROW):
        samples = recording.by_sample(label)
        assert len(samples) == len(ids)
        for number, found in enumerate(samples):
            rows = [row for one in passes for row in one.rows]
            places = [place for place, row in enumerate(rows) if row[0] == number]
            assert torch.equal(found, wanted[label][places])
            assert torch.equal(samples[number - len(ids)], found)
        assert all(map(torch.equal, samples[1:3], list(samples)[1:3]))
        with pytest.raises(IndexError):
            samples[len(ids)]


@pytest.mark.parametrize("passes", ALL_PASSES)
@pytest.mark.parametrize("store", STORES)
def test_every_store_keeps_rows(store, passes, tmp_path):
    recording = write(make_store(store, tmp_path), ALL_PASSES[passes])
    check(recording, ALL_PASSES[passes])
    check(pickle.loads(pickle.dumps(recording)), ALL_PASSES[passes])
    if recording.path:
        assert all(isinstance(column, DiskTensor) for column in recording.rows.values())
        check(open_recording(recording.path, verify=True), ALL_PASSES[passes])
    with pytest.raises(TypeError):
        recording.rows["sample"] = torch.zeros(1)


@pytest.mark.parametrize("passes", ALL_PASSES)
@pytest.mark.parametrize("store", ["host", "small chunks"])
def test_saved_and_opened(store, passes, tmp_path):
    recording = write(make_store(store, tmp_path), ALL_PASSES[passes])
    recording.save(tmp_path / "saved")
    opened = open_recording(tmp_path / "saved", verify=True)
    check(opened, ALL_PASSES[passes])
    assert opened.complete
    assert opened.settings["rows"] == {"kind": "Tokens"}


@pytest.mark.parametrize("passes", ALL_PASSES)
def test_saved_in_parts(passes, tmp_path, monkeypatch):
    monkeypatch.setattr("scio_recorder.recording.recording.CHUNK_BYTES", 100)
    write("host", ALL_PASSES[passes]).save(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("chunk-*"))) == 1
    check(open_recording(tmp_path / "saved"), ALL_PASSES[passes])


def test_memory_of_a_host_is_used_again():
    host = Host()
    first = write(host, PADDED)
    kept = write(host, GENERATED)
    check(first, PADDED)
    addresses = {name: kept.rows[name].data_ptr() for name in kept.rows}
    sample = kept.rows["sample"]
    del first, kept
    gc.collect()
    third = write(host, PADDED)
    check(third, PADDED)
    # What somebody holds stays.
    assert sample.tolist() == expected(GENERATED)["sample"].tolist()
    assert third.rows["sample"].data_ptr() != addresses["sample"]
    assert third.rows["token"].data_ptr() == addresses["token"]


@pytest.mark.parametrize("done", range(1, 5))
def test_resumed(tmp_path, done):
    store = Disk(tmp_path / "run", chunk_bytes=60)
    write(store, GENERATED[:done], finish=False)
    opened = open_recording(tmp_path / "run")
    assert not opened.complete
    check(opened, GENERATED[:done])
    assert "interrupted" in repr(opened)
    check(write(store, GENERATED[done:], resume=True), GENERATED)


def test_resumed_with_rows_of_another_kind(tmp_path):
    write(f"disk:{tmp_path}/run", PADDED[:1], finish=False)
    other = Pass([3], [(3, 0)])
    with pytest.MonkeyPatch.context() as patch:
        made = expected([other])
        patch.setattr("tests.recording.rows.tensors_of", lambda rows: {**made, "token": made[WIDE]})
        with pytest.raises(RecordingError, match=r"token gives .* are stored"):
            write(f"disk:{tmp_path}/run", [other], resume=True)


def test_several_ranks(tmp_path):
    parts = [
        [Pass([f"{rank}-{number}" for number in one.ids], one.rows) for one in passes]
        for rank, passes in enumerate((GENERATED, PADDED, GENERATED))
    ]
    for rank in (2, 0, 1):
        store = Disk(tmp_path / "run", chunk_bytes=60, rank=rank, world_size=3)
        check(write(store, parts[rank]), parts[rank])
    joined, before = [], 0
    for part in parts:
        joined += [Pass(ids, [(before + at, row) for at, row in rows]) for ids, rows in part]
        before += len(ids_of(part))
    wanted = expected(joined)
    # Layers' values follow from numbers of samples that are counted by rank.
    own = [tensor for part in parts for tensor in [expected(part)]]
    recording = open_recording(tmp_path / "run", verify=True)
    assert recording.complete
    assert recording.sample_ids == ids_of(joined)
    assert torch.equal(recording.rows["sample"][:], wanted["sample"])
    assert torch.equal(recording.rows["position"][:], wanted["position"])
    assert torch.equal(recording[WIDE][:], torch.cat([tensors[WIDE] for tensors in own]))
    samples = [found for part in parts for found in write("host", part).by_sample(WIDE)]
    assert all(map(torch.equal, recording.by_sample(WIDE), samples))
    recording.save(tmp_path / "saved")
    saved = open_recording(tmp_path / "saved")
    assert torch.equal(saved.rows["sample"][:], wanted["sample"])
    assert saved.sample_ids == recording.sample_ids


def test_rows_that_are_together_are_not_numbered():
    rising = RowsOfSamples(expected(PADDED)["sample"], 6)
    assert rising[2] == slice(3, 6)
    assert rising[3] == slice(6, 6)
    falling = RowsOfSamples(expected(GENERATED)["sample"], 4)
    assert torch.equal(falling[0], torch.tensor([0, 1, 2, 4, 6]))
    assert falling.lengths.tolist() == [5, 3, 2, 3]
    assert len(RowsOfSamples(torch.zeros(0, dtype=torch.int64), 3)[2:]) == 1


def test_without_rows_a_sample_is_a_row(tmp_path):
    rnet = recorder()
    for store in ("host", f"disk:{tmp_path}/run"):
        recording = rnet.collect([torch.randn(2, 3, 4), torch.randn(1, 3, 4)], store=store)
        assert (recording.num_rows, dict(recording.rows)) == (3, {})
        assert "rows" not in repr(recording)
        samples = recording.by_sample("0")
        assert [tuple(one.shape) for one in samples] == [(1, 3, 4)] * 3
        assert torch.equal(torch.cat(list(samples)), recording["0"][:])


def test_repr_and_reduced_layers():
    recording = write(Device(), PADDED)
    assert repr(recording) == "<Recording of 6 samples, 9 rows: 1-1, 1-2>"
    assert str(recording).splitlines()[0] == "Recording of 6 samples, 9 rows"
    rnet = recorder()
    reduced = rnet.collect([torch.randn(2, 3, 4)], reduce=Mean())
    with pytest.raises(ArgumentError, match=r"no rows of 1-1 0 \(Linear\): collect without reduce"):
        reduced.by_sample("0")
