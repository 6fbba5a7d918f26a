"""What the post-processors share: the walk over structures, and checked arguments."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scio_recorder.errors import PostprocessorError
from scio_recorder.tensors.structures import Rebuild, flatten

__all__ = ["FloatingMap", "describe", "index", "number", "take_apart"]


class FloatingMap(ABC):
    """Maps one function over the floating-point tensors of an activation."""

    def __call__(self, activation: Any) -> Any:
        """Return the activation with its floating-point tensors changed."""
        leaves, rebuild = take_apart(activation)
        if not any(_is_floating(leaf) for leaf in leaves):
            raise PostprocessorError(
                f"{self!r} was given an activation without floating-point tensors: "
                f"{describe(activation)}. Name the layers that it is for with a mapping: "
                "activation_postproc={selector: post-processor}."
            )
        return rebuild([self._apply(leaf) if _is_floating(leaf) else leaf for leaf in leaves])

    @abstractmethod
    def _apply(self, activation: Tensor) -> Tensor:
        """Change one floating-point tensor, not in place."""


def take_apart(value: Any) -> tuple[list[Any], Rebuild]:
    """Return what a structure holds, tensors and possibly more, and what builds it again."""
    if not torch.compiler.is_compiling():
        return flatten(value)
    # Dynamo follows torch's own walk over structures, but not one that looks into objects.
    leaves, structure = pytree.tree_flatten(value)
    return leaves, lambda new: pytree.tree_unflatten(new, structure)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def number(owner: str, name: str, value: Any, *, finite: bool = True, nan: bool = False) -> float:
    """Return an argument as a float, or say what was wrong with it."""
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
    """Return an argument as an integer, or say what was wrong with it."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise PostprocessorError(
            f"{owner} takes integers as {name}, not {describe(value)}."
        ) from None


def describe(value: Any) -> str:
    """Return what an error message calls a value, without its contents."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, str | int | float | complex | None):
        return repr(value)
    return f"a {type(value).__name__}"
