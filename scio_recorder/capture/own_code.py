"""What a module's own code calls: a function mode that is active only while that code runs.

NOTE [Where the mode is active]

Torch hands each call of its functions to the function modes of a thread. Ours is entered around the
call of a module with a selected operation, and left for the calls of other modules in it, also from
under modes that the own code has entered since. So the rest of the network pays nothing, and keeps
its fast paths, which torch does not take under a mode. Both are done around the calls, not by
hooks, which don't run after an interruption.

Hooks of the module run inside its call, and are no own code, whoever has added them. So the mode
begins paused: the last hook before the forward resumes it, and the first behind it pauses it again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from scio_recorder.capture.around import AroundPlain, Uncopied
from scio_recorder.capture.checkpoint_regions import regions
from scio_recorder.errors import PostprocessorError
from scio_recorder.layer import Layer
from scio_recorder.nets.operations import LibraryMode, function_name, returns_tensors
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import memories_of, same_bits, version_of

# Operators that write to their first argument, by their names without underscores.
_OPERATORS = "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_IN_PLACE = {f"i{name}" for name in _OPERATORS.split()}


class FunctionHook(Protocol):
    """Takes the calls of one function, as hooks on a module do."""

    index: int

    def before(self, module: None, args: Any, kwargs: Any) -> Any:
        """Take the inputs; return those that the function receives instead."""

    def after(self, module: None, args: Any, output: Any) -> Any:
        """Take the output; return what the code goes on with, None for the same."""

    def note_outside(self) -> None:
        """Note a call of the own code outside of any pass."""


class _OwnCode(LibraryMode):
    """Takes the calls of some functions while the own code of one call of a module runs."""

    def __init__(
        self,
        hooks: _Functions,
        log: list[Any] | None,
        *,
        sees_inputs: bool,
        changes: bool,
        skips_transforms: bool,
    ) -> None:
        super().__init__()
        self._hooks = hooks
        # That of the pass, if hooks may simply append to it.
        self._log = log
        # Whether inputs are looked at, and whether post-processors may change something.
        self._sees_inputs = sees_inputs
        self._changes = changes
        # In a pass that has to learn, or where there was a compiled function before: it takes long.
        may_be_compiled = log is None or hooks.calls_compiled
        self._may_be_compiled = may_be_compiled and private.DYNAMO in sys.modules
        # Whether calls inside a transform, whose tensors die with it, are not told apart by number.
        self._skips_transforms = skips_transforms
        self._looks_around = skips_transforms or self._may_be_compiled
        self.is_paused = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The compiler follows this, and nothing behind it.
        if is_compiling() or self.is_paused:
            return func(*args, **kwargs)
        hook = self._hooks[func]
        if hook is None or (self._looks_around and self._is_unseen()):
            return func(*args, **kwargs)
        if self._sees_inputs:
            return self._take(hook, func, args, kwargs)
        output = func(*args, **kwargs)
        # Every recorded operation pays for this path in every pass.
        log = self._log
        if log is not None and isinstance(output, Tensor):
            try:
                log += hook.index, output, output._version
                return output
            except (AttributeError, RuntimeError):
                pass
        if returns_tensors(output):
            hook.after(None, args, output)
        return output

    def _is_unseen(self) -> bool:
        """Whether the call is inside a transform or a compiled function."""
        if self._skips_transforms and private.transform_around() is not None:
            return True
        return self._may_be_compiled and self._is_compiled()

    def _is_compiled(self) -> bool:
        """Whether a function that others have compiled runs, of which no operation is listed."""
        found = private.is_in_compiled_function((AroundCode.run.__code__,))
        self._hooks.calls_compiled |= found
        return found

    def _take(self, hook: FunctionHook, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function with its hook before and behind it."""
        given = {**dict(enumerate(args)), **kwargs}
        received = hook.before(None, args, kwargs)
        if received is not None:
            args, kwargs = received
        arguments = {**dict(enumerate(args)), **kwargs}
        before = _Before(given, arguments) if self._changes else None
        output = func(*args, **kwargs)
        if not returns_tensors(output):
            return output
        changed = hook.after(None, args, output)
        changed = output if changed is None else changed
        if changed is not output and isinstance(kwargs.get("out"), tuple | list):
            raise PostprocessorError(
                f"{function_name(func)} writes to several tensors, and what the post-processor "
                "gave can't be written there: change another operation"
            )
        if before is None or not before.is_written(output, _is_in_place(func, args, kwargs)):
            return changed
        place = before.place_of(output)
        if changed is not place:
            _write(changed, place, function_name(func))
        return place


