"""The hooks on modules that record."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scio_recorder.capture.around import CallHook as CallHook  # for code that imports it here
from scio_recorder.capture.around import CallHooks as CallHooks
from scio_recorder.capture.around import (
    CallWrapper,
    Uncopied,
    arrange,
    change_hooks,
    keep_out_of_copies,
    let_copy,
    take_out,
    wrappers,
)
from scio_recorder.capture.keeping import NOTHING
from scio_recorder.capture.own_code import OwnCodeHook, RecordedCode, RunningCode
from scio_recorder.nets.operations import unseen
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import plain_version

if TYPE_CHECKING:
    from scio_recorder.capture.checkpoint_regions import Reruns
    from scio_recorder.capture.compiled import CompiledPass
    from scio_recorder.capture.passes import Pass
    from scio_recorder.capture.program import Program


class ThreadState(RunningCode):
    """What one thread does with the hooks of a site."""

    active: Pass | None = None
    # The log of the active pass, if all its hooks may simply append to it.
    log: list[Any] | None = None
    # True while calls of modules must be ignored: the recorder runs the network without a pass,
    # since nothing is recorded, or a post-processor or transform runs.
    is_idle = False
    # The indices of modules that were called outside of any pass, once a block asks for them.
    outside: set[int] | None = None

    def run_aside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function whose own calls of the network's modules are no part of the pass."""
        outer = self.active, self.log, self.is_idle
        try:
            self.active, self.log, self.is_idle = None, None, True
            return function(*args, **kwargs)
        finally:
            self.active, self.log, self.is_idle = outer


# The passes that are being compiled, by the names of their sites. Dynamo can't see into
# thread-local objects; were it an attribute of the site, each pass would check, for each hook, that
# the site is still the same.
TRACED: dict[str, CompiledPass] = {}
_SITES = itertools.count()


class RunningPass(NamedTuple):
    """A pass that has begun and not ended, with the hooks and the thread that it belongs to."""

    site: Site
    thread: int
    current: Pass


# By the ``id`` of the pass.
RUNNING: dict[int, RunningPass] = {}


