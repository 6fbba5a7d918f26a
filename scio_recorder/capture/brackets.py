"""Code at both ends of each call of a module, for the length of a block."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scio_recorder.capture.hooks import Around, AroundPlain, take_out
from scio_recorder.capture.uncopied import Uncopied, keep_out_of_copies, let_copy
from scio_recorder.tensors import private


class Bracket(Uncopied):
    """Hooks at both ends of each call of a module; a subclass defines what they do.

    Parameters
    ----------
    name : str
        The name of the module.
    module : torch.nn.Module
        The module.
    unseen : dict
        Receives the name if the module runs as compiled code.
    """

    def __init__(self, name: str, module: nn.Module, unseen: dict[str, bool]) -> None:
        self.name = name
        self._hooks = private.forward_hooks(module)
        self._others = private.hooks_besides(module)
        self._unseen = unseen

    @property
    def is_alone(self) -> bool:
        """Whether no other hooks change what the module receives or returns."""
        after, before = self._hooks
        return len(after) == len(before) == 1 and not any(self._others)

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Take the inputs of a call that begins.

        There are no keyword arguments if another thread is just removing this hook.
        """
        if kwargs is not None and not torch.compiler.is_dynamo_compiling():
            self.begin(args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take the output of a call that has returned."""
        if torch.compiler.is_dynamo_compiling():
            self._unseen[self.name] = True
        else:
            self.end(args, output)

    def begin(self, args: Any, kwargs: Any) -> None:
        """Take the inputs of a call, ahead of the forward and behind other hooks."""
        raise NotImplementedError

    def end(self, args: Any, output: Any) -> None:
        """Take the output of a call, behind other hooks; None if it raised an ``Exception``."""
        raise NotImplementedError

    def abandon(self, args: Any) -> None:
        """Forget a call that something else has broken off, such as ``KeyboardInterrupt``."""
        raise NotImplementedError


class _AroundBracketed(AroundPlain):
    """Does what the hooks of a bracket would, for half of the time, if a module has no others.

    The hooks stay, for compiled code and for whoever adds others. Torch calls none of them if a
    call is broken off by something other than an ``Exception``, so this notes it for them too.
    """

    def __init__(self, module: nn.Module, bracket: Bracket) -> None:
        super().__init__(module)
        self._bracket = bracket

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the module's forward alone."""
        bracket = self._bracket
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # not in its stubs
        if is_traced or torch.compiler.is_dynamo_compiling():
            return self._plain(*args, **kwargs)
        is_alone = bracket.is_alone
        if is_alone:
            bracket.begin(args, kwargs)
        try:
            call = self._module.forward if is_alone else self.inner or self._plain
            output = call(*args, **kwargs)
        except Exception:
            if is_alone:
                bracket.end(args, None)
            raise
        except BaseException:
            bracket.abandon(args)
            raise
        if is_alone:
            bracket.end(args, output)
        return output


@contextlib.contextmanager
def bracketed(brackets: Mapping[nn.Module, Bracket]) -> Iterator[None]:
    """Keep hooks at both ends of the calls of modules inside a block."""
    number = RemovableHandle(OrderedDict()).id
    own: set[Around] = set()
    try:
        for module, bracket in brackets.items():
            private.put_hooks_around(module, number, bracket.before, bracket.after)
            keep_out_of_copies(module)
            call = private.compiled_call(module)
            if call is None or isinstance(call, _AroundBracketed):
                around = _AroundBracketed(module, bracket)
                own.add(around)
                around.put_around(module)
        yield
    finally:
        for module in brackets:
            private.remove_hook(module, number)
            take_out(module, own.__contains__)
            let_copy(module)
