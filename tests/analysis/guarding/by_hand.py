"""The makers of gradients that are not finite, found without looking at the graph.

Identities stand around each call: around its inputs, its own parameters and its outputs. Each sees
the gradients of this one call, even if other calls use the same tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.tensors.structures import map_tensors, tensors


class Made(NamedTuple):
    name: str
    num_nan: int
    num_inf: int


class _Seen:
    """What a call received, in both directions."""

    def __init__(self, name: str, args: Any) -> None:
        self.name = name
        self.is_given_finite = all(bool(one.detach().isfinite().all()) for one in _floats(args))
        self.kinds: set[str] = set()
        self.was_entered = False


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, see: Any) -> Tensor:
        ctx.see = see
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.see(gradients[0])
        return gradients[0], None


@contextlib.contextmanager
def gradient_makers(net: nn.Module) -> Iterator[list[Made]]:
    """Collect the calls of a net that make gradients which they were not given, in their order."""
    stack: list[tuple[_Seen, dict[str, Any]]] = []
    makers: list[Made] = []

    def leave(around: list[_Seen], gradient: Tensor) -> None:
        kinds = _kinds(gradient)
        for seen in reversed(around):
            is_maker = bool(
                kinds - seen.kinds if not seen.kinds else (kinds & {"nan"}) - seen.kinds
            )
            if is_maker and seen.is_given_finite and seen.was_entered:
                nan, inf = int(gradient.isnan().sum()), int(gradient.isinf().sum())
                makers.append(Made(seen.name, nan, inf))

    def enter(seen: _Seen, gradient: Tensor) -> None:
        seen.was_entered = True
        seen.kinds |= _kinds(gradient)

    def around(value: Any, see: Any) -> Any:
        def one(tensor: Tensor) -> Tensor:
            return _Identity.apply(tensor, see) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

        return map_tensors(one, value)

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            seen = _Seen(name, (args, kwargs))
            own = dict(module._parameters)
            stack.append((seen, own))
            calls = [one for one, _ in stack]
            for key, weight in own.items():
                if weight is not None:
                    see = lambda gradient: leave(calls, gradient)  # noqa: E731
                    module._parameters[key] = around(weight, see)
            return around((args, kwargs), lambda gradient: leave([seen], gradient))

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        seen, own = stack.pop()
        module._parameters.update(own)
        return None if output is None else around(output, lambda gradient: enter(seen, gradient))

    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    try:
        yield makers
    finally:
        for handle in handles:
            handle.remove()


def _floats(value: Any) -> list[Tensor]:
    return [one for one in tensors(value) if one.is_floating_point()]


def _kinds(gradient: Tensor) -> set[str]:
    found = {"nan": gradient.isnan().any(), "inf": gradient.isinf().any()}
    return {kind for kind, has in found.items() if has}
