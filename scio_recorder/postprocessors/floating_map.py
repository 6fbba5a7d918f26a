"""The parts that post-processors share: the walk over structures, and checked arguments."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import Rebuild, flatten, is_opened


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
    if any(isinstance(one, bool) for one in many):
        # A mask would count as the positions 0 and 1.
        raise PostprocessorError(
            f"{owner} takes positions as {name}, not {describe(value)}; "
            "for a mask, write mask.nonzero().flatten()."
        )
    return tuple(index(owner, name, one) for one in many)


def refuse_nested(owner: object, activation: Tensor) -> None:
    """Refuse a nested tensor, of whose samples one position can't name the same part."""
    if activation.is_nested:
        raise PostprocessorError(
            f"{owner!r} was given {describe(activation)}, which is nested: its samples differ in "
            "length. Give a function that treats them one by one, as activation.unbind() has them."
        )


def check_postprocessor(owner: str, given: object) -> None:
    """Refuse what can't be called, and a class whose objects are post-processors: one was meant.

    Raises
    ------
    PostprocessorError
        It is no post-processor.
    """
    if not callable(given):
        raise PostprocessorError(
            f"{owner} takes a post-processor, which is callable, Tensor -> Tensor or None, not "
            f"{describe(given)}."
        )
    # Other classes are functions like any other.
    if isinstance(given, type) and any("__call__" in vars(base) for base in given.__mro__):
        name = given.__name__
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
