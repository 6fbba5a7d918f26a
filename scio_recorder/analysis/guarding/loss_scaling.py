"""Overflows of gradients that a ``GradScaler`` provokes, and takes back.

NOTE [Whose overflow it is]

A scaler multiplies the loss by a scale at which gradients in half precision just fit. If they
don't, it skips the step and continues with a smaller scale. So while the scale is above one,
overflows in the backward pass of a scaled loss are expected. If the network itself makes a NaN, the
scale falls to one within a few skipped steps, and then no longer explains it.

The only trace of a scaler in the graph is a product, the last operation of the loss. Scalers are
looked for among all objects, which takes long and happens only if gradients are not finite.
"""

from __future__ import annotations

import inspect
import weakref

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from scio_recorder.lowlevel import interpreter
from scio_recorder.tensors import tensors

_ROOTS = {
    inspect.unwrap(torch.autograd.backward).__code__: "tensors",
    inspect.unwrap(torch.autograd.grad).__code__: "outputs",
}


class LossScaling:
    """The overflows that scalers have provoked in one block."""

    def __init__(self) -> None:
        self._num_skipped_steps = 0
        # The scale in the first backward pass that overflowed since the scaler's last step.
        self._overflows: weakref.WeakKeyDictionary[GradScaler, float] = weakref.WeakKeyDictionary()
        self._scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()

    @property
    def num_skipped_steps(self) -> int:
        """The number of steps that scalers have skipped."""
        self.count_skipped()
        return self._num_skipped_steps

    def count_skipped(self) -> None:
        """Count the steps that were skipped since the last time: each made the scale smaller."""
        for scaler, scale in list(self._overflows.items()):
            if scaler.get_scale() < scale:
                self._num_skipped_steps += 1
                del self._overflows[scaler]

    def explains_overflow(self) -> bool:
        """Whether gradients of the current backward pass may overflow, and note that they do."""
        if not _is_loss_a_product():
            return False
        if not self._scalers:
            self._scalers.update(interpreter.all_of(GradScaler))
        scalers = [one for one in self._scalers if one.is_enabled() and one.get_scale() > 1]
        self.count_skipped()
        for scaler in scalers:
            self._overflows.setdefault(scaler, scaler.get_scale())
        return bool(scalers)


def _is_loss_a_product() -> bool:
    """Whether the differentiated tensor may be a scaled loss."""
    function = interpreter.running(_ROOTS)
    if function is None:
        # On a thread of another device, this is not known.
        return True
    code, variables = function
    roots = variables.get(_ROOTS[code])
    nodes = [root.grad_fn for root in tensors(roots) if isinstance(root, Tensor)]
    return any(node is not None and node.name().startswith("Mul") for node in nodes)
