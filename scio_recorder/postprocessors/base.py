"""What the post-processors share: the walk over structures, and checked arguments."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from typing import Any, SupportsIndex

from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.tree import map_tensors, tensors

__all__ = ["FloatingMap", "describe", "index", "number"]


class FloatingMap(ABC):
    """Maps one function over the floating-point tensors of an activation."""

    def __call__(self, activation: Any) -> Any:
        """Return the activation with its floating-point tensors changed."""
        if not any(tensor.is_floating_point() for tensor in tensors(activation)):
            raise PostprocessorError(
                f"{self!r} was given an activation without floating-point tensors: "
                f"{describe(activation)}. Name the layers that it is for with a mapping: "
                "activation_postproc={selector: post-processor}."
            )
        return map_tensors(self._change_floating, activation)

    def _change_floating(self, tensor: Tensor) -> Tensor:
        return self._apply(tensor) if tensor.is_floating_point() else tensor

    @abstractmethod
    def _apply(self, activation: Tensor) -> Tensor:
        """Change one floating-point tensor, not in place."""


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
