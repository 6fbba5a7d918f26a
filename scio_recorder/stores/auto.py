"""Choosing where activations go by the bytes needed and free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scio_recorder.disk import TensorSpec
from scio_recorder.disk.ids import Ids
from scio_recorder.kept import KeptCall
from scio_recorder.stores.base import Job, State, Store
from scio_recorder.stores.buffers import Buffer, Column, DeviceBuffer, HostBuffer
from scio_recorder.stores.memory import MemoryWriter
from scio_recorder.stores.plan import Plan, choose, labelled_bytes, make_plan

if TYPE_CHECKING:
    from scio_recorder.architecture import DepthIdx

__all__ = ["Auto"]


class Auto(Store):
    """Keeps everything on the GPU where half of what is free there is enough, else in host memory.

    Where host memory is not enough either, it raises `CollectError` with the plan after the first
    batch. A loader of unknown length goes to host memory, unchecked.
    """

    def open(self, job: Job) -> AutoWriter:
        """Begin a job."""
        return AutoWriter(job)


class AutoWriter(MemoryWriter):
    """Chooses the device when the first layer returns, and checks once all have."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, self._buffer)
        self._job = job
        self._on_device: bool | None = None
        self._rows = 0

    def column(self, label: DepthIdx, spec: TensorSpec, first: Tensor) -> Column:
        """Make room for a layer."""
        self._rows = first.shape[0]
        if self._on_device is None:
            self._on_device = self._fits_on(first.device)
        return super().column(label, spec, first)

    def commit(
        self,
        ids: Ids,
        state: Callable[[], State],
        calls: Mapping[DepthIdx, KeptCall] | None = None,
    ) -> None:
        """Check, after the first batch, that all of them will fit."""
        if self._num_batches is not None and self.start == 0 and self._columns:
            sizes = {label: column.spec.num_bytes for label, column in self._columns.items()}
            plan = self._plan(sizes, torch.device("cpu"))
            if not self._on_device:
                choose(plan)
        super().commit(ids, state, calls)

    def _fits_on(self, device: torch.device) -> bool:
        if device.type != "cuda" or self._num_batches is None:
            return False
        sizes = labelled_bytes(self._job.architecture, self._job.stored)
        return "device" in self._plan(sizes, device).stores

    def _plan(self, sizes: dict[DepthIdx, int], device: torch.device) -> Plan:
        num_samples = self._rows * (self._num_batches or 0)
        return make_plan(self._job.architecture, sizes, num_samples, device)

    def _buffer(self, label: DepthIdx, device: torch.device, num_bytes: int) -> Buffer:
        if self._on_device and device.type != "cpu":
            return DeviceBuffer(device)
        return HostBuffer(pinned=device.type == "cuda")
