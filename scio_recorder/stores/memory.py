"""Writing into memory: one array a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scio_recorder.recompute.calls import KeptCall, MemoryBatches
from scio_recorder.stores.base import Held, Job, State, StoreWriter
from scio_recorder.stores.buffers import Buffer, Column
from scio_recorder.stores.disk_format import TensorSpec
from scio_recorder.stores.disk_format.ids import Ids

if TYPE_CHECKING:
    from scio_recorder.nets.architecture import DepthIdx

__all__ = ["MemoryWriter", "wait_for"]

# Batches to make room for at first where their number is not known.
_GUESSED_BATCHES = 8
# So much memory at most, or one batch, is made ready at once. Where the length is not known, it is
# such a part of what is there already, or so many bytes: they may be in vain.
_AHEAD_BYTES = 1 << 26
_UNKNOWN_PART = 32
_UNKNOWN_BYTES = 1 << 23

MakeBuffer = Callable[["DepthIdx", torch.device, int], Buffer]


class MemoryWriter(StoreWriter):
    """Fills one column a layer; ``make_buffer(label, device, num_bytes)`` gives the memory."""

    def __init__(self, job: Job, make_buffer: MakeBuffer) -> None:
        super().__init__()
        self._num_batches = job.num_batches
        self._make_buffer = make_buffer
        self._columns: dict[DepthIdx, Column] = {}
        self._devices: set[torch.device] = set()
        # The next rows to be made ready, and the row at which that is done.
        self._touch_from = self._touch_to = 0
        self._thread = ThreadPoolExecutor(1, "scio-memory")

    def column(self, label: DepthIdx, spec: TensorSpec, first: Tensor) -> Column:
        """Make room for as many batches like the first as there will be."""
        is_exact = self._num_batches is not None
        rows = first.shape[0] * (self._num_batches or _GUESSED_BATCHES)
        buffer = self._make_buffer(label, first.device, rows * spec.num_bytes)
        column = self._columns[label] = Column(spec, buffer, rows, is_exact)
        self._devices.add(first.device)
        return column

    def commit(
        self,
        ids: Ids,
        state: Callable[[], State],
        calls: Mapping[DepthIdx, KeptCall] | None = None,
    ) -> None:
        """Count a batch, and have memory made ready for those that follow the next ones."""
        super().commit(ids, state, calls)
        if self.start >= self._touch_from:
            self._touch(len(ids))

    def _touch(self, rows: int) -> None:
        """While the rows up to the last such call are filled, make as many behind them ready."""
        columns = list(self._columns.values())
        sample_bytes = sum(column.spec.num_bytes for column in columns)
        ahead = self.start
        if self._num_batches is None:
            ahead = max(ahead // _UNKNOWN_PART, _UNKNOWN_BYTES // max(sample_bytes, 1))
        first = self._touch_from = max(self._touch_to, self.start)
        self._touch_to = first + min(ahead, max(rows, _AHEAD_BYTES // max(sample_bytes, 1)))
        if self._touch_to > first:
            self._thread.submit(_touch, columns, first, self._touch_to)

    def finish(self, state: Callable[[], State]) -> Held:
        """Return the arrays, narrowed to what was committed."""
        self._close()
        values = {label: column.close(self.start) for label, column in self._columns.items()}
        return Held(values, self.sample_ids, calls=MemoryBatches(self._calls))

    def abandon(self, state: Callable[[], State] | None) -> None:
        """Let go of the memory, once nothing is copied into it any more."""
        self._close()
        self._columns.clear()

    def _close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        wait_for(self._devices)


def _touch(columns: list[Column], start: int, stop: int) -> None:
    for column in columns:
        column.touch(start, stop)


def wait_for(devices: set[torch.device]) -> None:
    """Wait for every copy that is under way from these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
