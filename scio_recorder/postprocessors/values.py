"""Post-processors that treat every number alike, or replace all numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors.floating_map import FloatingMap, describe, number, take_apart
from scio_recorder.tensors.structures import tensors


@dataclass(frozen=True, eq=False)
class Clip(FloatingMap):
    """Limit activations to an interval; with ``max`` alone this is ReAct.

    Parameters
    ----------
    max : float, optional
        Upper limit, in the activation's own unit; None for no upper limit.
    min : float, optional
        Lower limit; None (default) for no lower limit.

    Raises
    ------
    PostprocessorError
        Neither limit is given, one is not a number, or ``min`` is above ``max``.

    References
    ----------
    Sun, Guo and Li, "ReAct: Out-of-distribution Detection With Rectified Activations",
    NeurIPS 2021: ``min(x, c)`` on the penultimate layer, ``c`` a percentile of its activations
    on training data.

    Examples
    --------
    >>> import torch
    >>> Clip(1.0)(torch.tensor([-2.0, 0.5, 3.0]))
    tensor([-2.0000,  0.5000,  1.0000])
    """

    max: float | None
    min: float | None = None

    def __post_init__(self) -> None:
        for name in ("max", "min"):
            limit = getattr(self, name)
            if limit is not None:
                # Infinity is a limit that never acts, which sweeps over thresholds use.
                object.__setattr__(self, name, number("Clip", name, limit, finite=False))
        if self.max is None and self.min is None:
            raise PostprocessorError("Clip needs a limit: write Clip(max) or Clip(None, min=...).")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise PostprocessorError(
                f"Clip was given min={self.min} above max={self.max}; "
                f"did you mean Clip({self.min}, min={self.max})?"
            )

    def _apply(self, activation: Tensor) -> Tensor:
        return torch.clamp(activation, min=self.min, max=self.max)


@dataclass(frozen=True, eq=False)
class Scale(FloatingMap):
    """Multiply activations by a number.

    Parameters
    ----------
    factor : float
        Finite; 0 removes the activation, negative values invert it.

    Raises
    ------
    PostprocessorError
        ``factor`` is not a finite number.

    References
    ----------
    Stoehr et al., "Activation Scaling for Steering and Interpreting Language Models", Findings of
    EMNLP 2024 (arXiv:2410.04962).

    Examples
    --------
    >>> import torch
    >>> Scale(0.5)(torch.tensor([2.0, -4.0]))
    tensor([ 1., -2.])
    """

    factor: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", number("Scale", "factor", self.factor))

    def _apply(self, activation: Tensor) -> Tensor:
        return activation * self.factor


@dataclass(frozen=True, eq=False)
class GaussianNoise(FloatingMap):
    """Add independent Gaussian noise of mean 0.

    Parameters
    ----------
    std : float
        Standard deviation, in the activation's own unit; not negative.
    generator : torch.Generator, optional
        The source of the noise, on the generator's device. None (default) draws from torch's
        global generator. Activation checkpointing restores only that one when it runs a layer
        again, so use it there; otherwise the second run sees other noise.
        ``torch.compile(fullgraph=True)`` needs it too.

    Raises
    ------
    PostprocessorError
        ``std`` is not a finite number or is negative; ``generator`` is something else.

    References
    ----------
    Meng et al., "Locating and Editing Factual Associations in GPT", NeurIPS 2022 (corrupted runs).

    Examples
    --------
    >>> import torch
    >>> noise = GaussianNoise(0.1, torch.Generator().manual_seed(0))
    >>> noise(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """

    std: float
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "std", number("GaussianNoise", "std", self.std))
        if self.std < 0:
            raise PostprocessorError(
                f"GaussianNoise was given std={self.std}; it can't be negative."
            )
        if not isinstance(self.generator, torch.Generator | None):
            raise PostprocessorError(
                f"GaussianNoise takes a torch.Generator, not {describe(self.generator)}; "
                "write torch.Generator().manual_seed(seed)."
            )

    def _apply(self, activation: Tensor) -> Tensor:
        if self.generator is None:
            noise = torch.randn_like(activation)
        else:
            drawn = torch.randn(
                activation.shape,
                generator=self.generator,
                device=self.generator.device,
                dtype=activation.dtype,
            )
            noise = drawn.to(activation.device)
        return torch.add(activation, noise, alpha=self.std)


@dataclass(frozen=True, eq=False)
class Replace:
    """Replace the layer's activation by another one: activation patching.

    The net goes on with a copy, so the given activation survives in-place operations.

    Parameters
    ----------
    activation : Tensor or structure of tensors
        It has the layer's structure and shapes, and is usually ``rnet.activations[label]`` of a
        pass on other data. It is converted to the dtype and device of the layer's activation.
        Gradients reach it.

    Raises
    ------
    PostprocessorError
        ``activation`` holds no tensor; at a call, the structure, the shape or the kind of number
        differs.

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
                f"Replace has {describe(new)} for a layer that returns {describe(own)}. Record "
                "the layer on the same number of samples, or write "
                "Replace(activation.expand(shape))."
            )
        return new.to(own.device, own.dtype, copy=True)


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else str(tensor.dtype)
