"""Tensors that need not be looked at, since what a module makes of them tells.

NOTE [What need not be looked at]

Some modules make nothing that is not finite of finite inputs, whatever these are. Others hand on
whatever is not finite: if what they return is finite, what they received was. Inside a Sequential,
and only there, it is sure that what a module returns is what the next one receives. So a chain of
such modules is looked at once, at its end, and link by link only if something is found there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.tensors import private
from scio_recorder.tensors.finite import Found, Known

_HARMLESS = {nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Flatten}
_TELLING = {
    *(nn.Linear, nn.GELU, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
}
# Chains keep their links in memory.
_MOST_LINKS = 4


class Link(NamedTuple):
    """What a module has returned and nobody has looked at."""

    tensor: Tensor
    version: int
    name: str
    number: int
    given: list[Found]

    def look(self, known: Known) -> list[Found]:
        """Return what of it is not finite; of what somebody has written to, nobody knows."""
        found = known.look(self.tensor) if self.tensor._version == self.version else None
        return [] if found is None else [found]


def is_harmless(module: nn.Module) -> bool:
    """Whether a module returns finite values wherever it is given such."""
    return type(module) in _HARMLESS and "forward" not in vars(module)


def tells(module: nn.Module) -> bool:
    """Whether what a module returns is not finite wherever what it receives is not.

    A convolution with strides may leave out some of its input, and a module without outputs all.
    """
    if type(module) not in _TELLING or "forward" in vars(module):
        return False
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return set(module.stride) == {1} and module.out_channels > 0
    return not isinstance(module, nn.Linear) or module.out_features > 0


def followed(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return the Sequential of each module that is followed there by one that tells.

    Modules that lie in several places, and those that others have hooks on, are left out.
    """
    found: dict[nn.Module, nn.Module] = {}
    parents = list(modules)
    places = Counter(id(child) for parent in parents for child in vars(parent)["_modules"].values())
    for parent in parents:
        if type(parent) is not nn.Sequential or "forward" in vars(parent):
            continue
        for module, following in pairwise(parent):
            is_alone = places[id(module)] == 1 and not any(private.forward_hooks(module))
            if is_alone and tells(following):
                found[module] = parent
    return found


def can_wait(output: object, links: list[Link]) -> bool:
    """Whether a module's output may be looked at later."""
    return (
        type(output) is Tensor
        and output.is_cpu
        and output.is_floating_point()
        and not output.is_inference()
        and output.layout is torch.strided
        and len(links) < _MOST_LINKS
    )
