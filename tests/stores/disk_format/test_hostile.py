"""Somebody else's recording: an error or the data, in bounded time, and nothing else happens."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scio_recorder.stores.disk_format.medium import FormatError
from scio_recorder.stores.disk_format.reader import Packed, RunReader
from scio_recorder.stores.disk_format.tensor_file import MAX_DEPTH, as_read, dump, parse
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format.by_the_book import (
    compact,
    put_together,
    read_run,
    read_state,
    rewrite,
    seal,
    take_apart,
    unseal,
)
from tests.stores.disk_format.runs import LAYERS, NUM_SAMPLES, make_run, rows

TERABYTE = 1 << 40


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def test_a_reader_written_from_the_specification_agrees(tmp_path):
    with RunWriter.create(tmp_path / "run", layers=LAYERS, header={}) as writer:
        writer.append(rows(0, 4), range(4))
    with RunWriter.resume(tmp_path / "run") as writer:
        state = Packed({"x": 0}, [torch.ones(3)])
        writer.append(rows(4, NUM_SAMPLES), [8, 7, 6, 5, 4], state=state)
        writer.finish()
    ids, tensors = read_run(tmp_path / "run")
    assert ids == [0, 1, 2, 3, 8, 7, 6, 5, 4]
    for name, expected in rows(0, NUM_SAMPLES).items():
        assert torch.equal(tensors[name], expected)
    value, (tensor,) = read_state(tmp_path / "run")
    assert value == {"x": 0}
    assert torch.equal(tensor, torch.ones(3))


def described(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda run: rewrite(run / "recording.safetensors", change)


def sealed(text: str) -> Callable[[Path], None]:
    return lambda run: (run / "recording.safetensors").write_bytes(seal(text.encode())) and None


def committed(number: int, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda run: rewrite(run / f"{CHUNK}{number}.safetensors", change)


def said(text: bytes) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / f"{CHUNK}1.safetensors"
        file.write_bytes(put_together(take_apart(file.read_bytes()), text=text))

    return apply


def entered(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change the entries of a chunk, as safetensors reads them."""

    def apply(run: Path) -> None:
        file = run / f"{CHUNK}1.safetensors"
        parts = take_apart(file.read_bytes())
        change(parts.entries)
        file.write_bytes(put_together(parts))

    return apply


def chunk(data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / f"{CHUNK}1.safetensors").write_bytes(data) and None


def listed(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / "manifest-00000.safetensors"
        content = unseal((run.parents[1] / "honest" / "run" / file.name).read_bytes())
        content["run"] = unseal((run / "recording.safetensors").read_bytes())["run"]
        change(content)
        file.write_bytes(seal(compact(content)))

    return apply


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / name
        file.rename(run.parent / "outside")
        make(file)

    return apply


def put(key: str, value: Any, inside: str | None = None) -> Callable[[Any], None]:
    return lambda record: (record[inside] if inside else record).update({key: value})


def to_outside(file: Path) -> None:
    file.symlink_to("../outside")


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, TERABYTE)


