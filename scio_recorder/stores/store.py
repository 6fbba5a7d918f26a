"""The interface of a store, which keeps activations batch by batch, in columns of rows."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scio_recorder.layer import RowIdx, TensorSpec
from scio_recorder.nets.architecture import Architecture
from scio_recorder.stores.disk_format.reader import Ids, SampleIds
from scio_recorder.stores.kept_inputs import Calls, KeptCalls
from scio_recorder.tensors.arguments import ProcessRank

State: TypeAlias = dict[str, Any]


class NoRoomError(MemoryError):
    """Memory can't be allocated; the caller explains what it is for."""

    def __init__(self, num_bytes: int, reason: object) -> None:
        super().__init__(f"{num_bytes} bytes: {reason}")
        self.num_bytes = num_bytes


class DeviceBuffer:
    """Memory of a device that can grow. Growing copies, one layer at a time.

    Parameters
    ----------
    device : torch.device
        The device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._raw = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least this many bytes, beginning with the earlier ones.

        Tensors from earlier calls must not be used any more.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        if num_bytes > self._raw.numel():
            try:
                larger = torch.empty(num_bytes, dtype=torch.uint8, device=self._raw.device)
            except (RuntimeError, OverflowError, TypeError) as error:
                raise NoRoomError(num_bytes, error) from error
            larger[: self._raw.numel()].copy_(self._raw)
            self._raw = larger
        return self._raw

    def prepare(self, num_bytes: int) -> int:
        """Have at least this many bytes ready to be written to; return how many are.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        return self._raw.numel()

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes, in a tensor of only these if that needs no copy.

        Parameters
        ----------
        num_bytes : int
            How many.
        """
        return self._raw[:num_bytes]


def wait_for(devices: set[torch.device]) -> None:
    """Wait for every pending copy from these devices.

    Parameters
    ----------
    devices : set of torch.device
        Those from which copies may be pending.
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Column:
    """The rows of one layer, one after the other: ``array`` is [capacity, ...].

    Parameters
    ----------
    spec : TensorSpec
        Shape and dtype of one row.
    buffer : DeviceBuffer
        The memory for them.
    rows : int
        The expected number of rows.
    """

    __slots__ = ("_buffer", "_ready", "array", "capacity", "row_bytes", "spec")

    def __init__(self, spec: TensorSpec, buffer: DeviceBuffer, rows: int) -> None:
        self.spec = spec
        self.row_bytes = spec.nbytes
        # The rows that the memory has room for, and those of which it is ready.
        self.capacity = 0
        self._ready = 0
        self._buffer = buffer
        self._reserve(max(rows, 1))

    def place(self, start: int, rows: int) -> Tensor:
        """Return the place of a batch's rows, which count once the batch does.

        Parameters
        ----------
        start : int
            The first of them.
        rows : int
            The number of rows.

        Returns
        -------
        torch.Tensor
            The place, [rows, ...].
        """
        stop = start + rows
        if stop > self.capacity:
            self._reserve(max(stop, 2 * self.capacity))
        if stop > self._ready:
            self._ready = self._buffer.prepare(stop * self.row_bytes) // max(self.row_bytes, 1)
        return self.array[start:stop]

    def turn_to(self, buffer: DeviceBuffer) -> DeviceBuffer:
        """Continue in other memory, from its beginning.

        Parameters
        ----------
        buffer : DeviceBuffer
            The memory for rows from now on.

        Returns
        -------
        DeviceBuffer
            The earlier memory with its content.
        """
        buffer, self._buffer = self._buffer, buffer
        self._reserve(self.capacity)
        return buffer

    def close(self, rows: int) -> Tensor:
        """Return the rows that count, and drop the reference to them.

        Parameters
        ----------
        rows : int
            The number of rows that count.

        Returns
        -------
        torch.Tensor
            The rows, [rows, ...].
        """
        self.let_go()
        with torch.inference_mode(False):
            return self._view(self._buffer.first(rows * self.row_bytes), rows)

    def let_go(self) -> None:
        """Drop all memory until more is requested."""
        self.array = torch.empty(0)
        self.capacity = self._ready = 0

    def _reserve(self, rows: int) -> None:
        num_bytes = rows * self.row_bytes
        # No view may be alive while the memory moves.
        self.let_go()
        # Tensors made in inference mode could not be used outside of it.
        with torch.inference_mode(False):
            self.array = self._view(self._buffer.reserve(num_bytes)[:num_bytes], rows)
        self.capacity = rows

    def _view(self, raw: Tensor, rows: int) -> Tensor:
        return raw.view(self.spec.dtype).view(rows, *self.spec.shape)


