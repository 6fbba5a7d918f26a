"""What stands around the calls of a module, and is no part of its copies: hooks and functions.

NOTE [How a copy comes without hooks]

A module holds its hooks in ordered dictionaries, by number, and they are copied and saved with the
module. ``copy`` and ``pickle`` ask a dictionary's ``__reduce_ex__`` how to construct it again. As
long as a module has hooks of ours, its dictionaries have a ``__reduce_ex__`` that leaves them out.
They stay the same objects, since the handles of other hooks refer to them.

A function in place of a module's call lies where the module keeps the result of its own
``compile``. Several may stand around each other.

NOTE [Why hooks change inside a garbage collection]

At each call, torch reads a module's hooks out of ordered dictionaries, by one instruction of the
interpreter. Other threads can't interrupt an instruction, with one exception: up to Python 3.11, an
instruction that creates objects may collect garbage, finalizers are Python code, and other threads
can run during that. If one of them adds or removes a hook then, the call fails: "OrderedDict
mutated during iteration". Only one collection runs at a time. So hooks change inside a collection
of our own, and no other thread can be halfway through such an instruction.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from scio_recorder.tensors import private

_T = TypeVar("_T")
RunCall: TypeAlias = Callable[[Callable[..., Any], Any, Any], Any]

_COLLECTS_INSIDE_INSTRUCTIONS = sys.version_info < (3, 12)
# Who runs a finalizer that never ends, or waits for us in it, must not stop us for good.
_PATIENCE_IN_SECONDS = 1.0
_ONE_AT_A_TIME = threading.RLock()


class _ChangingThread(threading.local):
    """Whether this thread runs a change, inside a collection that it has started."""

    is_changing = False


_THIS_THREAD = _ChangingThread()


def change_hooks(change: Callable[[], _T], *, waits: bool = True) -> _T:
    """Run a change of hooks while no other thread changes or reads the hooks of a module.

    Parameters
    ----------
    change : callable
        Takes no arguments.
    waits : bool, default True
        Wait for other threads. A finalizer must not: they may wait for the collection that has
        called it.

    Returns
    -------
    object
        What the change returns.
    """
    has_lock = _ONE_AT_A_TIME.acquire(blocking=waits)
    try:
        if _COLLECTS_INSIDE_INSTRUCTIONS and not _THIS_THREAD.is_changing:
            return _in_own_collection(change, waits)
        return change()
    finally:
        if has_lock:
            _ONE_AT_A_TIME.release()


def _in_own_collection(change: Callable[[], _T], waits: bool) -> _T:
    # Popped in the end: frames that hold an error which holds them live until garbage is collected.
    outcome: list[Future[_T]] = [Future()]
    thread = threading.get_ident()

    def run(*collection: object) -> None:
        if outcome[0].done() or threading.get_ident() != thread:
            return
        _THIS_THREAD.is_changing = True
        try:
            # The collector would ignore an error.
            outcome[0].set_result(change())
        except BaseException as error:
            outcome[0].set_exception(error)
        finally:
            _THIS_THREAD.is_changing = False

    deadline = time.monotonic() + (_PATIENCE_IN_SECONDS if waits else 0)
    try:
        gc.callbacks.append(run)
        # A collection inside another one does nothing.
        gc.collect(0)
        while not outcome[0].done() and time.monotonic() < deadline:
            time.sleep(1e-5)
            gc.collect(0)
    finally:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(run)
        if not outcome[0].done():
            # The time is up, or the user interrupts the wait: hooks must not stay behind.
            run()
    return outcome.pop().result()


def entries(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Return the numbers and hooks in a dictionary, which other threads may change meanwhile.

    Reading the keys alone creates no objects, and so can't be interrupted.
    """
    return [(at, hook) for at in list(hooks) if (hook := hooks.get(at)) is not None]


def arrange(
    hooks: OrderedDict[int, Any], *, first: Sequence[int] = (), last: Sequence[int] = ()
) -> None:
    """Put some hooks before all others, and some behind them.

    Below its own order, an ordered dictionary is one in the order of insertion, which `move_to_end`
    and ``prepend=True`` leave alone, and some versions of dynamo take one for the other. So all
    hooks are put in again, by one instruction of the interpreter: other threads, which call the
    module meanwhile, must not miss any.
    """
    others = [number for number in list(hooks) if number not in {*first, *last}]
    wanted = [*first, *others, *last]
    if list(hooks) != wanted or list(dict.keys(hooks)) != wanted:
        hooks.update(zip(wanted, map(hooks.pop, wanted), strict=True))


