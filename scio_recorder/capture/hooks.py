"""The only place that registers hooks."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scio_recorder.capture.keeping import NOTHING
from scio_recorder.capture.uncopied import Uncopied, keep_out_of_copies, let_copy
from scio_recorder.tensors import private

if TYPE_CHECKING:
    from scio_recorder.capture.checkpoint_regions import Reruns
    from scio_recorder.capture.compiled import CompiledPass
    from scio_recorder.capture.passes import Pass


class _Local(threading.local):
    """The state of each thread."""

    active: Pass | None = None
    # The log of the active pass, if all its hooks may simply append to it.
    log: list[Any] | None = None
    # Whether calls of modules are nobody's business: the recorder runs the network without a pass,
    # since nothing is recorded, or a post-processor or transform runs.
    is_idle = False
    # The indices of modules that were called outside of any pass, once a block asks for them.
    outside: set[int] | None = None

    def run_aside(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function whose own calls of the network's modules are no part of the pass."""
        outer = self.active, self.log, self.is_idle
        try:
            self.active, self.log, self.is_idle = None, None, True
            return function(*args)
        finally:
            self.active, self.log, self.is_idle = outer


# The passes that are being compiled, by the names of their sites. Dynamo can't see into
# thread-local objects; were it an attribute of the site, each pass would check, for each hook, that
# the site is still the same.
TRACED: dict[str, CompiledPass] = {}
_SITES = itertools.count()


class Site:
    """The state that the hooks of one program share."""

    __slots__ = ("local", "name", "reruns")

    def __init__(self, reruns: Reruns) -> None:
        self.local = _Local()
        self.reruns = reruns
        # A string: a number could become a symbol if the network is compiled again.
        self.name = f"site {next(_SITES)}"