@dataclass(frozen=True)
class Job:
    """The description of a collection that is about to begin.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    stored : tuple of (int, int)
        The layers whose samples are kept.
    num_batches : int or None
        The number of batches, if known.
    settings : callable
        Returns, as JSON, all settings that must agree when a recording is resumed.
    resume : bool
        Whether to continue a recording that the store already holds.
    """

    architecture: Architecture
    stored: tuple[RowIdx, ...]
    num_batches: int | None
    settings: Callable[[], dict[str, Any]]
    resume: bool = False

    def shared_settings(self) -> dict[str, Any]:
        """Return the settings of a recording that several processes write."""
        settings = self.settings()
        if str(settings.get("weights")).startswith("local-"):
            # Each process holds other shards of the weights.
            settings["weights"] = "local"
        return settings


@dataclass
class Held:
    """The content of a store: rows by layer, ids of samples, and whether it is complete.

    Parameters
    ----------
    values : mapping
        The rows of each layer, [rows, ...], by label, which are asked for once. A row is a sample,
        unless ``num_rows`` is given.
    sample_ids : SampleIds
        One for each sample.
    calls : Calls
        The calls that can run again, if inputs were recorded.
    complete : bool, default True
        False for an interrupted run.
    path : str, optional
        Its place, if it outlives the process.
    rows : mapping, optional
        The facts about rows, [rows] each: "sample", a position in ``sample_ids``, and others by
        name.
    num_rows : int, optional
        The number of rows, if they are not samples.
    made_with : mapping, optional
        The versions with which a recording that was found was begun, and what the net was then.
    """

    values: Mapping[RowIdx, Tensor]
    sample_ids: SampleIds
    calls: Calls
    complete: bool = True
    path: str | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    num_rows: int | None = None
    made_with: Mapping[str, Any] | None = None


