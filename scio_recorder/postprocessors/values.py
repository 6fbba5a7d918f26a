"""Post-processors that act on every number, on chosen channels or along a direction.

Other post-processors share their walk over structures, and their checks of arguments.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import Rebuild, flatten, is_opened, tensors


class FloatingMap(ABC):
    """Maps one function over the floating-point tensors of an activation."""

    def __call__(self, activation: Any) -> Any:
        """Return the activation with its floating-point tensors changed."""
        leaves, rebuild = take_apart(activation)
        if not any(_is_floating(leaf) for leaf in leaves):
            raise PostprocessorError(
                f"{self!r} was given an activation without floating-point tensors: "
                f"{describe(activation)}. Use a mapping to name its layers: "
                "activation_postproc={selector: post-processor}."
            )
        return rebuild([self._apply(leaf) if _is_floating(leaf) else leaf for leaf in leaves])

    @abstractmethod
    def _apply(self, activation: Tensor) -> Tensor:
        """Change one floating-point tensor, not in place."""


def take_apart(value: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of a structure, and a function that builds it again."""
    if not torch.compiler.is_compiling():
        return flatten(value)
    leaves, rebuild = private.flatten_registered(value)
    for leaf in leaves:
        if is_opened(leaf):
            raise PostprocessorError(
                f"a compiled pass can't look into a {type(leaf).__name__}, which may hold tensors: "
                "let the layer return tensors in a tuple, list or dict, or in a dataclass that "
                "torch.export.register_dataclass was told of, or call the recorder uncompiled"
            )
    return leaves, rebuild


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def number(owner: str, name: str, value: Any, *, finite: bool = True, nan: bool = False) -> float:
    """Return an argument as a float, or raise an error that explains what is wrong."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise PostprocessorError(
            f"{owner} takes one number as {name}, not {describe(value)}."
        ) from None
    if (math.isnan(number) and not nan) or (math.isinf(number) and finite):
        raise PostprocessorError(f"{owner} was given {name}={number}; it must be a finite number.")
    return number


def index(owner: str, name: str, value: SupportsIndex) -> int:
    """Return an argument as an integer, or raise an error that explains what is wrong."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise PostprocessorError(
            f"{owner} takes integers as {name}, not {describe(value)}."
        ) from None


def integers(owner: str, name: str, value: Any) -> tuple[int, ...]:
    """Return an argument, one integer or several, as a tuple, or raise an error."""
    if isinstance(value, Tensor):
        value = value.tolist()
    many = list(value) if isinstance(value, Iterable) else [value]
    if not many:
        raise PostprocessorError(f"{owner} was given no {name}, so it would do nothing: name some.")
    if any(isinstance(position, bool) for position in many):
        # A mask would count as the positions 0 and 1.
        raise PostprocessorError(
            f"{owner} takes positions as {name}, not {describe(value)}; "
            "for a mask, write mask.nonzero().flatten()."
        )
    return tuple(index(owner, name, position) for position in many)


def refuse_nested(owner: object, activation: Tensor) -> None:
    """Refuse a nested tensor, of whose samples one position can't name the same part."""
    if activation.is_nested:
        raise PostprocessorError(
            f"{owner!r} was given {describe(activation)}, which is nested: its samples differ in "
            "length. Give a function that treats them one by one, as activation.unbind() has them."
        )


def check_postprocessor(owner: str, function: object) -> None:
    """Refuse what can't be called, and a class whose objects are post-processors: one was meant.

    Raises
    ------
    PostprocessorError
        It is no post-processor.
    """
    if not callable(function):
        raise PostprocessorError(
            f"{owner} takes a post-processor, which is callable, Tensor -> Tensor or None, not "
            f"{describe(function)}."
        )
    # Other classes are functions like any other.
    if isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__):
        name = function.__name__
        raise PostprocessorError(
            f"{name} is a class, and a post-processor is an object of it: write {name}(), with its "
            "arguments if it takes any"
        )


def describe(value: Any) -> str:
    """Return the description of a value for error messages, without its contents."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, str | int | float | complex | None):
        return repr(value)
    return f"a {type(value).__name__}"


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
            raise PostprocessorError(
                f"Replace takes a tensor or a structure of them, not {describe(self.activation)}."
            )

    def __repr__(self) -> str:
        return f"Replace({describe(self.activation)})"

    def __call__(self, activation: Any) -> Any:
        """Return a copy of the given activation, checked against the layer's own."""
        if isinstance(activation, Tensor) and isinstance(self.activation, Tensor):
            return self._replace(activation, self.activation)
        leaves, rebuild = take_apart(activation)
        new_leaves, _ = take_apart(self.activation)
        if len(new_leaves) != len(leaves) or type(activation) is not type(self.activation):
            raise PostprocessorError(
                f"{self!r} does not fit the layer, which returns {describe(activation)}. "
                "Give the whole structure, with the same tensors in it."
            )
        return rebuild(
            [self._replace(old, new) for old, new in zip(leaves, new_leaves, strict=True)]
        )

    def _replace(self, old: Any, new: Any) -> Any:
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            return old
        if old.shape != new.shape or _kind(old) != _kind(new):
            raise PostprocessorError(
                f"Replace has {describe(new)} for what is {describe(old)}. Record the layer on "
                "the same number of samples, or write Replace(activation.expand(shape)). Inside "
                "At and Heads give the same part of it: of heads, "
                "activation.unflatten(-1, (num_heads, -1))[..., heads, :] with a list of heads."
            )
        return new.to(old.device, old.dtype, copy=True)


def _kind(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "floating" if tensor.is_floating_point() else str(tensor.dtype)


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
        refuse_nested(self, activation)
        assert isinstance(self.channels, tuple)  # the constructor makes it so
        dim, shape = self.dim, tuple(activation.shape)
        size = shape[dim] if -len(shape) <= dim < len(shape) else 0
        missing = [channel for channel in self.channels if not -size <= channel < size]
        if missing:
            has = f"{size} channels along dimension {dim}, not {missing}" if size else None
            raise PostprocessorError(
                f"{self!r} was given an activation of shape {shape}, which has "
                f"{has or f'no dimension {dim}'}. To choose another dimension, write "
                "Ablate(channels, dim=...)."
            )
        positions = torch.tensor(self.channels, device=activation.device)
        return activation.index_fill(dim, positions, self.value)


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
        direction = self.direction.to(activation.device, activation.dtype)
        try:
            direction = direction.expand_as(activation)
        except RuntimeError:
            raise PostprocessorError(
                f"Add has a direction of shape {tuple(direction.shape)}, which does not broadcast "
                f"to the activation's {tuple(activation.shape)}. Shape it so that its last "
                "dimensions match; for channels of images, write direction[:, None, None]."
            ) from None
        return torch.add(activation, direction, alpha=self.coefficient)