def _is_in_place(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function is asked to write to one of its arguments.

    It may write what was there already, which nobody sees.
    """
    name = function_name(function)
    if name.endswith("_") or name in _IN_PLACE or kwargs.get("out") is not None:
        return True
    try:
        return bool(signature(function).bind(*args, **kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):
        return False


class _Before:
    """The tensors that a function is given, to tell whether it writes to the one it returns."""

    def __init__(self, given: Mapping[Any, Any], received: Mapping[Any, Any]) -> None:
        # The code's own tensors, by those that the function receives in their place.
        self._places = {id(received[key]): one for key, one in given.items() if key in received}
        # Tensors of inference mode have no version.
        self._versions = {
            id(one): version if (version := version_of(one)) != -1 else one.clone()
            for one in received.values()
            if isinstance(one, Tensor)
        }

    def is_written(self, output: Any, is_in_place: bool) -> bool:
        """Whether the function has returned what it was given, and written to it."""
        before = self._versions.get(id(output))
        if before is None or is_in_place:
            return before is not None
        if isinstance(before, Tensor):
            return not same_bits(before, output)
        return bool(before != version_of(output))

    def place_of(self, output: Tensor) -> Any:
        """Return the code's own tensor, into which what was returned belongs."""
        place: Tensor = self._places.get(id(output), output)
        return place


def _write(changed: Any, output: Tensor, function: str) -> None:
    """Put what a post-processor gave into the tensor to which an operation has written."""
    try:
        if _is_saved(output):
            raise RuntimeError("autograd has saved what the operation returned")
        output.copy_(changed)
    except RuntimeError as error:
        raise PostprocessorError(
            f"{function} writes to its own argument, so what the post-processor gave must be "
            f"written there too, but {error}: run the pass under torch.no_grad(), inside "
            "torch.autograd.graph.allow_mutation_on_saved_tensors(), or change another operation"
        ) from error


def _is_saved(output: Tensor) -> bool:
    """Whether autograd would notice that an output was changed, and fail in the backward pass."""
    if private.allows_mutation():
        return False
    names = (name for name in dir(output.grad_fn) if name.startswith("_saved_"))
    saved = [getattr(output.grad_fn, name) for name in names]
    own = memories_of(output)
    return any(isinstance(one, Tensor) and memories_of(one) & own for one in saved)


def refuse_checkpointed(row: Layer) -> None:
    """Refuse to change an operation in a checkpointed function, whose second run is not seen."""
    if regions((AroundOwnCode.run.__code__,)):
        raise PostprocessorError(
            f"{row} is in a checkpointed function that is no module, so its second run is not "
            "seen: let the post-processor act on a layer, or checkpoint a module"
        )


class _Functions(dict[Any, "FunctionHook | None"]):
    """The hook on a function, or None, looked up by name the first time."""

    def __init__(self, hooks: Mapping[str, FunctionHook]) -> None:
        super().__init__()
        self._by_name = hooks
        self.all = hooks.values()
        # Whether the own code has called a function that others have compiled.
        self.calls_compiled = False

    def __missing__(self, function: Any) -> FunctionHook | None:
        found = self[function] = self._by_name.get(function_name(function))
        return found


class AroundCode(AroundPlain):
    """Stands around the calls of a module, and lets a mode act while its own code runs.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    local : object
        Of each thread, with the mode of the own code that runs just now as ``own_code``.
    """

    def __init__(self, module: nn.Module, local: Any) -> None:
        super().__init__(module)
        self.local = local

    def mode(self) -> Any:
        """Return the mode for a call that begins; None for none."""
        return None

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the module, in a mode of its own or in none of the same observer."""
        local = self.local
        outer, own = local.own_code, self.mode()
        if outer is None and own is None:
            return self.call(args, kwargs)
        modes = private.function_modes()
        try:
            local.own_code = own
            others = [mode for mode in modes if mode is not outer]
            private.set_function_modes(others if own is None else [*others, own])
            return self.call(args, kwargs)
        finally:
            # The module may have entered or left modes for good, as `set_default_device` does.
            now = [mode for mode in private.function_modes() if mode not in (own, outer)]
            if outer is not None:
                above = len(modes) - 1 - modes.index(outer)
                now.insert(len(now) - above, outer)
            private.set_function_modes(now)
            local.own_code = outer

    def run_traced(self, args: Any, kwargs: Any) -> Any:
        """Call the module: in compiled code operations are not seen."""
        return self.call(args, kwargs)


class AroundOwnCode(AroundCode):
    """Stands around the calls of a module whose own code is recorded, or that such code may call.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    site : object
        That of the recorder's hooks.
    hooks : sequence of mapping
        For each call, the hooks on functions of the own code, by name; empty if the module is only
        called.
    """

    def __init__(
        self, module: nn.Module, site: Any, hooks: Sequence[Mapping[str, FunctionHook]]
    ) -> None:
        super().__init__(module, site.local)
        self.site = site
        self._hooks = [*map(_Functions, hooks)]

    def mode(self) -> _OwnCode | None:
        """Return the mode for a call in a pass, or in one that checkpointing runs again."""
        if not self._hooks:
            return None
        local = self.site.local
        active = local.active
        if active is not None:
            number = active.own_code_calls.get(self, 0)
            active.own_code_calls[self] = number + 1
            # A call too many shows, since functions are called again then.
            hooks = self._hooks[min(number, len(self._hooks) - 1)]
            sees, changes = active.sees_inputs, active.posts.acts
            return self._mode(hooks, local.log, sees_inputs=sees, changes=changes)
        if local.is_idle:
            return None
        if private.backward_pass() == -1:
            for hook in self._hooks[0].all:
                hook.note_outside()
        elif self.site.reruns:
            # Which call it is shows by what the first run has noted.
            return self._mode(self._hooks[0], None, sees_inputs=True, changes=True)
        return None

    def _mode(self, hooks: _Functions, log: list[Any] | None, **options: bool) -> _OwnCode:
        return _OwnCode(hooks, log, skips_transforms=self.site.skips_transforms, **options)


class ObservingMode(LibraryMode):
    """Shows an observer the operations in the own code of one call; it begins paused.

    Functions that others have compiled are left alone, and those inside a transform only counted.
    An assignment, ``x[i] = y``, counts as a call that returns what it has written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = True
        self._counts: Counter[str] = Counter()

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Look at what a function is given, and return what was found."""

    def after(self, function: str, index: int, given: Any, output: Any) -> None:
        """Look at what an operation has returned; two functions lie between here and its line."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.is_paused:
            return func(*args, **kwargs)
        is_seen = private.transform_around() is None
        given = self.before(args, kwargs) if is_seen else None
        output = func(*args, **kwargs)
        made = args[0] if func is Tensor.__setitem__ else output
        if returns_tensors(made):
            name = function_name(func)
            self._counts[name] += 1
            if is_seen:
                self.after(name, self._counts[name] - 1, given, made)
        return output


class OwnCodeHook(Uncopied):
    """The hooks next to the forward of a module, between which its own code runs."""

    __slots__ = ("local",)

    def __init__(self, local: Any) -> None:
        self.local = local

    def resume(self, module: nn.Module, args: Any) -> None:
        """Let the mode take what comes, as the last hook before the forward."""
        own = self.local.own_code
        if own is not None and not torch.compiler.is_dynamo_compiling():
            own.is_paused = False

    def pause(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let the mode take nothing, as the first hook behind the forward."""
        own = self.local.own_code
        if own is not None and not torch.compiler.is_dynamo_compiling():
            own.is_paused = True
