"""Tensors that need not be examined, since a module's output tells whether they are finite.

NOTE [What need not be looked at]

Some modules return finite values for any finite inputs. Others hand on everything that is not
finite: if their output is finite, their input was. Inside a Sequential, and only there, each module
certainly receives the output of the one before. So a chain of such modules is examined once, at its
end, and link by link only if something is found there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.tensors import private
from scio_recorder.tensors.finite import Found, Known

_HARMLESS = {nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Flatten}
_TELLING = {
    *(nn.Linear, nn.GELU, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
}
# A chain keeps its links in memory, so its length is limited.
_MOST_LINKS = 4


class Link(NamedTuple):
    """An output that nobody has examined yet."""

    tensor: Tensor
    version: int
    name: str
    number: int
    given: list[Found]

    def look(self, known: Known) -> list[Found]:
        """Return findings about it; nothing is known about a tensor that was written to since."""
        found = known.look(self.tensor) if self.tensor._version == self.version else None
        return [] if found is None else [found]


def is_harmless(module: nn.Module) -> bool:
    """Whether a module returns finite values for all finite inputs."""
    return type(module) in _HARMLESS and runs_own(module)


def tells(module: nn.Module) -> bool:
    """Whether a module's output shows that its input is not finite.

    A convolution with strides or gaps may skip some of its input, and a module with an empty output
    all.
    """
    if type(module) not in _TELLING or not runs_own(module):
        return False
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return {*module.stride, *module.dilation} == {1} and module.out_channels > 0
    return not isinstance(module, nn.Linear) or module.out_features > 0


def runs_own(module: nn.Module) -> bool:
    """Whether nobody has replaced the forward of a module of torch, on it or on its class."""
    kind: Any = type(module)
    its_globals = getattr(kind.forward, "__globals__", {})
    return "forward" not in vars(module) and its_globals.get("__name__") == kind.__module__


def followed(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Return the Sequential of each module that is followed there by a module that `tells`.

    Modules with several places, and those that others have hooked, are left out.
    """
    found: dict[nn.Module, nn.Module] = {}
    parents = list(modules)
    places = Counter(id(child) for parent in parents for child in vars(parent)["_modules"].values())
    for parent in parents:
        if type(parent) is not nn.Sequential or not runs_own(parent):
            continue
        for module, following in pairwise(parent):
            is_alone = places[id(module)] == 1 and not any(private.forward_hooks(module))
            if is_alone and tells(following):
                found[module] = parent
    return found


def can_wait(output: object, links: list[Link]) -> bool:
    """Whether a module's output may be examined later."""
    return (
        type(output) is Tensor
        and output.is_cpu
        and output.is_floating_point()
        and not output.is_inference()
        and output.layout is torch.strided
        and len(links) < _MOST_LINKS
    )
