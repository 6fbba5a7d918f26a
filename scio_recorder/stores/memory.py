"""Writing into memory: one array a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scio_recorder.stores.base import Held, Job, State, StoreWriter
from scio_recorder.stores.buffers import Buffer, Column
from scio_recorder.stores.calls import Calls
from scio_recorder.stores.disk_format import TensorSpec

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


# Batches to make room for at first where their number is not known.
_GUESSED_BATCHES = 8
MakeBuffer = Callable[["DepthIdx", torch.device, int], Buffer]


class MemoryWriter(StoreWriter):
    """Fills one column a layer; ``make_buffer(label, device, num_bytes)`` gives the memory."""

    def __init__(self, job: Job, make_buffer: MakeBuffer) -> None:
        super().__init__()
        self._architecture = job.architecture
        self._num_batches = job.num_batches
        self._make_buffer = make_buffer
        self._columns: dict[DepthIdx, Column] = {}
        self._devices: set[torch.device] = set()

    def column(self, label: DepthIdx, spec: TensorSpec, first: Tensor) -> Column:
        """Make room for as many batches like the first as there will be."""
        is_exact = self._num_batches is not None
        rows = first.shape[0] * (self._num_batches or _GUESSED_BATCHES)
        buffer = self._make_buffer(label, first.device, rows * spec.nbytes)
        column = self._columns[label] = Column(spec, buffer, rows, is_exact)
        self._devices.add(first.device)
        return column

    def finish(self, state: Callable[[], State]) -> Held:
        """Return the arrays, narrowed to what was committed."""
        wait_for(self._devices)
        values = {label: column.close(self.start) for label, column in self._columns.items()}
        names = self.calls.read(0)[0] if self.calls.rows else ()
        return Held(values, self.sample_ids, Calls(self.calls, self._architecture, names))

    def abandon(self, state: Callable[[], State] | None) -> None:
        """Let go of the memory, once nothing is copied into it any more."""
        wait_for(self._devices)
        self._columns.clear()


def wait_for(devices: set[torch.device]) -> None:
    """Wait for every copy that is under way from these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
