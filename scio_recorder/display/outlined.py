"""A base that gives a class its table on a terminal and its tree in a notebook."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult

from scio_recorder.display.notebook import notebook_html
from scio_recorder.display.outline import Outline
from scio_recorder.display.table import table_lines


class Outlined:
    """An object that is shown as the rows of a net."""

    def _outline(self) -> Outline:
        """Return what to show."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of a table that fits the console."""
        yield from table_lines(self._outline(), options)

    def _repr_html_(self) -> str:
        """Return a tree that can be folded and searched."""
        return notebook_html(self._outline())
