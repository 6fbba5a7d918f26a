"""What the disk format raises comes out as errors of this package."""

from __future__ import annotations

import errno
import pickle
import sys
from pathlib import Path

import pytest
import torch

from scio_recorder import CollectError, RecordingError
from scio_recorder.errors import MissingPackageError
from scio_recorder.stores import files
from scio_recorder.stores.disk_format.medium import ContentError, FormatError
from scio_recorder.stores.disk_format.tensor_file import TensorInfo

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
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
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