CHUNK = "chunk-00000-0000000"
FILES = ("recording.safetensors", f"{CHUNK}1.safetensors")
HOSTILE: dict[str, Callable[[Path], None]] = {
    **{f"link for {name}": replaced(name, to_outside) for name in FILES},
    **{f"pipe for {name}": replaced(name, os.mkfifo) for name in FILES},
    **{f"folder for {name}": replaced(name, os.mkdir) for name in FILES},
    **{f"terabyte for {name}": replaced(name, sparse) for name in FILES},
    **{
        f"pickle for {name}": replaced(name, lambda file: file.write_bytes(pickle.dumps(Bomb())))
        for name in FILES
    },
    "nested description": sealed('{"format":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "endless number": sealed('{"format":' + "9" * 100_000 + "}"),
    "not a number": described(put("header", {"a": float("nan")})),
    "repeated key": sealed('{"format":"scio-recording","format":"scio-recording"}'),
    "not an object": sealed("[1]"),
    "other version": described(put("version", 3)),
    "version as truth": described(put("version", True)),
    "no layers": described(lambda content: content.pop("layers")),
    "layers as text": described(put("layers", "abc")),
    "unknown dtype": described(put("layers", [["1-1", {"dtype": "object", "shape": [3]}]])),
    "negative shape": described(put("layers", [["1-1", {"dtype": "int8", "shape": [-3]}]])),
    "huge shape": described(put("layers", [["1-1", {"dtype": "int8", "shape": [1 << 62]}]])),
    "huge shapes": described(put("layers", [["1-1", {"dtype": "int8", "shape": [1 << 40] * 9}]])),
    "many dimensions": described(put("layers", [["1-1", {"dtype": "int8", "shape": [1] * 99}]])),
    "no ranks": described(put("world_size", 0)),
    "endless ranks": described(put("world_size", 1 << 60)),
    "nested content": said(b"[" * 100_000 + b"]" * 100_000),
    "endless number in a commit": said(b'{"tensors":' + b"9" * 100_000 + b"}"),
    "content as list": said(b"[1]"),
    "content with spaces": said(b'{"tensors": []}'),
    "long header": chunk(b"\0\0\0\0\1\0\0\0" + b"{}" * 9999),
    "no header": chunk(bytes(8192)),
    "text as chunk": chunk(b"import os; os.mkdir('imported')\n" * 900),
    "binary chunk": chunk(b"\xff\xfe" * 9999),
    "other run": committed(0, put("run", "0" * 32)),
    "other rank": committed(0, put("rank", 1)),
    "lost samples": committed(0, put("samples_before", 7)),
    "other number": committed(1, put("number", 2)),
    "no number": committed(1, lambda content: content.pop("number")),
    "tensors of other shape": committed(
        1, lambda content: content["tensors"][0][1].update(shape=[9])
    ),
    "tensors of huge shape": committed(
        1, lambda content: content["tensors"][0][1].update(shape=[1 << 40] * 9)
    ),
    "tensors as text": committed(1, put("tensors", "abc")),
    "tensor twice": committed(1, lambda content: content["tensors"].append(content["tensors"][0])),
    "tensor too many": committed(
        1, lambda content: content["tensors"].append(["x", {"dtype": "int8", "shape": [0]}])
    ),
    "entries overlap": entered(lambda entries: entries["1-1"].update(data_offsets=[0, 24])),
    "entries beyond the end": entered(
        lambda entries: entries["1-1"].update(data_offsets=[0, 1 << 62])
    ),
    "entry of another dtype": entered(lambda entries: entries["1-1"].update(dtype="I32")),
    "endless samples": committed(1, put("ids", {"start": 0, "count": 1 << 62})),
    "other samples": committed(1, put("ids", {"start": 0, "count": 4})),
    "backward samples": committed(1, put("ids", {"start": 0, "count": -3})),
    "mixed samples": committed(1, put("ids", [1, "a"])),
    "ids as truth": committed(1, put("ids", [True, False])),
    "huge ids": committed(1, put("ids", [1 << 80, 1])),
    "strings and numbers": committed(1, put("ids", ["a", "b"])),
    "state as text": committed(2, put("state", "abc")),
    "state from elsewhere": committed(2, put("file", "../../outside", "state")),
    "state as number": committed(2, put("file", 7, "state")),
    "state without a value": committed(2, put("state", {"file": None})),
    "state that is not there": committed(2, put("file", "0" * 16, "state")),
    "listed with fewer": listed(put("samples", 3)),
    "listed with more": listed(lambda content: content["chunks"].append("0" * 16)),
    "listed endlessly": listed(put("chunks", ["0" * 16] * 700_000)),
    "listed as text": listed(put("chunks", "abc")),
}

# Runs in a process of its own: what an audit hook forbids stays forbidden.
GUARDED = """
import os, resource, sys
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.medium import FormatError

def attempt(path):
    with RunReader(path, verify=True) as reader:
        for layer in reader.layers:
            reader.read(layer, 0, min(9, reader.num_samples))
        reader.read_state()

allowed = {sys.argv[1]: None}
def watch(event, arguments):
    head = event.split(".")[0]
    if head in {"import", "exec", "compile", "subprocess", "socket", "pickle", "ctypes", "shutil"}:
        os._exit(90)
    if head == "os" and event not in {"os.listdir", "os.scandir"}:
        os._exit(91)
    if event == "open":
        path, mode, flags = arguments
        name = os.fspath(path)
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            os._exit(92)
        if name != allowed["run"] and ("/" in name or not flags & os.O_NOFOLLOW):
            os._exit(93)

allowed["run"] = sys.argv[1]
attempt(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.addaudithook(watch)
for path in sys.argv[1:]:
    allowed["run"] = path
    try:
        attempt(path)
        problem = "none"
    except FormatError as error:
        problem = str(error)
    print(path, problem, sep="\\t")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("grown", (after - before) // 1024, sep="\\t")
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hostile")
    make_run(folder / "honest" / "run")
    paths = {"honest": folder / "honest" / "run"}
    for index, (name, attack) in enumerate(HOSTILE.items()):
        paths[name] = folder / str(index) / "run"
        shutil.copytree(paths["honest"], paths[name])
        # The manifest would give most of them away.
        (paths[name] / "manifest-00000.safetensors").unlink()
        attack(paths[name])
    before = snapshot(folder)
    result = subprocess.run(
        [sys.executable, "-c", GUARDED, *map(str, paths.values())],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=False,
    )
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])
    assert snapshot(folder) == before
    lines = dict(line.split("\t", 1) for line in result.stdout.splitlines())
    return {"grown": lines["grown"], **{name: lines[str(path)] for name, path in paths.items()}}


def snapshot(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def test_an_honest_recording_is_read_under_guard(verdicts):
    assert verdicts["honest"] == "none"


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_recording_is_refused(verdicts, attack):
    assert verdicts[attack] != "none"
    names = ("recording.safetensors", "chunk-00000", "state-00000", "manifest-00000", "mixed")
    assert any(name in verdicts[attack] for name in names)


def test_hostile_recordings_take_little_memory(verdicts):
    # MiB, at its highest, over all of them.
    assert int(verdicts["grown"]) < 100


def test_rows_without_bytes_take_no_memory(tmp_path):
    layers = {"nothing": LAYERS["nothing"]}
    with RunWriter.create(tmp_path, layers=layers, header={}) as writer:
        writer.append({"nothing": torch.empty(1 << 40, 0, 4).half()}, range(1 << 40))
    with RunReader(tmp_path, verify=True) as reader:
        assert reader.num_samples == len(reader.sample_ids) == 1 << 40
        assert reader.read("nothing", 5, 1 << 39).shape == ((1 << 39) - 5, 0, 4)
        assert reader.sample_ids[1 << 39] == 1 << 39


def test_many_chunks_open_in_time(tmp_path):
    # Quadratic work would take minutes over as many.
    with RunWriter.create(tmp_path, layers={}, header={}) as writer:
        for number in range(2000):
            writer.append({}, [number])
    with RunReader(tmp_path) as reader:
        assert reader.sample_ids == list(range(2000))


def test_a_number_that_no_writer_comes_to_is_no_work(tmp_path):
    make_run(tmp_path, finish=False)
    (tmp_path / "chunk-00000-99999999.safetensors").touch()
    with pytest.raises(FormatError, match=r"00000003\.safetensors: No such file"):
        RunReader(tmp_path)


def test_a_manifest_of_another_kind(tmp_path):
    make_run(tmp_path)
    for text in (b"[]", b'{"run":1}', b"null", b'{"chunks":[]}'):
        (tmp_path / "manifest-00000.safetensors").write_bytes(seal(text))
        with pytest.raises(FormatError, match=r"manifest-00000\.safetensors"):
            RunReader(tmp_path)


# Signs that mean something outside a text, and those that hide others inside one.
TEXTS = st.text(alphabet='[]{}"\\,: \n\u00e9', max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(MAX_DEPTH - 6, MAX_DEPTH + 1))
def test_what_is_nested_too_deeply_is_refused_and_nothing_else(value, around):
    # Enough brackets that they are looked at.
    value = [value, ["]"] * 9, {'"': "[{" * MAX_DEPTH}, [[]] * MAX_DEPTH]
    for _ in range(around):
        value = [value]
    if depth(value) > MAX_DEPTH:
        with pytest.raises(ValueError, match="nested deeper"):
            dump(value)
        with pytest.raises(ValueError, match="nested deeper"):
            parse(json.dumps(value, separators=(",", ":")).encode())
    else:
        assert parse(dump(value)) == value


def test_tuples_are_nested_as_lists_are():
    value: Any = ()
    for _ in range(MAX_DEPTH - 1):
        value = (value,)
    assert as_read(value) == json.loads(json.dumps(value))
    with pytest.raises(ValueError, match="nested deeper"):
        dump((value,))
