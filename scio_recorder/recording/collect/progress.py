"""How far a collection has come, on a terminal; nothing anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

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

__all__ = ["Advance", "progress_bar"]

# Told after each batch: samples and bytes that it added.
Advance = Callable[[int, int], None]


@contextlib.contextmanager
def progress_bar(is_wanted: bool, num_batches: int | None) -> Iterator[Advance]:
    """Show batches, samples/s, bytes and the time left while the block runs."""
    console = Console(stderr=True)
    if not is_wanted or not console.is_terminal:
        yield _ignore
        return
    columns = (
        TextColumn("collecting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[size]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=num_batches, rate="", size="")
        samples = num_bytes = 0

        def advance(more_samples: int, more_bytes: int) -> None:
            nonlocal samples, num_bytes
            samples += more_samples
            num_bytes += more_bytes
            elapsed = progress.tasks[0].elapsed or 0.0
            rate = f"{samples / elapsed:,.0f} samples/s" if elapsed else ""
            progress.update(task, advance=1, rate=rate, size=decimal(num_bytes))

        yield advance


def _ignore(samples: int, num_bytes: int) -> None:
    """Show nothing."""