# Threads may begin and end blocks around one network at once. A recorder that is collected as
# garbage meanwhile takes out its own.
_CHANGING_CALLS = threading.RLock()


class Uncopied:
    """A hook, or the object that a hook is a method of, that copies of the module don't have."""

    __slots__ = ()


def keep_out_of_copies(*modules: nn.Module) -> None:
    """Leave the hooks that are `Uncopied` out of the copies of some modules."""
    for module in modules:
        owner = weakref.ref(module)
        for name in private.AROUND_FORWARD:
            reduce: Any = partial(_without_uncopied, owner, name)
            vars(module)[name].__reduce_ex__ = reduce  # asked before the class's own


def let_copy(*modules: nn.Module) -> None:
    """Undo `keep_out_of_copies` for those modules of which no hook is `Uncopied` any more."""
    for module in modules:
        if not _uncopied(module):
            for name in private.AROUND_FORWARD:
                vars(vars(module)[name]).pop("__reduce_ex__", None)


def _without_uncopied(module: weakref.ref[nn.Module], name: str, protocol: int) -> tuple[Any, ...]:
    owner = module()
    left_out = set() if owner is None else _uncopied(owner)
    own: OrderedDict[int, Any] = OrderedDict() if owner is None else vars(owner)[name]
    rest = [(key, value) for key, value in entries(own) if key not in left_out]
    return OrderedDict, (), None, None, iter(rest)


def _uncopied(module: nn.Module) -> set[int]:
    uncopied = set()
    for name in private.FORWARD_HOOKS:
        for number, hook in entries(vars(module)[name]) if vars(module)[name] else ():
            if isinstance(getattr(hook, "__self__", hook), Uncopied):
                uncopied.add(number)
    return uncopied


