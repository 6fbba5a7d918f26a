"""Files of tensors: written from tensors' own memory, read into that of others, and checked.

NOTE [A file that says all about itself]

Each is a safetensors file whose metadata has three texts: the checksum of the header, those of all
blocks of the data, and ``content``, which is JSON: a table of the tensors in torch's words, and
whatever the commit consists of besides. Table and content determine every byte of the header. So a
reader does not believe a header: it writes the header again from what it has parsed, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from json import JSONDecoder
from typing import TYPE_CHECKING, Any

import numpy
import torch

from scio_recorder.errors import RecordingError
from scio_recorder.layer import TensorSpec
from scio_recorder.stores.disk_format import system
from scio_recorder.stores.disk_format.faults import accessing, parsing
from scio_recorder.stores.disk_format.folder import write_at
from scio_recorder.stores.disk_format.helper import helped_by
from scio_recorder.stores.disk_format.jsons import (
    DIGITS,
    JSON,
    MAX_FILE_BYTES,
    checksum,
    dump,
    expect,
    parse,
)
from scio_recorder.stores.disk_format.tables import Table, format_entry, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from scio_recorder.stores.disk_format.folder import Folder


BLOCK_BYTES = 1 << 20
# Where the header fills whole pages the data begins aligned, and is read faster.
_PAGE_BYTES = 4096
# So many bytes at a time go to the disk while the next are copied to the system's cache.
_BEHIND_BYTES = 8 << 20
# From so many blocks on, a second thread pays for its start.
_BLOCKS_FOR_TWO = 6

_BEFORE_CHECKSUM = b'{"__metadata__":{"xxh3_64":"'
_BEFORE_BLOCKS = b'","blocks":"'
_BEFORE_CONTENT = b'","content":'
_CHECKSUM_AT = 8 + len(_BEFORE_CHECKSUM)
_BLOCKS_AT = _CHECKSUM_AT + DIGITS + len(_BEFORE_BLOCKS)


class Layout:
    """How tensors lie in a file, and what stands in front of them; see the NOTE.

    Tensors of wider elements come first, which keeps every one of them aligned.

    Parameters
    ----------
    table : mapping of str to TensorSpec
        What the file holds.
    content : mapping of str to JSON
        What it says besides.
    """

    def __init__(self, table: Table, content: Mapping[str, JSON]) -> None:
        self.table = table
        text = dump({"tensors": to_json(table), **content}).decode()
        # Of each tensor, in the order in the file: where it begins behind the header, and the
        # number of its first block.
        self.starts: dict[str, tuple[int, int]] = {}
        entries: dict[str, JSON] = {}
        end = num_blocks = 0
        for name, spec in sorted(table.items(), key=lambda item: -item[1].dtype.itemsize):
            self.starts[name] = start, _ = end, num_blocks
            end += spec.nbytes
            num_blocks += -(-spec.nbytes // BLOCK_BYTES)
            entries[name] = {**format_entry(spec), "data_offsets": [start, end]}
        rest = _BEFORE_CONTENT + dump(text) + b"}" + (b"," if entries else b"") + dump(entries)[1:]
        num_bytes = _BLOCKS_AT + num_blocks * DIGITS + len(rest)
        self._rest = rest + b" " * (-num_bytes % _PAGE_BYTES)
        self.header_bytes = num_bytes + -num_bytes % _PAGE_BYTES
        self.num_bytes = self.header_bytes + end
        if self.header_bytes > MAX_FILE_BYTES:
            raise ValueError(f"a header of {num_bytes} bytes: commit fewer samples at a time")

    def header(self, blocks: str) -> bytes:
        """Return what precedes the data, given the checksums of all blocks in one text."""
        before = (self.header_bytes - 8).to_bytes(8, "little") + _BEFORE_CHECKSUM
        after = _BEFORE_BLOCKS + blocks.encode("ascii") + self._rest
        return before + checksum(before + after).encode() + after


def _parsed(header: bytes) -> tuple[Layout, str, dict[str, Any]]:
    """Return the layout, the checksums of blocks and the content that a header states."""
    before, after = header[:_CHECKSUM_AT], header[_CHECKSUM_AT + DIGITS :]
    if header != before + checksum(before + after).encode() + after:
        raise ValueError("its header does not match its checksum")
    blocks, _, rest = header[_BLOCKS_AT:].decode("ascii").partition(_BEFORE_CONTENT.decode())
    text, _ = JSONDecoder().raw_decode(rest)
    content = expect(parse(expect(text, str).encode("ascii")), dict)
    layout = Layout(from_json(content.pop("tensors")), content)
    if layout.header(blocks) != header:
        raise ValueError("its header contradicts itself")
    return layout, blocks, content


def checksum_of(header: bytes) -> str:
    """Return the checksum that a header states."""
    return header[_CHECKSUM_AT:][:DIGITS].decode("ascii")


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` for a tensor that is not simply numbers in memory."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        raise ValueError(f"{name} has no plain memory to write; make it an ordinary tensor")


def write_tensors(descriptor: int, tensors: Mapping[str, Tensor], layout: Layout) -> bytes:
    """Write a file from the tensors' own memory; return its header.

    The header is written last. While a block is in the processor's cache for its checksum, it is
    copied to that of the system.
    """
    blocks = []
    begun = done = layout.header_bytes
    for name in layout.starts:
        data = _bytes_of(tensors[name])
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            blocks.append(checksum(block))
            write_at(descriptor, done, block)
            done += len(block)
            if done - begun >= _BEHIND_BYTES:
                system.write_behind(descriptor, begun, done - begun)
                begun = done
    header = layout.header("".join(blocks))
    write_at(descriptor, 0, header)
    return header


def _bytes_of(tensor: Tensor) -> memoryview:
    # A conjugate or negative view reads as its base does until it is resolved.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: NDArray[numpy.uint8] = plain.reshape(-1).view(torch.uint8).numpy()
    return array.data


def memory(num_bytes: int) -> Tensor:
    """Return bytes to read into."""
    # NumPy asks the system for large pages, which are made ready in a part of the time. An array of
    # no bytes would have no stride, and no view of another dtype.
    return torch.from_numpy(numpy.empty(max(1, num_bytes), numpy.uint8))[:num_bytes]


class TensorFile:
    """A file that is open for reading: its header checked, its data not yet.

    Data is read into the memory in which it is handed out, and checked there: what was checked is
    what the caller gets, whatever happens to the file meanwhile.

    Attributes
    ----------
    table : dict of str to TensorSpec
        Its tensors.
    content : dict of str to JSON
        What it says besides.
    checksum : str
        That of its header, and so of all.

    Raises
    ------
    RecordingError
        If the file is not of the length that its header states, or that is damaged.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self.path = folder.path_of(name)
        with parsing(self.path), ExitStack() as stack:
            self._file = folder.open(name)
            self.close = self._file.close
            stack.callback(self.close)
            header = self._read_header()
            self._layout, self._blocks, self.content = _parsed(header)
            if self._file.num_bytes != self.num_bytes:
                raise ValueError(
                    f"{self._file.num_bytes} bytes long, {self.num_bytes} were written"
                )
            stack.pop_all()
        self.checksum = checksum_of(header)
        self.table = self._layout.table
        self._verified = bytearray(len(self._blocks) // DIGITS)

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        return self._layout.num_bytes

    def _read_header(self) -> bytes:
        first = self._file.read(0, _PAGE_BYTES)
        length = 8 + int.from_bytes(first[:8], "little")
        if not _PAGE_BYTES <= length <= MAX_FILE_BYTES:
            raise ValueError(f"its header is said to have {length} bytes")
        return first + self._file.read(_PAGE_BYTES, length - _PAGE_BYTES)

    def copy_into(self, out: NDArray[numpy.uint8], name: str, start: int) -> None:
        """Fill ``out`` with the bytes of a tensor from ``start`` on, each block verified once."""
        blocks = range(start - start % BLOCK_BYTES, start + len(out), BLOCK_BYTES)
        remaining = iter(blocks)
        with accessing(self.path):
            if len(blocks) < _BLOCKS_FOR_TWO:
                self._copy_blocks(remaining, out, name, start)
                return
            # Each takes the next block; neither the system nor the checksum holds the other up.
            with helped_by(lambda: self._copy_blocks(remaining, out, name, start)):
                self._copy_blocks(remaining, out, name, start)

    def _copy_blocks(
        self, blocks: Iterator[int], out: NDArray[numpy.uint8], name: str, start: int
    ) -> None:
        stop, length = start + len(out), self.table[name].nbytes
        offset, first_block = self._layout.starts[name]
        offset += self._layout.header_bytes
        for block in blocks:
            end = min(block + BLOCK_BYTES, length)
            low, high = max(start, block), min(stop, end)
            part, number = out[low - start : high - start], first_block + block // BLOCK_BYTES
            if self._verified[number]:
                self._file.fill(part.data, offset + low)
            elif (low, high) == (block, end):
                self._fill_verified(part, offset + block, number)
            else:
                whole = numpy.empty(end - block, numpy.uint8)
                self._fill_verified(whole, offset + block, number)
                part[:] = whole[low - block : high - block]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in memory of its own."""
        spec = self.table[name]
        data = memory(spec.nbytes)
        self.copy_into(data.numpy(), name, 0)
        return data.view(spec.dtype).view(spec.shape)

    def verify(self) -> None:
        """Check every block."""
        scratch = numpy.empty(BLOCK_BYTES, numpy.uint8)
        with accessing(self.path):
            for name, spec in self.table.items():
                for start in range(0, spec.nbytes, BLOCK_BYTES):
                    part = scratch[: spec.nbytes - start]
                    self._copy_blocks(iter([start]), part, name, start)

    def _fill_verified(self, out: NDArray[numpy.uint8], offset: int, number: int) -> None:
        self._file.fill(out.data, offset)
        if checksum(out.data) != self._blocks[number * DIGITS : (number + 1) * DIGITS]:
            raise RecordingError(
                f"{self.path} is damaged: bytes {offset} to {offset + len(out)} do not match their "
                "checksum"
            )
        self._verified[number] = True
