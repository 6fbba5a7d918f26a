"""Hooks that copies of their module don't have.

NOTE [How a copy comes without hooks]

A module holds its hooks in ordered dictionaries, by number, and they are copied and saved with the
module. ``copy`` and ``pickle`` ask a dictionary's ``__reduce_ex__`` how to construct it again. As
long as a module has hooks of ours, its dictionaries have a ``__reduce_ex__`` that leaves them out.
They stay the same objects, since the handles of other hooks refer to them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from scio_recorder.capture.hook_changes import entries
from scio_recorder.tensors import private


class Uncopied:
    """A hook, or the object that a hook is a method of, that copies of the module don't have."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # For code that copies single hooks.
        return _Nothing, ()


class _Nothing:
    """A hook that does nothing."""

    def __call__(self, *call: Any) -> None:
        """Do nothing."""

    after = after_traced = before = __call__


def keep_out_of_copies(module: nn.Module, *, before_only: bool = False) -> None:
    """Leave the hooks that are `Uncopied`, or only those before calls, out of a module's copies."""
    owner, own = weakref.ref(module), vars(module)
    for name in _names(before_only):
        hooks = own.get(name)
        if isinstance(hooks, OrderedDict):
            reduce: Any = partial(_without_uncopied, owner, name)
            hooks.__reduce_ex__ = reduce  # type: ignore[method-assign]  # asked before the class's own


def let_copy(module: nn.Module, *, before_only: bool = False) -> None:
    """Undo `keep_out_of_copies`, once no hook of the module is `Uncopied`."""
    own = vars(module)
    found = [own.get(name) for name in _names(before_only)]
    if not any(found) or not _uncopied(module):
        for hooks in found:
            if isinstance(hooks, OrderedDict):
                vars(hooks).pop("__reduce_ex__", None)


def _names(before_only: bool) -> tuple[str, ...]:
    return private.FORWARD_HOOKS[1:] if before_only else private.AROUND_FORWARD


def _without_uncopied(module: weakref.ref[nn.Module], name: str, protocol: int) -> tuple[Any, ...]:
    owner = module()
    left_out = set() if owner is None else _uncopied(owner)
    own: OrderedDict[int, Any] = OrderedDict() if owner is None else vars(owner)[name]
    rest = [(key, value) for key, value in entries(own) if key not in left_out]
    return OrderedDict, (), None, None, iter(rest)


def is_hooked_by_others(module: nn.Module) -> bool:
    """Whether hooks that are not ours act on a module's calls, its own or those on all modules."""
    own = _uncopied(module)
    hooks_of_all = map(list, private.forward_hooks(module))
    has_others = any(key not in own for keys in hooks_of_all for key in keys)
    return has_others or any(private.hooks_besides(module))


def _uncopied(module: nn.Module) -> set[int]:
    return {
        key
        for hooks in _dictionaries(module)
        for key, hook in entries(hooks)
        if isinstance(getattr(hook, "__self__", hook), Uncopied)
    }


def _dictionaries(module: nn.Module) -> Iterator[OrderedDict[int, Any]]:
    """Yield the dictionaries of hooks around forward, and those of their options."""
    # All of ours are called around forward.
    own = vars(module)
    for name in private.AROUND_FORWARD:
        hooks = own.get(name)
        if isinstance(hooks, OrderedDict):
            yield hooks
