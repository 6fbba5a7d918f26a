"""A call that is kept before it runs, so that it can run again if it fails."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from scio_recorder.layer import Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.stores.disk_format.ids import SampleIds, to_ids
from scio_recorder.stores.kept_inputs import Calls, KeptCall, KeptCalls
from scio_recorder.stores.store import Held
from scio_recorder.tensors.copies import is_plain
from scio_recorder.tensors.digests import Weights, digest_of
from scio_recorder.tensors.structures import map_tensors, tensors


class CallBefore:
    """Copies of a module's inputs before a call, and of the state in which it will run.

    Parameters
    ----------
    layer : Layer
        A call of the module.
    module : torch.nn.Module
        The module.
    inputs : Inputs
        The inputs that its forward is about to receive.
    weights : Weights
        Takes digests of modules' parameters.
    """

    def __init__(self, layer: Layer, module: nn.Module, inputs: Inputs, weights: Weights) -> None:
        self._calls = KeptCalls()
        call = KeptCall(inputs, Moment.of(module, inputs), weights.digest(module))
        self._kept = self._calls.keep(layer, call)
        self._output: Any = None

    def end(self, output: Any) -> None:
        """Note the module's output."""
        self._kept["output"] = digest_of(output)
        self._output = map_tensors(lambda tensor: tensor.detach().clone(), output)

    def save(self, path: str | os.PathLike[str], architecture: Architecture, layer: Layer) -> None:
        """Write a recording of this call of a layer, with its output if that is a tensor."""
        # A guard does not wait for the import of what reads recordings.
        from scio_recorder.recording.recording import Recording

        output, calls, ids = self._output, self._calls, SampleIds()
        sizes = [len(tensor) for tensor in tensors(output) if tensor.ndim]
        num_samples = sizes[0] if sizes else 1
        is_kept = isinstance(output, Tensor) and is_plain(output) and output.ndim > 0
        if not calls.rows:
            calls.commit(num_samples, {str(layer.label): self._kept})
        ids.add(to_ids(range(num_samples)))
        held = Held(
            {layer.label: output} if is_kept else {},
            ids,
            Calls(calls, architecture, [str(layer.label)]),
        )
        Recording(architecture, held, reductions={}, relative_errors={}, settings={}).save(path)
