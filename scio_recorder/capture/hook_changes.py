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
from typing import Any, TypeVar

_T = TypeVar("_T")

_COLLECTS_INSIDE_INSTRUCTIONS = sys.version_info < (3, 12)
# Who runs a finalizer that never ends, or waits for us in it, must not stop us for good.
_PATIENCE_IN_SECONDS = 1.0
_ONE_AT_A_TIME = threading.RLock()


class _Changer:
    """Runs one change inside a collection that its thread has started."""

    # The thread in whose collection a change runs now. There is only one at a time.
    running_thread: int | None = None

    def __init__(self, change: Callable[[], Any]) -> None:
        self._change = change
        self._thread = threading.get_ident()
        self.is_over = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, phase: str, info: object) -> None:
        """Run the change, if this is a callback from a collection of its own thread."""
        if not self.is_over and self._thread == threading.get_ident():
            _Changer.running_thread = self._thread
            try:
                self.run()
            finally:
                _Changer.running_thread = None

    def run(self) -> None:
        """Run the change. The collector would ignore an error, so it is kept."""
        self.is_over = True
        try:
            self.result = self._change()
        except BaseException as error:
            self.error = error


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
        if _COLLECTS_INSIDE_INSTRUCTIONS and _Changer.running_thread != threading.get_ident():
            return _in_own_collection(change, waits)
        return change()
    finally:
        if has_lock:
            _ONE_AT_A_TIME.release()


def _in_own_collection(change: Callable[[], _T], waits: bool) -> _T:
    changer = _Changer(change)
    deadline = time.monotonic() + (_PATIENCE_IN_SECONDS if waits else 0)
    try:
        gc.callbacks.append(changer)
        # A collection inside another one does nothing.
        gc.collect(0)
        while not changer.is_over and time.monotonic() < deadline:
            time.sleep(1e-5)
            gc.collect(0)
    finally:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(changer)
        # The time is up, or the user interrupts the wait: hooks must not stay behind.
        if not changer.is_over:
            changer.run()
    error, changer.error = changer.error, None
    if error is not None:
        try:
            raise error
        finally:
            # Frames that hold an error which holds them live until garbage is collected.
            del error
    result: _T = changer.result
    return result


def entries(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Return the numbers and hooks in a dictionary, which other threads may change meanwhile.

    Reading the keys alone creates no objects, and so can't be interrupted.
    """
    found = ((number, hooks.get(number)) for number in list(hooks))
    return [(number, hook) for number, hook in found if hook is not None]
