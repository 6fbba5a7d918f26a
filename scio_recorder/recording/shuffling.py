"""Rows in random order, in bounded memory, with each block of a file verified once.

NOTE [How rows are shuffled]

Checksums are of blocks, and a disk is fast only in large pieces: a single row would cost a block.
So the rows of each chunk are divided into *runs* of consecutive rows, each read in one go. An epoch
permutes the runs. As many of them as fit fill one half of a buffer, and the rows in it are
permuted; the other half is filled meanwhile. If all rows fit at once, the whole buffer is filled
once, and the permutation is one of all rows. Rows go from the processor's cache straight to their
place in a batch: each is written once, and batches are parts of the buffer.

A *place* is the number of a row in the sequence of permuted runs. Every share is a range of places:
a rank's, a worker's within that, a filling of the buffer, a batch. Each follows from the arguments,
the epoch and its own number. So ranks and workers need not communicate, no row is given twice, and
resuming needs only the number of batches that were given: earlier rows are not read again.

Rows in memory are not buffered: only their numbers are, and they are gathered directly.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.stores.disk_format.tensor_file import BLOCK_BYTES, memory
from scio_recorder.stores.disk_tensor import DiskTensor, bytes_of_row

if TYPE_CHECKING:
    from typing import Self

# The largest number of bytes read in one go, and the least number of runs in a half of the buffer.
_RUN_BYTES = 4 << 20
_LEAST_RUNS = 32
# If runs end inside blocks, these are read twice, so fewer and longer runs are better.
_ALIGNED_BYTES, _LEAST_ALIGNED_RUNS = 16 << 20, 8
# Besides its bytes, a row costs two numbers: its own, and its place in the buffer.
_NUMBERS_BYTES = 16
# One for each of two cores; while batches are used, reading waits for the disk.
_THREADS = 2


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
    room = buffer_bytes - 2 * batch_size * row_bytes
    half = max(0, room) // 2
    run = min(_RUN_BYTES, half // _LEAST_RUNS) // row_bytes
    # A block of every layer begins after each such number of rows. Blocks of narrower columns are
    # longer.
    each = [BLOCK_BYTES // math.gcd(BLOCK_BYTES, max(1, bytes_of_row(one))) for one in layers]
    aligned = max(each)
    if aligned * row_bytes <= min(_ALIGNED_BYTES, half // _LEAST_ALIGNED_RUNS):
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

    @property
    def is_random(self) -> bool:
        """Whether rows are permuted at all."""
        return self._key is not None

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


class _Memory:
    """Memory for rows, which can be used again once no batch is part of it.

    Parameters
    ----------
    num_bytes : int
        The size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.data = memory(num_bytes).numpy()
        self._alone = self._references()

    @property
    def is_free(self) -> bool:
        """Whether nobody holds a batch in it: each batch refers to the array that it is part of."""
        return self._references() == self._alone

    def _references(self) -> int:
        return sys.getrefcount(self.data)


