"""Results in HTML, for notebooks and as pages of one file, made from the folder ``templates``."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scio_recorder.display.outline import Outline, call_text, hint, nodes, table_lines, visible
from scio_recorder.errors import RecorderError, RecordingError

__all__ = [
    "Outlined",
    "TableColumn",
    "check_page",
    "number_text",
    "rendered",
    "write_page",
]

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import Console, ConsoleOptions, RenderResult

    from scio_recorder.display.figure import Bars


@cache
def asset(name: str) -> str:
    """Return the text of a template, style sheet or script."""
    return (files("scio_recorder.display") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        # What is HTML already comes from a template.
        finalize=lambda value: value if hasattr(value, "__html__") else visible(str(value)),
    )
    filters = {"call": call_text, "count": "{:,}".format, "hint": hint, "nodes": nodes}
    environment.filters |= filters | {"number": number_text, "path": bars_path, "placed": placed}
    environment.globals["asset"] = lambda name: Markup(asset(name))
    return environment


def rendered(template: str, **data: Any) -> str:
    """Return a template that is filled with data, all of which is escaped.

    Examples
    --------
    >>> class Shown:
    ...     title, texts, numbers, rows = "<b>", ["a"], [], [["&"]]
    >>> rendered("listing.html", shown=Shown)[:15]
    '<p>&lt;b&gt;</p'
    """
    return _environment().get_template(template).render(data)


class Outlined:
    """An object that is shown as the rows of a net."""

    def _outline(self) -> Outline:
        """Return the outline to show."""
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of a table that fits the console."""
        yield from table_lines(self._outline(), console, options)

    def _repr_html_(self) -> str:
        """Return a tree that can be folded and searched."""
        return rendered("notebook.html", outline=self._outline())


class TableColumn(NamedTuple):
    """A column of a table of layers: its name, a text for each layer, and numbers to sort by."""

    name: str
    texts: Sequence[str]
    values: Sequence[float | None] | None = None
    # The rows in which the text stands out.
    alarms: Collection[int] = ()
    # The class of the cells in the style sheet, if they are long.
    kind: str = ""

    @property
    def style(self) -> str:
        """The class of heading and cells; rows are sorted by numbers unless it is "text"."""
        return "text" if self.values is None else self.kind or "number"

    def key(self, place: int) -> str:
        """Return the number by which a row is sorted; nothing and NaN come last in an order."""
        number = None if self.values is None else self.values[place]
        # NaN has no place in an order: it sorts as missing.
        known = "" if number is None or math.isnan(number) else repr(float(number))
        return known.replace("inf", "Infinity")


def placed(
    columns: Sequence[TableColumn], urgent: Collection[str]
) -> tuple[list[TableColumn], list[TableColumn]]:
    """Return columns that come before the name of the layer, and the others.

    Urgent ones come before it where they alarm, since a narrow screen shows only the first columns.
    Columns without any text are left out.
    """
    shown = [column for column in columns if any(column.texts)]
    first = [column for column in shown if column.alarms and column.name in urgent]
    return first, [column for column in shown if column not in first]


def number_text(value: float | None) -> str:
    """Return a number in at most four digits; an empty text if it is not known.

    Examples
    --------
    >>> [number_text(x) for x in (0.0, 1234567.0, -0.00001234, math.inf, None)]
    ['0', '1.235e+06', '-1.234e-05', 'inf', '']
    """
    return "" if value is None else f"{value:.4g}"


def bars_path(bars: Bars) -> str:
    """Return the outline of a histogram for SVG: a bin is 1 wide, and the tallest is 100 high.

    Heights are square roots of counts, so that a peak at zero leaves the rest to be seen.

    Examples
    --------
    >>> from scio_recorder.display.figure import Bars
    >>> bars_path(Bars((4, 0, 16), 0.0, 3.0))
    'M0 100V50h1V100h1V0h1V100z'
    """
    top = max(bars.counts, default=0) or 1
    heights = [round(100 * (1 - math.sqrt(count / top)), 1) for count in bars.counts]
    return f"M0 100{''.join(f'V{height:g}h1' for height in heights)}V100z"


def check_page(path: object, title: object, error: type[RecorderError]) -> None:
    """Refuse arguments that name no file for a page, or no heading."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not name or "\0" in name or "://" in name:
        raise error(f'report({path!r}): name a file on this machine, such as "page.html"')
    if not isinstance(title, str | None):
        raise error(f"report(title={title!r}): give the heading as a string")


def write_page(path: str | os.PathLike[str], pieces: Iterable[str]) -> Path:
    """Write a text in UTF-8, in place of the file's content.

    Parameters
    ----------
    path : str or path-like
        The file. Its folder must exist.
    pieces : iterable of str
        The text.

    Returns
    -------
    pathlib.Path
        The file.

    Raises
    ------
    RecordingError
        It can't be written; an earlier file stays as it was.
    """
    target = Path(path)
    if target.is_dir() or os.fspath(path).endswith("/"):
        raise RecordingError(f"{path} is a folder: name a file, such as {target / 'page.html'}")
    if target.exists() and not target.is_file():
        raise RecordingError(f"{path} is a device, which a page would replace: name a file")
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            # Whether the file can be written is known before this work.
            file.write("".join(pieces))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except RecordingError:
        raise
    except OSError as error:
        advice = "Name a file in a folder that is there, and in which you may write"
        raise RecordingError(f"can't write {target}: {error.strerror}. {advice}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return target