class StoreWriter(abc.ABC):
    """Takes the batches of one job. Rows count once their batch is committed.

    A subclass makes the columns and puts them into ``columns``, gives back their rows at the end,
    and may act when a batch is committed (`on_commit`).

    Parameters
    ----------
    for_file : bool, default False
        Whether calls are kept as JSON, see `KeptCalls`.
    """

    def __init__(self, *, for_file: bool = False) -> None:
        # The row of the columns at which the current batch begins, and the number of all rows.
        self.start = self.num_rows = 0
        # Whether rows are counted apart from samples.
        self.counts_rows = False
        self.sample_ids = SampleIds()
        self.calls = KeptCalls(for_file=for_file)
        # All columns so far, the bytes of one row of those that count, and the devices from which
        # copies into them may be pending.
        self.columns: dict[RowIdx | str, Column] = {}
        self.row_bytes = 0
        self.devices: set[torch.device] = set()
        # Whether the found recording is complete already, and its last state.
        self.is_complete = False
        # The number of rows that were found, if rows are counted apart from samples.
        self.num_found_rows = 0
        self.state: State | None = None

    @abc.abstractmethod
    def column(self, key: RowIdx | str, spec: TensorSpec, first: Tensor) -> Column:
        """Return the column for the rows of a layer, given those of its first batch.

        Parameters
        ----------
        key : (int, int) or str
            The layer; or the name of a column of rows, the first of which is "sample".
        spec : TensorSpec
            Shape and dtype of one row, as it is kept.
        first : torch.Tensor
            The rows of the first batch, [rows, ...].

        Returns
        -------
        Column
            The place of each batch, including this one.
        """

    def commit(
        self,
        ids: Ids,
        state: Callable[[], State],
        calls: Mapping[str, Any] | None = None,
        *,
        rows: int | None = None,
    ) -> None:
        """Make the rows of the current batch count, together with its calls.

        Parameters
        ----------
        ids : range, array.array or tuple
            One integer or string for each new sample.
        state : callable
            Returns the state that is needed to resume after this batch.
        calls : mapping, optional
            The result of `KeptCalls.keep` for each layer with kept inputs, by its name.
        rows : int, optional
            The number of rows, if rows are not samples; they may belong to earlier samples.
        """
        self.sample_ids.add(ids)
        self.counts_rows = rows is not None
        number = len(ids) if rows is None else rows
        self.start += number
        self.num_rows += number
        self.row_bytes = sum([column.row_bytes for column in self.columns.values()])
        if calls:
            self.calls.commit(len(ids), calls)
        self.on_commit(ids, state)

    def on_commit(  # noqa: B027 - many stores have nothing to do
        self, ids: Ids, state: Callable[[], State]
    ) -> None:
        """Go on after a batch that counts from now on.

        Copies from a GPU into the columns may be pending. So `column` adds ``first.device`` to
        ``devices``, and `wait_for` comes before anything reads a column. A subclass that takes the
        rows out sets ``start`` to 0.

        Parameters
        ----------
        ids : range, array.array or tuple
            The ids of its new samples.
        state : callable
            Returns the state that is needed to resume after it.
        """

    def held(
        self,
        arrays: Mapping[RowIdx | str, Tensor],
        architecture: Architecture,
        *,
        is_complete: bool,
    ) -> Held:
        """Return the content of a store in memory.

        Parameters
        ----------
        arrays : mapping
            All committed rows of each column.
        architecture : Architecture
            The labelled net.
        is_complete : bool
            Whether nothing is missing.
        """
        names = self.calls.read(0)[0] if self.calls.rows else ()
        return Held(
            {key: array for key, array in arrays.items() if not isinstance(key, str)},
            self.sample_ids,
            Calls(self.calls, architecture, names),
            is_complete,
            rows={key: array for key, array in arrays.items() if isinstance(key, str)},
            num_rows=self.num_rows if self.counts_rows else None,
        )

    @abc.abstractmethod
    def finish(self, state: Callable[[], State], *, is_complete: bool = True) -> Held:
        """Return all committed rows.

        Parameters
        ----------
        state : callable
            Returns the last state.
        is_complete : bool, default True
            Whether nothing is missing.

        Returns
        -------
        Held
            The samples.
        """

    @abc.abstractmethod
    def abandon(self, state: Callable[[], State] | None) -> None:
        """End early; a ``state`` means that all committed rows are still worth keeping.

        Parameters
        ----------
        state : callable or None
            Returns the last state; None if the committed rows can't be trusted.
        """


class Store(abc.ABC):
    """A place for activations; `open` returns a writer for one job."""

    can_resume = False
    # Whether other processes fill it too, with samples of their own.
    is_shared = False

    def placed(self, place: ProcessRank, problem: str | None) -> Store | None:
        """Return the store in which one of several processes keeps its share of a dataset.

        Parameters
        ----------
        place : ProcessRank
            The place of this process, according to the sampler that splits the dataset.
        problem : str or None
            Why the samples of each process are not known.

        Returns
        -------
        Store or None
            None if the process keeps its samples regardless of the others.

        Raises
        ------
        CollectError
            Others keep their samples in the same place, and there is a problem.
        """
        return self if problem is None else None

    @abc.abstractmethod
    def open(self, job: Job) -> StoreWriter:
        """Begin a job.

        Parameters
        ----------
        job : Job
            The layers, and the known facts about the data.

        Returns
        -------
        StoreWriter
            The writer that takes the batches.

        Raises
        ------
        CollectError, RecordingError
            The store can't keep them.
        """
