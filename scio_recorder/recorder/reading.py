"""What can be read from a recorder at any time: what is recorded, and what the latest pass left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from scio_recorder.nets.records import LayerMapping, Records

if TYPE_CHECKING:
    from torch.nn.parameter import Parameter

    from scio_recorder.capture.engine import Capture
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture


class Reading:
    """The part of a recorder that the others build on."""

    architecture: Architecture
    _capture: Capture
    _net: nn.Module

    @property
    def recording(self) -> tuple[DepthIdx, ...]:
        """The labels of the recorded layers, sorted."""
        return self._capture.program.recording

    @property
    def activations(self) -> Records:
        """What the recorded layers returned in the latest pass that this thread has run.

        A read-only mapping; keys are ``(1, 3)``, ``"1-3"`` or unambiguous qualified names. It stays
        as it is when the next pass runs.
        """
        return self._capture.activations

    @property
    def inputs(self) -> Records:
        """What the forward of the recorded modules received, after ``record(..., inputs=True)``.

        Values are named tuples ``(args, kwargs)``.
        """
        return self._capture.inputs

    @property
    def gradients(self) -> Records:
        """Gradients of what was differentiated with respect to the activations.

        After ``record(..., gradients=True)``, a pass and a backward pass. A layer that got none is
        absent; a new backward pass replaces them. Under gradient scaling they are scaled.
        """
        return self._capture.gradients

    @property
    def recorded_modules(self) -> LayerMapping[nn.Module]:
        """The modules of the recorded layers, by label."""
        modules = {label: self.architecture[label].module for label in self.recording}
        found = {label: module for label, module in modules.items() if module is not None}
        return LayerMapping(self.architecture, found, "module")

    @property
    def recorded_params(self) -> dict[str, Parameter]:
        """The parameters inside recorded layers by their names in this module.

        A parameter that the net holds under several names appears under each.
        """
        modules = self.recorded_modules.values()
        own = {id(parameter) for module in modules for parameter in module.parameters()}
        every = self._net.named_parameters("_net", remove_duplicate=False)
        return {name: parameter for name, parameter in every if id(parameter) in own}
