"""What the disk format raises comes out as errors of this package."""

from __future__ import annotations

import errno
import itertools
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scio_recorder import CollectError, RecordingError
from scio_recorder.errors import MissingPackageError
from scio_recorder.stores import files
from scio_recorder.stores.disk_format.medium import ContentError, FormatError
from scio_recorder.stores.disk_format.tensor_file import TensorInfo, empty_bytes
from tests.stores.disk_format.runs import flip

LAYERS = {"x": TensorInfo((), torch.int64)}


def written(path: Path) -> Path:
    with files.RunWriter.create(path, layers=LAYERS, header={}) as writer:
        writer.append({"x": torch.arange(3)}, range(3))
        writer.finish()
    return path


def test_every_function_and_method_of_the_border(tmp_path):
    place = written(tmp_path / "run")
    calls = (
        lambda: files.place_of("ftp://somewhere"),
        lambda: files.medium_at(tmp_path / "nothing"),
        lambda: files.holds_recording("s3://user:password@bucket"),
        lambda: files.read_description(files.medium_at(tmp_path)),
        lambda: files.scan(files.medium_at(tmp_path)),
        lambda: files.check_empty(files.medium_at(place.parent)),
        lambda: files.RunReader(tmp_path),
        lambda: files.RunWriter.create(place, layers=LAYERS, header={}),
        lambda: files.RunWriter.resume(place),
    )
    for call in calls:
        with pytest.raises(RecordingError) as caught:
            call()
        assert not isinstance(caught.value, FormatError)
    with pytest.raises(CollectError, match="not JSON"):
        files.RunWriter.create(tmp_path / "new", layers=LAYERS, header={"a": {1}})
    with (
        files.RunWriter.create(tmp_path / "new", layers=LAYERS, header={}) as writer,
        pytest.raises(CollectError, match="x is missing") as caught,
    ):
        writer.append({}, [0])
    assert not isinstance(caught.value, ContentError)
    for use in (lambda: writer.append({"x": torch.arange(1)}, [0]), writer.finish):
        with pytest.raises(RecordingError, match=r"this writer of .* is closed"):
            use()


def test_damage_that_is_found_when_data_is_read(tmp_path):
    file = written(tmp_path) / "chunk-00000-00000000.safetensors"
    reader = pickle.loads(pickle.dumps(files.RunReader(tmp_path)))
    flip(file, -1)
    reader = files.RunReader(tmp_path)
    with pytest.raises(RecordingError, match="do not match their checksum"):
        reader.read("x", 0, 3)
    reader = pickle.loads(pickle.dumps(reader))
    with pytest.raises(RecordingError, match="do not match their checksum"):
        reader.read("x", 0, 3)
    with pytest.raises(RecordingError, match="is damaged"):
        files.RunReader(tmp_path, verify=True)


@pytest.mark.parametrize(
    ("guard", "error", "message", "code"),
    [
        (files.accessing, OSError(errno.ENOSPC, "full"), "there: full", errno.ENOSPC),
        (files.accessing, FormatError("there is bad"), "there is bad", None),
        (files.accessing, RecordingError("as it was"), "as it was", None),
        (files.parsing, KeyError("ids"), "there is damaged: unknown or missing 'ids'", None),
        (files.parsing, FormatError("there is bad"), "there is bad", None),
        (files.parsing, RecordingError("as it was"), "as it was", None),
    ],
)
def test_blocks(guard, error, message, code):
    with pytest.raises(RecordingError) as caught, guard("there"):
        raise error
    assert (str(caught.value), caught.value.errno) == (message, code)
    with pytest.raises(ZeroDivisionError), files.accessing("there"):
        raise ZeroDivisionError


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackageError, match=r"pip install -e .\.\[cloud\]. in a clone"):
        files.medium_at("s3://bucket/run")


class LateCopies:
    """Copies to a GPU, of which each takes effect at some time until it is waited for."""

    def __init__(self, moments: Iterator[bool]) -> None:
        self.moments = moments
        self.events: list[str] = []
        self.begun: list[LateCopy] = []

    def begin(self, place: Tensor, part: Tensor) -> LateCopy:
        self.events.append(f"copy {len(self.begun)}")
        self.begun.append(LateCopy(self, len(self.begun), place, part))
        return self.begun[-1]

    def pass_time(self) -> None:
        self.events.append("read")
        for copy in self.begun[::-1]:
            if next(self.moments):
                copy.synchronize()


