"""Keeping activations on the device where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scio_recorder.stores.base import Job, Store
from scio_recorder.stores.buffers import Buffer, DeviceBuffer, HostBuffer
from scio_recorder.stores.memory import MemoryWriter

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


class Device(Store):
    """Keeps every layer on the device on which the net computes it.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    >>> rnet.record("0-1")
    >>> rnet.collect([torch.ones(3, 2)], store=Device())["0-1"].device
    device(type='cpu')
    """

    def open(self, job: Job) -> MemoryWriter:
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
        return MemoryWriter(job, _make_buffer)


def _make_buffer(label: DepthIdx, device: torch.device, num_bytes: int) -> Buffer:
    return HostBuffer() if device.type == "cpu" else DeviceBuffer(device)
