"""Post-processors that act on chosen channels or along a direction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors.floating_map import (
    FloatingMap,
    Jagged,
    describe,
    index,
    integers,
    number,
)


@dataclass(frozen=True, eq=False)
class Ablate(FloatingMap):
    """Set chosen channels, or everything, to a number.

    Parameters
    ----------
    channels : int or iterable of int, optional
        Positions along ``dim``; negative ones count from the end. None (default) for everything,
        as inside :class:`Heads` and :class:`At`.
    dim : int, default 1
        The dimension of channels: 1 for convolutions, -1 for transformers' features.
    value : float, default 0
        The number to set them to, in the activation's own unit. It need not be finite: NaN
        shows which values depend on a channel.

    Raises
    ------
    PostprocessorError
        ``channels`` is empty or holds anything other than integers; at a call, the activation
        lacks the dimension or a channel.

    References
    ----------
    Meyes et al., "Ablation Studies in Artificial Neural Networks", 2019 (arXiv:1901.08644).

    Examples
    --------
    >>> import torch
    >>> Ablate([0, 2])(torch.ones(1, 3))
    tensor([[0., 1., 0.]])
    """

    channels: int | Iterable[int] | None = None
    dim: int = 1
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.channels is not None:
            object.__setattr__(self, "channels", integers("Ablate", "channels", self.channels))
        object.__setattr__(self, "dim", index("Ablate", "dim", self.dim))
        object.__setattr__(
            self, "value", number("Ablate", "value", self.value, finite=False, nan=True)
        )

    def _apply(self, activation: Tensor) -> Tensor:
        if self.channels is None:
            everywhere = torch.ones((), dtype=torch.bool, device=activation.device)
            return activation.masked_fill(everywhere, self.value)
        if activation.is_nested:
            return self._apply_jagged(activation)
        shape = tuple(activation.shape)
        self._check_dimension(shape)
        self._check_channels(shape, shape[self.dim])
        positions = torch.tensor(self._listed, device=activation.device)
        return activation.index_fill(self.dim, positions, self.value)

    def _apply_jagged(self, activation: Tensor) -> Tensor:
        parts, shape = Jagged.of(self, activation), tuple(activation.shape)
        self._check_dimension(shape)
        dim = self.dim % len(shape)
        if dim == 0:
            raise PostprocessorError(
                f"{self!r} was given a nested activation of shape {shape}, whose dimension 0 "
                "counts samples. Give the dimension of channels: Ablate(channels, dim=...)."
            )
        if dim == parts.varying:
            starts = parts.offsets[:-1]
            lengths = parts.offsets.diff() if parts.lengths is None else parts.lengths
            self._check_channels(shape, int(lengths.min()))
            found = [starts + lengths * (channel < 0) + channel for channel in self._listed]
            positions = torch.cat(found)
        else:
            self._check_channels(shape, shape[dim])
            positions = torch.tensor(self._listed, device=activation.device)
        return parts.replaced(parts.values.index_fill(dim - 1, positions, self.value))

    @property
    def _listed(self) -> tuple[int, ...]:
        assert isinstance(self.channels, tuple)  # the constructor makes it so
        return self.channels

    def _check_dimension(self, shape: tuple[int, ...]) -> None:
        if not -len(shape) <= self.dim < len(shape):
            raise PostprocessorError(
                f"{self!r} was given an activation of shape {shape}, which has no dimension "
                f"{self.dim}. Give the dimension of channels: Ablate(channels, dim=...)."
            )

    def _check_channels(self, shape: tuple[int, ...], size: int) -> None:
        missing = [channel for channel in self._listed if not -size <= channel < size]
        if missing:
            raise PostprocessorError(
                f"{self!r} was given an activation of shape {shape}, whose dimension {self.dim} "
                f"has {size} channels; {missing} are not among them. To choose another dimension, "
                "write Ablate(channels, dim=...)."
            )


@dataclass(frozen=True, eq=False)
class Add(FloatingMap):
    """Add a direction: activation steering.

    Parameters
    ----------
    direction : Tensor
        Broadcastable to the activation without enlarging it: ``[features]`` for a transformer's
        ``[batch, tokens, features]``, ``[channels, 1, 1]`` for images. Gradients reach it.
    coefficient : float, default 1.0
        A factor of the direction.

    Raises
    ------
    PostprocessorError
        ``direction`` is not a floating-point tensor; ``coefficient`` is not a finite number; at a
        call, the shapes do not fit.

    References
    ----------
    Turner et al., "Steering Language Models With Activation Engineering", 2023
    (arXiv:2308.10248).

    Examples
    --------
    >>> import torch
    >>> Add(torch.tensor([1.0, 0.0]), coefficient=3.0)(torch.zeros(2, 2))
    tensor([[3., 0.],
            [3., 0.]])
    """

    direction: Tensor
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.direction, Tensor) or not self.direction.is_floating_point():
            raise PostprocessorError(
                f"Add takes a floating-point tensor as direction, not {describe(self.direction)}; "
                "for a number, write Add(torch.tensor(number))."
            )
        coefficient = number("Add", "coefficient", self.coefficient)
        object.__setattr__(self, "coefficient", coefficient)

    def __repr__(self) -> str:
        return f"Add({describe(self.direction)}, coefficient={self.coefficient})"

    def _apply(self, activation: Tensor) -> Tensor:
        shape, own = tuple(activation.shape), tuple(self.direction.shape)
        if not _fits(own, shape):
            raise PostprocessorError(
                f"Add has a direction of shape {own}, which does not broadcast to the "
                f"activation's {shape}. Shape it so that its last dimensions match; for channels "
                "of images, write direction[:, None, None]."
            )
        direction = self.direction.to(activation.device, activation.dtype)
        return torch.add(activation, direction, alpha=self.coefficient)


def _fits(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of shape ``own`` broadcasts to ``shape`` without enlarging it."""
    if len(own) > len(shape):
        return False
    # Lengths are equal here: torch 2.8 can't compile a zip of different lengths.
    pairs = zip(own, shape[len(shape) - len(own) :], strict=True)
    # Written out, since under torch.compile `in` does not compare lengths that vary.
    return all(mine == 1 or mine == theirs for mine, theirs in pairs)
