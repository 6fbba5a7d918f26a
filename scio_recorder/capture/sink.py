"""What the capture engine hands activations to, one at a time, while a network runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.records import Inputs


class Sink(Protocol):
    """Receives what recorded layers return, instead of the records of the pass.

    Whatever a sink needs it must copy before it returns: the network goes on with the same tensors
    and may overwrite them. What a pass handed over counts only once the pass has ended well.
    """

    @property
    def receivers(self) -> Mapping[DepthIdx, Callable[[Any], None]]:
        """For each layer, what takes what it returned, a tensor or a structure.

        Of a module that is called once in a pass, the hook itself calls it: nothing may stand
        between the two in what every layer of every batch pays for.
        """

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> Any:
        """Copy what a module's forward is about to receive; which call it is shows later."""

    def receive_inputs(self, label: DepthIdx, kept: Any) -> None:
        """Take what `keep_inputs` returned for a layer, just before what the layer returned."""
