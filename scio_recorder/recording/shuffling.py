"""Rows in random order, in bounded memory, with each block of a file verified once.

NOTE [How rows are shuffled]

Checksums are of blocks, and a disk is fast only in large pieces: a single row would cost a block.
So the rows of each chunk are divided into *runs* of consecutive rows, each read in one go. An epoch
permutes the runs. As many of them as fit fill a buffer, and the rows in it are permuted. If all
rows fit at once, the permutation is one of all rows. Batches are copies of rows of the buffer.

A *place* is the number of a row in the sequence of permuted runs. Every share is a range of places:
a rank's, a worker's within that, a filling of the buffer, a batch. Each follows from the arguments,
the epoch and its own number. So ranks and workers need not communicate, no row is given twice, and
resuming needs only the number of batches that were given: earlier rows are not read again.

Rows in memory are not buffered: only their numbers are, and they are gathered directly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.stores.disk_format.tensor_file import BLOCK_BYTES, memory
from scio_recorder.stores.disk_tensor import DiskTensor, bytes_of_row

# The largest number of bytes read in one go, and the least number of runs in the buffer.
_RUN_BYTES = 4 << 20
_LEAST_RUNS = 64
# If runs end inside blocks, these are read twice, so fewer and longer runs are better.
_ALIGNED_BYTES, _LEAST_ALIGNED_RUNS = 16 << 20, 16
# Besides its bytes, a row costs two numbers: its own, and its place in the buffer.
_NUMBERS_BYTES = 16


def sizes_of(
    layers: Sequence[Tensor], rows: Sequence[Tensor], batch_size: int, buffer_bytes: int
) -> tuple[int, int]:
    """Return the number of rows to read in one go, and that for which a buffer has room.

    Parameters
    ----------
    layers : sequence of Tensor
        The values of each layer in all rows.
    rows : sequence of Tensor
        The columns of rows.
    batch_size : int
        Rows of a batch. The buffer also has room for two: one is made while the caller still has
        the one before.
    buffer_bytes : int
        The limit for everything together.
    """
    row_bytes = max(1, sum(map(bytes_of_row, [*layers, *rows])))
    room = max(0, buffer_bytes - 2 * batch_size * row_bytes)
    run = min(_RUN_BYTES, room // _LEAST_RUNS) // row_bytes
    # A block of every layer begins after each such number of rows. Blocks of narrower columns are
    # longer.
    each = [BLOCK_BYTES // math.gcd(BLOCK_BYTES, max(1, bytes_of_row(one))) for one in layers]
    aligned = max(each)
    if aligned * row_bytes <= min(_ALIGNED_BYTES, room // _LEAST_ALIGNED_RUNS):
        run = max(1, run // aligned) * aligned
    on_disk = [one for one in [*layers, *rows] if isinstance(one, DiskTensor)]
    buffered = sum(map(bytes_of_row, on_disk))
    return max(1, run), max(1, room // (buffered + _NUMBERS_BYTES))


def _bytes_of(rows: Tensor) -> NDArray[numpy.uint8]:
    """Return rows on the host as their bytes, [rows, bytes]."""
    return rows.detach().reshape(len(rows), rows.shape[1:].numel()).view(torch.uint8).numpy()


class Order:
    """The rows at the places of an epoch; see the NOTE.

    Parameters
    ----------
    samples : Tensor
        The values of any layer.
    run : int
        The number of rows that are read in one go.
    key : str, optional
        The seed of the permutation; None for no permutation.
    """

    def __init__(self, samples: Tensor, run: int, key: str | None) -> None:
        self._key = key
        chunks: Sequence[int] = [0, len(samples)]
        if isinstance(samples, DiskTensor):
            chunks = samples.reader.starts
        begins = [torch.arange(a, b, run, device="cpu") for a, b in pairwise(chunks)]
        starts = torch.cat([*begins, torch.tensor([len(samples)], device="cpu")])
        order = self.permutation(len(starts) - 1, "runs")
        self._starts: list[int] = starts[order].tolist()
        # The place at which each run begins.
        self._places: list[int] = [0, *starts.diff()[order].cumsum(0).tolist()]

    def permutation(self, count: int, name: object) -> Tensor:
        """Return numbers from 0 to ``count``, in an order that depends on the name."""
        if self._key is None:
            return torch.arange(count, device="cpu")
        seed = xxhash.xxh3_64_intdigest(f"{self._key} {name}".encode())
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randperm(count, generator=generator, device="cpu")

    def rows(self, places: range) -> Iterator[range]:
        """Yield the rows at places, those of a run together."""
        number, place = bisect_right(self._places, places.start) - 1, places.start
        while place < places.stop:
            end = min(places.stop, self._places[number + 1])
            first = self._starts[number] + place - self._places[number]
            yield range(first, first + end - place)
            number, place = number + 1, end


class Batch(NamedTuple):
    """The numbers of some rows, and the values of each layer in them."""

    rows: Tensor
    values: list[Tensor]


def batches_of(
    columns: Sequence[Tensor], order: Order, own: range, room: int, batch_size: int, begun: int
) -> Iterator[Batch]:
    """Yield rows batch by batch.

    Parameters
    ----------
    columns : sequence of Tensor
        The values of each layer in all rows, in memory or on disk.
    order : Order
        The order of the rows.
    own : range
        The places to be given.
    room : int
        The number of rows for which a buffer has room.
    batch_size : int
        The number of rows of a batch.
    begun : int
        The number of rows that were given already, which are whole batches.
    """
    # No batch has rows of two fillings.
    size = len(own) if len(own) <= room else max(1, room // batch_size) * batch_size
    buffers: list[Tensor | None] = []
    for column in columns:
        if isinstance(column, DiskTensor):
            column.reader.distrust()
            buffers.append(memory(min(size, len(own)) * bytes_of_row(column)))
        else:
            buffers.append(None)
    for start in range(begun - begun % size, len(own), size):
        span = own[start : start + size]
        pieces = list(order.rows(span))
        slots = order.permutation(len(span), span.start)
        rows = torch.cat([torch.arange(one.start, one.stop, device="cpu") for one in pieces])[slots]
        held = [
            None if buffer is None else _read(column, pieces, buffer)
            for column, buffer in zip(columns, buffers, strict=True)
        ]
        for at in range(max(0, begun - start), len(span), batch_size):
            some = slice(at, at + batch_size)
            values = [
                _gathered(column, rows[some]) if read is None else _gathered(read, slots[some])
                for column, read in zip(columns, held, strict=True)
            ]
            yield Batch(rows[some].clone(), values)
            # The caller may have dropped them.
            del values


def _read(column: Tensor, pieces: Sequence[range], buffer: Tensor) -> Tensor:
    """Read rows of a column on disk into a buffer, one after the other."""
    assert isinstance(column, DiskTensor)
    row_bytes, count, out = bytes_of_row(column), sum(map(len, pieces)), buffer.numpy()
    shape = (count, *column.shape[1:])
    if not row_bytes:
        return torch.empty(shape, dtype=column.dtype, device="cpu")
    slot = 0
    for piece in pieces:
        end = slot + len(piece) * row_bytes
        column.reader.read_into(out[slot:end], column.layer, piece.start)
        slot = end
    return buffer[:slot].view(column.dtype).view(shape)


def _gathered(values: Tensor, rows: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.index_select(0, rows.to(values.device))
    out = torch.empty(len(rows), *values.shape[1:], dtype=values.dtype, device="cpu")
    # Bytes, since torch gathers not all dtypes.
    numpy.take(_bytes_of(values), rows.numpy(), 0, _bytes_of(out), mode="clip")
    return out