class ModuleHook(Uncopied):
    """The hooks before and after one module's forward."""

    __slots__ = ("index", "local", "name", "site")

    def __init__(self, index: int, site: Site) -> None:
        self.index = index
        self.site = site
        self.name = site.name
        self.local = site.local

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Take the module's output.

        Every recorded layer pays for this path in every pass.
        """
        log = self.local.log
        if log is not None:
            try:
                log += self.index, output, output._version
                return None
            except (AttributeError, RuntimeError):
                # Not a tensor this time, or one without a version counter.
                pass
        if torch.compiler.is_dynamo_compiling():
            # Without a compiled pass of ours, this is a compiled part of the net: a value that is
            # traced once must not count as a record. Before 2.12 the compiler can't look at a pass.
            return self.after_traced(module, args, output)
        active = self.local.active
        if active is not None:
            take = active.receivers[self.index]
            if take is not None:
                take(output)
                active.log += self.index, NOTHING, 0
                return None
            if active.fast[self.index]:
                try:
                    active.log += self.index, output, output._version
                    return None
                except (AttributeError, RuntimeError):
                    pass
        if self.name in TRACED:
            return self.after_traced(module, args, output)
        if active is not None:
            return active.receive(self.index, args, output)
        # A call outside of any pass, unless a backward pass runs the module again.
        site, local = self.site, self.local
        if local.is_idle:
            return None
        if site.reruns and private.backward_pass() != -1:
            return site.reruns.again(self.index, output)
        if local.outside is not None and private.backward_pass() == -1:
            local.outside.add(self.index)
        return None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Take the inputs of the module's forward; return those that it receives instead."""
        site = self.site
        if self.name in TRACED or torch.compiler.is_dynamo_compiling():
            return None
        if site.local.active is not None:
            return site.local.active.receive_inputs(self.index, args, kwargs)
        if site.reruns and not site.local.is_idle and private.backward_pass() != -1:
            return site.reruns.inputs_again(self.index, args, kwargs)
        return None

    def after_traced(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Take a compiled module's output, while the network around it is compiled."""
        compiled = TRACED.get(self.name)
        return None if compiled is None else compiled.receive(self.index, output)


# Threads may begin and end blocks around one network at once. A recorder that is collected as
# garbage meanwhile takes out its own.
_CHANGING_CALLS = threading.RLock()


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
            return self.run_copy(called, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Stand for a call of the module."""
        raise NotImplementedError

    def run_traced(self, args: Any, kwargs: Any) -> Any:
        """Stand for a call of the module that dynamo follows."""
        return self.run(args, kwargs)

    def run_copy(self, copy: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a shallow copy of the module."""
        return private.plain_call(copy)(*args, **kwargs)


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


class AroundCompiled(Around):
    """Stands for a module's compiled call, so that our hook acts outside of it.

    ``module.compile()`` compiles the module's hooks too, and a value that is traced once is no
    record.
    """

    def __init__(self, hook: ModuleHook, sees_inputs: bool, module: nn.Module) -> None:
        self.hook = hook
        self._sees_inputs = sees_inputs
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function, with our hook before and after it."""
        if torch.compiler.is_dynamo_compiling():
            # The network around it is compiled: not all versions of torch call this, but all call a
            # hook.
            return self.inner(*args, **kwargs)
        module: Any = self._module()
        if self._sees_inputs:
            received = self.hook.before(module, args, kwargs)
            if received is not None:
                args, kwargs = received
        output = self.inner(*args, **kwargs)
        changed = self.hook.after(module, args, output)
        return output if changed is None else changed


def _remove(module: nn.Module, site: Site) -> None:
    take_out(module, lambda call: isinstance(call, AroundCompiled) and call.hook.site is site)
    for _, key in _hooks_of(module, site):
        private.remove_hook(module, key)
    let_copy(module)


def _hooks_of(module: nn.Module, site: Site) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield the hooks of a site, as found on modules: interruptions can lose handles."""
    for hooks in private.forward_hooks(module):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, ModuleHook) and owner.site is site:
                yield hooks, key


class Hooks:
    """The hooks of one program, attached or not."""

    def __init__(self, modules: tuple[nn.Module, ...], site: Site, with_inputs: bool) -> None:
        self._modules = modules
        self._site = site
        self._with_inputs = set(range(len(modules))) if with_inputs else set()
        self._checked_at = -1
        # Set when all are attached, and cleared before the first is removed: an interruption can
        # come between any two.
        self._is_attached = False

    def attach(self) -> None:
        """Attach the hooks, behind all others."""
        self.detach()
        for index, module in enumerate(self._modules):
            hook = ModuleHook(index, self._site)
            sees_inputs = index in self._with_inputs
            if private.calls_compiled(module):
                AroundCompiled(hook, sees_inputs, module).put_around(module)
                module.register_forward_hook(hook.after_traced)
            else:
                module.register_forward_hook(hook.after)
                if sees_inputs:
                    module.register_forward_pre_hook(hook.before, with_kwargs=True)
            keep_out_of_copies(module)
        self._checked_at = RemovableHandle.next_id
        self._is_attached = True

    def detach(self) -> None:
        """Remove the hooks."""
        self._is_attached = False
        for module in self._modules:
            _remove(module, self._site)

    def make_ready(self, indices: set[int]) -> None:
        """Attach the hooks behind any that were added later, with those on some modules' inputs.

        Every new handle takes a number, so one comparison shows whether there are new ones. A
        module that has been compiled since then needs its hook outside of the compiled call.
        """
        is_complete = self._is_attached and indices <= self._with_inputs
        is_newly_compiled = private.dynamo_is_loaded() and any(
            private.calls_compiled(module)
            and not isinstance(private.compiled_call(module), AroundCompiled)
            for module in self._modules
        )
        if not is_complete or is_newly_compiled:
            self._with_inputs = self._with_inputs | indices
            self.attach()
        elif self._checked_at != RemovableHandle.next_id:
            for module in self._modules:
                for hooks, key in list(_hooks_of(module, self._site)):
                    hooks[key] = hooks.pop(key)
            self._checked_at = RemovableHandle.next_id


class _Observer(Uncopied):
    """A hook that calls a method while the method's object lives."""

    __slots__ = ("_method", "_name", "_unseen")

    def __init__(
        self,
        method: weakref.WeakMethod[Any],
        name: str,
        unseen: dict[str, bool] | None = None,
    ) -> None:
        self._method = method
        self._name = name
        self._unseen = unseen

    def __call__(self, *call: Any) -> None:
        # A value that is traced once must not count for every call; dynamo follows a write to a
        # dictionary without a graph break.
        if torch.compiler.is_dynamo_compiling():
            if self._unseen is not None:
                self._unseen[self._name] = True
            return
        method = self._method()
        if method is not None:
            method(self._name, *call)


def precede(module: nn.Module, function: Callable[[nn.Module, Any, Any], Any]) -> RemovableHandle:
    """Call ``function(module, args, kwargs)`` before each call; its result is received instead."""
    return module.register_forward_pre_hook(function, with_kwargs=True)


def follow(module: nn.Module, function: Callable[[nn.Module, Any, Any], Any]) -> RemovableHandle:
    """Call ``function(module, args, output)`` behind all other hooks; its result goes on."""
    return module.register_forward_hook(function)


def observe(
    module: nn.Module,
    method: Any,
    name: str,
    *,
    before: bool = False,
    always: bool = False,
    unseen: dict[str, bool] | None = None,
) -> RemovableHandle:
    """Call ``method(name, module, args, kwargs, output)`` after each call of a module's forward.

    The hook goes behind all others and does not keep the method's object alive. With ``before``, it
    is called without an output ahead of the forward; with ``always``, after one that raised too.
    In compiled code it writes the name to ``unseen`` instead.
    """
    observer = _Observer(weakref.WeakMethod(method), name, unseen)
    if before:
        handle = module.register_forward_pre_hook(observer, with_kwargs=True)
    else:
        handle = module.register_forward_hook(observer, with_kwargs=True, always_call=always)
    keep_out_of_copies(module)
    return handle
