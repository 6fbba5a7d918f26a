"""How far long work has come: a bar on a terminal; elsewhere nothing, or lines where wanted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Told of samples and bytes that were done, and of steps, which is 1 if it is not given.
Advance = Callable[..., None]

_SECONDS: ContextVar[float | None] = ContextVar("_SECONDS", default=None)


@contextlib.contextmanager
def lines_every(seconds: float) -> Iterator[None]:
    """Print a line now and then inside the block, where work is long and there is no terminal."""
    token = _SECONDS.set(seconds)
    try:
        yield
    finally:
        _SECONDS.reset(token)


@contextlib.contextmanager
def progress_bar(what: str, total: int | None, *, is_wanted: bool = True) -> Iterator[Advance]:
    """Show steps, samples or bytes a second, bytes and the time left while the block runs.

    Parameters
    ----------
    what : str
        The work, such as "collecting".
    total : int or None
        How many steps there are, None where that is not known.
    is_wanted : bool, default True
        Show anything at all.
    """
    console, seconds = Console(stderr=True), _SECONDS.get()
    if not is_wanted or not (console.is_terminal or seconds is not None):
        yield _ignore
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[size]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as drawn:
        drawn.add_task(what, total=total, rate="", size="")
        yield _Work(drawn, None if console.is_terminal else seconds).advance


def _ignore(samples: int, num_bytes: int, steps: int = 1) -> None:
    """Show nothing."""


class _Work:
    """The work that was done so far, drawn as a bar, or printed now and then."""

    def __init__(self, drawn: Progress, seconds: float | None) -> None:
        self._drawn = drawn
        self._seconds = seconds
        self._samples = self._bytes = 0
        self._started = self._printed = time.monotonic()

    def advance(self, samples: int, num_bytes: int, steps: int = 1) -> None:
        """Take in what was done since the last call."""
        self._samples += samples
        self._bytes += num_bytes
        now, (task,) = time.monotonic(), self._drawn.tasks
        elapsed = max(1e-9, now - self._started)
        rate = f"{decimal(int(self._bytes / elapsed))}/s"
        if self._samples:
            rate = f"{self._samples / elapsed:,.0f} samples/s"
        self._drawn.update(task.id, advance=steps, rate=rate, size=decimal(self._bytes))
        if self._seconds is not None and now - self._printed >= self._seconds:
            self._printed = now
            total = "?" if task.total is None else f"{task.total:,}"
            line = f"{task.description} {task.completed:,}/{total}, {rate}, {decimal(self._bytes)}"
            # The work goes on, though nobody reads on.
            with contextlib.suppress(OSError):
                print(line, file=sys.stderr, flush=True)