class Site:
    """The state that the hooks of one program share."""

    __slots__ = ("local", "name", "reruns", "skips_transforms")

    def __init__(self, reruns: Reruns, *, skips_transforms: bool) -> None:
        self.local = ThreadState()
        self.reruns = reruns
        # Whether operations inside transforms of torch.func don't count.
        self.skips_transforms = skips_transforms
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

    def after(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Take the module's output, or that of an operation, which has no module.

        Every recorded layer pays for this path in every pass.
        """
        log = self.local.log
        if log is not None:
            try:
                version = output._version if type(output) is Tensor else plain_version(output)
            except RuntimeError:
                # A tensor without a version counter.
                version = None
            if version is not None:
                log += self.index, output, version
                return None
        if torch.compiler.is_dynamo_compiling():
            # Without a compiled pass of ours, this is a compiled part of the net: a value that is
            # traced once must not count as a record. Before 2.12 the compiler can't look at a pass.
            return self.after_traced(module, args, output)
        active = self.local.active
        if active is not None:
            take = active.receivers[self.index]
            if take is not None:
                private.apart_from_modes(take, output)
                active.log += self.index, NOTHING, 0
                return None
            if active.fast[self.index] and (version := plain_version(output)) is not None:
                active.log += self.index, output, version
                return None
        if self.name in TRACED:
            return self.after_traced(module, args, output)
        if active is not None:
            return unseen(active.receive, self.index, args, output)
        # A call outside of any pass, unless a backward pass runs the module again.
        site = self.site
        if self.local.is_idle:
            return None
        if private.backward_pass() != -1:
            return site.reruns.again(self.index, output) if site.reruns else None
        self.note_outside()
        return None

    def note_outside(self) -> None:
        """Note a call outside of any pass, if a block or the pass of another thread asks for it."""
        if self.local.outside is not None:
            self.local.outside.add(self.index)
        if RUNNING:
            self._note_for_other_threads()

    def _note_for_other_threads(self) -> None:
        """Note a call in a thread without a pass, which the network of a pass may have started."""
        running, thread = list(RUNNING.values()), threading.get_ident()
        if all(other.thread != thread for other in running):
            for other in running:
                if other.site is self.site:
                    other.current.called_in_other_threads.add(self.index)

    def before(self, module: nn.Module | None, args: Any, kwargs: Any = None) -> Any:
        """Take the inputs of the module's forward; return those that it receives instead.

        There are no keyword arguments if another thread is just adding or removing this hook, which
        no running pass needs then.
        """
        site = self.site
        if kwargs is None or self.name in TRACED or torch.compiler.is_dynamo_compiling():
            return None
        if site.local.active is not None:
            return unseen(site.local.active.receive_inputs, self.index, args, kwargs)
        if site.reruns and not site.local.is_idle and private.backward_pass() != -1:
            return site.reruns.inputs_again(self.index, args, kwargs)
        return None

    def after_traced(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Take a compiled module's output, while the network around it is compiled."""
        compiled = TRACED.get(self.name)
        if compiled is None or module is None:
            return None
        is_behind = False
        for hook in private.forward_hooks(module)[0].values():
            owner = getattr(hook, "__self__", hook)
            if is_behind and not isinstance(owner, Uncopied):
                compiled.hooks_behind[self.index] = True
            is_behind = is_behind or owner is self
        return compiled.receive(self.index, output)


def _run_compiled(
    hook: ModuleHook, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a module's compiled function with our hook before and behind it, outside of it.

    ``module.compile()`` compiles the module's hooks too, and a value that is traced once is no
    record.
    """
    received = hook.before(module, args, kwargs)
    if received is not None:
        args, kwargs = received
    output = call(*args, **kwargs)
    changed = hook.after(module, args, output)
    return output if changed is None else changed


_Hook = ModuleHook | OwnCodeHook


class Hooks:
    """The hooks of one program, attached or not."""

    def __init__(self, program: Program, site: Site, with_inputs: bool) -> None:
        self._modules = program.modules
        # The modules around own code, with hooks on functions for each of their calls.
        self._own_code = [
            (module, [_on_functions(entries, site) for entries in calls])
            for module, calls in (*program.functions, *program.called)
        ]
        self._all = (*self._modules, *(module for module, _ in self._own_code))
        self._counts_calls = program.counts_calls
        self._site = site
        # The indices of modules with hooks on their inputs; post-processors add some.
        self.with_inputs = set(range(len(self._modules))) if with_inputs else set()
        # What was known at the last look: the number of handles, and the calls of modules.
        self._checked_at = -1
        self._calls: list[Any] = []
        # Set when all are attached, and cleared before the first is removed: an interruption can
        # come between any two.
        self.is_attached = False

    def attach(self) -> None:
        """Attach the hooks, behind all others."""
        change_hooks(self._attach)

    def _attach(self) -> None:
        """Add what is missing: what is there stays, since other threads may call the modules."""
        for index, module in enumerate(self._modules):
            hook = ModuleHook(index, self._site)
            after, before = private.forward_hooks(module)
            if not private.calls_compiled(module):
                if not self._own(after):
                    module.register_forward_hook(hook.after)
                if index in self.with_inputs and not self._own(before):
                    module.register_forward_pre_hook(hook.before, with_kwargs=True)
            elif self._is_newly_compiled(module):
                self._remove_from(module)
                CallWrapper(
                    module, partial(_run_compiled, hook, module), site=self._site
                ).put_around()
                module.register_forward_hook(hook.after_traced)
        for module, hooks in self._own_code:
            # Nothing is seen of compiled code.
            if not (private.calls_compiled(module) or self._wraps(module)):
                code = RecordedCode(module, self._site, hooks, int(module in self._modules))
                # What makes calls passes must stand around it.
                run = code.run if hooks else self._site.local.run_outside
                CallWrapper(module, run, site=self._site).put_inside()
        keep_out_of_copies(*self._all)
        self._move_behind_others()
        self.is_attached = True

    def _is_newly_compiled(self, module: nn.Module) -> bool:
        """Whether a module is compiled, and our hook is not outside of the compiled call."""
        return private.calls_compiled(module) and not self._wraps(module)

    def _wraps(self, module: nn.Module) -> bool:
        return any(wrapper.site is self._site for wrapper in wrappers(module))

    def removed_by_others(self) -> set[int]:
        """Return the entries whose hooks are gone, where the number of calls does not tell."""
        if not self.is_attached:
            return set()
        unhooked = {index for index in self.with_inputs if self._lacks(self._modules[index], 1)}
        if self._counts_calls:
            return unhooked
        unhooked |= {index for index, module in enumerate(self._modules) if self._lacks(module, 0)}
        return unhooked

    def _lacks(self, module: nn.Module, which: int) -> bool:
        hooks = private.forward_hooks(module)[which]
        return not (self._own(hooks) or private.calls_compiled(module))

    def detach(self, *, waits: bool = True) -> None:
        """Remove the hooks; a finalizer must not wait."""
        change_hooks(self._detach, waits=waits)

    def _detach(self) -> None:
        self.is_attached = False
        for module in self._all:
            self._remove_from(module)
        let_copy(*self._all)

    def _remove_from(self, module: nn.Module) -> None:
        take_out(module, lambda wrapper: wrapper.site is self._site)
        for hooks in filter(None, private.forward_hooks(module)):
            for number in self._own(hooks, _Hook):
                private.remove_hook(module, number)

    def _own(self, hooks: Mapping[int, Any], kind: Any = ModuleHook) -> list[int]:
        """Return the numbers of our hooks: they are looked for, as interruptions lose handles."""
        local = self._site.local
        # Reading the numbers alone can't be interrupted: others may change the hooks meanwhile.
        return [
            number
            for number in list(hooks)
            if isinstance(owner := getattr(hooks.get(number), "__self__", None), kind)
            and owner.local is local
        ]

    def make_ready(self, indices: Collection[int] = ()) -> None:
        """Attach the hooks behind any that were added later, with those on some modules' inputs.

        Every new handle takes a number, so one comparison shows whether there are new ones. A
        module that has been compiled since then needs its hook outside of the compiled call.
        """
        if private.DYNAMO in sys.modules:
            calls = [*map(private.compiled_call, self._modules)]
            if calls != self._calls and any(map(self._is_newly_compiled, self._modules)):
                self.is_attached = False
            self._calls = calls
        if not (self.is_attached and self.with_inputs.issuperset(indices)):
            self.with_inputs.update(indices)
            self.attach()
        elif self._checked_at != RemovableHandle.next_id:
            change_hooks(self._move_behind_others)

    def _move_behind_others(self) -> None:
        next_id = RemovableHandle.next_id
        for module in self._all:
            after, before = private.forward_hooks(module)
            # A hook that is alone is at its place.
            if len(after) > 1:
                arrange(after, first=self._own(after, OwnCodeHook), last=self._own(after))
            if len(before) > 1:
                arrange(before, last=[*self._own(before), *self._own(before, OwnCodeHook)])
        self._checked_at = next_id


def _on_functions(entries: Mapping[str, int], site: Site) -> dict[str, ModuleHook]:
    return {name: ModuleHook(entry, site) for name, entry in entries.items()}
