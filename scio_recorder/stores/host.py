"""Keeping activations in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scio_recorder.stores.base import Job, Store
from scio_recorder.stores.buffers import HostBuffer
from scio_recorder.stores.memory import MemoryWriter

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


class Host(Store):
    """Keeps every layer in one array in host memory.

    Parameters
    ----------
    pin_memory : bool, optional
        Whether to register the memory with the GPU's driver, which makes copies from the GPU
        asynchronous. None (default) does so where activations are on a GPU.

    Notes
    -----
    Given to ``collect`` again, the same object re-uses the memory of recordings that nobody holds
    any more, neither as a whole nor any tensor or array of them.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    >>> rnet.record("0-1")
    >>> host = Host()
    >>> for epoch in range(2):
    ...     recording = rnet.collect([torch.ones(3, 2), torch.ones(1, 2)], store=host)
    >>> recording["0-1"].shape
    torch.Size([4, 2])
    """

    def __init__(self, pin_memory: bool | None = None) -> None:
        self._pin_memory = pin_memory
        self._buffers: dict[DepthIdx, HostBuffer] = {}

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
        return MemoryWriter(job, self._make_buffer)

    def _make_buffer(self, label: DepthIdx, device: torch.device, num_bytes: int) -> HostBuffer:
        pinned = device.type == "cuda" if self._pin_memory is None else self._pin_memory
        pinned = pinned and torch.cuda.is_available()
        known = self._buffers.get(label)
        if known is None or known.pinned != pinned or known.is_held:
            known = self._buffers[label] = HostBuffer(pinned=pinned)
        return known
