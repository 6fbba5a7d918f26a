"""A post-processor that puts another activation in the place of the layer's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors.base import describe, take_apart
from scio_recorder.tensors.structures import tensors


@dataclass(frozen=True, eq=False)
class Replace:
    """Put another activation in the place of the layer's own: activation patching.

    The net goes on with a copy, so that what is given here survives in-place operations.

    Parameters
    ----------
    activation : Tensor or structure of tensors
        It has the layer's structure and shapes, and is usually ``rnet.activations[label]`` of a
        pass on other data. It is brought to the dtype and device of what it replaces. Gradients
        reach it.

    Raises
    ------
    PostprocessorError
        ``activation`` holds no tensor; at a call, structure, shape or kind of number differ.

    References
    ----------
    Vig et al., "Investigating Gender Bias in Language Models Using Causal Mediation Analysis",
    NeurIPS 2020; Meng et al., "Locating and Editing Factual Associations in GPT", NeurIPS 2022.

    Examples
    --------
    >>> import torch
    >>> Replace(torch.ones(2))(torch.zeros(2))
    tensor([1., 1.])
    """

    activation: Any

    def __post_init__(self) -> None:
        if not tensors(self.activation):
            given = describe(self.activation)
            raise PostprocessorError(f"Replace takes a tensor or a structure of them, not {given}.")

    def __repr__(self) -> str:
        return f"Replace({describe(self.activation)})"

    def __call__(self, activation: Any) -> Any:
        """Return a copy of the given activation, checked against the layer's own."""
        if isinstance(activation, Tensor) and isinstance(self.activation, Tensor):
            return self._replace(activation, self.activation)
        leaves, rebuild = take_apart(activation)
        given, _ = take_apart(self.activation)
        if len(given) != len(leaves) or type(activation) is not type(self.activation):
            raise PostprocessorError(
                f"{self!r} does not fit the layer, which returns {describe(activation)}. "
                "Give the whole structure, with the same tensors in it."
            )
        return rebuild([self._replace(own, new) for own, new in zip(leaves, given, strict=True)])

    def _replace(self, own: Any, new: Any) -> Any:
        if not isinstance(own, Tensor) or not isinstance(new, Tensor):
            return own
        if own.shape != new.shape or _kind(own) != _kind(new):
            raise PostprocessorError(
                f"Replace has {describe(new)} for a layer that returns {describe(own)}. "
                "Record the layer on as many samples as it is replaced for, or write "
                "Replace(activation.expand(shape))."
            )
        return new.to(own.device, own.dtype, copy=True)


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else str(tensor.dtype)
