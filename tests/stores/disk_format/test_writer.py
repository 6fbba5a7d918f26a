"""What a writer accepts and refuses, and who may write."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import subprocess
import sys
import warnings

import pytest
import torch

from scio_recorder.stores.disk_format import folder as system
from scio_recorder.stores.disk_format.description import holds_recording
from scio_recorder.stores.disk_format.medium import ContentError, FormatError
from scio_recorder.stores.disk_format.reader import Packed, RunReader
from scio_recorder.stores.disk_format.tensor_file import TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.runs import (
    HEADER,
    LAYERS,
    check_complete,
    check_contents,
    make_run,
    rows,
    start,
    write_rest,
)


def create(path, **changes):
    return RunWriter.create(path, **{"layers": LAYERS, "header": HEADER} | changes)


def resume(path):
    return RunWriter.resume(path)


def test_creation_needs_an_empty_folder(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(FormatError, match=r"not empty: it holds 'thesis\.tex'"):
        create(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match=r"file: (is a file, or lies in one|File exists)"):
        create(tmp_path / "file")
    make_run(tmp_path / "run")
    with pytest.raises(FormatError, match="already holds a recording"):
        create(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty").abort()
    create(tmp_path / "deep" / "er" / "run").abort()
    assert holds_recording(tmp_path / "deep" / "er" / "run")


def test_resuming_needs_a_recording_and_leaves_no_trace_elsewhere(tmp_path):
    with pytest.raises(FormatError, match="No such file"):
        resume(tmp_path / "nothing")
    with pytest.raises(FormatError, match="holds no recording"):
        resume(tmp_path)
    assert not holds_recording(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"header": {**HEADER, "fingerprint": "abd"}}, 'fingerprint is "abc" there and "abd" here'),
        ({"header": {**HEADER, "settings": {"every": 1}}}, "settings.scale is stored and was not"),
        ({"header": {**HEADER, "new": 1}}, ": new is not stored"),
        (
            {"layers": {**LAYERS, "1-1": TensorInfo((4,), torch.float32)}},
            r"values\.1-1\.shape is \[3\]",
        ),
        (
            {"layers": {**LAYERS, "1-1": TensorInfo((3,), torch.float16)}},
            r"values\.1-1\.dtype is .*float32",
        ),
        ({"world_size": 3}, "world_size is 2 there and 3 here"),
        ({"layers": {}}, "values.1-1 is stored and was not given; .*; and 1 more"),
    ],
)
def test_joining_needs_the_same_settings(tmp_path, changes, where):
    create(tmp_path, world_size=2).abort()
    with pytest.raises(FormatError, match=f"recorded with other settings.*{where}"):
        create(tmp_path, **{"world_size": 2, "rank": 1} | changes)


def test_types_that_json_takes_for_its_own_are_the_same_settings(tmp_path):
    create(tmp_path, header={"size": (1, 2), "by": {1: None}}, world_size=2).abort()
    create(tmp_path, header={"size": [1, 2], "by": {"1": None}}, world_size=2, rank=1).abort()


def test_what_others_left_is_removed_once_the_manifest_stands(tmp_path):
    make_run(tmp_path, finish=False)
    kept = {path.name for path in tmp_path.iterdir()}
    left = {
        "state-00000-0123456789abcdef.safetensors",
        "chunk-00000-00000003.safetensors.00000-0123456789abcdef.tmp",
        "recording.safetensors.00000-0123456789abcdef.tmp",
    }
    others = {"notes.txt", "chunk-00001-00000003.safetensors.00001-0123456789abcdef.tmp"}
    for name in left | others:
        (tmp_path / name).write_bytes(b"not of this writer")
    resume(tmp_path).abort()
    # They may be of a writer that is alive.
    assert {path.name for path in tmp_path.iterdir()} == kept | left | others
    write_rest(tmp_path, [])
    states = {path.name for path in tmp_path.glob("state-*")}
    names = {path.name for path in tmp_path.iterdir()} - {"manifest-00000.safetensors"}
    assert len(states) == 1
    assert names == {name for name in kept if not name.startswith("state")} | states | others
    check_complete(tmp_path)


def test_where_names_can_not_be_given_exclusively_at_once(tmp_path, monkeypatch):
    def refuse(*arguments):
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(system, "_renameat2", refuse)
    make_run(tmp_path / "run")
    check_complete(tmp_path / "run")
    assert not list(tmp_path.glob("run/*.tmp"))
    with pytest.raises(FormatError, match="already holds"):
        create(tmp_path / "run")


def test_one_writer_at_a_time(tmp_path):
    with create(tmp_path) as writer:
        with pytest.raises(FormatError, match="another writer, which holds lock-00000"):
            resume(tmp_path)
        writer.append(rows(0, 3), range(3))
        # Readers are welcome.
        assert check_contents(tmp_path, with_state=False) == 3
    resume(tmp_path).abort()
    assert (tmp_path / "lock-00000").stat().st_size == 0


def test_a_writer_that_is_dropped_gives_up_its_lock(tmp_path):
    writer = create(tmp_path)
    del writer
    resume(tmp_path).abort()


@pytest.mark.campaign
def test_another_process_is_kept_out_and_a_forked_child_holds_nothing(tmp_path):
    script = (
        "import sys; from tests.stores.disk_format.runs import start\n"
        "try: start(sys.argv[1]).abort()\n"
        "except OSError as error: print(error)\n"
    )
    writer = start(tmp_path)
    output = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "written by another writer" in output.stdout

    ready, wait = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        # The child calls nothing that takes locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            writer.append(rows(0, 3), range(3))
        except FormatError as error:
            os.write(ready[1], str(error).encode())
        os.read(wait[0], 1)
        os._exit(0)
    try:
        assert b"another process opened it" in os.read(ready[0], 1000)
        writer.append(rows(0, 3), range(3))
        writer.abort()
        # As if the writer had been killed while its data loader's worker lives on.
        resume(tmp_path).abort()
    finally:
        os.write(wait[1], b"x")
        os.waitpid(child, 0)
    for descriptor in (*ready, *wait):
        os.close(descriptor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {k: v for k, v in x.items() if k != "label"}, "label is missing, not .*int64"),
        (lambda x: {**x, "9-9": torch.ones(3)}, "9-9 is .*, not one of the recording"),
        (lambda x: {**x, "label": x["label"].int()}, r"label is .*int32, not .*int64"),
        (lambda x: {**x, "label": x["label"][:2]}, r"\(2,\).*, not .*\(3,\).* \(3 sample ids"),
        (lambda x: {**x, "1-1": x["1-1"].view(3, 3, 1)}, r"1-1 is .*\(3, 3, 1\)"),
        (lambda x: {**x, "1-1": x["1-1"].to_sparse()}, "1-1 has no plain memory"),
        (lambda x: {**x, "1-1": x["1-1"].to("meta")}, "1-1 has no plain memory"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    with create(tmp_path) as writer:
        with pytest.raises(ContentError, match=message):
            writer.append(change(rows(0, 3)), range(3))
        writer.append(rows(0, 3), range(3))
    assert check_contents(tmp_path, with_state=False) == 3


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", 1, 2], "integers of 64 bits, or strings"),
        ([0.5, 1, 2], "integers of 64 bits, or strings"),
        ([2**63, 1, 2], "integers of 64 bits, or strings"),
        (["a", "b", "c"], "mixed"),
    ],
)
def test_sample_ids_that_do_not_fit(tmp_path, ids, message):
    with create(tmp_path) as writer:
        writer.append(rows(0, 1), [0])
        with pytest.raises(ContentError, match=message):
            writer.append(rows(1, 4), ids)
        writer.append(rows(1, 3), torch.tensor([1, 2]))
    assert check_contents(tmp_path, with_state=False) == 3


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": float("nan")}, "Out of range float"),
        ({"a": object()}, "not JSON serializable"),
        (torch.ones(2).to_sparse(), "0 has no plain memory"),
        (torch.zeros(2, dtype=torch.bits8), "can't be kept"),
        (eval("[" * 63 + "]" * 63), "deeper than 64"),
    ],
)
def test_state_that_can_not_be_kept(tmp_path, state, message):
    is_tensor = isinstance(state, torch.Tensor)
    state = Packed(None, [state]) if is_tensor else Packed(state, [])
    with create(tmp_path) as writer:
        with pytest.raises(ContentError, match=message):
            writer.append(rows(0, 3), range(3), state=state)
        assert writer.durable == 0
        writer.append(rows(0, 3), range(3), state=Packed({"a": [1, {"b": None}]}, []))
    with RunReader(tmp_path) as reader:
        assert reader.read_state().value == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    "changes",
    [
        {"header": {"a": float("inf")}},
        {"header": {"a": {1, 2}}},
        {"header": {"a": eval("[" * 63 + "]" * 63)}},
        {"layers": {"__metadata__": LAYERS["1-1"]}},
        {"layers": {"#0": LAYERS["1-1"]}},
        {"layers": {"\ud800": LAYERS["1-1"]}},
        {"layers": {"a": TensorInfo((1,), torch.qint8)}},
        {"layers": {"a": TensorInfo((-1,), torch.int8)}},
        {"world_size": 0},
    ],
)
def test_descriptions_that_can_not_be_written(tmp_path, changes):
    with pytest.raises(ContentError):
        create(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_after_finish_and_abort_nothing_is_written(tmp_path):
    writer = create(tmp_path / "a")
    writer.finish()
    writer.abort()
    with pytest.raises(FormatError, match=r"is closed.*resume"):
        writer.append(rows(0, 3), range(3))
    with pytest.raises(FormatError, match=r"is closed.*resume"):
        writer.finish()
    with pytest.raises(FormatError, match=r"is complete$"):
        resume(tmp_path / "a")


def test_files_have_the_modes_of_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        make_run(tmp_path / "run")
    finally:
        os.umask(previous)
    for path in [tmp_path / "run", *tmp_path.glob("run/**/*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o750 if path.is_dir() else 0o640), path


def test_a_rank_that_is_not_there(tmp_path):
    create(tmp_path, world_size=2).abort()
    with pytest.raises(FormatError, match="made for 2 ranks; there is no 2"):
        RunWriter.resume(tmp_path, rank=2)
