"""Whatever happens to a byte on disk: the right data, or a `RecordingError` that names the file."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import RunReader, RunWriter, TensorSpec
from tests.stores.disk_format.runs import NUM_SAMPLES, check_contents, make_run

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
FILES = ("recording.json", "manifest.json", "journal.log", "chunk-00000002.safetensors")


@pytest.fixture(scope="module", params=["complete", "interrupted"])
def template(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return make_run(folder, finish=request.param == "complete")


@pytest.fixture
def run(template, tmp_path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def find(run: Path, name: str) -> Path:
    found = list(run.rglob(name))
    if not found:
        pytest.skip(f"an interrupted recording has no {name}")
    return found[0]


def survives(run: Path, file: Path) -> bool:
    """Whether the recording can be read; if not, it must be said why, and of which file."""
    complete = (run / "manifest.json").exists()
    problem = None
    try:
        count = check_contents(run)
    except RecordingError as error:
        problem = str(error)
    if problem is not None:
        assert str(run) in problem
        assert file.name in problem or "manifest.json" in problem
        return False
    assert count == NUM_SAMPLES or not complete
    return True


@pytest.mark.parametrize("name", FILES)
def test_a_flip_in_any_byte(run, name):
    file = find(run, name)
    dice = random.Random(name)
    # Chunk files are the same in both kinds of recordings.
    repeated = name.startswith("chunk") and not (run / "manifest.json").exists()
    for position in range(0, file.stat().st_size, 11 if repeated and not FULL else 1):
        for bit in range(8) if FULL else (dice.randrange(8),):
            flip(file, position, 1 << bit)
            assert not survives(run, file), f"bit {bit} of byte {position} went unnoticed"
            flip(file, position, 1 << bit)
    assert survives(run, file)


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_any_length(run, name):
    file = find(run, name)
    if name == "journal.log" and not (run / "manifest.json").exists():
        pytest.skip("may end anywhere, see below")
    size = file.stat().st_size
    for length in reversed(range(0, size, 1 if FULL or size < 4096 else 23)):
        os.truncate(file, length)
        assert not survives(run, file), f"{length} bytes of {size} were enough"


def test_a_journal_may_end_anywhere_while_it_is_written(tmp_path):
    run = make_run(tmp_path / "run", finish=False)
    file = find(run, "journal.log")
    opening = file.read_bytes().index(b"\n") + 1
    counts = set()
    for length in reversed(range(file.stat().st_size)):
        os.truncate(file, length)
        if length < opening:
            assert not survives(run, file)
        else:
            counts.add(check_contents(run, with_state=False))
    assert counts == {0, 3, 5}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tail", [b"\0", b"garbage" * 99], ids=["zero", "garbage"])
def test_bytes_after_the_end(run, name, tail):
    file = find(run, name)
    torn = name == "journal.log" and len(tail) == 1 and not (run / "manifest.json").exists()
    file.write_bytes(file.read_bytes() + tail)
    assert survives(run, file) == torn


@pytest.mark.parametrize("name", ["recording.json", "journal.log", "chunk-00000000.safetensors"])
def test_a_missing_file(run, name):
    file = find(run, name)
    file.unlink()
    assert not survives(run, file)


def test_without_its_manifest_a_finished_recording_is_whole(run):
    find(run, "manifest.json").unlink()
    with RunReader(run) as reader:
        assert reader.complete
    assert check_contents(run) == NUM_SAMPLES


def test_a_missing_shard(run):
    shutil.rmtree(run / "shard-00000-00000")
    if (run / "manifest.json").exists():
        with pytest.raises(RecordingError, match=r"manifest\.json does not match"):
            RunReader(run)


def test_a_shard_that_others_follow_is_missed(template, run):
    if not (run / "manifest.json").exists():
        shard = run / "shard-00000-00000"
        shard.rename(run / "shard-00000-00001")
        with pytest.raises(RecordingError, match="expected shard-00000-00000"):
            RunReader(run)


def test_chunks_that_changed_places(run):
    first, second = (find(run, f"chunk-0000000{i}.safetensors") for i in (0, 2))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    with pytest.raises(RecordingError, match="chunk-00000000"):
        RunReader(run)


def test_a_chunk_of_another_recording(run, tmp_path):
    # Of the same size and header, so that nothing but its data tells.
    file = find(run, "chunk-00000000.safetensors")
    data = bytearray(file.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    file.write_bytes(data)
    with RunReader(run) as reader:
        reader.read("1-1", 3, 9)
        with pytest.raises(RecordingError, match=r"chunk-00000000.*do not match their checksum"):
            reader.read("1-1", 2, 4)
        problems = [report.name for report in reader.verify() if report.problem]
    assert problems == ["shard-00000-00000/chunk-00000000.safetensors"]
    with pytest.raises(RecordingError, match="chunk-00000000"):
        RunReader(run, verify=True)


def test_a_chunk_too_many(run):
    extra = run / "shard-00000-00000" / "chunk-00000099.safetensors"
    shutil.copy(find(run, "chunk-00000000.safetensors"), extra)
    # In an interrupted recording it may have been written and never committed.
    assert survives(run, extra) == (not (run / "manifest.json").exists())


def test_the_journal_of_another_recording(template, run, tmp_path):
    other = make_run(tmp_path / "other", finish=(run / "manifest.json").exists())
    shutil.copy(find(other, "journal.log"), find(run, "journal.log"))
    with pytest.raises(RecordingError, match=r"journal\.log.*does not belong here"):
        RunReader(run)


def test_flips_in_much_data_and_only_there(tmp_path):
    generator = torch.Generator().manual_seed(0)
    kept = torch.randint(0, 256, (40, 131_072), generator=generator).to(torch.uint8)
    with RunWriter.create(
        tmp_path / "run", layers={"x": TensorSpec((131_072,), torch.uint8)}, header={}
    ) as writer:
        writer.append({"x": kept}, range(40))
    file = find(tmp_path, "chunk-00000000.safetensors")
    dice = random.Random(0)
    for _ in range(2000 if FULL else 60):
        position, bit = 4096 + dice.randrange(kept.numel()), 1 << dice.randrange(8)
        flip(file, position, bit)
        # Eight rows share a block with the byte.
        block = (position - 4096) // 2**20 * 8
        with RunReader(tmp_path / "run") as reader:
            row = block + dice.randrange(8)
            with pytest.raises(RecordingError, match="chunk-00000000"):
                reader.read("x", row, row + 1)
            for clean in {*range(0, 40, 8)} - {block}:
                assert torch.equal(reader.read("x", clean, clean + 8), kept[clean : clean + 8])
        flip(file, position, bit)
    with RunReader(tmp_path / "run", verify=True) as reader:
        assert torch.equal(reader.read("x", 0, 40), kept)


def flip(file: Path, position: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        (value,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes([value ^ bit]))


def test_a_file_cut_short_while_it_is_mapped(run):
    file = find(run, "chunk-00000000.safetensors")
    with RunReader(run) as reader:
        reader.read("1-1", 0, 1)
        os.truncate(file, 4096)
        with pytest.raises(RecordingError, match="chunk-00000000"):
            reader.read("1-1", 0, 3)
