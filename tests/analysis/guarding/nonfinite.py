"""Networks that make NaNs and infinities, and what plain hooks find in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.base import Net

NAN, INF = torch.nan, torch.inf


class Do(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Residual(nn.Module):
    """Adds what a module makes of its input, in place if asked."""

    def __init__(self, inner: nn.Module, in_place: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.in_place:
            y += x
            return y
        return x + y


def attention(hidden: list[int]) -> nn.Module:
    """Return scores, a mask that the caller makes, and a softmax."""

    def forward(net: Any, x: Tensor) -> Any:
        mask = torch.zeros(4)
        mask[hidden] = -INF
        return net.softmax(net.masked(net.scores(x), mask=mask))

    masked = Do(lambda scores, mask: scores + mask)
    return Net(forward, scores=nn.Linear(4, 4), masked=masked, softmax=nn.Softmax(-1))


def between(net: Any, x: Tensor) -> Tensor:
    """Its own code makes a NaN between two modules."""
    y: Tensor = net.before(x)
    return net.after(y + (y - y) / (y - y))  # type: ignore[no-any-return]  # a module's call


def structured(x: Tensor) -> dict[str, Any]:
    """Return tensors in a structure, with counts beside them."""
    return {"counts": torch.arange(3), "pair": (x, [x.log()]), "none": None}


def linear(weight: float = 1.0) -> nn.Linear:
    module = nn.Linear(4, 4)
    with torch.no_grad():
        module.weight[1, 2] = weight
    return module


class Seen(NamedTuple):
    name: str
    inputs_finite: bool
    num_nan: int
    num_inf: int


def first_maker(net: nn.Module, run: Callable[[], object]) -> Seen | None:
    """Return the first call to give a kind that it was not given, by plain hooks and copies."""
    stack: list[list[Tensor]] = []
    found: list[Seen] = []

    def numbers(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value.detach().clone().double()] if value.is_floating_point() else []
        items = value.values() if isinstance(value, dict) else value
        return (
            [one for item in items for one in numbers(item)]
            if isinstance(value, dict | list | tuple)
            else []
        )

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(numbers([args, kwargs]))

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            given, made = stack.pop(), numbers(output)
            nan = sum(int(tensor.isnan().sum()) for tensor in made)
            inf = sum(int(tensor.isinf().sum()) for tensor in made)
            has_nan = any(math.isnan(value) for tensor in given for value in tensor.flatten())
            is_finite = all(math.isfinite(value) for tensor in given for value in tensor.flatten())
            if (nan and not has_nan) or (inf and is_finite):
                found.append(Seen(name, is_finite, nan, inf))

        return hook

    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    run()
    for handle in handles:
        handle.remove()
    return found[0] if found else None


def forward_faults() -> dict[str, tuple[nn.Module, str | None]]:
    """Return networks on inputs [3, 4], and the name of the module that makes the fault."""
    relu = nn.ReLU(inplace=True)
    return {
        "nothing": (nn.Sequential(linear(), relu, nn.LayerNorm(4)), None),
        "log of zero": (nn.Sequential(linear(), nn.ReLU(), Do(torch.log), linear()), "2"),
        "log in place": (nn.Sequential(linear(), relu, Do(Tensor.log_), linear()), "2"),
        "norm without eps": (nn.Sequential(Do(torch.zeros_like), nn.LayerNorm(4, eps=0.0)), "1"),
        "exp overflows": (nn.Sequential(linear(), Do(lambda x: (x.abs() + 100).exp())), "1"),
        "a masked row": (nn.Sequential(linear(), attention([0, 1, 2, 3])), "1.softmax"),
        "a mask": (nn.Sequential(linear(), attention([1, 2])), None),
        "a weight": (nn.Sequential(linear(), linear(NAN), nn.ReLU()), "1"),
        "an infinite weight": (nn.Sequential(linear(), linear(INF), nn.ReLU()), "1"),
        "between two modules": (
            nn.Sequential(linear(), Net(between, before=nn.Linear(4, 4), after=nn.Linear(4, 4))),
            "1",
        ),
        "residual": (
            nn.Sequential(linear(), Residual(nn.Sequential(nn.ReLU(), Do(torch.rsqrt)))),
            "1.inner.1",
        ),
        "residual in place": (
            nn.Sequential(linear(), Residual(nn.Sequential(relu, Do(torch.rsqrt)), True)),
            "1.inner.1",
        ),
        "in a structure": (nn.Sequential(nn.ReLU(), Do(structured)), "1"),
        "inf made, NaN of it later": (
            nn.Sequential(nn.ReLU(), Do(torch.reciprocal), Do(lambda x: x - x)),
            "1",
        ),
        "written in place behind a module": (
            nn.Sequential(linear(), Do(lambda x: nn.functional.relu_(x.div_(0.0).sub_(x)))),
            "1",
        ),
    }
