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

__all__ = ["Advance", "lines_every", "progress_bar"]

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
    tally = _Tally(what, total)
    if is_wanted and console.is_terminal:
        with tally.bar(console) as advance:
            yield advance
    else:
        tally.seconds = seconds if is_wanted else None
        yield tally.add_and_print


class _Tally:
    """What was done so far."""

    def __init__(self, what: str, total: int | None) -> None:
        self.seconds: float | None = None
        self._what = what
        self._total = total
        self._steps = self._samples = self._bytes = 0
        self._started = self._printed = time.monotonic()

    def _add(self, samples: int, num_bytes: int, steps: int) -> None:
        self._samples += samples
        self._bytes += num_bytes
        self._steps += steps

    @property
    def _rate(self) -> str:
        elapsed = max(1e-9, time.monotonic() - self._started)
        if self._samples:
            return f"{self._samples / elapsed:,.0f} samples/s"
        return f"{decimal(int(self._bytes / elapsed))}/s"

    def add_and_print(self, samples: int, num_bytes: int, steps: int = 1) -> None:
        """Print a line if the last one was printed long ago."""
        self._add(samples, num_bytes, steps)
        now = time.monotonic()
        if self.seconds is not None and now - self._printed >= self.seconds:
            self._printed = now
            total = "?" if self._total is None else f"{self._total:,}"
            line = f"{self._what} {self._steps:,}/{total}, {self._rate}, {decimal(self._bytes)}"
            # The work goes on, though nobody reads on.
            with contextlib.suppress(OSError):
                print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bar(self, console: Console) -> Iterator[Advance]:
        """Draw a bar that is moved by what is yielded."""
        columns = (
            TextColumn(self._what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[size]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as drawn:
            task = drawn.add_task("", total=self._total, rate="", size="")

            def advance(samples: int, num_bytes: int, steps: int = 1) -> None:
                self._add(samples, num_bytes, steps)
                drawn.update(task, advance=steps, rate=self._rate, size=decimal(self._bytes))

            yield advance
