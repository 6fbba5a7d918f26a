"""The progress of long work: a bar on a terminal; elsewhere nothing, or lines on request."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from rich.filesize import decimal

from scio_recorder.display.printing import (
    BarColumn,
    Console,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Advance", "lines_every", "progress_bar"]

# Called with the samples, bytes and steps that were done; steps are 1 by default.
Advance = Callable[..., None]

_SECONDS: ContextVar[float | None] = ContextVar("_SECONDS", default=None)


@contextlib.contextmanager
def lines_every(seconds: float) -> Iterator[None]:
    """Print a line now and then inside the block, if there is no terminal."""
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
        The work and its steps, such as "collecting batches".
    total : int or None
        The number of steps; None if it is not known.
    is_wanted : bool, default True
        Show anything at all.
    """
    console, seconds = Console(stderr=True), _SECONDS.get()
    is_drawn = is_wanted and console.is_terminal
    is_printed = is_wanted and not is_drawn and seconds is not None
    samples = done_bytes = 0
    started = printed = time.monotonic()
    drawn = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not is_drawn,
    )
    # Rich 13.7 ends a bar that is disabled with an empty line.
    with drawn if is_drawn else contextlib.nullcontext():
        drawn.add_task(what, total=total, speed="")
        (task,) = drawn.tasks

        def advance(more_samples: int, more_bytes: int, steps: int = 1) -> None:
            nonlocal samples, done_bytes, printed
            samples += more_samples
            done_bytes += more_bytes
            now = time.monotonic()
            speed = _speed(samples, done_bytes, now - started)
            drawn.update(task.id, advance=steps, speed=speed)
            if is_printed and now - printed >= (seconds or 0.0):
                printed = now
                steps_done = f"{what} {task.completed:,}/{'?' if total is None else f'{total:,}'}"
                # The work goes on, although nobody reads the lines any more.
                with contextlib.suppress(OSError):
                    print(", ".join(filter(None, [steps_done, speed])), file=sys.stderr, flush=True)

        yield advance


def _speed(samples: int, num_bytes: int, seconds: float) -> str:
    """Return samples or bytes per second, and all bytes."""
    seconds = max(1e-9, seconds)
    size = decimal(num_bytes) if num_bytes else ""
    rate = f"{samples / seconds:,.0f} samples/s" if samples else ""
    rate = rate or (f"{decimal(int(num_bytes / seconds))}/s" if num_bytes else "")
    return ", ".join(filter(None, [rate, size]))