class _Column:
    """The rows of a layer on disk, in the order in which they are given.

    Parameters
    ----------
    samples : DiskTensor
        The layer.
    places : Tensor or None
        The target of each row, in the order of reading; None for that order itself.
    memory : _Memory
        The memory for them.
    """

    def __init__(self, samples: DiskTensor, places: Tensor | None, memory: _Memory) -> None:
        self._samples = samples
        self._row_bytes = bytes_of_row(samples)
        self._places = None if places is None else places.numpy()
        self._memory = memory

    def rows(self, start: int, count: int) -> Tensor:
        """Return some rows as a separate tensor, which is saved without the others."""
        begin, end = start * self._row_bytes, (start + count) * self._row_bytes
        shape, dtype = (count, *self._samples.shape[1:]), self._samples.dtype
        if begin == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.from_numpy(self._memory.data[begin:end]).view(dtype).view(shape)

    def jobs(self, pieces: Sequence[range]) -> Iterator[Callable[[], None]]:
        """Yield functions that read rows into this memory, which can run in any thread.

        Rows that may share a block are one job: two threads would both verify the block.
        """
        slots = accumulate(map(len, pieces), initial=0)
        placed = sorted(zip(pieces, slots, strict=False), key=lambda pair: pair[0].start)
        job: list[tuple[range, int]] = []
        for piece, slot in placed:
            if job and self._block_of(piece[0]) > self._block_of(job[-1][0][-1], at_end=True):
                yield partial(self._read, job)
                job = []
            job.append((piece, slot))
        yield partial(self._read, job)

    def _block_of(self, row: int, *, at_end: bool = False) -> tuple[int, int]:
        """Return the numbers of the chunk and of the block in which a row begins, or ends."""
        starts = self._samples.reader.starts
        chunk = bisect_right(starts, row) - 1
        byte = (row - starts[chunk] + at_end) * self._row_bytes - at_end
        return chunk, byte // BLOCK_BYTES

    def _read(self, job: Sequence[tuple[range, int]]) -> None:
        size, read = self._row_bytes, self._samples.reader.read_into
        data = self._memory.data
        for piece, slot in job if size else ():
            if self._places is None:
                read(data[slot * size :][: len(piece) * size], self._samples.layer, piece.start)
                continue
            # Small pieces stay in the processor's cache until they are put in their places.
            step = max(1, self._samples.reader.span_bytes // size)
            passing = numpy.empty(min(step, len(piece)) * size, numpy.uint8)
            for begin in range(0, len(piece), step):
                count = min(step, len(piece) - begin)
                read(passing[: count * size], self._samples.layer, piece.start + begin)
                places = self._places[slot + begin : slot + begin + count]
                # Rows of bytes as elements; in this form numpy lets other threads run meanwhile.
                data.view(f"V{size}")[places] = passing[: count * size].view(f"V{size}")


@dataclass
class _Filling:
    """Rows that are in the buffer at once, in the order in which they are given.

    Parameters
    ----------
    begin : int
        The number of rows in earlier fillings.
    rows : Tensor
        Their numbers.
    columns : sequence
        The rows of each layer on disk, and all values of a layer in memory.
    """

    begin: int
    rows: Tensor
    columns: Sequence[_Column | Tensor]

    def batch(self, at: int, count: int) -> Batch:
        """Return rows from ``at`` on."""
        rows = self.rows[at : at + count].clone()
        values = [
            column.rows(at, count) if isinstance(column, _Column) else _gathered(column, rows)
            for column in self.columns
        ]
        return Batch(rows, values)


def _gathered(samples: Tensor, rows: Tensor) -> Tensor:
    if samples.device.type != "cpu":
        return samples.index_select(0, rows.to(samples.device))
    out = torch.empty(len(rows), *samples.shape[1:], dtype=samples.dtype, device="cpu")
    # Torch's threads would wait for each other, and for the reading ones.
    numpy.take(_bytes_of(samples), rows.numpy(), 0, _bytes_of(out), mode="clip")
    return out


class Buffer:
    """Reads as many rows in advance as fit; for use in a ``with`` statement.

    Parameters
    ----------
    layers : sequence of Tensor
        The values of each layer, all in memory or all on disk.
    order : Order
        The order of the rows.
    own : range
        The places to be given.
    room : int
        The number of rows that fit.
    batch_size : int
        The number of rows that are given at a time.
    """

    def __init__(
        self, layers: Sequence[Tensor], order: Order, own: range, room: int, batch_size: int
    ) -> None:
        self._layers = layers
        self._on_disk = [samples for samples in layers if isinstance(samples, DiskTensor)]
        self._order = order
        self._own = own
        self._batch_size = batch_size
        # No batch has rows of two fillings.
        half = max(1, room // 2 // batch_size) * batch_size
        self._size = max(1, len(own) if len(own) <= room else min(half, len(own)))
        self._pool = ThreadPoolExecutor(_THREADS, "scio-loader")
        self._memories: dict[tuple[int, int], _Memory] = {}
        # The rows that are still to be read.
        self._jobs: deque[Callable[[], None]] = deque()

    def __enter__(self) -> Self:
        for samples in self._on_disk:
            samples.reader.distrust()
        return self

    def __exit__(self, *details: object) -> None:
        self._jobs.clear()
        self._pool.shutdown()

    def batches(self, begun: int) -> Iterator[Batch]:
        """Yield the batches after this many rows, which are whole batches."""
        last = (len(self._own) - 1) // self._size
        coming: tuple[_Filling, list[Future[None]]] | None = self._begin(begun // self._size)
        for number in range(begun // self._size, last + 1):
            assert coming is not None, "begun after the first batch of the one before"
            (filling, reading), coming = coming, None
            for future in reading:
                future.result()
            for at in range(begun - filling.begin, len(filling.rows), self._batch_size):
                yield filling.batch(at, min(self._batch_size, len(filling.rows) - at))
                # The caller has dropped the batch before, and so its filling's memory.
                if coming is None and number < last:
                    coming = self._begin(number + 1)
            begun = filling.begin + len(filling.rows)

    def _begin(self, number: int) -> tuple[_Filling, list[Future[None]]]:
        begin = number * self._size
        span = self._own[begin : begin + self._size]
        pieces = list(self._order.rows(span))
        rows = torch.cat([torch.arange(one.start, one.stop, device="cpu") for one in pieces])
        places = None
        if self._order.is_random:
            slots = self._order.permutation(len(span), span.start)
            rows, places = rows[slots], torch.empty_like(slots)
            places[slots] = torch.arange(len(slots), device="cpu")
        columns = [
            _Column(samples, places, self._memory(number % 2, layer, samples))
            if isinstance(samples, DiskTensor)
            else samples
            for layer, samples in enumerate(self._layers)
        ]
        for column in columns:
            if isinstance(column, _Column):
                self._jobs.extend(column.jobs(pieces))
        reading = [self._pool.submit(self._read) for _ in range(_THREADS)] if self._jobs else []
        return _Filling(begin, rows, columns), reading

    def _memory(self, half: int, layer: int, samples: Tensor) -> _Memory:
        """Return memory for a filling: that of the last but one, unless a batch of it is held."""
        known = self._memories.get((half, layer))
        if known is None or not known.is_free:
            known = _Memory(self._size * bytes_of_row(samples))
            self._memories[half, layer] = known
        return known

    def _read(self) -> None:
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            job()
