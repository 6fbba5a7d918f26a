"""What shows and exports a recording says of rows that are not samples."""

from __future__ import annotations

import json

import pytest
import torch

from scio_recorder import open_recording
from scio_recorder.command_line import main as run
from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.stores import Disk
from tests.integrations.test_exporting import FORMS, assert_exported, export, read
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


def test_inspect_verify_and_report(tmp_path, capsys):
    write(Disk(tmp_path / "run", chunk_bytes=60), GENERATED)
    assert run(["inspect", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 samples, 13 rows (sample, position, token), complete" in shown
    assert run(["verify", str(tmp_path / "run")]) == 0
    assert "all checksums match" in capsys.readouterr().out
    assert run(["report", str(tmp_path / "run")]) == 0
    file = next((tmp_path / "run").glob("chunk-*1.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run(["verify", str(tmp_path / "run")]) == 1


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("passes", [*ALL_PASSES, "many"])
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
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    file.write_bytes(data)
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
