"""What a module's own code calls: a function mode that is active only while that code runs.

NOTE [Where the mode is active]

Torch hands each call of its functions to the function modes of a thread. Ours is entered around the
call of a module with a selected operation, and left for the calls of other modules in it, also from
under modes that the own code has entered since. So the rest of the network pays nothing, and keeps
its fast paths, which torch does not take under a mode. Both are done around the calls, not by
hooks, which don't run after an interruption.

Hooks of the module run inside its call, and are no own code, whoever has added them. So where there
are any, the mode begins paused: the last hook before the forward resumes it, and the first behind
it leaves it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling

from scio_recorder.capture.around import Uncopied, arrange, change_hooks, wrappers
from scio_recorder.errors import PostprocessorError
from scio_recorder.nets.operations import (
    LibraryMode,
    calling_line,
    function_name,
    is_global,
    returns_tensors,
    unseen,
)
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import twin
from scio_recorder.tensors.ownership import plain_version
from scio_recorder.tensors.structures import flatten, tensors


class _Functions(dict[Any, Any]):
    """The hooks on functions by name, and by the function itself once it was called; or None."""

    def __missing__(self, function: Any) -> Any:
        hook = self.get(function_name(function))
        if is_global(function):
            self[function] = hook
        return hook


class _RecordingMode(LibraryMode):
    """Takes the calls of some functions by own code in one pass.

    Attributes
    ----------
    hooks : mapping
        The hooks on functions of the call of a module whose own code runs.
    """

    def __init__(self, site: Any, current: Any = None) -> None:
        self.hooks = _Functions()
        self._site = site
        # Not the pass itself, which holds this mode.
        self._setting = None if current is None else current.setting
        self._inputs = [] if current is None else current.inputs
        # When a region runs again, only post-processors act, perhaps on inputs.
        self._sees_inputs = current is None or current.sees_inputs
        self._noted = {} if current is None else current.noted
        # The names of those that post-processors change; None if that is not known.
        self._changed = None if current is None else current.posts.operations
        # To look takes long. The first pass of a setting shows if compiled functions are called.
        self._looks_around = (
            current is None
            or current.setting.is_new
            or current.setting.calls_compiled
            or site.skips_transforms
        )
        # Whether a hook that keeps outputs may run under it: a sink's computes with them.
        self.meets_hooks = current is not None and not current.has_sink
        # That of the pass, if outputs need only be noted, and nothing else has to be done.
        is_plain = not (self._looks_around or self._sees_inputs or self._noted)
        self._log = current.log if is_plain and current.is_fast else None

    # Every recorded operation pays for this in every pass, and so it takes no other call.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The compiler follows this, and nothing behind it.
        if is_dynamo_compiling() or self.is_paused or (hook := self.hooks[func]) is None:
            return func(*args, **(kwargs or {}))
        log = self._log
        if log is None:
            return self._take(hook, func, args, kwargs or {})
        output = func(*args, **(kwargs or {}))
        try:
            if type(output) is Tensor:
                log += hook.index, output, output._version
                return output
        except RuntimeError:
            # The tensor has no version counter.
            pass
        if returns_tensors(output):
            hook.after(None, args, output)
        return output

    def _take(self, hook: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function whose inputs count, or that may not count at all."""
        if self._looks_around and self._is_unseen():
            return func(*args, **kwargs)
        position = self._noted.get(hook.index)
        versions = None if position is None else plain_version((*args, *kwargs.values()))
        if self._sees_inputs or (position is not None and versions is None):
            # On the fast path, its hook would lose the inputs.
            hook.local.log = None
            return _take_inputs(hook, func, args, kwargs, self._changed)
        output = func(*args, **kwargs)
        if position is not None:
            self._inputs.append((position, Inputs(args, kwargs), versions))
        if returns_tensors(output):
            hook.after(None, args, output)
        return output

    def _is_unseen(self) -> bool:
        """Whether the caller is inside a function that others have compiled, or in a transform."""
        if private.is_in_compiled_function((run_in_mode.__code__,)):
            if self._setting is not None:
                self._setting.calls_compiled = True
            return True
        # Where calls are counted, a call too many shows.
        return self._site.skips_transforms and private.transform_around() is not None


