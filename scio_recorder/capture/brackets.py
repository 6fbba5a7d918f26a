"""Code at both ends of each call of a module, for the length of a block.

NOTE [How both ends are reached]

A function takes the place of a module's call, which costs less than half of what two hooks do. Only
where other hooks act on the module does it get two of ours as well, which have to stand among them:
what the others change is not the module's own work. Others may add hooks inside the block, too.
Compiled code runs hooks and nothing else. So each module has a hook that notes only that.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scio_recorder.capture.around import AroundPlain, Uncopied, keep_out_of_copies, let_copy
from scio_recorder.capture.hook_changes import change_hooks
from scio_recorder.capture.hooks import move_behind_others
from scio_recorder.tensors import private


class Bracket(AroundPlain):
    """Stands around the calls of a module; a subclass defines what happens at both ends.

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
        super().__init__(module)
        self.name = name
        self._hooks = private.forward_hooks(module)
        self._others = private.hooks_besides(module)
        self._unseen = unseen
        # The hook that notes compiled calls, and the two others if the module has them.
        self._note = self._handle = -1
        self._num_hooks = 0
        self._is_over = False

    def run(self, args: Any, kwargs: Any) -> Any:
        """Stand for a call of the module."""
        if self.is_alone():
            return self.run_alone(args, kwargs)
        return self.run_beside_others(args, kwargs)

    def run_traced(self, args: Any, kwargs: Any) -> Any:
        """Call what dynamo follows, hooks included, as torch does."""
        return self._plain(*args, **kwargs)

    def run_copy(self, copy: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a shallow copy of the module, which shares the hooks too."""
        self.add_hooks()
        return super().run_copy(copy, args, kwargs)

    def is_alone(self) -> bool:
        """Whether no other hooks change what the module receives or returns."""
        after, before = self._hooks
        one, two, three, four, five, six = self._others
        has_others = one or two or three or four or five or six
        num_own = self._num_hooks
        return len(after) == num_own and len(before) == num_own + 1 and not has_others

    def run_alone(self, args: Any, kwargs: Any) -> Any:
        """Call the forward of a module on which no other hooks act."""
        raise NotImplementedError

    def run_beside_others(self, args: Any, kwargs: Any) -> Any:
        """Call a module on which other hooks act: ours are among them."""
        self.add_hooks()
        try:
            return (self.inner or self._plain)(*args, **kwargs)
        except Exception:
            raise
        except BaseException:
            # Torch calls no hook then.
            self.abandon(args)
            raise

    def begin(self, args: Any, kwargs: Any) -> None:
        """Take the inputs of a call, ahead of the forward and behind other hooks."""
        raise NotImplementedError

    def end(self, args: Any, output: Any) -> None:
        """Take the output of a call, behind other hooks; None if it raised an ``Exception``."""
        raise NotImplementedError

    def abandon(self, args: Any) -> None:
        """Forget a call that something else has broken off, such as ``KeyboardInterrupt``."""
        raise NotImplementedError

    def put(self, number: int) -> None:
        """Begin to stand around the module's calls; the number is that of no other hook."""
        module, self._note = self._module, number
        self._hooks[1][number] = _Note(self)
        keep_out_of_copies(module)
        call = private.compiled_call(module)
        if call is None or isinstance(call, Bracket):
            self.put_around(module)
        if call is not None or not self.is_alone():
            self.add_hooks()

    def add_hooks(self) -> None:
        """Let the module have hooks at both ends, ahead of those that record its outputs."""
        # One thread may end a block while another one's call adds hooks.
        if not (self._num_hooks or self._is_over):
            change_hooks(self._add_hooks)

    def _add_hooks(self) -> None:
        if self._num_hooks or self._is_over:
            return
        self._handle = RemovableHandle(OrderedDict()).id
        hooks = _Hooks(self)
        private.put_hooks_around(self._module, self._handle, hooks.before, hooks.after)
        keep_out_of_copies(self._module)
        self._num_hooks = 1
        move_behind_others(self._hooks[0])

    def take_away(self) -> None:
        """Stand around the module's calls no longer."""
        module = self._module
        self._is_over = True
        self._hooks[1].pop(self._note, None)
        if self._num_hooks:
            private.remove_hook(module, self._handle)
        let_copy(module)
        self.take_from(module)

    def note_compiled(self) -> None:
        """Note that the module runs as compiled code."""
        self._unseen[self.name] = True


class _Note(Uncopied):
    """A hook that notes compiled calls."""

    __slots__ = ("_bracket",)

    def __init__(self, bracket: Bracket) -> None:
        self._bracket = bracket

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Note that the module runs as compiled code, if it does."""
        if torch.compiler.is_dynamo_compiling():
            self._bracket.note_compiled()


class _Hooks(Uncopied):
    """The hooks of a bracket."""

    def __init__(self, bracket: Bracket) -> None:
        self._bracket = bracket

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Take the inputs of a call that begins.

        There are no keyword arguments if another thread is just removing this hook.
        """
        if kwargs is not None and not torch.compiler.is_dynamo_compiling():
            self._bracket.begin(args, kwargs)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Take the output of a call that has returned."""
        if not torch.compiler.is_dynamo_compiling():
            self._bracket.end(args, output)


@contextlib.contextmanager
def bracketed(brackets: Collection[Bracket]) -> Iterator[None]:
    """Let brackets stand around the calls of their modules inside a block."""

    def put() -> None:
        number = RemovableHandle(OrderedDict()).id
        for bracket in brackets:
            bracket.put(number)

    def take_away() -> None:
        for bracket in brackets:
            bracket.take_away()

    try:
        change_hooks(put)
        yield
    finally:
        change_hooks(take_away)
