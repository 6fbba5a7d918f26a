"""A table under a sentence, for a terminal: the printed form of results."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from scio_recorder.display.outline import visible

# A longer column of text would push figures out of sight.
_WIDEST, _SHORT = 36, 8


@dataclass(frozen=True)
class Listing:
    """The printed lines.

    Parameters
    ----------
    title : str
        A sentence or two.
    texts, numbers : sequence of str
        Names of columns, those of text first. Long texts are cut off if there is no room.
    rows : sequence of sequence of str
        A cell for each column.
    marked : collection of int
        The rows that stand out.
    notes : sequence of str
        Remarks below the table.
    """

    title: str
    texts: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Collection[int] = ()
    notes: Sequence[str] = ()

    def __rich__(self) -> Group:
        """Return the table for rich."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
        for place, name in enumerate(self.texts):
            width = max(len(name), *(len(row[place]) for row in self.rows), 0)
            # Short words are never cut off.
            least = width if width <= _SHORT or not place else None
            table.add_column(_line(name), min_width=least, max_width=_WIDEST)
        for name in self.numbers:
            table.add_column(name, justify="right", no_wrap=True)
        for place, row in enumerate(self.rows):
            style = "bold" if place in self.marked else ""
            table.add_row(*map(_line, row), style=style)
        title = Text(visible(self.title), "bold")
        return Group(title, *([table] * bool(self.rows)), *(Text(visible(n)) for n in self.notes))


def _line(text: str) -> Text:
    return Text(visible(text), no_wrap=True, overflow="ellipsis")


class Listed:
    """An object that prints itself as a table."""

    def _listing(self) -> Listing:
        """Return the listing to print."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a table that fits the console."""
        yield self._listing()

    def __str__(self) -> str:
        """Return the table at its full width."""
        console = Console(file=io.StringIO(), width=10_000, color_system=None)
        with console.capture() as capture:
            console.print(self._listing())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())
