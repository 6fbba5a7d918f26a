"""The labelled architecture as a table for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import ConsoleOptions
from rich.text import Text

from scio_recorder.display.outline import Node, Outline, call_text, nodes, shape_text, visible

# Below this width numbers are rounded and gaps are single.
_NARROW = 64
# A structure of outputs, mostly that of the net itself, must not push everything else apart.
_WIDEST_SHAPE = 36
_ASCII = str.maketrans("●│├└…", "*||`~")


class _Row(NamedTuple):
    mark: str
    label: str
    guides: str
    module: Text
    shape: str
    params: str
    style: str


class _Widths(NamedTuple):
    """Widths of the columns; a column of width 0 is left out."""

    gap: int
    label: int
    module: int
    shape: int
    params: int


def table_lines(shown: Outline, options: ConsoleOptions) -> Iterator[Text]:
    """Yield a line for each row, none of them wider than the console.

    Parameters
    ----------
    shown : Outline
        The rows to show. A recorded row has a ● in front and is bold, one that did not run is dim.
    options : rich.console.ConsoleOptions
        Width, and whether only ASCII can be shown.

    Returns
    -------
    iterator of rich.text.Text
        Title, header, rows.

    Examples
    --------
    >>> from rich.console import Console
    >>> from torch import nn
    >>> from scio_recorder.display import outline
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.Linear(4, 3)), input_size=(1, 4))
    >>> shown = outline("Architecture", list(architecture.values()), None)
    >>> for line in table_lines(shown, Console(width=60).options):
    ...     print(line.plain)
    Architecture: Sequential, 2 layers
      Label Module     Output shape Params
      0-1   Sequential (1,3)            15
      1-1   └0 Linear  (1,3)            15
    """
    is_narrow = options.max_width < _NARROW
    header = _Row("", "Label", "", Text("Module"), "Output shape", "Params", "bold")
    rows = [header, *(_row(node, is_narrow) for node in nodes(shown))]
    widths = _fit(rows, options.max_width, gap=1 if is_narrow else 2)
    title = Text(visible(shown.title), style="bold")
    for line in (title, *(_line(row, widths) for row in rows)):
        if options.ascii_only:
            line.plain = line.plain.translate(_ASCII)
        line.truncate(options.max_width, overflow="crop" if options.ascii_only else "ellipsis")
        line.no_wrap = True
        yield line


def _row(node: Node, is_narrow: bool) -> _Row:
    layer = node.layer
    name = layer.name.rpartition(".")[2]
    module = Text(f"{visible(name)} " if name else "")
    module.append(visible(layer.type_name), style="cyan" if layer.executed else "")
    if layer.call:
        module.append(f" ({call_text(layer)})", style="italic")
    guides = "".join(_guide(node, level, is_narrow) for level in range(1, node.level + 1))
    return _Row(
        mark="●" if node.is_recorded else "",
        label=str(layer.label),
        guides=guides,
        module=module,
        shape=_shape(layer.output_shape, is_narrow) if layer.executed else "did not run",
        params=_number(layer.num_params, is_narrow) if layer.num_params else "-",
        style="bold" if node.is_recorded else "" if layer.executed else "dim",
    )


def _guide(node: Node, level: int, is_narrow: bool) -> str:
    if level == node.level:
        sign = "├" if node.followed[level] else "└"
    else:
        sign = "│" if node.followed[level] else " "
    return sign if is_narrow else f"{sign} "


def _shape(shape: Any, is_narrow: bool) -> str:
    return shape_text(shape).replace(", ", ",") if is_narrow else shape_text(shape)


def _number(count: int, is_narrow: bool) -> str:
    if not is_narrow or count < 10_000:
        return f"{count:,}"
    steps = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**steps:.3g}{' kMGT'[steps]}"


def _fit(rows: Sequence[_Row], width: int, gap: int) -> _Widths:
    """Give each column what it needs, or share what there is between modules and shapes."""
    label = max(cell_len(row.label) for row in rows)
    module = max(cell_len(row.guides) + row.module.cell_len for row in rows)
    shape = min(_WIDEST_SHAPE, max(cell_len(row.shape) for row in rows))
    params = max(cell_len(row.params) for row in rows)
    room = width - 2 - label - 3 * gap - params
    if room < 16:
        room, params = room + params + gap, 0
    if room < 12:
        return _Widths(gap, label, max(1, room + gap), 0, params)
    if module + shape > room:
        shape = min(shape, max(room // 2, room - module))
        module = min(module, room - shape)
    return _Widths(gap, label, module, shape, params)


def _line(row: _Row, widths: _Widths) -> Text:
    line = Text(f"{row.mark:<2}{row.label:<{widths.label}}", style=row.style)
    space = " " * widths.gap
    line.append(space).append_text(_module(row, widths.module))
    if widths.shape:
        line.append(space).append_text(_cut(Text(row.shape), widths.shape))
    if widths.params:
        line.append(f"{space}{row.params:>{widths.params}}")
    return line


def _module(row: _Row, width: int) -> Text:
    # However deep, half of the column is left for the name.
    guides = row.guides
    if len(guides) > width // 2:
        guides = f"…{guides[len(guides) - width // 2 + 1 :]}"
    return _cut(Text().append(guides, style="dim").append_text(row.module), width)


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis", pad=True)
    return text
