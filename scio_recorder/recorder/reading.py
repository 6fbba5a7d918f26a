"""The methods of a recorder that read a pass: records, gradients, saved tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from scio_recorder.errors import SelectorTypeError, UnsupportedNetError
from scio_recorder.nets.records import LayerMapping, Records
from scio_recorder.nets.state.sharded import refuse_part_of_fsdp
from scio_recorder.tensors import private_distributed
from scio_recorder.tensors.structures import map_tensors, tensors

if TYPE_CHECKING:
    from torch.nn.parameter import Parameter

    from scio_recorder.capture.engine import Capture
    from scio_recorder.capture.gradients import GradientHooks
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture


class Reading:
    """The part of a recorder that reads records, gradients and saved tensors."""

    architecture: Architecture
    _capture: Capture
    _net: nn.Module

    def _refuse_inside_fsdp(self) -> None:
        module: Any = self
        if private_distributed.is_inside_fsdp(module):
            raise UnsupportedNetError(
                "the recorder itself is sharded by FSDP, whose parameters are there only while "
                "the wrapper is called: call it, inside `with rnet.collecting(...):`, or "
                "shard the network, as in fully_shard(rnet.net)"
            )
        refuse_part_of_fsdp(self._net)

    @property
    def net(self) -> nn.Module:
        """The wrapped network."""
        return self._net

    @property
    def capture(self) -> Capture:
        """What records the present selection, until the next :meth:`record`.

        For code on top of this package: ``capture.architecture``, ``capture.recording`` and
        ``capture.options`` say what is recorded, and ``Capture(net, architecture, recording,
        options)`` makes another one, which leaves this recorder as it is.
        """
        return self._capture

    @property
    def recording(self) -> tuple[DepthIdx, ...]:
        """The labels of the recorded layers, sorted."""
        return self._capture.program.recording

    @property
    def activations(self) -> Records:
        """The outputs of the recorded layers in the latest pass that this thread ran.

        A read-only mapping; keys are ``(1, 3)``, ``"1-3"`` or unambiguous qualified names. It does
        not change when the next pass runs.
        """
        return self._capture.activations

    @property
    def inputs(self) -> Records:
        """The inputs of the recorded modules' forward, after ``record(..., inputs=True)``.

        Values are named tuples ``(args, kwargs)``.
        """
        return self._capture.inputs

    @property
    def gradients(self) -> Records:
        """Gradients of the loss with respect to the activations.

        They exist after ``record(..., gradients=True)``, a pass and a backward pass. A layer
        without a gradient is absent. A new backward pass replaces them. Under gradient scaling they
        are scaled.
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

    @property
    def _gradient_hooks(self) -> GradientHooks:
        hooks: GradientHooks = self.__dict__.setdefault("_hooks_on_gradients", OrderedDict())
        return hooks

    @property
    def grad_nodes(self) -> LayerMapping[Any]:
        """The node of autograd's graph behind each recorded activation.

        It exists after a pass with gradients on. For a layer that returns a structure, it is the
        same structure of nodes, with None for tensors without a node. A layer without nodes is
        absent. A leaf's node is the one that accumulates its gradient.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("1")
        >>> _ = rnet(torch.ones(1, 2))
        >>> rnet.grad_nodes["1"].name()
        'ReluBackward0'
        """
        activations = self.activations
        peeked = {label: activations.peek(label) for label in activations}
        differentiable = {
            label: map_tensors(_node, activation)
            for label, activation in peeked.items()
            if any(tensor.requires_grad for tensor in tensors(activation))
        }
        return LayerMapping(self.architecture, differentiable, "autograd node")

    def on_gradients(self, hook: Callable[[dict[DepthIdx, Any]], object]) -> RemovableHandle:
        """Register a function that is called with the gradients of the recorded layers.

        The function is called when a backward pass ends, once for each pass that it went
        through, even if newer passes have run since. Layers without a gradient are absent.

        Parameters
        ----------
        hook : callable
            Called with a dictionary, label -> gradient.

        Returns
        -------
        torch.utils.hooks.RemovableHandle
            Its ``remove()`` ends the calls. A later :meth:`record` does not.

        Raises
        ------
        SelectorTypeError
            Gradients are not recorded, or ``hook`` is not callable.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("*", gradients=True)
        >>> handle = rnet.on_gradients(lambda gradients: print(list(gradients)))
        >>> rnet(torch.ones(1, 2)).sum().backward()
        [(1, 1), (1, 2), (0, 1)]
        >>> handle.remove()
        """
        if not callable(hook):
            raise SelectorTypeError(
                f"on_gradients({hook!r}): give a function of a dictionary, label -> gradient"
            )
        if not self._capture.program.options.gradients:
            raise SelectorTypeError(
                "no gradients are recorded: write record(..., gradients=True) first"
            )
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle


def _node(tensor: Tensor) -> Any:
    return get_gradient_edge(tensor).node if tensor.requires_grad else None
