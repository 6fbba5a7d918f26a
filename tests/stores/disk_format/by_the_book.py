"""The disk format once more, written from `docs/disk-format.md` alone, with other libraries.

What the package writes is read here, and hostile recordings are put together with it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import xxhash

BLOCK = 2**20
PAGE = 4096
# Where the checksum of a header stands: behind its length and the text that all begin with.
DIGITS = slice(
    8 + len('{"__metadata__":{"xxh3_64":"'), 8 + len('{"__metadata__":{"xxh3_64":"') + 16
)


def digest(data: bytes) -> str:
    return f"{xxhash.xxh3_64(data).intdigest():016x}"


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Parts(NamedTuple):
    """A file of tensors, taken apart."""

    content: Any
    blocks: str
    entries: dict[str, Any]
    data: bytes


def take_apart(whole: bytes) -> Parts:
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = whole[: 8 + length], whole[8 + length :]
    assert len(header) % PAGE == 0
    assert header[DIGITS].decode() == digest(header[: DIGITS.start] + header[DIGITS.stop :])
    entries = json.loads(header[8:])
    metadata = entries.pop("__metadata__")
    assert list(metadata) == ["xxh3_64", "blocks", "content"]
    assert metadata["blocks"] == blocks_of(data, entries)
    return Parts(json.loads(metadata["content"]), metadata["blocks"], entries, data)


def blocks_of(data: bytes, entries: dict[str, Any]) -> str:
    digits = []
    for entry in entries.values():
        first, last = entry["data_offsets"]
        digits += [digest(data[i : min(i + BLOCK, last)]) for i in range(first, last, BLOCK)]
    return "".join(digits)


def put_together(parts: Parts, *, text: bytes | None = None) -> bytes:
    """Make a file whose checksums are right; ``text`` stands for the content, whatever it is."""
    content = compact(parts.content) if text is None else text
    metadata = {"xxh3_64": "0" * 16, "blocks": parts.blocks, "content": content.decode()}
    header = compact({"__metadata__": metadata, **parts.entries})
    header += b" " * (-(8 + len(header)) % PAGE)
    header = struct.pack("<Q", len(header)) + header
    own = digest(header[: DIGITS.start] + header[DIGITS.stop :]).encode()
    return header[: DIGITS.start] + own + header[DIGITS.stop :] + parts.data


def seal(text: bytes) -> bytes:
    """Make a file without tensors that says this."""
    return put_together(Parts(None, "", {}, b""), text=text)


def unseal(data: bytes) -> Any:
    parts = take_apart(data)
    assert (parts.content["tensors"], parts.entries, parts.data) == ([], {}, b"")
    return parts.content


def rewrite(file: Path, change: Callable[[Any], Any]) -> None:
    """Change what a file says; its checksums are right again."""
    parts = take_apart(file.read_bytes())
    change(parts.content)
    file.write_bytes(put_together(parts))


def chunks_of(root: Path) -> list[tuple[Path, Any]]:
    """Return the commits of a finished recording, in order, and what they say."""
    description = unseal((root / "recording.safetensors").read_bytes())
    by_rows = description["rows"] is not None
    version = 3 if by_rows else 2
    assert (description["format"], description["version"]) == ("scio-recording", version)
    found = []
    for rank in range(description["world_size"]):
        manifest = unseal((root / f"manifest-{rank:05d}.safetensors").read_bytes())
        assert (manifest["run"], manifest["rank"]) == (description["run"], rank)
        before = 0
        for number, checksum in enumerate(manifest["chunks"]):
            file = root / f"chunk-{rank:05d}-{number:08d}.safetensors"
            whole = file.read_bytes()
            assert whole[DIGITS].decode() == checksum
            content = take_apart(whole).content
            place = {"run": description["run"], "rank": rank, "number": number}
            assert place.items() <= content.items()
            assert content["samples_before"] == before
            assert (content["rows"] is not None) == by_rows
            before += len(ids_of(content))
            found.append((file, content))
            said = {key: content[key] for key in ("ids", "rows", "batches", "state")}
            assert manifest["commits"] is None or manifest["commits"][number] == said
        assert manifest["samples"] == before
        assert not (root / f"chunk-{rank:05d}-{len(manifest['chunks']):08d}.safetensors").exists()
    return found


def ids_of(content: Any) -> list[Any]:
    span = content["ids"]
    return span if isinstance(span, list) else [span["start"] + i for i in range(span["count"])]


def read_run(root: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Read a finished recording, in the slowest way there is."""
    description = unseal((root / "recording.safetensors").read_bytes())
    names = [name for name, _ in description["layers"]]
    ids: list[Any] = []
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for file, content in chunks_of(root):
        tensors = safetensors.torch.load_file(file)
        assert [name for name, _ in content["tensors"]][: len(names)] == names
        for name in names:
            parts[name].append(tensors[name])
        ids += ids_of(content)
    return ids, {name: torch.cat(part) for name, part in parts.items()}


def read_rows(root: Path) -> dict[str, torch.Tensor]:
    """Read what the rows of a finished recording are; samples are counted over all ranks."""
    description = unseal((root / "recording.safetensors").read_bytes())
    names = [name for name, _ in description["layers"]]
    columns = [name for name, _ in description["rows"]]
    assert columns[0] == "sample"
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in columns}
    samples_of: dict[int, int] = {}
    for file, content in chunks_of(root):
        tensors = safetensors.torch.load_file(file)
        here = [name for name, _ in content["tensors"]][len(names) :]
        assert here[: len(columns)] == [f"@{name}" for name in columns]
        assert {len(tensors[name]) for name in names + here} == {content["rows"]}
        earlier = sum(count for rank, count in samples_of.items() if rank < content["rank"])
        tensors["@sample"] += earlier
        samples_of[content["rank"]] = content["samples_before"] + len(ids_of(content))
        assert all(tensors["@sample"] < earlier + samples_of[content["rank"]])
        for name in columns:
            parts[name].append(tensors[f"@{name}"])
    return {name: torch.cat(part) for name, part in parts.items()}


def read_kept(root: Path) -> list[tuple[int, Any, list[torch.Tensor]]]:
    """Read what is kept of each batch: its number of samples, a value, and tensors."""
    found = []
    for file, content in chunks_of(root):
        tensors = safetensors.torch.load_file(file)
        kept = [name for name, _ in content["tensors"] if name.startswith("#")]
        ordered = [tensors[name] for name in kept[:-1]]
        assert kept == [*(f"#{i}" for i in range(len(ordered))), "#values"]
        values = json.loads(bytes(tensors["#values"].tolist()))
        found += [
            (rows, value, ordered) for rows, value in zip(content["batches"], values, strict=True)
        ]
    return found


def read_state(root: Path) -> tuple[Any, list[torch.Tensor]]:
    """Read what was committed last besides samples."""
    states = [content["state"] for _, content in chunks_of(root) if content["state"] is not None]
    token = states[-1]["file"]
    if token is None:
        return states[-1]["value"], []
    file = root / f"state-00000-{token}.safetensors"
    names = [name for name, _ in take_apart(file.read_bytes()).content["tensors"]]
    tensors = safetensors.torch.load_file(file)
    return states[-1]["value"], [tensors[name] for name in names]
