"""The disk format once more, written from `docs/disk-format.md` alone, with other libraries.

What the package writes is read here, and hostile recordings are put together with it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy
import safetensors.torch
import torch
import xxhash

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 2**20


def digest(data: bytes) -> str:
    return f"{xxhash.xxh3_64(data).intdigest():016x}"


def seal(text: bytes) -> bytes:
    return b'{"xxh3_64":"' + digest(text).encode() + b'","content":' + text + b"}\n"


def unseal(data: bytes) -> Any:
    sealed = json.loads(data)
    text = data[data.index(b'"content":') + 10 : -2]
    assert sealed["xxh3_64"] == digest(text)
    return sealed["content"]


def frame(payload: bytes) -> bytes:
    length = f"{len(payload):08x}"
    return (
        f"{length} {digest(length.encode())[:8]} ".encode()
        + payload
        + (f" {digest(payload)}\n".encode())
    )


def frames(data: bytes) -> list[Any]:
    records = []
    while data:
        length = int(data[:8], 16)
        record, data = data[: length + 36], data[length + 36 :]
        assert record == frame(record[18 : 18 + length])
        records.append(json.loads(record[18 : 18 + length]))
    return records


def read_run(root: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Read a finished recording of one rank, in the slowest way there is."""
    description = unseal((root / "recording.json").read_bytes())
    assert (description["format"], description["version"]) == ("scio-recording", 1)
    names = [name for name, _ in description["layers"]]
    ids: list[Any] = []
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    manifest = unseal((root / "manifest.json").read_bytes())
    for shard in sorted(root.glob("shard-*")):
        journal = (shard / "journal.log").read_bytes()
        assert manifest["shards"][shard.name]["journal_xxh3_64"] == digest(journal)
        for record in frames(journal):
            if record["kind"] == "chunk":
                file = shard / f"chunk-{record['file']['number']:08d}.safetensors"
                check_blocks(file, names, record["file"])
                tensors = safetensors.torch.load_file(file)
                for name in names:
                    parts[name].append(tensors[name])
                span = record["ids"]
                whole = span if isinstance(span, list) else None
                ids += whole or range(span["start"], span["start"] + span["count"])
    return ids, {name: torch.cat(part) for name, part in parts.items()}


def read_kept(root: Path) -> list[tuple[int, Any, list[torch.Tensor]]]:
    """Read what is kept of each batch: its number of samples, a value, and tensors."""
    found = []
    for shard in sorted(root.glob("shard-*")):
        for record in frames((shard / "journal.log").read_bytes()):
            if record["kind"] == "chunk" and record["kept"] is not None:
                kept = record["kept"]
                file = shard / f"chunk-{kept['file']['number']:08d}.safetensors"
                check_blocks(file, [name for name, _ in kept["tensors"]], kept["file"])
                tensors = safetensors.torch.load_file(file)
                texts = [bytes(tensors.pop(f"batch-{i}")) for i in range(len(kept["batches"]))]
                ordered = [tensors[str(i)] for i in range(len(tensors))]
                found += [
                    (count, json.loads(text), ordered)
                    for count, text in zip(kept["batches"], texts, strict=True)
                ]
    return found


def check_blocks(file: Path, names: list[str], entry: Any) -> None:
    data = file.read_bytes()
    assert len(data) == entry["bytes"]
    start = 8 + int(numpy.frombuffer(data, "<u8", 1)[0])
    header = json.loads(data[8:start])
    for name, blocks in zip(names, entry["blocks"], strict=True):
        first, last = (start + offset for offset in header[name]["data_offsets"])
        pieces = [data[i : min(i + BLOCK, last)] for i in range(first, last, BLOCK)]
        assert blocks == "".join(map(digest, pieces))
