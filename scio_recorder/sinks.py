"""What the capture engine hands activations to, one at a time, while a network runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    from scio_recorder.architecture import DepthIdx
    from scio_recorder.records import Inputs

__all__ = ["Sink"]


class Sink(Protocol):
    """Receives what recorded layers return, instead of the records of the pass.

    Whatever a sink needs it must copy before it returns: the network goes on with the same tensors
    and may overwrite them. What a pass handed over counts only once the pass has ended well.
    """

    def receive(self, label: DepthIdx, activation: Any) -> None:
        """Take what a layer returned, a tensor or a structure, after post-processing in place."""

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> Any:
        """Copy what a module's forward is about to receive; which call it is shows later."""

    def receive_inputs(self, label: DepthIdx, kept: Any) -> None:
        """Take what `keep_inputs` returned for a layer, just before what the layer returned."""
