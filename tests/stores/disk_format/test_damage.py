"""Whatever happens to a byte on disk: the right data, or a `FormatError` that names the file."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from scio_recorder.stores.disk_format.medium import FormatError
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.disk_format.tensor_file import TensorInfo
from scio_recorder.stores.disk_format.writer import RunWriter
from tests.stores.disk_format import test_kept, test_rows
from tests.stores.disk_format.runs import (
    NUM_SAMPLES,
    check_complete,
    check_contents,
    finish_and_check,
    flip,
    make_run,
)

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
MANIFEST = "manifest-00000.safetensors"
CHUNK = "chunk-00000-0000000"
FILES = ("recording.safetensors", MANIFEST, f"{CHUNK}1.safetensors", "state-00000-*.safetensors")


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
    # Of two states the later one counts.
    return max(found, key=lambda file: file.stat().st_mtime_ns)


def survives(run: Path, file: Path) -> bool:
    """Whether the recording can be read; if not, it must be said why, and of which file."""
    complete = (run / MANIFEST).exists()
    problem = None
    try:
        count = check_contents(run)
    except FormatError as error:
        problem = str(error)
    if problem is not None:
        assert str(run) in problem
        assert file.name in problem
        return False
    assert count == NUM_SAMPLES or not complete
    return True


@pytest.mark.parametrize(
    ("name", "step"),
    [("*.safetensors", 97), *(pytest.param(name, 1, marks=pytest.mark.campaign) for name in FILES)],
)
def test_a_flip_in_any_byte(run, name, step):
    file = find(run, name)
    dice = random.Random(name)
    # Chunk files are the same in both kinds of recordings.
    repeated = name.endswith("tensors") and not (run / MANIFEST).exists()
    for position in range(0, file.stat().st_size, step * (11 if repeated and not FULL else 1)):
        for bit in range(8) if FULL else (dice.randrange(8),):
            flip(file, position, 1 << bit)
            assert not survives(run, file), f"bit {bit} of byte {position} went unnoticed"
            flip(file, position, 1 << bit)
    assert survives(run, file)


@pytest.mark.campaign
@pytest.mark.parametrize("room", [test_rows, test_kept], ids=["rows", "kept batches"])
def test_damage_of_rows_and_of_what_is_kept_of_batches(tmp_path, room):
    run = tmp_path / "run"
    room.write(run)
    file = run / f"{CHUNK}1.safetensors"
    whole = file.read_bytes()
    # The header's padding included.
    for position in [*range(0, len(whole) - 250, 37), *range(len(whole) - 250, len(whole))]:
        flip(file, position, 1 << position % 8)
        with pytest.raises(FormatError, match=r"00000001\.safetensors is damaged"):
            RunReader(run, verify=True)
        if position >= len(whole) - 60:
            with RunReader(run) as reader, pytest.raises(FormatError, match="damaged"):
                room.check(reader)
        flip(file, position, 1 << position % 8)
    for size in (0, 8, 4096, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(FormatError, match="damaged"):
            RunReader(run)
    file.unlink()
    with pytest.raises(FormatError, match="No such file"):
        RunReader(run)


@pytest.mark.parametrize("name", FILES)
def test_truncation_at_any_length(run, name):
    file = find(run, name)
    size = file.stat().st_size
    for length in reversed(range(0, size, 1 if FULL or size < 4096 else 23)):
        os.truncate(file, length)
        assert not survives(run, file), f"{length} bytes of {size} were enough"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tail", [b"\0", b"garbage" * 99], ids=["zero", "garbage"])
def test_bytes_after_the_end(run, name, tail):
    file = find(run, name)
    file.write_bytes(file.read_bytes() + tail)
    assert not survives(run, file)


@pytest.mark.parametrize("name", [name for name in FILES if name != MANIFEST])
def test_a_missing_file(run, name):
    file = find(run, name)
    file.unlink()
    assert not survives(run, file)


def test_without_its_manifest_a_recording_has_all_samples_and_can_be_finished(run):
    find(run, MANIFEST).unlink()
    assert check_contents(run) == NUM_SAMPLES
    finish_and_check(run)


def test_a_missing_end(run):
    # All that tells of the last commit of an unfinished recording is its file.
    find(run, f"{CHUNK}2.safetensors").unlink()
    if (run / MANIFEST).exists():
        with pytest.raises(FormatError, match=r"chunk-00000-00000002\.safetensors: No such file"):
            RunReader(run)
    else:
        assert check_contents(run, with_state=False) == 5


def test_chunks_that_changed_places(run):
    first, second = (find(run, f"{CHUNK}{i}.safetensors") for i in (0, 1))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    with pytest.raises(FormatError, match=r"chunk-00000-00000000.* does not belong here"):
        RunReader(run)


def test_data_of_another_recording(run):
    # Of the same size and header, so that nothing but the data tells.
    file = find(run, f"{CHUNK}0.safetensors")
    data = bytearray(file.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    file.write_bytes(data)
    with RunReader(run) as reader:
        reader.read("1-1", 3, 9)
        with pytest.raises(FormatError, match=r"0000\.safetensors.*do not match their checksum"):
            reader.read("1-1", 2, 4)
        problems = [report.name for report in reader.verify() if report.problem]
    assert problems == [f"{CHUNK}0.safetensors"]
    with pytest.raises(FormatError, match="chunk-00000-00000000"):
        RunReader(run, verify=True)


@pytest.mark.parametrize("name", [f"{CHUNK}1.safetensors", "state-00000-*.safetensors"])
def test_a_file_of_another_recording(run, tmp_path, name):
    other = make_run(tmp_path / "other", finish=False)
    shutil.copy(find(other, name), find(run, name))
    with pytest.raises(FormatError, match=r"safetensors.*does not belong here"):
        check_contents(run)


@pytest.mark.parametrize(
    "change",
    [
        # As it could be written again by a run that was resumed from an older copy.
        lambda file, other: shutil.copy(make_run(other, finish=False) / file.name, file),
        lambda file, other: os.truncate(file, 4096),
    ],
    ids=["replaced", "cut short"],
)
def test_a_chunk_that_changes_while_it_is_read(run, tmp_path, change):
    file = find(run, f"{CHUNK}0.safetensors")
    with RunReader(run) as reader:
        reader.read("1-1", 0, 1)
        change(file, tmp_path / "other")
        with pytest.raises(FormatError, match=r"0000\.safetensors was replaced since"):
            reader.read("1-1", 0, 3)


def test_a_chunk_too_many(run):
    extra = run / f"{CHUNK}9.safetensors"
    shutil.copy(find(run, f"{CHUNK}2.safetensors"), extra)
    if (run / MANIFEST).exists():
        # Whoever put a commit behind the manifest had lost the right, and never reported it.
        assert check_contents(run) == NUM_SAMPLES
        extra.rename(run / f"{CHUNK}3.safetensors")
        check_complete(run)
        return
    with pytest.raises(FormatError, match=r"00000003\.safetensors: No such file"):
        RunReader(run)
    extra.rename(run / f"{CHUNK}3.safetensors")
    with pytest.raises(FormatError, match=r"00000003\.safetensors.*does not belong here"):
        RunReader(run)


def test_a_rank_too_many(run):
    shutil.copy(find(run, f"{CHUNK}0.safetensors"), run / "chunk-00001-00000000.safetensors")
    with pytest.raises(FormatError, match=r"chunk-00001-00000000\.safetensors is out of place"):
        RunReader(run)


def test_flips_in_much_data_and_only_there(tmp_path):
    generator = torch.Generator().manual_seed(0)
    kept = torch.randint(0, 256, (40, 131_072), generator=generator).to(torch.uint8)
    with RunWriter.create(
        tmp_path / "run", layers={"x": TensorInfo((131_072,), torch.uint8)}, header={}
    ) as writer:
        writer.append({"x": kept}, range(40))
    file = find(tmp_path, f"{CHUNK}0.safetensors")
    dice = random.Random(0)
    for _ in range(2000 if FULL else 60):
        position, bit = 4096 + dice.randrange(kept.numel()), 1 << dice.randrange(8)
        flip(file, position, bit)
        # Eight rows share a block with the byte.
        block = (position - 4096) // 2**20 * 8
        with RunReader(tmp_path / "run") as reader:
            row = block + dice.randrange(8)
            with pytest.raises(FormatError, match="chunk-00000-00000000"):
                reader.read("x", row, row + 1)
            for clean in {*range(0, 40, 8)} - {block}:
                assert torch.equal(reader.read("x", clean, clean + 8), kept[clean : clean + 8])
        flip(file, position, bit)
    with RunReader(tmp_path / "run", verify=True) as reader:
        assert torch.equal(reader.read("x", 0, 40), kept)
