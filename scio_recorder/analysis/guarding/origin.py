"""The call that made the first NaN or infinity, and its inputs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from scio_recorder import Architecture
from scio_recorder.errors import ArgumentError
from scio_recorder.layer import Layer, Operation
from scio_recorder.lowlevel import Inputs, Moment, WeightDigests, digest_of
from scio_recorder.stores import Calls, Held, KeptCall, KeptCalls, SampleIds, to_ids
from scio_recorder.tensors import is_plain, map_tensors, tensors

Direction: TypeAlias = Literal["forward", "gradient"]


class KeptInputs:
    """Copies of a module's inputs before a call, and of the state in which it will run.

    Parameters
    ----------
    layer : Layer
        A call of the module.
    module : torch.nn.Module
        The module.
    inputs : Inputs
        The inputs that its forward is about to receive.
    weights : WeightDigests
        Takes digests of modules' parameters.
    """

    def __init__(
        self, layer: Layer, module: nn.Module, inputs: Inputs, weights: WeightDigests
    ) -> None:
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
        from scio_recorder import Recording

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


@dataclass(frozen=True, eq=False)
class Origin:
    """The call that made the first NaN or infinity.

    Parameters
    ----------
    layer : Layer
        The call; if the module ran more often than at labelling, its last labelled call.
    direction : {"forward", "gradient"}
        Whether the fault is in its output, or in the gradients that it gave back.
    pass_number : int
        The number of the pass in the block, from 0 on; for a gradient, of the differentiated pass.
    num_nan, num_inf : int or None
        How many of each it made: in its whole output, or in the first gradient that is not finite.
        None if that was gone or overwritten when the pass ended. Up to 64 MiB of a pass are kept.
    num_values : int
        The number of values among which these were counted.
    index : tuple of int or None
        The index of the first of them, in the first tensor that has any; None as these.
    parameter : str or None
        Name of the module's parameter, if this is the gradient of one.
    inputs_finite : bool
        Whether all its inputs, or the gradients of its outputs, were finite.
    weights_finite : bool or None
        Whether the module's parameters and buffers are finite; None for a gradient if they were
        written to in that backward pass.
    operation : Operation or None
        With ``operations=True``, the operation in the call's own code with which the fault began:
        the first that gives a NaN or an infinity which it was not given, numbers included. None
        for a gradient, and where no operation that is seen did it.
    """

    layer: Layer
    direction: Direction
    pass_number: int
    num_nan: int | None
    num_inf: int | None
    num_values: int
    index: tuple[int, ...] | None
    parameter: str | None
    inputs_finite: bool
    weights_finite: bool | None
    operation: Operation | None
    _architecture: Architecture = field(repr=False)
    _kinds: frozenset[str] = field(repr=False)
    _kept: KeptInputs | None = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the inputs of the call, and the state in which it ran, as a recording.

        ``open_recording(path).recompute(rnet, label)`` runs the module again, which makes the same
        NaNs, and ``.inputs[label][0]`` is what it received. Nothing of the net is needed to read.

        Parameters
        ----------
        path : str or path-like
            The folder. It is empty or does not exist yet.

        Raises
        ------
        ArgumentError
            Inputs were not kept.
        CollectError
            Some inputs are of a type that can't be kept on disk.
        RecordingError
            The folder is not empty, or the disk fails.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder, open_recording
        >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.LayerNorm(2, eps=0.0)), input_size=(1, 2))
        >>> with rnet.guard(action="record", keep_inputs=True) as guard:
        ...     out = rnet(torch.tensor([[3.0, 3.0]]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     guard.origin.save(f"{folder}/fault")
        ...     recording = open_recording(f"{folder}/fault")
        ...     recording.inputs["1"][0].args, recording.recompute(rnet, "1")["1"]
        ((tensor([[3., 3.]]),), tensor([[nan, nan]]))
        """
        if self._kept is None:
            raise ArgumentError(
                "the inputs of the call were not kept: write guard(keep_inputs=True). No part of a "
                "backward pass can run again on its own: for a gradient, save the weights and the "
                "batch instead, and run the step again"
            )
        self._kept.save(path, self._architecture, self.layer)

    @property
    def sample(self) -> int | None:
        """The index of the first affected sample; None for a parameter's gradient."""
        return self.index[0] if self.index and self.parameter is None else None

    def __str__(self) -> str:
        counts = ((self.num_nan, "NaN"), (self.num_inf, "infinite"))
        made = " and ".join(f"{count:,} {kind}" for count, kind in counts if count)
        first = f", the first at {list(self.index)}" if self.index else ""
        if self.num_nan is None:
            made = "NaNs" if "nan" in self._kinds else "infinities"
            first = " (how many is not known, since the tensor was gone or overwritten when the "
            first += "pass ended: write guard(immediate=True))"
        what, given = "what it returned", "its inputs"
        if self.direction == "gradient":
            of = "its inputs" if self.parameter is None else f"its parameter {self.parameter!r}"
            what, given = f"the gradient of {of}", "the gradients of its outputs"
        operation = "" if self.operation is None else f"; {self.operation.made_at}"
        amount = f"{'among' if self.num_nan is None else 'of'} {self.num_values:,} values"
        return (
            f"layer {self.layer} made {made} {amount} in {what}, in pass {self.pass_number}"
            f"{first}: {self._states(given)}{operation}"
        )

    def _states(self, given: str) -> str:
        if self.inputs_finite and self.weights_finite:
            return f"{given} and its weights were finite"
        said = f"{given} were {'' if self.inputs_finite else 'not '}finite"
        if self.weights_finite is None:
            return f"{said}, and its weights have changed since"
        return f"{said} and its weights were {'' if self.weights_finite else 'not '}finite"
