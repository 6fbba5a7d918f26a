"""A row of the zoo, and the small parts that its nets are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A net, inputs for it, and what it is able to do.

    `build()` is seeded by `fresh()`, so that two calls give nets with equal weights: some nets
    can't be deep-copied. `inputs(seed)` gives `(args, kwargs)`, always of the same shapes.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    static_flow: bool = True
    train: bool = True
    inference: bool = True
    autocast: bool = True
    backward: bool = True
    # torch.autograd.grad does not go through reentrant checkpointing.
    partial_backward: bool = True
    # torch takes another kernel when modules carry hooks: the bare output differs in rounding.
    hooks_change_kernel: bool = False
    # Some nets make leaves of views of their inputs, which an input on a graph does not allow.
    input_gradients: bool = True
    # Modules whose record need not be on the graph: something else holds their output, or it
    # overlaps another one; or whose gradient the net's own hooks change after the oracle saw it.
    unjudged: tuple[str, ...] = ()

    def fresh(self) -> nn.Module:
        torch.manual_seed(1234)
        return self.build()

    def __repr__(self) -> str:
        return self.name


class Net(nn.Module):
    """A net whose forward is the function given, which gets the net first."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Table(list[Case]):
    """A list of cases that a decorated builder adds itself to, under its own name."""

    def add(
        self, inputs: Callable[[int], Inputs], **marks: Any
    ) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        def decorate(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            self.append(Case(build.__name__, build, inputs, **marks))
            return build

        return decorate


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Make an `inputs` function: one random tensor a shape, as positional inputs."""

    def inputs(seed: int) -> Inputs:
        source = generator(seed)
        return tuple(torch.randn(shape, generator=source, dtype=dtype) for shape in shapes), {}

    return inputs


vectors = random_tensors((3, 4))
images = random_tensors((2, 3, 8, 8))
sequences = random_tensors((2, 5, 8))


def linear(width: int = 4) -> nn.Linear:
    return nn.Linear(width, width)
