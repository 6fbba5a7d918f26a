"""What can be read from a recorder at any time, what autograd makes of it, and whole datasets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from scio_recorder.capture.saved_tensors import SavedTensors
from scio_recorder.errors import CollectError, SelectorTypeError
from scio_recorder.nets.records import LayerMapping, Records
from scio_recorder.tensors.structures import map_tensors, tensors

if TYPE_CHECKING:
    from torch.nn.parameter import Parameter

    from scio_recorder.capture.engine import Capture
    from scio_recorder.capture.gradients import GradientHooks
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture
    from scio_recorder.postprocessors.assigning import Postprocessors
    from scio_recorder.recording import Recording
    from scio_recorder.recording.collect.options import Reduce, Transforms
    from scio_recorder.stores import Plan, Store


class Reading:
    """What is recorded, what the latest pass left, what autograd makes of it, and datasets."""

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

    @property
    def _gradient_hooks(self) -> GradientHooks:
        hooks: GradientHooks = self.__dict__.setdefault("_hooks_on_gradients", OrderedDict())
        return hooks

    @property
    def grad_nodes(self) -> LayerMapping[Any]:
        """The node of autograd's graph behind each recorded activation.

        After a pass with gradients on. Where a layer returns a structure, so is this, with None for
        tensors without a node; a layer without any is absent. A leaf's node is the one that
        accumulates its gradient.

        Examples
        --------
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
        """Have a function called with the gradients of the recorded layers.

        Once for each pass and each backward pass through it, when that ends: then all gradients
        that come have come. Layers that got none are absent. Passes count that are no longer the
        latest, too.

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
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("*", gradients=True)
        >>> handle = rnet.on_gradients(lambda gradients: print(list(gradients)))
        >>> rnet(torch.ones(1, 2)).sum().backward()
        [(0, 1), (1, 1), (1, 2)]
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

    def saved_tensors(
        self,
        *selectors: Any,
        device: torch.device | str | None = "cpu",
        pin_memory: bool = False,
        dtype: torch.dtype | None = None,
    ) -> SavedTensors:
        """Move or shrink what autograd keeps for the backward pass inside the chosen layers.

        For passes inside the block, whether they go through this recorder or not. Parameters and
        buffers, views of these, and regions under activation checkpointing are left alone.

        Parameters
        ----------
        *selectors
            What :meth:`record` takes; the layers need not be recorded.
        device : torch.device or str, default "cpu"
            Where to keep tensors; None to leave them where they are.
        pin_memory : bool, default False
            Keep what comes from a GPU in pinned host memory, from where it comes back without
            holding up the host.
        dtype : torch.dtype, optional
            Keep wider floating-point tensors in this dtype. Without it, gradients are bit for bit
            what they are without the block.

        Returns
        -------
        SavedTensors
            A context manager. Backward may run after its block.

        Raises
        ------
        LayerNotFoundError
            A selector matches no layer.
        SelectorTypeError
            The dtype is not one of floating-point numbers, or the device is not available.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), input_size=(1, 2))
        >>> with rnet.saved_tensors("1", dtype=torch.bfloat16):
        ...     rnet(torch.ones(1, 2)).sum().backward()
        """
        return SavedTensors(self.architecture, selectors, device, pin_memory, dtype)

    def collect(
        self,
        batches: Iterable[Any],
        *,
        store: str | Store | None = "auto",
        reduce: Reduce | None = None,
        transform: Transforms | None = None,
        every: int = 1,
        max_batches: int | None = None,
        to_inputs: Callable[[Any], Any] | None = None,
        sample_ids: Callable[[Any], Any] | None = None,
        dtype: torch.dtype | None = None,
        activation_postproc: Postprocessors | None = None,
        stop_early: bool = False,
        progress: bool = True,
        resume: bool = False,
    ) -> Recording:
        """Run the network over a dataset and keep what the recorded layers return.

        The net is run under ``no_grad``, in the mode that it is in.

        Parameters
        ----------
        batches : iterable
            A DataLoader, a list, a generator. The net is given a tensor as it is, the first element
            of a tuple or list, and a mapping as keywords.
        store : str, Store or None, default "auto"
            Where samples go: "device", "host", "disk:PATH", an object of
            :mod:`scio_recorder.stores`, None where all layers are reduced, or "auto", which
            chooses by the bytes needed and free.
        reduce : Reduction, list of them or mapping by selector, optional
            Summaries to keep in place of the samples of layers.
        transform : callable or mapping by selector, optional
            ``transform(activation, batch) -> Tensor [batch, ...]``: what is kept or reduced.
        every : int, default 1
            Take every n-th batch.
        max_batches : int, optional
            Stop after so many batches that were taken.
        to_inputs : callable, optional
            ``batch ->`` a tensor, a tuple of positional or a dict of keyword inputs of the net, or
            both as a pair ``(tuple, dict)``.
        sample_ids : callable, optional
            ``batch ->`` integers or strings, one for each sample, none twice. By default samples
            are numbered from 0 on, those of batches that are passed over included.
        dtype : torch.dtype, optional
            What floating-point activations are rounded to where they are kept.
        activation_postproc : callable, list or mapping, optional
            What to do to the output of recorded layers before the network goes on with it, as in
            ``Recorder.forward``. Layers are collected as they returned, before it acts; one that
            works in place changes what is collected too.
        stop_early : bool, default False
            Run the network no further than the last recorded layer.
        progress : bool, default True
            Show a progress bar, on a terminal.
        resume : bool, default False
            Go on with what is on disk already: the loader must give the same samples in the same
            order. What is complete is returned.

        Returns
        -------
        Recording
            Samples or summaries by layer.

        Raises
        ------
        CollectError
            Nothing is selected, batches are not understood, samples have different shapes, or
            something else can't be done as asked.
        PostprocessorError
            Too few post-processors, or one that failed.
        RecordingError
            The disk fails, or holds a recording made otherwise.

        Warns
        -----
        CollectWarning
            The net is in training mode and has layers that do something else there; or only the
            first element of batches goes into a net that would take the second, too.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Flatten(), nn.ReLU()), input_size=(1, 2, 2))
        >>> rnet.record("1")
        >>> loader = [(torch.ones(3, 2, 2), "labels"), (torch.ones(1, 2, 2), "labels")]
        >>> rnet.collect(loader)["1"].shape
        torch.Size([4, 4])
        """
        from scio_recorder.recording.collect.collection import Collection
        from scio_recorder.recording.collect.feed import Feed
        from scio_recorder.recording.collect.options import Options

        return Collection(
            self._capture,
            self._net,
            Feed(batches, every, max_batches, to_inputs, sample_ids),
            Options(self._capture, reduce, transform, dtype),
            store,
            activation_postproc,
            stop_early,
            progress,
            resume,
        ).run()

    def plan(self, num_samples: int) -> Plan:
        """Say what collecting the recorded layers would take, before anything runs.

        Parameters
        ----------
        num_samples : int
            How many samples.

        Returns
        -------
        Plan
            Bytes by layer, from the shapes at labelling, and free bytes by store; printable.

        Raises
        ------
        CollectError
            Nothing is selected.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Linear(4, 3), input_size=(2, 4))
        >>> rnet.record("0-1")
        >>> rnet.plan(1000).num_bytes
        {(0, 1): 12000}
        """
        recording = self._capture.program.recording
        if not recording:
            raise CollectError("nothing is selected: choose layers with record(...) first")
        from scio_recorder.stores.room import make_plan

        device = next((p.device for p in self._net.parameters()), torch.device("cpu"))
        return make_plan(self.architecture, recording, num_samples, device)

    def parameters_snapshot(self) -> dict[str, Tensor]:
        """Return copies of the parameters inside recorded layers, in host memory.

        Returns
        -------
        dict
            The names of ``recorded_params`` -> tensors of their own; a parameter under several
            names is copied once.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Linear(4, 3), input_size=(2, 4))
        >>> rnet.record("0-1")
        >>> before = rnet.parameters_snapshot()
        >>> _ = rnet.net.bias.data.add_(1)
        >>> (rnet.parameters_snapshot()["_net.bias"] - before["_net.bias"]).round()
        tensor([1., 1., 1.])
        """
        copies: dict[int, Tensor] = {}
        for parameter in self.recorded_params.values():
            if id(parameter) not in copies:
                copies[id(parameter)] = parameter.detach().clone().cpu()
        return {name: copies[id(value)] for name, value in self.recorded_params.items()}


def _node(tensor: Tensor) -> Any:
    return get_gradient_edge(tensor).node if tensor.requires_grad else None
