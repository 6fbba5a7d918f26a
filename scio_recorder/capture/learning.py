"""The setting of a pass: all that decides, besides the data, what a network does in place."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterable, Mapping
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scio_recorder.postprocessors.assigning import Postprocessor, signature
from scio_recorder.tensors import private

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


_training = operator.itemgetter("training")


class Settings:
    """Tells settings apart, cheaply: this runs in every pass, however few layers are recorded."""

    def __init__(self, net: nn.Module) -> None:
        # Flags are read from the instances' dictionaries: attribute access on a module is slow.
        self._states = [module.__dict__ for module in net.modules() if _may_read_flag(module)]

    def key(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        posts: Mapping[DepthIdx, Postprocessor] | None,
        stops: bool,
    ) -> object:
        """Return a value that is equal for passes in the same setting."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            inputs: object = args[0].dtype
        else:
            inputs = (_structure(args), _structure(kwargs))
        if posts is not None:
            inputs = (inputs, frozenset((label, signature(f)) for label, f in posts.items()))
        return (
            bytes(map(_training, self._states)),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            private.is_any_autocast_on(),
            stops,
            inputs,
        )


def _may_read_flag(module: nn.Module) -> bool:
    """Whether a module may behave differently in training.

    Most never do, and reading the flags of all is most of what a pass costs with few layers
    recorded. Where this is mistaken, the pass still fails verification rather than be wrong.
    """
    if "training" not in module.__dict__:
        # A scripted part, whose flag lies elsewhere.
        return False
    hooks = private.forward_hooks(module), private.forward_pre_hooks(module)
    is_patched = "forward" in module.__dict__ or any(hooks)
    is_readable = hasattr(inspect.unwrap(module.forward), "__code__")
    kind: Any = type(module)
    return is_patched or not is_readable or _mentions_flag(kind)


@cache
def _mentions_flag(kind: Any) -> bool:
    own = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
    members = [member for base in own for member in vars(base).values()]
    functions = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f)]
    return any(_mentions(code) for code in codes if code is not None)


def _mentions(code: CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    named = "training" in code.co_names or "training" in code.co_consts
    return named or any(map(_mentions, inner))


def _structure(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype
    if isinstance(value, Mapping):
        return (type(value), _all(value), _all(value.values()))
    if isinstance(value, list | tuple):
        return (type(value), _all(value))
    return type(value)


def _all(values: Iterable[Any]) -> tuple[object, ...]:
    return tuple(value if isinstance(value, str) else _structure(value) for value in values)