class CallWrapper:
    """Stands in place of a module's call; several may stand around each other.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    run : callable
        ``run(call, args, kwargs)`` stands for a call of the module; ``call(*args, **kwargs)`` is
        what would be called without this.
    run_traced : callable, optional
        The same for a call that dynamo follows. By default that is called as without this.
    site : object, optional
        The site of the hooks with which this comes and goes.

    Attributes
    ----------
    inner : callable or None
        The function that was there before.
    """

    inner: Any = None

    def __init__(
        self, module: nn.Module, run: RunCall, run_traced: RunCall | None = None, site: Any = None
    ) -> None:
        self.module = module
        self.site = site
        self._run, self._run_traced = run, run_traced
        self._plain = private.plain_call(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand for a call, unless it is that of a shallow copy, which shares what is set here."""
        run = self._run_traced
        if is_dynamo_compiling() or (run is not None and private.compiler_around()):
            return self.call(*args, **kwargs) if run is None else run(self.call, args, kwargs)
        called = private.called_module()
        if called is not None and called is not self.module:
            return private.plain_call(called)(*args, **kwargs)
        # A pass puts the recorder's own functions inside before it calls. Inside these is no other.
        call = self.call if self.site is None else self.inner or self._plain
        return self._run(call, args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as it would be called without this."""
        return (self.inner or self._plain)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the module has nothing in place of its call.
        return type(None), ()

    @property
    def is_plain(self) -> bool:
        """Whether the module is not compiled, see ``private.is_compiled``."""
        return self.inner is None or getattr(self.inner, "is_plain", False)

    def put_around(self) -> None:
        """Take the place of the module's call."""
        with _CHANGING_CALLS:
            self.inner = private.compiled_call(self.module)
            private.set_compiled_call(self.module, self)

    def put_inside(self) -> None:
        """Take the place of what the functions around the module's call stand for."""
        with _CHANGING_CALLS:
            *_, innermost = None, *wrappers(self.module)
            if innermost is None:
                self.put_around()
            else:
                self.inner, innermost.inner = innermost.inner, self

    def remove(self) -> None:
        """Leave the place of the module's call, or of those around which others stand."""
        take_out(self.module, lambda wrapper: wrapper is self)


def wrappers(module: nn.Module) -> Iterator[CallWrapper]:
    """Yield the wrappers around a module's call, the outermost first."""
    call = private.compiled_call(module)
    while isinstance(call, CallWrapper):
        yield call
        call = call.inner


def take_out(module: nn.Module, is_gone: Callable[[CallWrapper], bool]) -> None:
    """Take some wrappers out of those around a module's call, whichever came first."""
    with _CHANGING_CALLS:
        call = private.compiled_call(module)
        if isinstance(call, CallWrapper):
            private.set_compiled_call(module, _remaining(call, is_gone))


def _remaining(call: Any, is_gone: Callable[[CallWrapper], bool]) -> Any:
    if not isinstance(call, CallWrapper):
        return call
    call.inner = _remaining(call.inner, is_gone)
    return call.inner if is_gone(call) else call


class CallHook(NamedTuple):
    """Functions at both ends of the calls of a module.

    Methods are held weakly: hooks keep nobody alive who only observes.
    """

    module: nn.Module
    name: str
    # Called with the name, the module, its positional and its keyword arguments. What it returns,
    # if anything, the forward receives in place of both kinds of arguments.
    before: Callable[..., Any] | None = None
    # Called with the output as well. What it returns, if anything, goes on in place of it.
    after: Callable[..., Any] | None = None
    # Whether `after` is also called if the call has raised an ``Exception``; the output is None.
    always: bool = False


class CallHooks:
    """The hooks of one observer on calls of modules, which are removed together.

    They stand behind all other hooks, and copies and files of the modules don't have them. In
    compiled code they only note the name of the module.

    Examples
    --------
    >>> net, seen = nn.Identity(), []
    >>> hooks = CallHooks()
    >>> hooks.add(CallHook(net, "net", after=lambda *call: seen.append(call[0])))
    >>> _ = net(1), hooks.remove(), net(1)
    >>> seen
    ['net']
    """

    def __init__(self) -> None:
        # The names of modules that ran as compiled code, as keys: dynamo follows a write to a
        # dictionary without a graph break.
        self.compiled: dict[str, bool] = {}
        self._added: list[tuple[weakref.ref[nn.Module], RemovableHandle]] = []

    def __len__(self) -> int:
        return len(self._added)

    def add(self, *hooks: CallHook) -> None:
        """Add hooks, all at once."""
        change_hooks(partial(self._add, hooks))

    def _add(self, hooks: Sequence[CallHook]) -> None:
        for module, name, before, after, always in hooks:
            owner = weakref.ref(module)
            for function, num_values, register, options in (
                (before, 3, module.register_forward_pre_hook, {}),
                (after, 4, module.register_forward_hook, {"always_call": always}),
            ):
                if function is not None:
                    held = weakref.WeakMethod(function) if inspect.ismethod(function) else function
                    hook = _ObservingHook(held, name, num_values, self.compiled)
                    self._added.append((owner, register(hook, with_kwargs=True, **options)))
        keep_out_of_copies(*[hook.module for hook in hooks])

    def remove(self, *, waits: bool = True) -> None:
        """Remove all of them; a finalizer must not wait."""
        added, self._added = self._added, []
        change_hooks(partial(_remove, added), waits=waits)


def _remove(added: Sequence[tuple[weakref.ref[nn.Module], RemovableHandle]]) -> None:
    for _, handle in added:
        handle.remove()
    let_copy(*{module for reference, _ in added if (module := reference()) is not None})


@dataclass(slots=True, eq=False)
class _ObservingHook(Uncopied):
    """Calls a function at one end of a module's calls."""

    function: Any
    name: str
    num_values: int
    compiled: dict[str, bool]

    def __call__(self, *call: Any) -> Any:
        # A value that is traced once must not count for every call.
        if is_dynamo_compiling():
            self.compiled[self.name] = True
            return None
        held = self.function
        function = held() if isinstance(held, weakref.WeakMethod) else held
        # The keyword arguments are missing if another thread is just adding or removing the hook.
        if function is None or len(call) != self.num_values:
            return None
        if not private.num_dispatch_modes():
            return function(self.name, *call)
        # As `apart_from_modes` does, but in this frame: a guard counts the frames around it.
        with private.no_dispatch_modes():
            return function(self.name, *call)
