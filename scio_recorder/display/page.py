"""A self-contained page of HTML: its frame, the table of layers, the file."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scio_recorder.display.outline import asset, call_text, searched, text
from scio_recorder.errors import RecorderError, RecordingError
from scio_recorder.layer import Layer

# The page may fetch nothing, whatever names in it contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
# The sort keys of columns. Cells of numeric columns carry their numbers; text columns are aligned
# left.
NOTHING, TEXT, NUMBER, PLACE = "", "text", "number", "place"
_AT_ONCE = 200


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading, which the contents name.

    Parameters
    ----------
    title : str
        One word.
    pieces : iterable of str
        HTML.
    """

    title: str
    pieces: Iterable[str]


def page_html(
    title: str,
    facts: Sequence[tuple[str, str]],
    warnings: Sequence[str],
    sections: Sequence[Section],
) -> Iterator[str]:
    """Yield the pieces of a page.

    Parameters
    ----------
    title : str
        Its heading.
    facts : sequence of (str, str)
        Names and values that describe the whole.
    warnings : sequence of str
        Warnings to show first, as HTML.
    sections : sequence of Section
        The rest.

    Returns
    -------
    iterator of str
        HTML, to be joined and written in UTF-8.

    Examples
    --------
    >>> html = "".join(page_html("<empty>", [], [], []))
    >>> "<h1>&lt;empty&gt;</h1>" in html, "://" in html
    (True, False)
    """
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{text(title)}</title>"
    yield f"<style>\n{asset('page.css')}{asset('tree.css')}</style></head>\n<body><main>"
    links = (f'<li><a href="#h-{_key(one)}">{one.title}</a></li>' for one in sections)
    contents = f'<nav aria-label="Sections"><ul>{"".join(links)}</ul></nav>'
    yield f"<header><h1>{text(title)}</h1>{contents}</header>"
    yield from _facts(facts)
    if warnings:
        yield '<section class="warning" aria-labelledby="h-warnings">'
        listed = "".join(f"<li>{warning}</li>" for warning in warnings)
        yield f'<h2 id="h-warnings">Look at this first</h2><ul>{listed}</ul></section>\n'
    for one in sections:
        yield f'<section id="{_key(one)}" aria-labelledby="h-{_key(one)}">'
        yield f'<h2 id="h-{_key(one)}">{one.title}</h2>'
        yield from one.pieces
        yield "</section>\n"
    yield "</main>\n"
    yield f"<script>\n{asset('tree.js')}</script>\n<script>\n{asset('page.js')}</script>"
    yield "</body></html>\n"


def _key(section: Section) -> str:
    return section.title.lower()


def _facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield '<dl class="facts">'
    for name, value in facts:
        yield f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>"
    yield "</dl>\n"


def words_html(words: Mapping[str, str]) -> str:
    """Return words with their meanings."""
    listed = "".join(f"<dt>{name}</dt><dd>{meaning}</dd>" for name, meaning in words.items())
    return f'<dl class="words">{listed}</dl>'


def search_box(what: str) -> str:
    """Return a box that searches the layers of a page; ``what`` names the searched part."""
    return (
        '<div class="tools" hidden><input type="search" id="search" placeholder="Search layers" '
        f'aria-label="Search {what} by label, name or type">'
        '<output id="found" aria-live="polite"></output></div>'
    )


def table_html(
    what: str, columns: Mapping[str, str], rows: Sequence[Iterable[str]]
) -> Iterator[str]:
    """Yield a table that can be sorted and searched.

    Parameters
    ----------
    what : str
        A description of the table for screen readers.
    columns : mapping of str to str
        The sort key of each column: one of the words above. At first, rows are in the order of the
        first.
    rows : sequence of iterable of str
        The cells of each row, the first of them from `layer_cells`.

    Returns
    -------
    iterator of str
        HTML.
    """
    # The arrow of the first heading would suggest an order of labels.
    yield '<p class="quiet">Rows are in the order of execution: press a heading to sort them.</p>'
    yield '<p class="quiet scrolls" aria-hidden="true">Scroll sideways for more columns &rarr;</p>'
    # Focusable, so that it can be scrolled by keyboard.
    yield f'<div class="table" tabindex="0" role="region" aria-label="{what}"><table><thead><tr>'
    for place, (name, sorts_by) in enumerate(columns.items()):
        yield _heading(name, sorts_by, "none" if place else "ascending")
    # Further rows are shown after the page itself.
    yield f"</tr></thead><tbody{' class=short' * (len(rows) > _AT_ONCE)}>\n"
    for row in rows:
        yield "".join(row) + "</tr>\n"
    yield "</tbody></table></div>"


def _heading(name: str, sorts_by: str, order: str) -> str:
    if not sorts_by:
        return f'<th scope="col"><span>{name}</span></th>'
    kind = ' class="number"' if sorts_by == NUMBER else ""
    kind += ' data-sort="number"' if sorts_by in (NUMBER, PLACE) else ""
    return f'<th scope="col"{kind} aria-sort="{order}"><button type="button">{name}</button></th>'


def layer_cells(place: int, layer: Layer) -> Iterator[str]:
    """Yield the start of a row and its first three cells: label, name and type of a layer."""
    label, name = text(str(layer.label)), text(layer.name)
    yield f'<tr id="layer-{label}" data-search="{searched(layer)}">'
    yield f'<th scope="row" data-value="{place}">{label}</th>'
    yield f'<td class="name tail" title="{name}">{name_html(layer.name, layer)}</td>'
    yield f"<td><bdi>{text(layer.type_name)}</bdi></td>"


def name_html(name: str, layer: Layer) -> str:
    """Return a layer's name with the number of its call, for an element of class ``tail``.

    Such an element shows the end of a long name, since names of a deep net begin alike.
    """
    return f'<span dir="ltr"><bdi>{text(name)}</bdi>{call_text(layer)}</span>'


def address_of(layer: Layer) -> str:
    """Return the address of a layer's row."""
    return f"#layer-{layer.label}"


def link_html(layer: Layer) -> str:
    """Return a link to the row of a layer."""
    name = f"<bdi>{text(layer.name or layer.type_name)}</bdi>{call_text(layer)}"
    return f'<a href="{address_of(layer)}">{text(str(layer.label))} {name}</a>'


def alarm(shown: str) -> str:
    """Return a text that stands out."""
    return f'<span class="alarm">{shown}</span>'


def number_cell(
    value: float | None, shown: str, kind: str = "number", *, is_alarm: bool = False
) -> str:
    """Return a cell that sorts by a number; nothing and NaN come last."""
    # NaN has no place in an order: it sorts as missing, which is last.
    key = "" if value is None or math.isnan(value) else repr(float(value))
    shown = alarm(shown) if is_alarm else shown
    return f'<td class="{kind}" data-value="{key.replace("inf", "Infinity")}">{shown}</td>'


def count_cell(count: int | None) -> str:
    """Return a cell with a count that should be zero, such as NaNs."""
    return number_cell(count, "" if count is None else f"{count:,}", is_alarm=bool(count))


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
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise error(f'report({path!r}): name the file to write, such as "page.html"')
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
    draft = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Whether the file can be written is known before the work.
        draft.touch(exist_ok=False)
        draft.unlink()
        text = "".join(pieces)
        with open(draft, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except RecordingError:
        raise
    except OSError as error:
        raise RecordingError(f"can't write {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return target