def _take_inputs(
    hook: Any, func: Callable[..., Any], args: Any, kwargs: Any, changed_ones: Any
) -> Any:
    """Call a function with its hook before and behind it, which may change something."""
    name = function_name(func)
    writes = (changed_ones is None or name in changed_ones) and _writes_to_argument(
        func, args, kwargs
    )
    given = *args, *kwargs.values()
    received = hook.before(None, args, kwargs)
    if received is not None:
        args, kwargs = received
    # What is written in place of its result must not be what its backward reads.
    with _saving_copies() if writes and torch.is_grad_enabled() else contextlib.nullcontext():
        output = func(*args, **kwargs)
    if not returns_tensors(output):
        return output
    changed = hook.after(None, args, output)
    if changed is None and received is None:
        return output
    if private.regions_around((run_in_mode.__code__,)):
        raise PostprocessorError(
            f"{name} is called in a checkpointed function that is no module, so its second run is "
            "not seen: let the post-processor act on a layer, or checkpoint a module"
        )
    changed = output if changed is None else changed
    return (
        _write_back(changed, output, given, (*args, *kwargs.values()), name) if writes else changed
    )


def run_in_mode(local: Any, mode: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module, in a mode of its own or in none of the same observer.

    Parameters
    ----------
    local : object
        Of each thread, with the mode of the own code that runs just now as ``own_code``.
    mode : ObservingMode or None
        The mode for this call; None for none.
    call, args, kwargs
        As a `CallWrapper` gives them.
    """
    outer, num_above = local.own_code, None
    if outer is mode is None:
        return call(*args, **kwargs)
    try:
        local.own_code = mode
        num_above = private.replace_function_mode(outer, mode)
        return call(*args, **kwargs)
    finally:
        # Torch takes a mode away while it handles a call, as when a post-processor runs. And the
        # module may have entered or left modes for good, as `set_default_device` does.
        private.replace_function_mode(mode, None if num_above is None else outer, num_above or 0)
        local.own_code = outer


class RunningCode(threading.local):
    """The mode of the own code that runs just now, for each thread."""

    own_code: Any = None

    def run_outside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module outside of the mode, as `run_in_mode` does: what own code calls most."""
        mode, count = self.own_code, private.num_function_modes()
        if mode is None or not count or private.function_mode_at(count - 1) is not mode:
            return run_in_mode(self, None, call, args, kwargs)
        try:
            self.own_code = None
            private.leave_function_mode()
            return call(*args, **kwargs)
        finally:
            if private.num_function_modes() == count - 1:
                private.enter_function_mode(mode)
            else:
                private.replace_function_mode(None, mode)
            self.own_code = mode


class RecordedCode:
    """The recorded operations in the own code of one module.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    site : object
        That of the recorder's hooks.
    hooks : sequence of mapping
        For each call, the hooks on functions of the own code, by name.
    num_own : int
        How many hooks behind the forward are the recorder's own.
    """

    def __init__(
        self, module: nn.Module, site: Any, hooks: Sequence[Mapping[str, Any]], num_own: int
    ) -> None:
        self._module = module
        self._site = site
        self._num_own = num_own
        self._hooks = [*map(_Functions, hooks)]
        # Those of the hooks between which the own code runs, if there are other hooks.
        self._numbers = -1, -1

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module, in the mode of the pass."""
        local = self._site.local
        active = local.active
        number = 0
        if active is not None:
            number = active.starts.get(self, 0)
            active.starts[self] = number + 1
            mode = active.mode = active.mode or _RecordingMode(self._site, active)
        else:
            mode = self._mode_outside()
            if mode is None:
                return run_in_mode(local, None, call, args, kwargs)
        before = mode.hooks, mode.is_paused
        try:
            # A call too many shows, since functions are called again then.
            mode.hooks = self._hooks[min(number, len(self._hooks) - 1)]
            num_hooks = private.num_forward_hooks(self._module)
            mode.is_paused = num_hooks > (self._num_own if mode.meets_hooks else 0)
            if mode.is_paused:
                self._pause_hooks()
            return run_in_mode(local, mode, call, args, kwargs)
        finally:
            mode.hooks, mode.is_paused = before

    def _mode_outside(self) -> _RecordingMode | None:
        """Return the mode for a call outside of any pass, which checkpointing may run again."""
        if not self._site.local.is_idle:
            if private.backward_pass() == -1:
                for hook in filter(None, set(self._hooks[0].values())):
                    hook.note_outside()
            elif self._site.reruns:
                # Which call it is shows by what the first run has noted.
                return _RecordingMode(self._site)
        return None

    def _pause_hooks(self) -> None:
        """Let the mode take nothing that hooks of the module call."""
        after, before = private.forward_hooks(self._module)
        if not (self._numbers[0] in after and self._numbers[1] in before):
            change_hooks(self._attach)

    def _attach(self) -> None:
        module, hook = self._module, OwnCodeHook(self._site.local)
        # Another thread may have taken all hooks of the site away.
        if any(wrapper.site is self._site for wrapper in wrappers(module)):
            pause = module.register_forward_hook(hook.pause).id
            self._numbers = pause, module.register_forward_pre_hook(hook.resume).id
            arrange(private.forward_hooks(module)[0], first=[pause])


class ObservingMode(LibraryMode):
    """Shows an observer the operations in the own code of one call; it begins paused.

    Functions that others have compiled are left alone, and those inside a transform only counted.
    An assignment, ``x[i] = y``, counts as a call that returns what it has written to.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Look at what a function is given, and return what was found."""

    def after(self, function: str, index: int, given: Any, output: Any) -> None:
        """Look at what an operation has returned."""

    def line(self) -> tuple[str, int, str]:
        """Return the line that calls the function, while it is taken: see `calling_line`."""
        return calling_line()

    def apart(self, look: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the observer, whose own operations no mode of this library sees."""
        return unseen(look, *args)

    def take(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function between `before` and `after`."""
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
            # Hooks ask tensors for their versions, which a mode that is paused would see.
            private.replace_function_mode(own, None)


# -- operations that write to their own argument ---------------------------------------------------


def _writes_to_argument(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call asks a function to write to one of its arguments.

    Examples
    --------
    >>> from torch.nn.functional import relu
    >>> x, functions = torch.ones(1), [torch.relu_, Tensor.__ior__, Tensor.__invert__, torch.relu]
    >>> [_writes_to_argument(function, (x,), {}) for function in functions]
    [True, True, False, False]
    >>> _writes_to_argument(relu, (x,), {"inplace": True})
    True
    """
    name = function_name(function)
    # Operators such as that of ``x += y``.
    is_operator = name[:1] == "i" and hasattr(Tensor, f"__{name[1:]}__")
    if is_operator or name.endswith("_") or kwargs.get("out") is not None:
        return True
    try:
        return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):
        return False


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def _saving_copies() -> Iterator[None]:
    """Let autograd save copies inside the block, so that its tensors may be written to after it.

    Hooks on saved tensors, such as those of activation checkpointing, are given the copies.
    """
    pack, unpack = private.active_saved_tensors_hooks() or (_same, _same)

    @functools.wraps(pack)  # checkpointing is recognised by its own
    def pack_copy(tensor: Tensor) -> Any:
        return pack(twin(tensor))

    with saved_tensors_hooks(pack_copy, unpack):
        yield


def _write_back(
    changed: Any, output: Any, given: Sequence[Any], received: Sequence[Any], what: str
) -> Any:
    """Put what a post-processor gave into the arguments to which an operation has written.

    Parameters
    ----------
    changed, output : Any
        What it gave, and what the operation returned.
    given, received : sequence
        The arguments of the code, and those that the operation received in their place.
    what : str
        The operation.

    Returns
    -------
    Tensor, or a tuple or list of some
        Those arguments of the code.

    Raises
    ------
    PostprocessorError
        Other tensors than these came back, or autograd can't have it.
    """
    leaves, rebuild = flatten(output)
    pairs = zip(tensors(tuple(given)), tensors(tuple(received)), strict=False)
    own = {id(other): argument for argument, other in pairs}
    places = [own[id(leaf)] for leaf in leaves if id(leaf) in own]
    values = tensors(changed)
    if not len(leaves) == len(places) == len(values):
        raise PostprocessorError(
            f"{what} writes to {len(leaves)} of its arguments, and what the post-processor gave "
            "can't be written there: return as many tensors, or change another operation"
        )
    for value, place in zip(values, places, strict=True):
        _write(value, place, what)
    return rebuild(places)


def _write(changed: Tensor, place: Tensor, what: str) -> None:
    if changed.shape != place.shape:
        raise PostprocessorError(
            f"{what} writes to its own argument, of shape {tuple(place.shape)}, where a tensor of "
            f"shape {tuple(changed.shape)} can't be written: return one of the same shape"
        )
    try:
        if changed is not place:
            place.copy_(changed)
    except RuntimeError as error:
        raise PostprocessorError(
            f"{what} writes to its own argument, and what the post-processor gave must go there, "
            f"but {error}: run the pass under torch.no_grad(), or change another operation"
        ) from error
