"""Chunk files: safetensors files, written from tensors' own memory and read into that of others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from scio_recorder.errors import RecordingError
from scio_recorder.stores.disk_format import system
from scio_recorder.stores.disk_format.checksums import BLOCK_BYTES, DIGITS, block_count, checksum
from scio_recorder.stores.disk_format.faults import accessing
from scio_recorder.stores.disk_format.folder import close_quietly, read_at, write_all
from scio_recorder.stores.disk_format.helper import helped_by
from scio_recorder.stores.disk_format.tables import Table, TensorSpec, encode_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from scio_recorder.stores.disk_format.folder import Folder

__all__ = [
    "ChunkFile",
    "FileEntry",
    "block_checksums",
    "dense",
    "expected_size",
    "memory",
    "spec_of",
    "write_tensors",
]

# So many bytes at a time go to the disk while the next are copied to the system's cache.
_BEHIND_BYTES = 8 << 20
# From so many blocks on, a second thread pays for its start.
_BLOCKS_FOR_TWO = 6


class FileEntry(NamedTuple):
    """What a journal says of a chunk file.

    ``blocks`` holds for each tensor, in the order of the table, the checksums of its blocks of
    `BLOCK_BYTES`, one after the other.
    """

    number: int
    num_bytes: int
    blocks: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name; no two files of a shard ever share one."""
        return f"chunk-{self.number:08d}.safetensors"


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def expected_size(table: Table) -> int:
    """Return how long a file that holds ``table`` is, in bytes."""
    return len(encode_header(table)[0]) + sum(spec.num_bytes for spec in table.values())


def write_tensors(descriptor: int, tensors: Mapping[str, Tensor]) -> int:
    """Write a safetensors file from the tensors' own memory; return its length in bytes."""
    header, offsets = encode_header({name: spec_of(tensor) for name, tensor in tensors.items()})
    write_all(descriptor, header)
    length, begun = len(header), 0
    for name in sorted(tensors, key=offsets.__getitem__):
        data = _bytes_of(tensors[name])
        for start in range(0, len(data), _BEHIND_BYTES):
            piece = data[start : start + _BEHIND_BYTES]
            write_all(descriptor, piece)
            length += len(piece)
            if length - begun >= _BEHIND_BYTES:
                system.write_behind(descriptor, begun, length - begun)
                begun = length
    return length


def block_checksums(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return for each tensor the checksums of its blocks, taken from the tensor itself."""
    return tuple(_checksums(_bytes_of(tensor)) for tensor in tensors.values())


def _checksums(data: memoryview) -> str:
    starts = range(0, len(data), BLOCK_BYTES)
    return "".join(checksum(data[start : start + BLOCK_BYTES]) for start in starts)


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory is what is to be written; itself, if it can be."""
    # A conjugate or negative view reads as its base does until it is resolved.
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes_of(tensor: Tensor) -> memoryview:
    array: NDArray[numpy.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array.data


def memory(num_bytes: int) -> Tensor:
    """Return bytes to read into."""
    # NumPy asks the system for large pages, which are made ready in a part of the time. An array of
    # no bytes would have no stride, and no view of another dtype.
    return torch.from_numpy(numpy.empty(max(1, num_bytes), numpy.uint8))[:num_bytes]


class ChunkFile:
    """A chunk file that is open for reading: its header checked, its data not yet.

    Data is read into the memory in which it is handed out, and checked there: what was checked is
    what the caller gets, whatever happens to the file meanwhile.

    Raises
    ------
    RecordingError
        If the file is not as long as the journal says, or its header is not the one that the
        table determines.
    """

    def __init__(self, folder: Folder, entry: FileEntry, table: Table) -> None:
        self._path = folder.path_of(entry.name)
        header, self._offsets = encode_header(table)
        self._table = table
        with accessing(self._path):
            self._descriptor = folder.open_regular(entry.name)
        # When the last reader lets go of it, which may be after a recording was closed.
        self._finalizer = weakref.finalize(self, close_quietly, self._descriptor)
        try:
            self._check(entry.num_bytes, header)
        except BaseException:
            self._finalizer()
            raise
        self._blocks = dict(zip(table, entry.blocks, strict=True))
        self._verified = {
            name: bytearray(block_count(spec.num_bytes)) for name, spec in table.items()
        }

    def _check(self, num_bytes: int, header: bytes) -> None:
        with accessing(self._path):
            size = system.fstat(self._descriptor).st_size
            if size != num_bytes:
                raise RecordingError(
                    f"{self._path} is damaged: {size} bytes long, {num_bytes} were written"
                )
            if read_at(self._descriptor, 0, len(header)) != header:
                raise RecordingError(f"{self._path} is damaged: its header is not the one written")

    def copy_into(self, out: NDArray[numpy.uint8], name: str, start: int) -> None:
        """Fill ``out`` with the bytes of a tensor from ``start`` on, each block verified once."""
        blocks = range(start - start % BLOCK_BYTES, start + len(out), BLOCK_BYTES)
        remaining = iter(blocks)
        with accessing(self._path):
            if len(blocks) < _BLOCKS_FOR_TWO:
                self._copy_blocks(remaining, out, name, start)
                return
            # Each takes the next block; neither the system nor the checksum holds the other up.
            with helped_by(lambda: self._copy_blocks(remaining, out, name, start)):
                self._copy_blocks(remaining, out, name, start)

    def _copy_blocks(
        self, blocks: Iterator[int], out: NDArray[numpy.uint8], name: str, start: int
    ) -> None:
        stop, length = start + len(out), self._table[name].num_bytes
        for block in blocks:
            end = min(block + BLOCK_BYTES, length)
            low, high = max(start, block), min(stop, end)
            part = out[low - start : high - start]
            if self._verified[name][block // BLOCK_BYTES]:
                self._fill(part, self._offsets[name] + low)
            elif (low, high) == (block, end):
                self._fill_verified(part, name, block)
            else:
                whole = numpy.empty(end - block, numpy.uint8)
                self._fill_verified(whole, name, block)
                part[:] = whole[low - block : high - block]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in memory of its own."""
        spec = self._table[name]
        data = memory(spec.num_bytes)
        self.copy_into(data.numpy(), name, 0)
        return data.view(spec.dtype).view(spec.shape)

    def verify(self) -> None:
        """Check every block that has not been checked yet."""
        scratch = numpy.empty(BLOCK_BYTES, numpy.uint8)
        with accessing(self._path):
            for name, spec in self._table.items():
                for index, known in enumerate(self._verified[name]):
                    start = index * BLOCK_BYTES
                    if not known:
                        self._fill_verified(scratch[: spec.num_bytes - start], name, start)

    def _fill_verified(self, out: NDArray[numpy.uint8], name: str, start: int) -> None:
        first, index = self._offsets[name] + start, start // BLOCK_BYTES
        self._fill(out, first)
        if checksum(out.data) != self._blocks[name][index * DIGITS : (index + 1) * DIGITS]:
            raise RecordingError(
                f"{self._path} is damaged: bytes {first} to {first + len(out)}, in {name!r}, do "
                "not match their checksum"
            )
        self._verified[name][index] = True

    def _fill(self, out: NDArray[numpy.uint8], offset: int) -> None:
        view = out.data
        while view:
            count = system.pread_into(self._descriptor, view, offset)
            if not count:
                raise RecordingError(f"{self._path} is damaged: it ends at byte {offset}")
            view, offset = view[count:], offset + count