@dataclass
class LateCopy:
    copies: LateCopies
    number: int
    place: Tensor
    part: Tensor
    has_ended: bool = False

    def synchronize(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.copies.events.append(f"end {self.number}")
            self.place.copy_(self.part)


@pytest.fixture
def late(request, monkeypatch):
    copies = LateCopies(iter(request.param))
    monkeypatch.setattr(files, "_SPAN_BYTES", 3 << 16)
    monkeypatch.setattr(files, "_COPY_ALONE", ("cpu",))
    monkeypatch.setattr(files, "_pinned_bytes", empty_bytes)
    monkeypatch.setattr(files, "_begin_copy", copies.begin)
    read_into = files.RunReader.read_into

    def read_later(*args: Any) -> None:
        copies.pass_time()
        read_into(*args)

    monkeypatch.setattr(files.RunReader, "read_into", read_later)
    return copies


def rows_on_disk(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return rows on disk, which are read in small parts, and the rows themselves."""
    rows = (torch.arange(3 << 18) % 251).view(-1, 1 << 14).to(dtype)
    layers = {"x": TensorInfo(rows.shape[1:], dtype)}
    with files.RunWriter.create(folder, layers=layers, header={}) as writer:
        for part in rows.split(19):
            writer.append({"x": part}, range(len(part)))
        writer.finish()
    return opened(folder), rows


def opened(folder: Path) -> Tensor:
    reader = files.RunReader(folder)
    reader.span_bytes = 1
    return files.DiskTensor(reader, "x")


NEVER, AT_ONCE = itertools.repeat(False), itertools.repeat(True)


@pytest.mark.parametrize(
    "late", [NEVER, AT_ONCE, itertools.cycle([False, True, False, False, True])], indirect=True
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_rows_on_their_way_to_a_gpu_are_right_whenever_copies_end(late, dtype, tmp_path):
    there, rows = rows_on_disk(tmp_path / "run", dtype)
    for moved, expected in (
        (there.to("cpu"), rows),
        (there.to(device="cpu", non_blocking=True), rows),
        (there.to(torch.float64), rows.double()),
        (there[:5].to("cpu"), rows[:5]),
    ):
        assert type(moved) is Tensor
        assert moved.dtype == expected.dtype
        assert torch.equal(moved, expected)
    assert len(late.begun) >= 12
    assert all(copy.has_ended for copy in late.begun)


@pytest.mark.parametrize("late", [NEVER], indirect=True)
def test_the_next_part_is_read_before_the_copy_of_the_last_has_ended(late, tmp_path):
    rows_on_disk(tmp_path / "run", torch.bool)[0].to("cpu")
    assert late.events == [
        *("read", "copy 0", "read", "copy 1"),
        *("end 0", "read", "copy 2", "end 1", "read", "copy 3"),
        *("end 2", "end 3"),
    ]
    assert len({copy.part.data_ptr() for copy in late.begun}) == 2


@pytest.mark.parametrize("late", [NEVER], indirect=True)
def test_damage_on_the_way_to_a_gpu(late, tmp_path):
    _, rows = rows_on_disk(tmp_path / "run")
    file = max((tmp_path / "run").glob("chunk*"))
    flip(file, -1)
    with pytest.raises(RecordingError, match="do not match their checksum"):
        opened(tmp_path / "run").to("cpu")
    assert late.begun
    flip(file, -1)
    assert torch.equal(opened(tmp_path / "run").to("cpu"), rows)


@pytest.mark.parametrize("late", [NEVER], indirect=True)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_nothing_to_move(late, shape, tmp_path):
    rows = torch.empty(shape)
    layers = {"x": TensorInfo(shape[1:], rows.dtype)}
    with files.RunWriter.create(tmp_path / "run", layers=layers, header={}) as writer:
        writer.append({"x": rows}, range(len(rows)))
        writer.finish()
    assert opened(tmp_path / "run").to("cpu").shape == shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_on_a_gpu(monkeypatch, tmp_path):
    there, rows = rows_on_disk(tmp_path / "run")
    for num_bytes in (1 << 16, 1 << 20, 16 << 20):
        monkeypatch.setattr(files, "_SPAN_BYTES", num_bytes)
        for moved in (there.to("cuda"), there.cuda(), there.to(torch.empty(0, device="cuda"))):
            with torch.cuda.stream(torch.cuda.Stream()):
                assert moved.is_cuda
                assert torch.equal(moved.cpu(), rows)
        half = there.to("cuda", torch.float16)
        assert half.is_cuda
        assert torch.equal(half.cpu(), rows.half())
