"""A recording that was uploaded to the Hugging Face Hub, opened from the cache of the Hub.

A local folder stands in for the Hub: what `upload_folder` would send lies in a cache as
`snapshot_download` lays it out, where each name is a link to a file that is named by its hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, snapshot_download
from torch import nn

from scio_recorder import RecordingError, Tokens, open_recording
from scio_recorder.stores.disk_format.folder import Folder
from tests.recording.nets import recorder_of
from tests.stores.disk_format.runs import flip

REVISION = "0" * 40


def uploaded(folder: Path, cache: Path) -> Path:
    """Put what an upload of a folder sends into a cache, and return its place there."""
    home = cache / "datasets--me--features"
    snapshot = home / "snapshots" / REVISION
    for operation in HfApi()._prepare_upload_folder_additions(folder, path_in_repo=""):
        content = Path(operation.path_or_fileobj).read_bytes()
        blob = home / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        name = snapshot / operation.path_in_repo
        name.parent.mkdir(parents=True, exist_ok=True)
        name.symlink_to(os.path.relpath(blob, name.parent))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    return home


def downloaded(cache: Path) -> str:
    return snapshot_download(
        "me/features", repo_type="dataset", cache_dir=cache, local_files_only=True
    )


def made(folder: Path, **options: object) -> torch.Tensor:
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True)).eval()
    rnet = recorder_of(net, "0", input_size=(1, 8), verbose=0)
    inputs = torch.randn(100, 8)
    rnet.collect(inputs.split(20), store=f"disk:{folder}", **options)
    with torch.no_grad():
        return nn.functional.linear(inputs, net[0].weight, net[0].bias)


def files(folder: Path) -> set[tuple[str, int]]:
    return {(str(one), one.lstat().st_mtime_ns) for one in folder.rglob("*")}


def test_a_recording_is_opened_from_the_cache_as_it_was(tmp_path: Path) -> None:
    right = made(tmp_path / "features")
    home = uploaded(tmp_path / "features", tmp_path / "cache")
    shutil.rmtree(tmp_path / "features")
    before = files(home)
    path = downloaded(tmp_path / "cache")
    recording = open_recording(path, verify=True)
    assert recording.complete
    # Products of other shapes may differ in the last bits.
    torch.testing.assert_close(recording["0"][:], right)
    parts = recording.loader("0", batch_size=30, shuffle=True)
    assert sum(map(len, parts)) == 100
    assert files(home) == before


def test_rows_and_statistics_of_a_page_come_from_the_cache_too(tmp_path: Path) -> None:
    net = nn.Embedding(50, 8)
    batch = {"input": torch.randint(50, (4, 6)), "attention_mask": torch.ones(4, 6).long()}
    rnet = recorder_of(nn.Sequential(net), "0", input_data=batch["input"], verbose=0)
    store = f"disk:{tmp_path / 'features'}"
    rnet.collect([batch], rows=Tokens(), to_inputs=lambda one: one["input"], store=store)
    uploaded(tmp_path / "features", tmp_path / "cache")
    recording = open_recording(downloaded(tmp_path / "cache"))
    assert torch.equal(recording["0"][:], net(batch["input"]).flatten(0, 1))
    recording.report(tmp_path / "page.html")


def test_a_damaged_download_is_noticed(tmp_path: Path) -> None:
    made(tmp_path / "features")
    home = uploaded(tmp_path / "features", tmp_path / "cache")
    blob = max((home / "blobs").iterdir(), key=lambda one: one.stat().st_size)
    flip(blob, -1)
    with pytest.raises(RecordingError):
        open_recording(downloaded(tmp_path / "cache"), verify=True)


def test_no_lock_is_taken_through_a_link(tmp_path: Path) -> None:
    made(tmp_path / "features")
    uploaded(tmp_path / "features", tmp_path / "cache")
    with pytest.raises(OSError, match="symbolic links"):
        Folder(downloaded(tmp_path / "cache")).lock("lock-00000")


@pytest.mark.parametrize("kind", ["link", "pipe", "other name"])
def test_links_to_anything_else_are_not_followed(kind: str, tmp_path: Path) -> None:
    made(tmp_path / "features")
    home = uploaded(tmp_path / "features", tmp_path / "cache")
    snapshot = home / "snapshots" / REVISION
    name = snapshot / "recording.safetensors"
    blob = name.resolve()
    if kind == "other name":
        name.unlink()
        name.symlink_to(os.path.relpath(blob.rename(blob.with_name("blob")), snapshot))
    else:
        blob.rename(tmp_path / "outside")
        blob.symlink_to(tmp_path / "outside") if kind == "link" else os.mkfifo(blob)
    with pytest.raises(RecordingError, match=r"is a link|not a regular file"):
        open_recording(downloaded(tmp_path / "cache"))
