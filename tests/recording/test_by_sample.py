"""Rows that are not samples: through every store, by sample, in batches, shown and exported."""

from __future__ import annotations

import gc
import json
import pickle

import pytest
import torch

from scio_recorder import open_recording
from scio_recorder.command_line import main as run
from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.reductions import Mean
from scio_recorder.stores import Device, Disk, Host
from scio_recorder.stores.files import DiskTensor
from tests.integrations.test_exporting import FORMS, assert_exported, export, read
from tests.recording.nets import LoaderMemory
from tests.recording.rows import (
    ALL_PASSES,
    GENERATED,
    MANY,
    NARROW,
    PADDED,
    WIDE,
    Pass,
    expected,
    ids_of,
    recorder,
    write,
)
from tests.stores.disk_format.runs import flip

STORES = ["device", "host", "disk", "small chunks"]


def make_store(name, path):
    made = {
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
    recording = open_recording(tmp_path / "run", verify=True)
    assert recording.complete
    assert recording.sample_ids == ids_of(joined)
    assert torch.equal(recording.rows["sample"][:], wanted["sample"])
    # Layers' values follow from numbers of samples that are counted by rank.
    samples = [found for part in parts for found in write("host", part).by_sample(WIDE)]
    assert all(map(torch.equal, recording.by_sample(WIDE), samples))
    recording.save(tmp_path / "saved")
    saved = open_recording(tmp_path / "saved")
    assert torch.equal(saved.rows["sample"][:], wanted["sample"])
    assert saved.sample_ids == recording.sample_ids


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
    with pytest.raises(ArgumentError, match="no rows of 1-1"):
        reduced.num_nans("0")


def test_the_frame_counts_rows_where_there_are_some():
    recording = write("host", PADDED)
    frame = recording.to_frame()
    assert frame["samples"].tolist() == [6, 6]
    assert frame["rows"].tolist() == [9, 9]
    assert frame["shape"].tolist() == [(4,), (2,)]
    wide = expected(PADDED)[WIDE].double()
    assert frame.loc["1-1", "mean"] == pytest.approx(float(wide.mean()))
    assert frame.loc["1-1", "std"] == pytest.approx(float(wide.std()))
    rnet = recorder()
    assert "rows" not in rnet.collect([torch.randn(2, 3, 4)]).to_frame()


def test_the_report_tells_rows_from_samples(tmp_path):
    page = write("host", PADDED).report(tmp_path / "page.html").read_text(encoding="utf-8")
    for text in ("0 to 3, 1.5 on average", "<dt>Rows</dt><dd>9</dd>"):
        assert text in page
    page = recorder().collect([torch.randn(2, 3, 4)]).report(tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    assert "<dt>Samples</dt><dd>2</dd>" in text
    assert "<dt>Rows" not in text


def test_without_any_row(tmp_path):
    recording = write(f"disk:{tmp_path}/run", [Pass(range(2), [])])
    page = recording.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "There are no rows." in page
    assert recording.by_sample("0")[1].shape == (0, 4)
    assert recording.to_frame()["rows"].tolist() == [0, 0]
    assert recording.to_arrow().read_all().num_rows == 0
    assert list(recording.loader("0", batch_size=2, with_rows=True)) == []


def test_names_of_somebody_else_do_nothing_to_a_terminal_or_a_page(tmp_path, capsys, monkeypatch):
    evil = "\x1b[31m[bold]<script>\u202e"
    made = expected(PADDED[:1])
    monkeypatch.setattr(
        "tests.recording.rows.tensors_of", lambda rows: {**made, evil: made["token"]}
    )
    recording = write(f"disk:{tmp_path}/run", PADDED[:1])
    assert run(["inspect", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    # A terminal may break the line inside the name.
    assert r"\x1b[31m[bold]<script>\u202e" in "".join(shown.split())
    page = recording.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "\x1b[31m" not in page
    assert "[bold]<script>" not in page


def test_inspect_counts_rows(tmp_path, capsys):
    write(Disk(tmp_path / "run", chunk_bytes=60), GENERATED)
    assert run(["inspect", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 samples, 13 rows (sample, position, token), complete" in shown


@pytest.mark.parametrize(
    ("passes", "store"), [("padded", "host"), ("generated", "disk"), ("many", "disk")]
)
@pytest.mark.parametrize("form", FORMS)
def test_exports_carry_rows(form, passes, store, tmp_path):
    passes = {**ALL_PASSES, "many": MANY}[passes]
    named = [Pass([f"text {number}" for number in ids], rows) for ids, rows in passes]
    place = Disk(tmp_path / "run", chunk_bytes=60) if store == "disk" else store
    exported = export(write(place, named), form, tmp_path / "out")
    wanted = expected(passes)
    names = {WIDE: "1-1_0", NARROW: "1-2_1"}
    for key, tensor in wanted.items():
        assert_exported(exported, names.get(key, key), tensor)
    ids = ids_of(named)
    assert read(exported, "sample_id").tolist() == [ids[at] for at in wanted["sample"]]
    columns = exported.array_keys() if form == "zarr" else exported.column_names
    assert {*columns} == {"sample_id", "1-1_0", "1-2_1", "sample", "position", "token"}


def test_metadata_say_what_is_known_of_rows():
    table = write("host", PADDED).to_arrow()
    about = json.loads(table.schema.metadata[b"scio_recorder"])
    assert about["rows"] == {
        "sample": {"dtype": "int64", "shape": []},
        "position": {"dtype": "int64", "shape": []},
        "token": {"dtype": "int32", "shape": []},
    }
    assert list(about["layers"]) == ["1-1_0", "1-2_1"]


@pytest.mark.parametrize("form", FORMS)
def test_two_columns_of_one_name_are_refused(form, tmp_path, monkeypatch):
    made = expected(PADDED)
    monkeypatch.setattr(
        "tests.recording.rows.tensors_of", lambda rows: {**made, "sample_id": made["token"]}
    )
    recording = write("host", [Pass(range(6), [(0, 0)] * 9)])
    with pytest.raises(ArgumentError, match="'sample_id', which another column"):
        export(recording, form, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_of_rows_is_no_page_and_no_export(tmp_path):
    write(f"disk:{tmp_path}/run", PADDED)
    file = next((tmp_path / "run").glob("chunk-*"))
    flip(file, 8 + int.from_bytes(file.read_bytes()[:8], "little"))
    recording = open_recording(tmp_path / "run")
    assert torch.equal(recording["0"][:], expected(PADDED)[WIDE])
    for act in (
        lambda: recording.report(tmp_path / "page.html"),
        lambda: recording.to_zarr(tmp_path / "arrays"),
        lambda: recording.by_sample("0")[0],
    ):
        with pytest.raises(RecordingError, match="is damaged"):
            act()
    assert {one.name for one in tmp_path.iterdir()} == {"run"}


NUM_ROWS = len(expected(MANY)["sample"])


def made(store, path, passes=MANY):
    return write(Disk(path / "run", chunk_bytes=500) if store == "disk" else store, passes)


@pytest.fixture(params=["host", "disk"])
def recording(request, tmp_path):
    return made(request.param, tmp_path)


def places(known):
    """Where rows are in the recording, by what is unique of each."""
    wanted = expected(MANY)
    numbers = {
        (int(sample), int(position)): place
        for place, (sample, position) in enumerate(
            zip(wanted["sample"], wanted["position"], strict=True)
        )
    }
    pairs = zip(known["sample"].tolist(), known["position"].tolist(), strict=True)
    return [numbers[pair] for pair in pairs]


@pytest.mark.parametrize(
    ("shuffle", "buffer_bytes", "batch_size"),
    [(True, 1, 16), (True, 900, 16), (True, 1 << 20, 1000), (False, 900, 16)],
)
def test_every_row_comes_once_with_what_it_is(recording, shuffle, buffer_bytes, batch_size):
    loader = recording.loader(
        batch_size=batch_size, shuffle=shuffle, buffer_bytes=buffer_bytes, with_rows=True
    )
    wanted, seen = expected(MANY), []
    assert len(loader) == -(-NUM_ROWS // batch_size)
    for batch, known in loader:
        assert list(batch) == [WIDE, NARROW]
        assert list(known) == ["sample", "position", "token"]
        at = places(known)
        seen += at
        for key, found in {**batch, **known}.items():
            assert found.dtype == wanted[key].dtype
            assert torch.equal(found, wanted[key][at])
    assert sorted(seen) == list(range(NUM_ROWS))
    assert (seen == sorted(seen)) is not shuffle


@pytest.mark.parametrize("buffer_bytes", [900, 1 << 20])
def test_the_order_is_the_same_without_what_rows_are(recording, buffer_bytes):
    options = {"batch_size": 16, "shuffle": True, "buffer_bytes": buffer_bytes}
    without = recording.loader("0", **options)
    with_rows = recording.loader("0", **options, with_rows=True)
    for batch, (other, _) in zip(without, with_rows, strict=True):
        assert torch.equal(batch, other)
    # So a state of the one serves the other.
    state = without.state_dict()
    with_rows.load_state_dict({**state, "batches": 2})
    rest = [batch for batch, _ in with_rows]
    assert all(map(torch.equal, rest, list(without)[2:]))


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_state_of_other_rows_is_refused(tmp_path, store):
    # Layers are alike, and what rows are is not.
    first = made(store, tmp_path / "first", [Pass(range(2), [(0, 0), (0, 1), (1, 0)])])
    other = made(store, tmp_path / "other", [Pass(range(2), [(0, 0), (0, 1), (1, 0)])])
    if store == "host":
        other.rows["token"][1] += 1
    state = first.loader("0", batch_size=2).state_dict()
    with pytest.raises(RecordingError, match="of another recording"):
        other.loader("0", batch_size=2).load_state_dict(state)
    first.loader("0", batch_size=2).load_state_dict(state)


def test_samples_are_counted_over_all_ranks(tmp_path):
    for rank in range(2):
        ids = [f"{rank}-{number}" for number in range(6)]
        passes = [Pass(ids, [row for one in PADDED for row in one.rows])]
        write(Disk(tmp_path / "run", rank=rank, world_size=2), passes)
    recording = open_recording(tmp_path / "run")
    for buffer_bytes in (1, 1 << 20):
        loader = recording.loader(
            "0", batch_size=4, shuffle=True, with_rows=True, buffer_bytes=buffer_bytes
        )
        for batch, known in loader:
            number = 100 * (known["sample"] % 6) + known["position"]
            assert torch.equal(batch[:, 0], number.float())
        samples = torch.cat([known["sample"] for _, known in loader])
        assert torch.equal(samples.sort().values, recording.rows["sample"][:])


def test_memory_is_bounded_by_the_buffer(tmp_path, monkeypatch):
    buffer_bytes = 20_000
    rows = [(sample, at) for sample in range(200) for at in range(5)]
    recording = made("disk", tmp_path, [Pass(range(200), rows)])
    held = LoaderMemory(monkeypatch)
    loader = recording.loader(
        "1", batch_size=8, shuffle=True, with_rows=True, buffer_bytes=buffer_bytes
    )
    assert sum(len(batch) for batch, _ in loader) == 1000
    # Two batches, and a number and a place for each row in the buffer.
    row_bytes = 4 + 8 + 8 + 4
    in_all = held.most * (row_bytes + 16) / row_bytes + 2 * 8 * row_bytes
    assert 0.9 * buffer_bytes < in_all <= buffer_bytes
