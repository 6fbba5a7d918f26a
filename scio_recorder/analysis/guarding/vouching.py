"""Tensors that need not be examined, since a module's output tells whether they are finite.

NOTE [What need not be looked at]

Some modules return finite values for any finite inputs. Others hand on everything that is not
finite: if their output is finite, their input was. Inside a Sequential, and only there, each module
certainly receives the output of the one before. So a chain of such modules is examined once, at its
end, and link by link only if something is found there.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.analysis.guarding.passing import Operations
from scio_recorder.tensors.finite import Found

_HARMLESS = {nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Flatten}
_CONVOLUTIONS = {nn.Conv1d, nn.Conv2d, nn.Conv3d}
_TELLING = {
    *(nn.Linear, nn.GELU, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *_CONVOLUTIONS,
}
# A chain keeps its links in memory, so its length is limited.
_MOST_LINKS = 4

# An output that nobody has examined yet: its version, the call that returned it, and findings about
# what this received. A bare tuple, since many calls make one.
Link: TypeAlias = tuple[Tensor, int, str, int, list[Found]]


class Traits(NamedTuple):
    """What is known about a module of torch as long as it runs its own forward."""

    # Whether no hooks of others act on it.
    is_alone: bool = True
    # That forward; None if nothing is known.
    forward: Any = None
    # Whether it returns finite values for all finite inputs.
    is_harmless: bool = False
    # Whether its output shows that its input is not finite.
    tells: bool = False
    # Whether it calls no other modules, or nothing else.
    is_leaf: bool = False
    is_plain: bool = False
    # What is known about its operations in the graph.
    operations: Operations | None = None


NO_TRAITS = Traits()
BESIDE_OTHERS = Traits(is_alone=False)


def traits_of(module: nn.Module) -> Traits:
    """Return what is known about a module."""
    kind: Any = type(module)
    if not kind.__module__.startswith("torch.nn.modules.") or not runs_own(module):
        return NO_TRAITS
    own: Any = module
    shows_inputs = shows_gradients = kind in _TELLING
    if kind in _CONVOLUTIONS:
        # With strides or gaps it may skip some of its input. Gradients reach all windows, unless
        # some lie wholly in the padding.
        shows_inputs = {*own.stride, *own.dilation} == {1} and own.out_channels > 0
        shows_gradients = {*own.dilation} == {1} and _is_narrow(own.padding, own.kernel_size)
    elif kind is nn.Linear:
        shows_inputs, shows_gradients = own.out_features > 0, own.in_features > 0
    is_leaf = not vars(module)["_modules"]
    return _traits(kind, kind.forward, is_leaf, shows_inputs, shows_gradients)


@functools.cache
def _traits(
    kind: type[nn.Module], forward: Any, is_leaf: bool, shows_inputs: bool, shows_gradients: bool
) -> Traits:
    if kind is nn.Sequential:
        return Traits(forward=forward, is_plain=True, operations=Operations(True, False, False))
    return Traits(
        forward=forward,
        is_harmless=kind in _HARMLESS,
        tells=shows_inputs,
        is_leaf=is_leaf,
        operations=Operations(False, kind is nn.Linear, shows_gradients) if is_leaf else None,
    )


def _is_narrow(padding: Any, size: Any) -> bool:
    return isinstance(padding, str) or all(map(operator.lt, padding, size))


def runs_own(module: nn.Module) -> bool:
    """Whether nobody has replaced the forward of a module of torch, on it or on its class."""
    kind: Any = type(module)
    its_globals = getattr(kind.forward, "__globals__", {})
    return "forward" not in vars(module) and its_globals.get("__name__") == kind.__module__


def can_wait(output: object, links: list[Link]) -> bool:
    """Whether a module's output may be examined later."""
    return (
        type(output) is Tensor
        and len(links) < _MOST_LINKS
        and output.is_cpu
        and output.dtype.is_floating_point
        and output.layout is torch.strided
        and not output.is_inference()
    )
