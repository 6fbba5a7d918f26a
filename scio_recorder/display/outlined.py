"""A base that gives a class its table on a terminal and its tree in a notebook."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult

from scio_recorder.display.outline import Outline
from scio_recorder.display.table import table_lines
from scio_recorder.display.tree import asset, tree_html


class Outlined:
    """An object that is shown as the rows of a net."""

    def _outline(self) -> Outline:
        """Return what to show."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of a table that fits the console."""
        yield from table_lines(self._outline(), console, options)

    def _repr_html_(self) -> str:
        """Return a tree that can be folded and searched, to be put into a page any number of times.

        There are no ids that could clash, each rule of the style begins with the tree's own class,
        and colours are those of the page around it. It folds without scripts too.
        """
        tree = "".join(tree_html(self._outline()))
        return f"<style>\n{asset('tree.css')}</style>{tree}<script>\n{asset('tree.js')}</script>"
