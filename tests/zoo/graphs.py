"""A mark on autograd's graph that tells whether the graph is alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor


class Payload:
    """Held by a node, also where nothing of Python holds the node."""


ALIVE: weakref.WeakSet[Payload] = weakref.WeakSet()


class Mark(torch.autograd.Function):
    """Copies its input, and marks the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.payload = Payload()
        ALIVE.add(ctx.payload)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def marked_graphs() -> int:
    """Return how many marked nodes there are, after what Python's collector can free is freed."""
    gc.collect()
    return len(ALIVE)
