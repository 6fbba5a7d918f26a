"""Choosing where activations go by the bytes needed and free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scio_recorder.stores.base import Job, Store
from scio_recorder.stores.buffers import Buffer, Column, DeviceBuffer, HostBuffer
from scio_recorder.stores.disk_format import TensorSpec
from scio_recorder.stores.memory import MemoryWriter
from scio_recorder.stores.room import Plan, choose, labelled_bytes, make_plan

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


class Auto(Store):
    """Keeps everything on the GPU where half of what is free there is enough, else in host memory.

    Where host memory is not enough either, it raises `CollectError` with the plan in the first
    batch, before it takes that memory. A loader of unknown length goes to host memory, unchecked.
    """

    def open(self, job: Job) -> AutoWriter:
        """Begin a job.

        Parameters
        ----------
        job : Job
            The layers, and what is known of the data.

        Returns
        -------
        StoreWriter
            What takes the batches.
        """
        return AutoWriter(job)


class AutoWriter(MemoryWriter):
    """Chooses the device when the first layer returns, and checks with each."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, self._buffer)
        self._job = job
        self._on_device = False
        self._guess: Plan | None = None
        # Bytes of all samples, for the layers seen so far.
        self._known: dict[DepthIdx, int] = {}

    def column(self, label: DepthIdx, spec: TensorSpec, first: Tensor) -> Column:
        """Make room for a layer, once it is known that there is some."""
        if self._num_batches is not None:
            num_samples = first.shape[0] * self._num_batches
            if self._guess is None:
                self._guess = self._labelled(num_samples, first.device)
                self._on_device = "device" in self._guess.stores
            self._known[label] = num_samples * spec.nbytes
            if not self._on_device:
                self._check(self._guess)
        return super().column(label, spec, first)

    def _labelled(self, num_samples: int, device: torch.device) -> Plan:
        architecture, stored = self._job.architecture, self._job.stored
        return make_plan(architecture, labelled_bytes(architecture, stored), num_samples, device)

    def _check(self, guess: Plan) -> None:
        """Raise where already the layers that were seen don't fit."""
        # The device was passed over already.
        free = {store: free for store, free in guess.free_bytes.items() if store != "device"}
        if "host" not in replace(guess, num_bytes=self._known, free_bytes=free).stores:
            # Of the other layers no more is known than their shapes at labelling.
            num_bytes = {**guess.num_bytes, **self._known}
            choose(replace(guess, num_bytes=num_bytes, free_bytes=free))

    def _buffer(self, label: DepthIdx, device: torch.device, num_bytes: int) -> Buffer:
        if self._on_device and device.type != "cpu":
            return DeviceBuffer(device)
        return HostBuffer(pinned=device.type == "cuda")
