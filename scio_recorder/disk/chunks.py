"""Chunk files: safetensors files, written from the tensors' own memory and read through a map."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch

from scio_recorder.disk import system
from scio_recorder.disk.checksums import BLOCK_BYTES, DIGITS, block_count, checksum, new_checksum
from scio_recorder.disk.faults import accessing
from scio_recorder.disk.folder import close_quietly, write_all
from scio_recorder.disk.tables import Table, TensorSpec, encode_header
from scio_recorder.errors import RecordingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from scio_recorder.disk.folder import Folder

__all__ = [
    "ChunkFile",
    "FileEntry",
    "block_checksums",
    "dense",
    "expected_size",
    "spec_of",
    "write_tensors",
]

_PIECE_BYTES = 1 << 18
# So many bytes at a time go to the disk while the next are copied to the system's cache.
_BEHIND_BYTES = 8 << 20


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


class ChunkFile:
    """A chunk file that is open for reading: mapped, its header checked, its data not yet.

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
        self._size = entry.num_bytes
        with accessing(self._path):
            descriptor = folder.open_regular(entry.name)
        try:
            self._check_size(system.fstat(descriptor).st_size)
            self._map = system.map_file(descriptor, self._size)
        finally:
            close_quietly(descriptor)
        self._data = numpy.frombuffer(self._map, numpy.uint8)
        if self._data[: len(header)].tobytes() != header:
            raise RecordingError(f"{self._path} is damaged: its header is not the one written")
        self._blocks = dict(zip(table, entry.blocks, strict=True))
        self._verified = {
            name: bytearray(block_count(spec.num_bytes)) for name, spec in table.items()
        }

    def copy_into(self, out: NDArray[numpy.uint8], name: str, start: int) -> None:
        """Fill ``out`` with the bytes of a tensor from ``start`` on, each block verified once."""
        # Touching a page beyond the end of a file that was cut short kills the process.
        self._check_size(self._map.size())
        stop = start + len(out)
        for block in range(start - start % BLOCK_BYTES, stop, BLOCK_BYTES):
            for begin, piece in self._pieces(name, block):
                low, high = max(start, begin), min(stop, begin + len(piece))
                if low < high:
                    out[low - start : high - start] = piece[low - begin : high - begin]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, in memory of its own."""
        spec = self._table[name]
        out = torch.empty(spec.num_bytes, dtype=torch.uint8)
        self.copy_into(out.numpy(), name, 0)
        return out.view(spec.dtype).view(spec.shape)

    def verify(self) -> None:
        """Check every block that has not been checked yet."""
        self._check_size(self._map.size())
        for name, spec in self._table.items():
            for start in range(0, spec.num_bytes, BLOCK_BYTES):
                for _ in self._pieces(name, start):
                    pass

    def _pieces(self, name: str, start: int) -> Iterator[tuple[int, NDArray[numpy.uint8]]]:
        """Yield the block at ``start`` in pieces, and raise after the last if it is damaged.

        Hashed and copied piece by piece, data comes out of memory once and then out of the cache.
        """
        stop = min(start + BLOCK_BYTES, self._table[name].num_bytes)
        offset = self._offsets[name]
        index = start // BLOCK_BYTES
        if self._verified[name][index]:
            yield start, self._data[offset + start : offset + stop]
            return
        digest = new_checksum()
        for begin in range(start, stop, _PIECE_BYTES):
            piece = self._data[offset + begin : offset + min(stop, begin + _PIECE_BYTES)]
            digest.update(piece.data)
            yield begin, piece
        if digest.hexdigest() != self._blocks[name][index * DIGITS : (index + 1) * DIGITS]:
            raise RecordingError(
                f"{self._path} is damaged: bytes {offset + start} to {offset + stop}, "
                f"in {name!r}, do not match their checksum"
            )
        self._verified[name][index] = True

    def _check_size(self, size: int) -> None:
        if size != self._size:
            raise RecordingError(
                f"{self._path} is damaged: {size} bytes long, {self._size} were written"
            )
