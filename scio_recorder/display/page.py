"""A self-contained page of HTML: its frame, the table of layers, the file."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from scio_recorder.display.outline import address_of, asset, call_text, hint, searched, text
from scio_recorder.errors import RecorderError, RecordingError
from scio_recorder.layer import Layer


def page_html(
    title: str,
    facts: Sequence[tuple[str, str]],
    warnings: Sequence[str],
    sections: Mapping[str, Iterable[str]],
) -> str:
    """Return a page, to be written in UTF-8.

    Parameters
    ----------
    title : str
        Its heading.
    facts : sequence of (str, str)
        Names and values that describe the whole.
    warnings : sequence of str
        Warnings to show first, as HTML.
    sections : mapping of str to iterable of str
        The rest: pieces of HTML below headings of one word, which the contents name.

    Examples
    --------
    >>> html = page_html("<empty>", [], [], {})
    >>> "<h1>&lt;empty&gt;</h1>" in html, "://" in html
    (True, False)
    """
    links = (f'<li><a href="#h-{name.lower()}">{name}</a></li>' for name in sections)
    named = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts)
    bodies = [_section(name, "".join(pieces)) for name, pieces in sections.items()]
    first = "".join(f"<li>{warning}</li>" for warning in warnings)
    return Template(asset("page.html")).substitute(
        title=text(title),
        style=asset("page.css") + asset("tree.css"),
        contents="".join(links),
        facts="".join(named),
        warnings=_section("Look at this first", f"<ul>{first}</ul>", "warning") if first else "",
        sections="\n".join(bodies),
        tree_script=asset("tree.js"),
        page_script=asset("page.js"),
    )


def _section(name: str, body: str, kind: str = "") -> str:
    key = kind or name.lower()
    heading = f'<h2 id="h-{key}">{name}</h2>'
    return f'<section id="{key}" class="{kind}" aria-labelledby="h-{key}">{heading}{body}</section>'


class Column(NamedTuple):
    """A column of a table of layers: its name, a text for each layer, and numbers to sort by."""

    name: str
    texts: Sequence[str]
    values: Sequence[float | None] | None = None
    # The rows in which the text stands out.
    alarms: Collection[int] = ()
    # The class of the cells in the style sheet, if they are long.
    kind: str = ""

    @property
    def heading(self) -> str:
        """The heading in HTML, which says by its class whether rows are sorted by numbers."""
        return _heading(self.name, "text" if self.values is None else self.kind or "number")

    def cell(self, place: int) -> str:
        """Return a cell in HTML; nothing and NaN come last in an order."""
        shown, number = text(self.texts[place]), None if self.values is None else self.values[place]
        if place in self.alarms:
            shown = f'<span class="alarm">{shown}</span>'
        if self.values is None:
            return f'<td class="{self.kind}">{shown}</td>'
        # NaN has no place in an order: it sorts as missing.
        key = "" if number is None or math.isnan(number) else repr(float(number))
        key = key.replace("inf", "Infinity")
        return f'<td class="{self.kind or "number"}" data-value="{key}">{shown}</td>'


def table_html(
    what: str, layers: Sequence[Layer], columns: Sequence[Column], urgent: Collection[str] = ()
) -> Iterator[str]:
    """Yield a table that can be sorted and searched.

    Parameters
    ----------
    what : str
        A description of the table for screen readers.
    layers : sequence of Layer
        The layers, in the order of rows at first.
    columns : sequence of Column
        The columns behind those that name the layer; those without any text are left out.
    urgent : collection of str, optional
        The columns that come before the name where they alarm, since a narrow screen shows only the
        first ones.

    Returns
    -------
    iterator of str
        HTML.
    """
    shown = [column for column in columns if any(column.texts)]
    yield (
        '<div class="tools" hidden><input type="search" id="search" placeholder="Search layers" '
        'aria-label="Search layers by label, name or type">'
        '<output id="found" aria-live="polite"></output></div>'
    )
    # The arrow of the first heading would suggest an order of labels.
    yield '<p class="quiet">Rows are in the order of execution: press a heading to sort them.</p>'
    yield '<p class="quiet scrolls" aria-hidden="true">Scroll sideways for more columns &rarr;</p>'
    # Focusable, so that it can be scrolled by keyboard.
    yield f'<div class="table" tabindex="0" role="region" aria-label="{what}"><table><thead><tr>'
    first = [column for column in shown if column.alarms and column.name in urgent]
    others = [column for column in shown if column not in first]
    yield _heading("Layer", "place", "ascending") + "".join(one.heading for one in first)
    yield _heading("Name", "text") + _heading("Type", "text")
    yield "".join(one.heading for one in others) + "</tr></thead><tbody>\n"
    for place, layer in enumerate(layers):
        label = text(str(layer.label))
        yield f'<tr id="layer-{label}" data-search="{searched(layer)}">'
        yield f'<th scope="row" data-value="{place}">{label}</th>'
        yield "".join(one.cell(place) for one in first) + _name_cells(layer)
        yield "".join(one.cell(place) for one in others) + "</tr>\n"
    yield "</tbody></table></div>"


def _heading(name: str, kind: str, order: str = "none") -> str:
    button = f'<button type="button">{name}</button>'
    return f'<th scope="col" class="{kind}" aria-sort="{order}">{button}</th>'


def _name_cells(layer: Layer) -> str:
    name = f'<td class="name tail" title="{text(hint(layer))}">{name_html(layer.name, layer)}</td>'
    return f"{name}<td><bdi>{text(layer.type_name)}</bdi></td>"


def name_html(name: str, layer: Layer) -> str:
    """Return a layer's name with the number of its call, for an element of class ``tail``.

    Such an element shows the end of a long name, since names of a deep net begin alike.
    """
    return f'<span dir="ltr"><bdi>{text(name)}</bdi>{call_text(layer)}</span>'


def link_html(layer: Layer) -> str:
    """Return a link to the row of a layer."""
    name = f"<bdi>{text(layer.name or layer.type_name)}</bdi>{call_text(layer)}"
    return f'<a href="{address_of(layer)}">{text(str(layer.label))} {name}</a>'


def number_text(value: float | None) -> str:
    """Return a number in at most four digits; an empty text if it is not known.

    Examples
    --------
    >>> [number_text(x) for x in (0.0, 1234567.0, -0.00001234, math.inf, None)]
    ['0', '1.235e+06', '-1.234e-05', 'inf', '']
    """
    return "" if value is None else f"{value:.4g}"


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
