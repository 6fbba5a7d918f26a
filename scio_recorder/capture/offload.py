"""Copies in host memory, made while the network runs on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scio_recorder.nets.records import Copied
from scio_recorder.tensors.structures import flatten


def offload(value: Any) -> Copied:
    """Start copying every tensor of a structure to host memory.

    The copies are issued on the stream that computes: an in-place operation queued later can't
    overtake them there. They go to pinned memory, so that the host is not held up.
    """
    leaves, rebuild = flatten(value)
    with torch.no_grad():
        copies = [_to_host(leaf.detach()) for leaf in leaves]
    devices = {leaf.device for leaf in leaves if leaf.device.type == "cuda"}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]
    return Copied(rebuild(copies), events)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda" or tensor.layout is not torch.strided:
        return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
