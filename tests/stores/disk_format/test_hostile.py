"""Somebody else's recording: an error or the data, in bounded time, and nothing else happens."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import RunReader, RunWriter
from tests.stores.disk_format.by_the_book import frame, frames, read_run, seal, unseal
from tests.stores.disk_format.runs import LAYERS, NUM_SAMPLES, make_run, rows

if TYPE_CHECKING:
    from collections.abc import Callable

SHARD = "shard-00000-00000"
TERABYTE = 1 << 40


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def test_a_reader_written_from_the_specification_agrees(tmp_path):
    with RunWriter.create(tmp_path / "run", layers=LAYERS, header={}) as writer:
        writer.append(rows(0, 4), range(4))
    with RunWriter.resume(tmp_path / "run", layers=LAYERS, header={}) as writer:
        writer.append(rows(4, NUM_SAMPLES), [8, 7, 6, 5, 4], state={"x": torch.ones(3)})
        writer.finish()
    ids, tensors = read_run(tmp_path / "run")
    assert ids == [0, 1, 2, 3, 8, 7, 6, 5, 4]
    for name, expected in rows(0, NUM_SAMPLES).items():
        assert torch.equal(tensors[name], expected)


def described(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / "recording.json"
        content = unseal(file.read_bytes())
        file.write_bytes(seal(json.dumps(change(content) or content).encode()))

    return apply


def sealed(text: str) -> Callable[[Path], None]:
    return lambda run: (run / "recording.json").write_bytes(seal(text.encode())) and None


def recorded(index: int, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / SHARD / "journal.log"
        records = frames(file.read_bytes())
        records[index] = change(records[index]) or records[index]
        file.write_bytes(b"".join(frame(json.dumps(record).encode()) for record in records))

    return apply


def journal(data: bytes) -> Callable[[Path], None]:
    return lambda run: (run / SHARD / "journal.log").write_bytes(data) and None


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        file = run / name
        file.rename(run.parent / "outside")
        make(file)

    return apply


def put(key: str, value: Any, inside: str | None = None) -> Callable[[Any], None]:
    return lambda record: (record[inside] if inside else record).update({key: value})


def to_outside(file: Path) -> None:
    file.symlink_to("../" * (2 if file.parent.name == SHARD else 1) + "outside")


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, TERABYTE)


CHUNK = f"{SHARD}/chunk-00000002.safetensors"
JOURNAL = f"{SHARD}/journal.log"
FILES = ("recording.json", JOURNAL, CHUNK)
HOSTILE: dict[str, Callable[[Path], None]] = {
    **{f"link for {name}": replaced(name, to_outside) for name in (*FILES, SHARD)},
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
    "other version": described(put("version", 2)),
    "version as truth": described(put("version", True)),
    "no layers": described(lambda content: content.pop("layers") and None),
    "layers as text": described(put("layers", "abc")),
    "unknown dtype": described(put("layers", [["1-1", {"dtype": "object", "shape": [3]}]])),
    "negative shape": described(put("layers", [["1-1", {"dtype": "int8", "shape": [-3]}]])),
    "huge shape": described(put("layers", [["1-1", {"dtype": "int8", "shape": [1 << 62]}]])),
    "huge shapes": described(put("layers", [["1-1", {"dtype": "int8", "shape": [1 << 40] * 9}]])),
    "many dimensions": described(put("layers", [["1-1", {"dtype": "int8", "shape": [1] * 99}]])),
    "no ranks": described(put("world_size", 0)),
    "endless ranks": described(put("world_size", 1 << 60)),
    "nested record": journal(frame(b"[" * 100_000)),
    "long record": journal(b"7fffffff " + frame(b"")[9:]),
    "text as journal": journal(b"import os; os.mkdir('imported')\n" * 9),
    "binary record": journal(frame(b"\xff\xfe" * 99)),
    "other run": recorded(0, put("run", "0" * 32)),
    "other rank": recorded(0, put("rank", 1)),
    "lost samples": recorded(0, put("samples_before", 7)),
    "unknown record": recorded(1, put("kind", "exec")),
    "skipped record": recorded(1, put("sequence", 2)),
    "record as list": recorded(1, lambda record: [record]),
    "path as number": recorded(1, put("number", "../../outside", "file")),
    "negative number": recorded(1, put("number", -1, "file")),
    "endless number of a file": recorded(1, put("number", 10**30, "file")),
    "file named twice": recorded(2, put("number", 0, "file")),
    "false length": recorded(1, put("bytes", 1 << 62, "file")),
    "no checksums": recorded(1, put("blocks", [], "file")),
    "short checksums": recorded(1, put("blocks", ["", "", "", ""], "file")),
    "no file": recorded(1, put("file", None)),
    "endless samples": recorded(1, put("ids", {"start": 0, "count": 1 << 62})),
    "other samples": recorded(1, put("ids", {"start": 0, "count": 4})),
    "backward samples": recorded(1, put("ids", {"start": 0, "count": -3})),
    "mixed samples": recorded(1, put("ids", [1, "a", 2])),
    "ids as truth": recorded(1, put("ids", [True, False, True])),
    "huge ids": recorded(1, put("ids", [1 << 80, 1, 2])),
    "state as text": recorded(3, put("state", "abc")),
    "state from elsewhere": recorded(3, put("file", {"number": 1}, "state")),
    "closed with fewer": recorded(-1, put("samples", 3)),
}

# Runs in a process of its own: what an audit hook forbids stays forbidden.
GUARDED = """
import os, resource, sys
from scio_recorder.stores.disk_format import RunReader
from scio_recorder.errors import RecordingError

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
    except RecordingError as error:
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
        (paths[name] / "manifest.json").unlink()
        attack(paths[name])
    before = snapshot(folder)
    result = subprocess.run(
        [sys.executable, "-c", GUARDED, *map(str, paths.values())],
        capture_output=True,
        text=True,
        timeout=60,
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
    assert any(name in verdicts[attack] for name in ("recording.json", SHARD))


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


def test_many_shards_open_in_time(tmp_path):
    # Quadratic work would take hours over as many as there may be.
    make_run(tmp_path, finish=False)
    for attempt in range(1, 2000):
        (tmp_path / f"shard-00000-{attempt:05d}").mkdir()
    with RunReader(tmp_path) as reader:
        assert reader.num_samples == NUM_SAMPLES


def test_a_manifest_of_another_kind(tmp_path):
    make_run(tmp_path)
    for text in (b"[]", b'{"run":1}', b"null", b'{"run":{"run":{}}}'):
        (tmp_path / "manifest.json").write_bytes(seal(text))
        with pytest.raises(RecordingError, match=r"manifest\.json does not match"):
            RunReader(tmp_path)
