"""A loader: the rows of a recording batch by batch, for any number of ranks and workers.

NOTE [How rows are shuffled]

Checksums are of blocks, and a disk is fast only in large pieces: a single row would cost a block.
So the rows of each chunk are divided into *runs* of consecutive rows, each read in one go. An epoch
permutes the runs. As many of them as fit fill a buffer, and the rows in it are permuted. If all
rows fit at once, the permutation is one of all rows. Batches are copies of rows of the buffer.

A *place* is the number of a row in the sequence of permuted runs. Every share is a range of places:
a rank's, a worker's within that, a filling of the buffer, a batch. Each follows from the arguments,
the epoch and its own number. So ranks and workers need not communicate, no row is given twice, and
resuming needs only the number of batches that were given: earlier rows are not read again. Which
of the batches of workers were given is known to nobody, so inside an epoch they don't resume.

Rows in memory are not buffered: only their numbers are, and they are gathered directly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import numpy
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from scio_recorder.errors import ArgumentError, RecordingError, caught_as
from scio_recorder.layer import RowIdx, counted, text_of
from scio_recorder.nets.selection import select
from scio_recorder.recording.readable import Readable
from scio_recorder.stores.disk_format.tensor_file import checksum, dump, empty_bytes
from scio_recorder.stores.files import DiskTensor, bytes_of_row
from scio_recorder.tensors.arguments import booleans, whole
from scio_recorder.tensors.digests import digest_of

BUFFER_BYTES = 256 << 20
# The largest number of bytes read in one go, and the least number of runs in the buffer.
_RUN_BYTES, _LEAST_RUNS = 16 << 20, 16
# Besides its bytes, a row costs two numbers: its own, and its place in the buffer.
_NUMBERS_BYTES = 16


@dataclass
class Arguments:
    """How a recording is read; see :meth:`scio_recorder.Recording.loader`."""

    batch_size: int
    shuffle: bool
    seed: int
    rank: int
    world_size: int
    drop_last: bool
    buffer_bytes: int
    with_rows: bool

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seed", 0), ("buffer_bytes", 1)):
            setattr(self, name, whole(name, getattr(self, name), least, ArgumentError))
        switches = ("shuffle", "drop_last", "with_rows")
        booleans(ArgumentError, **{name: getattr(self, name) for name in switches})

    def share(self, num_rows: int) -> range:
        """Return this rank's places, out of this many for all ranks together."""
        if self.drop_last:
            # Ranks that wait for each other need equal numbers of batches.
            each = num_rows // self.world_size
            return range(self.rank * each, (self.rank + 1) * each)
        before, behind = self.rank * num_rows, (self.rank + 1) * num_rows
        return range(before // self.world_size, behind // self.world_size)


def rows_of(recording: Readable, selectors: Sequence[object]) -> dict[RowIdx, Tensor]:
    """Return the rows of the selected layers in the recording's order; by default of all layers.

    Raises
    ------
    ArgumentError
        A selector matches only reduced layers, or no layer has rows.
    LayerNotFoundError
        A selector matches no layer of the recording.
    """
    chosen = set() if selectors else set(recording.stored)
    for selector in selectors:
        labels = select(recording.architecture, [selector])
        stored = set(recording.stored).intersection(labels)
        reduced = [label for label in labels if label in recording.reductions]
        if reduced and not stored:
            named = ", ".join(str(recording.architecture[label]) for label in reduced[:4])
            raise ArgumentError(f"there are no rows of {named}: collect without reduce= for them")
        if not stored:
            # Raises, naming the layers that exist.
            recording[labels[0]]
        chosen |= stored
    if not chosen:
        raise ArgumentError("the recording holds no samples: all of its layers are reduced")
    return {label: recording[label] for label in recording.stored if label in chosen}


# The places of the numbers that a loader shares with its copies in workers: the epoch, how many of
# its batches were given before the next iteration, and whether workers have begun to read it.
_EPOCH, _BATCHES, _HAS_WORKERS = range(3)


@dataclass(eq=False, repr=False)
class RecordingLoader(IterableDataset[Any]):
    """Batches of rows of a recording; see :meth:`scio_recorder.Recording.loader`.

    Parameters
    ----------
    layers : dict
        Rows by label.
    rows : dict
        The columns of rows by name; empty if a row is a sample.
    architecture : str
        The fingerprint of the labelled net.
    arguments : Arguments
        The arguments of the loader.
    """

    layers: dict[RowIdx, Tensor]
    rows: dict[str, Tensor]
    architecture: str
    arguments: Arguments

    def __post_init__(self) -> None:
        # What decides the order of rows, which is equal on all ranks.
        self._order_of = {"layers": list(map(text_of, self.layers)), **asdict(self.arguments)}
        del self._order_of["rank"], self._order_of["with_rows"]
        self._num_rows = len(next(iter(self.layers.values())))
        with torch.inference_mode(False):
            self._shared = torch.zeros(3, dtype=torch.int64, device="cpu")
            self._shared.share_memory_()  # type: ignore[no-untyped-call]  # torch has no type
        # The batches given in the latest iteration, and its number.
        self._given = self._iteration = 0

    @property
    def _epoch(self) -> int:
        return int(self._shared[_EPOCH])

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        batches = len(self.arguments.share(self._num_rows)) / self.arguments.batch_size
        return math.floor(batches) if self.arguments.drop_last else math.ceil(batches)

    def __getitem__(self, index: object) -> NoReturn:
        raise caught_as(
            ArgumentError,
            TypeError(),
            f"a loader gives batches one after the other: write `for batch in loader:`, or for all "
            f"values of a layer recording[{index!r}]",
        )

    def __iter__(self) -> Iterator[Any]:
        worker, skipped = get_worker_info(), int(self._shared[_BATCHES])
        part, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._shared[_HAS_WORKERS] = worker is not None
        if worker is None:
            self._shared[_BATCHES] = 0
        # Workers with one batch more come first.
        each, more = divmod(len(self), workers)
        first = part * each + min(part, more)
        size = self.arguments.batch_size
        share = self.arguments.share(self._num_rows)
        places = share[first * size : (first + each + (part < more)) * size]
        self._iteration += 1
        self._given = skipped
        return self._batches(places, skipped, self._iteration)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iterations: equal epochs have equal orders.

        Parameters
        ----------
        epoch : int
            Its number, from 0 on. The epoch of a loaded state continues; another one begins at
            its start.

        Raises
        ------
        ArgumentError
            It is not such a number.
        """
        if whole("epoch", epoch, 0, ArgumentError) != self._epoch:
            self._begin_at(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in plain values, from which to resume after the latest batch.

        Returns
        -------
        dict
            ``batches`` is how many batches of this epoch were given.

        Raises
        ------
        ArgumentError
            Workers have begun to read this epoch, and which of their batches came is not known.
        """
        if get_worker_info() is not None or self._shared[_HAS_WORKERS]:
            raise ArgumentError(
                "workers read this epoch, and nobody knows which of their batches came: ask for "
                "the state between epochs, after set_epoch(...), or read with num_workers=0"
            )
        return {
            "epoch": self._epoch,
            "batches": self._given,
            "recording": self._fingerprint,
            "arguments": self._order_of,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next iteration gives the remaining batches of its epoch.

        Parameters
        ----------
        state : mapping
            The result of `state_dict`, for the same recording and arguments; all ranks can load
            the state of one rank.

        Raises
        ------
        ArgumentError
            It is not a state, or is for other arguments. The next iteration raises it too, if
            workers are to continue inside an epoch.
        RecordingError
            It is the state of another recording.
        """
        try:
            epoch = whole("epoch", state["epoch"], 0, ArgumentError)
            batches = whole("batches", state["batches"], 0, ArgumentError)
            arguments, recording = dict(state["arguments"]), state["recording"]
        except (TypeError, LookupError, ValueError) as error:
            raise ArgumentError(f"this is not the state of a loader: {error!r}") from error
        others = [
            f"{key}={arguments.get(key)!r}"
            for key, value in self._order_of.items()
            if arguments.get(key) != value
        ]
        if others:
            raise ArgumentError(
                f"the state is of a loader with {', '.join(others)}: make a loader with the same "
                "arguments"
            )
        if recording != self._fingerprint:
            raise RecordingError("the state is of another recording, or this one has changed since")
        if batches > len(self):
            raise ArgumentError(f"batches={batches} in the state, but there are {len(self)}")
        # Earlier versions knew how many workers gave the batches, each of its own part.
        if batches and state.get("readers", 0) not in (0, 1):
            raise ArgumentError(
                "the state is from inside an epoch that workers read, which can't be continued: "
                "begin the epoch again, by set_epoch"
            )
        self._begin_at(epoch, batches)

    def _begin_at(self, epoch: int, batches: int) -> None:
        self._shared[:] = torch.tensor([epoch, batches, False])
        self._given = batches
        # An iteration that has begun no longer counts.
        self._iteration += 1

    @cached_property
    def _fingerprint(self) -> str:
        """A text that distinguishes the rows from those of other recordings.

        All data counts, by its checksums; without any, the outer rows do.
        """
        contents: list[Any] = [self.architecture]
        layers = ((text_of(label), samples) for label, samples in self.layers.items())
        for name, samples in (*layers, *self.rows.items()):
            content = samples.reader.fingerprint() if isinstance(samples, DiskTensor) else ""
            content = content or digest_of([samples[:32], samples[-32:]])
            contents.append([name, list(samples.shape), str(samples.dtype), content])
        return checksum(dump(contents))

    def _batches(self, places: range, skipped: int, iteration: int) -> Iterator[Any]:
        if skipped and get_worker_info() is not None:
            # Only when the first batch is wanted, since DataLoader hides earlier errors of workers.
            raise ArgumentError(
                f"the loaded state is from inside an epoch, of which {counted(skipped, 'batch')} "
                "came, and workers can't continue it: read the rest with num_workers=0"
            )
        layers, size = list(self.layers.values()), self.arguments.batch_size
        rows = list(self.rows.values())
        # The order does not depend on whether columns of rows are read as well.
        run, room = _sizes_of(layers, rows, size, self.arguments.buffer_bytes)
        columns = layers + rows * self.arguments.with_rows
        key = f"{self.arguments.seed} {self._epoch}" if self.arguments.shuffle else None
        begun = skipped * size
        if begun >= len(places):
            return
        order = _Order(layers[0], run, key)
        for numbers, values in _batches_of(columns, order, places, room, size, begun):
            skipped += 1
            if iteration == self._iteration:
                self._given = skipped
            shown = self._shown(numbers, values)
            del values
            yield shown
            del shown

    def _shown(self, numbers: Tensor, values: list[Tensor]) -> Any:
        layers = dict(zip(self.layers, values, strict=False))
        shown = layers if len(layers) > 1 else values[0]
        if not self.arguments.with_rows:
            return shown
        known = dict(zip(self.rows, values[len(layers) :], strict=True))
        return shown, known or {"sample": numbers}


def _sizes_of(
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
    columns = [*layers, *rows]
    row_bytes = max(1, sum(map(bytes_of_row, columns)))
    room = max(0, buffer_bytes - 2 * batch_size * row_bytes)
    run = min(_RUN_BYTES, room // _LEAST_RUNS) // row_bytes
    buffered = sum(bytes_of_row(column) for column in columns if isinstance(column, DiskTensor))
    return max(1, run), max(1, room // (buffered + _NUMBERS_BYTES))


def _bytes_of(rows: Tensor) -> NDArray[numpy.uint8]:
    """Return rows on the host as their bytes, [rows, bytes]."""
    return rows.detach().reshape(len(rows), rows.shape[1:].numel()).view(torch.uint8).numpy()


class _Order:
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


def _batches_of(
    columns: Sequence[Tensor], order: _Order, places: range, room: int, batch_size: int, begun: int
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the numbers of rows batch by batch, with the values of each layer in them.

    Parameters
    ----------
    columns : sequence of Tensor
        The values of each layer in all rows, in memory or on disk.
    order : _Order
        The order of the rows.
    places : range
        The places to be given.
    room : int
        The number of rows for which a buffer has room.
    batch_size : int
        The number of rows of a batch.
    begun : int
        The number of rows that were given already, which are whole batches.
    """
    # No batch has rows of two fillings.
    size = len(places) if len(places) <= room else max(1, room // batch_size) * batch_size
    buffers = [_buffer_for(column, min(size, len(places))) for column in columns]
    for start in range(begun - begun % size, len(places), size):
        span = places[start : start + size]
        pieces = list(order.rows(span))
        slots = order.permutation(len(span), span.start)
        in_order = [torch.arange(piece.start, piece.stop, device="cpu") for piece in pieces]
        rows = torch.cat(in_order)[slots]
        sources = [
            (column, rows) if buffer is None else (_read(column, pieces, buffer), slots)
            for column, buffer in zip(columns, buffers, strict=True)
        ]
        for at in range(max(0, begun - start), len(span), batch_size):
            some = slice(at, at + batch_size)
            values = [_gathered(source, index[some]) for source, index in sources]
            yield rows[some].clone(), values
            # The caller may have dropped them.
            del values


def _buffer_for(column: Tensor, count: int) -> Tensor | None:
    """Return memory for rows of a column on disk; None for one in memory."""
    if not isinstance(column, DiskTensor):
        return None
    column.reader.forget_verified()
    data = empty_bytes(count * bytes_of_row(column))
    return data.view(column.dtype).view(count, *column.shape[1:])


def _read(column: Tensor, pieces: Sequence[range], buffer: Tensor) -> Tensor:
    """Read rows of a column on disk into a buffer, one after the other."""
    assert isinstance(column, DiskTensor)
    slot = 0
    for piece in pieces:
        part = buffer[slot : slot + len(piece)]
        column.reader.read_into(_bytes_of(part).reshape(-1), column.layer, piece.start)
        slot += len(piece)
    return buffer[:slot]


def _gathered(values: Tensor, rows: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.index_select(0, rows.to(values.device))
    out = torch.empty(len(rows), *values.shape[1:], dtype=values.dtype, device="cpu")
    # Bytes, since torch gathers not all dtypes.
    numpy.take(_bytes_of(values), rows.numpy(), 0, _bytes_of(out), mode="clip")
    return out
