"""The setting of a pass: everything but the data that decides what a network does in place.

What a network did in a setting before decides how activations are kept there.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterable, Mapping
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.capture.program import Program
from scio_recorder.layer import DepthIdx
from scio_recorder.postprocessors.assigning import Assigned
from scio_recorder.tensors import private

# The kinds of keeping. LEARN copies and watches whether that was needed. REFERENCE refers to the
# tensors of a structure, and BARE to an output that is itself a tensor. Of several calls, the one
# that needs most decides: kinds are in that order.
LEARN, REFERENCE, BARE, COPY = range(4)
# The two things of each event that have a kind.
OUTPUT, INPUT = range(2)

_training = operator.itemgetter("training")


class Settings:
    """Distinguishes settings, cheaply: this runs in every pass, however few layers are recorded."""

    def __init__(self, net: nn.Module) -> None:
        # Flags are read from the instances' dictionaries: attribute access on a module is slow.
        self._states = [module.__dict__ for module in net.modules() if _may_read_flag(module)]

    def key(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        posts: Assigned,
        stops: bool,
    ) -> object:
        """Return a key that is equal for passes in the same setting."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
            inputs: object = args[0].dtype
        else:
            inputs = (_structure(args), _structure(kwargs))
        if posts:
            inputs = (inputs, posts.signature)
        return (
            bytes(map(_training, self._states)),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            private.is_any_autocast_on(),
            stops,
            inputs,
        )


class Keeping:
    """The kinds of all events in one setting; replaced, never changed, when more is learned."""

    __slots__ = ("fast", "is_fast", "kinds")

    def __init__(self, program: Program, kinds: tuple[list[int], list[int]]) -> None:
        self.kinds = kinds
        options = program.options
        is_simple = not (options.inputs or options.gradients or options.offload)
        self.fast = [
            is_simple
            and all(
                kinds[OUTPUT][at] == BARE and program.labels[at] is not None for at in positions
            )
            for positions in program.positions
        ]
        self.is_fast = all(self.fast)


class Setting:
    """The knowledge about a network in one setting; it improves from pass to pass."""

    def __init__(self, program: Program) -> None:
        self._program = program
        kind = REFERENCE if program.options.copy == "never" else LEARN
        kinds = [kind] * len(program.expected), [kind] * len(program.expected)
        self.keeping = Keeping(program, kinds)

    def learn(self, before: Keeping, seen: Iterable[tuple[int, int, int]]) -> None:
        """Keep from now on as a pass has shown: OUTPUT or INPUT, position and kind."""
        kinds = list(before.kinds[OUTPUT]), list(before.kinds[INPUT])
        for what, position, kind in seen:
            kinds[what][position] = max(kinds[what][position], kind)
        # Another thread may have learned more in the meantime.
        if kinds != before.kinds and before is self.keeping:
            self.keeping = Keeping(self._program, kinds)

    def copy(self, what: int, label: DepthIdx) -> None:
        """Copy a layer's output or inputs, from the next pass on."""
        self.learn(self.keeping, [(what, self._program.labels.index(label), COPY)])


def _may_read_flag(module: nn.Module) -> bool:
    """Whether a module may behave differently in training.

    Most never do, and reading all flags is most of the cost of a pass with few recorded layers. If
    this is mistaken, verification still fails, so no record is wrong.
    """
    if "training" not in module.__dict__:
        # A scripted part, which keeps its flag elsewhere.
        return False
    hooks = private.forward_hooks(module)
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


def _structure(value: Any, around: tuple[int, ...] = ()) -> object:
    if isinstance(value, Tensor):
        return value.dtype
    is_mapping = isinstance(value, Mapping)
    if (is_mapping or isinstance(value, list | tuple)) and id(value) not in around:
        # Not every mapping yields its keys: a TensorDict yields its rows.
        parts = (*value.keys(), *value.values()) if is_mapping else value
        return (type(value), *[_structure(part, (*around, id(value))) for part in parts])
    return value if isinstance(value, str) else type(value)
