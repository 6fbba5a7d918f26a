"""What stands around the calls of a module, and is no part of its copies: hooks and functions.

NOTE [How a copy comes without hooks]

A module holds its hooks in ordered dictionaries, by number, and they are copied and saved with the
module. ``copy`` and ``pickle`` ask a dictionary's ``__reduce_ex__`` how to construct it again. As
long as a module has hooks of ours, its dictionaries have a ``__reduce_ex__`` that leaves them out.
They stay the same objects, since the handles of other hooks refer to them.

A function in place of a module's call lies where the module keeps the result of its own
``compile``. Several may stand around each other.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from scio_recorder.capture.hook_changes import entries
from scio_recorder.tensors import private

# Threads may begin and end blocks around one network at once. A recorder that is collected as
# garbage meanwhile takes out its own.
_CHANGING_CALLS = threading.RLock()


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


def keep_out_of_copies(module: nn.Module) -> None:
    """Leave the hooks that are `Uncopied` out of a module's copies."""
    owner = weakref.ref(module)
    for name, hooks in _dictionaries(module):
        reduce: Any = partial(_without_uncopied, owner, name)
        hooks.__reduce_ex__ = reduce  # type: ignore[method-assign]  # asked before the class's own


def let_copy(module: nn.Module) -> None:
    """Undo `keep_out_of_copies`, once no hook of the module is `Uncopied`."""
    if not _uncopied(module):
        for _, hooks in _dictionaries(module):
            vars(hooks).pop("__reduce_ex__", None)


def _without_uncopied(module: weakref.ref[nn.Module], name: str, protocol: int) -> tuple[Any, ...]:
    owner = module()
    left_out = set() if owner is None else _uncopied(owner)
    own: OrderedDict[int, Any] = OrderedDict() if owner is None else vars(owner)[name]
    rest = [(key, value) for key, value in entries(own) if key not in left_out]
    return OrderedDict, (), None, None, iter(rest)


def _uncopied(module: nn.Module) -> set[int]:
    return {
        key
        for _, hooks in _dictionaries(module)
        for key, hook in (entries(hooks) if hooks else ())
        if isinstance(getattr(hook, "__self__", hook), Uncopied)
    }


def _dictionaries(module: nn.Module) -> list[tuple[str, OrderedDict[int, Any]]]:
    """Return the dictionaries of hooks around forward, and those of their options, by name."""
    found: list[tuple[str, OrderedDict[int, Any]]] = []
    for name in private.AROUND_FORWARD:
        hooks = vars(module).get(name)
        if isinstance(hooks, OrderedDict):
            found.append((name, hooks))
    return found


class Around:
    """Stands in place of a module's call, which may be several around each other.

    Attributes
    ----------
    inner : callable or None
        The function that was there before.
    """

    inner: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for a call."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module has nothing in place of its call.
        return type(None), ()

    def put_around(self, module: nn.Module) -> None:
        """Take the place of a module's call."""
        with _CHANGING_CALLS:
            self.inner = private.compiled_call(module)
            private.set_compiled_call(module, self)

    def take_from(self, module: nn.Module) -> None:
        """Leave the place of a module's call, or of those around which others stand."""
        with _CHANGING_CALLS:
            if private.compiled_call(module) is self:
                private.set_compiled_call(module, self.inner)
            else:
                take_out(module, lambda call: call is self)


class AroundPlain(Around):
    """Stands in place of the call of a module that is not compiled; a subclass says what it does.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    """

    # No compiled code: see private.is_compiled.
    is_plain = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._plain = private.plain_call(module)
        # A first use has a frame more, which calls must not see.
        private.called_module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for a call, unless it is that of a shallow copy, which shares what is set here."""
        if torch.compiler.is_dynamo_compiling():
            return self.run_traced(args, kwargs)
        called = private.called_module()
        if called is not None and called is not self._module:
            return private.plain_call(called)(*args, **kwargs)
        return self.run(args, kwargs)

    def call(self, args: Any, kwargs: Any) -> Any:
        """Call the module as it would be called without this."""
        return (self.inner or self._plain)(*args, **kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Stand for a call of the module."""
        raise NotImplementedError

    def run_traced(self, args: Any, kwargs: Any) -> Any:
        """Stand for a call of the module that dynamo follows."""
        return self.run(args, kwargs)


def take_out(module: nn.Module, is_gone: Callable[[Around], bool]) -> None:
    """Take some wrappers out of those around a module's call, whichever came first."""

    def remaining(call: Any) -> Any:
        if not isinstance(call, Around):
            return call
        call.inner = remaining(call.inner)
        return call.inner if is_gone(call) else call

    with _CHANGING_CALLS:
        call = private.compiled_call(module)
        if isinstance(call, Around):
            private.set_compiled_call(module, remaining(call))
