"""Changes of hooks on modules that other threads call meanwhile.

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
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")

_COLLECTS_INSIDE_INSTRUCTIONS = sys.version_info < (3, 12)
# Who runs a finalizer that never ends, or waits for us in it, must not stop us for good.
_PATIENCE_IN_SECONDS = 1.0
_ONE_AT_A_TIME = threading.RLock()


class _Local(threading.local):
    """Whether this thread runs a change, inside a collection that it has started."""

    is_changing = False


_LOCAL = _Local()


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
        if _COLLECTS_INSIDE_INSTRUCTIONS and not _LOCAL.is_changing:
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
        _LOCAL.is_changing = True
        try:
            # The collector would ignore an error.
            outcome[0].set_result(change())
        except BaseException as error:
            outcome[0].set_exception(error)
        finally:
            _LOCAL.is_changing = False

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
        # The time is up, or the user interrupts the wait: hooks must not stay behind.
        run()
    return outcome.pop().result()


def entries(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Return the numbers and hooks in a dictionary, which other threads may change meanwhile.

    Reading the keys alone creates no objects, and so can't be interrupted.
    """
    found = ((number, hooks.get(number)) for number in list(hooks))
    return [(number, hook) for number, hook in found if hook is not None]
