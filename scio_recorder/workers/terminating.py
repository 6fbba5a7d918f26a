"""SIGTERM, by which job schedulers end a process: in a collection it acts like Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# The status that shells report for a process that SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM leave the block by a `SystemExit`, so that pending data is saved.

    Otherwise the process would end at once. The caller's own handler stays in charge, and threads
    other than the main one never see a signal.

    Examples
    --------
    >>> import os
    >>> try:
    ...     with terminable():
    ...         os.kill(os.getpid(), signal.SIGTERM)
    ... except SystemExit as error:
    ...     error.code
    143
    """
    is_ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    # Schedulers may send it again while pending data is being saved.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(TERMINATED)
