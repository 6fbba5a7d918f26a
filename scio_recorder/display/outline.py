"""Texts that show results: the rows of a net as a table, and other tables."""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

from scio_recorder.layer import Layer, Operation, OperationIdx, RowIdx, counted, text_of

__all__ = [
    "Listed",
    "Listing",
    "Outline",
    "full_name",
    "visible",
    "with_operations",
]

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
    from rich.text import Text

# A structure of outputs, usually the net's own, must not widen the whole table.
_WIDEST_SHAPE = 36
_ASCII = str.maketrans("●│├└…", "*||`~")


@dataclass(frozen=True)
class Outline:
    """The rows of a net to draw, those that are marked, and a line above them.

    Parameters
    ----------
    title : str
        The line.
    rows : sequence of Layer
        The rows.
    recorded : collection of (int, int)
        The marked rows.
    mark : str, default "recorded"
        The meaning of a mark.
    remarks : mapping
        A few words on some rows; if there are any, shapes and parameters are left out.
    alarms : collection of (int, int), optional
        The rows whose remarks stand out.
    """

    title: str
    rows: Sequence[Layer]
    recorded: Collection[RowIdx] = ()
    mark: str = "recorded"
    remarks: Mapping[RowIdx, str] = field(default_factory=dict)
    alarms: Collection[RowIdx] = ()


@dataclass(frozen=True)
class Node:
    """A row, and for each level above it and its own, whether more rows follow there."""

    layer: Layer
    followed: tuple[bool, ...]
    has_children: bool
    is_recorded: bool
    remark: str | None = None

    @property
    def titles(self) -> tuple[str, str]:
        """The layer's own name and its type, or that of an operation and the line that made it."""
        layer = self.layer
        if isinstance(layer, Operation):
            return f"{layer.function}:{layer.index}", layer.place
        return layer.name.rpartition(".")[2], layer.type_name

    @property
    def texts(self) -> tuple[str, str]:
        """The shapes of the layer's output in one line, and its parameters."""
        layer = self.layer
        shape = "-" if layer.output_shape is None else visible(str(layer.output_shape))
        params = f"{layer.num_params:,}" if layer.num_params else "-"
        return shape if layer.executed else "did not run", params


def outline(
    what: str,
    rows: Sequence[Layer],
    recorded: Collection[RowIdx] | None,
    operations: Mapping[OperationIdx, Operation] = MappingProxyType({}),
) -> Outline:
    """Return rows with a title such as ``Recorder: ResNet, 3 of 63 layers recorded``.

    Recorded operations stand below the layers that made them.

    Examples
    --------
    >>> outline("Architecture", [], None).title
    'Architecture: 0 layers'
    """
    net = f" {visible(rows[0].type_name)}," if rows else ""
    if recorded is None:
        return Outline(f"{what}:{net} {counted(len(rows), 'layer')}", rows)
    inner = [operations[label] for label in recorded if isinstance(label, OperationIdx)]
    title = f"{what}:{net} {num_recorded(len(rows), recorded)} recorded"
    return Outline(title, with_operations(rows, inner), recorded)


def num_recorded(num_layers: int, recorded: Collection[RowIdx]) -> str:
    """Return how many layers and operations are recorded, as text.

    Examples
    --------
    >>> num_recorded(63, [(1, 1), OperationIdx(1, 1, "add", 0)])
    '1 of 63 layers and 1 operation'
    """
    inner = sum(isinstance(label, OperationIdx) for label in recorded)
    also = f" and {counted(inner, 'operation')}" * bool(inner)
    return f"{len(recorded) - inner:,} of {counted(num_layers, 'layer')}{also}"


def with_operations(rows: Iterable[Layer], operations: Iterable[Operation]) -> list[Layer]:
    """Return rows and operations, each operation below its layer, behind what ran before it."""
    rows = list(rows)
    placed: list[tuple[int, float, Layer]] = [(at, -2.0, row) for at, row in enumerate(rows)]
    at_of = {row.label: at for at, row in enumerate(rows)}
    ended = sorted(
        (row.completion, at) for at, row in enumerate(rows) if row.completion is not None
    )
    times = [time for time, _ in ended]
    # The last row among those that had returned by then.
    latest = [0, *accumulate((at for _, at in ended), max)]
    for operation in operations:
        time = operation.completion or 0.0
        place = max(at_of[operation.layer.label], latest[bisect_left(times, time)])
        placed.append((place, time, operation))
    return [row for *_, row in sorted(placed, key=lambda entry: entry[:2])]


def nodes(shown: Outline) -> list[Node]:
    """Return the rows with their nesting, which follows from their order and their depths."""
    recorded, drawn = set(shown.recorded), list[Node]()
    rows = nested(shown.rows)
    # Seen from the last row backwards: the depths at which another row follows under the same
    # parent.
    followed, depth_below = set[int](), -1
    for row in reversed(rows):
        flags = tuple(depth in followed for depth in range(row.depth + 1))
        is_recorded, remark = row.label in recorded, shown.remarks.get(row.label)
        drawn.append(Node(row, flags, depth_below > row.depth, is_recorded, remark))
        followed = {depth for depth in followed if depth < row.depth} | {row.depth}
        depth_below = row.depth
    return drawn[::-1]


def nested(rows: Iterable[Layer]) -> list[Layer]:
    """Return rows in an order in which each is below the container that holds it.

    A container that is never called, such as a ModuleList, appears once. If its modules run in turn
    with others, it is repeated before those that follow.
    """
    ordered, path = list[Layer](), list[Layer]()
    idle = dict[str, Layer]()
    for row in rows:
        holders = enumerate(path[: row.depth])
        depth = next((depth for depth, holder in holders if not _holds(holder, row)), None)
        if depth is not None:
            again = [
                container
                for name, container in idle.items()
                if row.name.startswith(f"{name}.") and depth <= container.depth < row.depth
            ]
            # By one of its own names: a shared module may run inside others.
            if len(again) == row.depth - depth:
                ordered += again
                path[depth:] = again
        ordered.append(row)
        path[row.depth :] = [row]
        if not row.executed:
            idle[row.name] = row
    return ordered


def _holds(container: Layer, row: Layer) -> bool:
    if container.completion is not None and row.completion is not None:
        return container.completion > row.completion
    return not container.name or row.name.startswith(f"{container.name}.")


def visible(text: str) -> str:
    r"""Return a text with invisible characters spelled out, so that names can't disturb a page.

    Control characters would reach the terminal, and marks of direction would reorder what follows.

    Examples
    --------
    >>> print(visible("conv\x1b[31m\u202e"))
    conv\x1b[31m\u202e
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short_name(name: str, longest: int) -> str:
    """Return a qualified name, or its end, which distinguishes layers."""
    name = visible(name)
    return name if len(name) <= longest else f"…{name[1 - longest :]}"


def hint(layer: Layer) -> str:
    """Return the qualified name of a layer; of an operation also its line."""
    if isinstance(layer, Operation):
        return f"{layer.name}, {layer.file}:{layer.line}: {layer.source}"
    return layer.name


def call_text(layer: Layer) -> str:
    """Return the number of a layer's call, such as `` (call 2)`` behind a name; empty for 1."""
    return f" (call {layer.call + 1})" if layer.call else ""


def full_name(layer: Layer) -> str:
    """Return the qualified name of a layer with the number of its call."""
    return f"{layer.name or '(root)'}{call_text(layer)}"


def short_title(layer: Layer, longest: int) -> str:
    """Return the label, a short name and the number of the call of a layer."""
    name = short_name(layer.name or layer.type_name, longest)
    # The name of an operation says which one it is.
    return f"{text_of(layer.label[:2])} {name}{call_text(layer)}"


def table_lines(shown: Outline, console: Console, options: ConsoleOptions) -> RenderResult:
    """Yield a line for each row, none of them wider than the console.

    Parameters
    ----------
    shown : Outline
        The rows to show. A recorded row has a ● in front and is bold, one that did not run is dim.
    console : rich.console.Console
        The console that prints them.
    options : rich.console.ConsoleOptions
        Width, and whether only ASCII can be shown.

    Yields
    ------
    rich.segment.Segment
        Title, header, rows.

    Examples
    --------
    >>> from rich.console import Console
    >>> from torch import nn
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.Linear(4, 3)), input_size=(1, 4))
    >>> Console(width=60).print(architecture)
    Architecture: Sequential, 2 layers
      Label  Module      Output shape  Params
      0-1    Sequential  (1, 3)            15
      1-1    └ 0 Linear  (1, 3)            15
    """
    from scio_recorder.display.printing import Segment, Table, Text

    title = _line((visible(shown.title), "bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  Label", no_wrap=True)
    # Text that does not wrap, in columns that may: rich narrows these.
    table.add_column(_line("Module"))
    table.add_column(_line("Output shape"), max_width=_WIDEST_SHAPE)
    table.add_column("Params", justify="right", no_wrap=True)
    for node in nodes(shown):
        layer = node.layer
        style = "bold" if node.is_recorded else "" if layer.executed else "dim"
        shape, params = node.texts
        label = Text(f"{'●' if node.is_recorded else '':<2}{visible(str(layer.label))}")
        # At any depth, most of the column is left for the name.
        module = _branch(node, options.max_width // 3)
        table.add_row(label, module, _line(shape), params, style=style)
    for renderable in (title, table):
        for segment in console.render(renderable, options):
            text = segment.text.translate(_ASCII) if options.ascii_only else segment.text
            yield Segment(text, segment.style, segment.control)


def _branch(node: Node, width: int) -> Text:
    layer = node.layer
    name, kind = node.titles
    last = "├ " if node.followed[-1] else "└ "
    guides = "".join("│ " if flag else "  " for flag in node.followed[1:-1]) + last
    if len(guides) > width:
        guides = f"…{guides[len(guides) - width + 1 :]}"
    return _line(
        (guides if layer.depth else "", "dim"),
        f"{visible(name)} " if name else "",
        (visible(kind), "cyan" if layer.executed else ""),
        (call_text(layer), "italic"),
    )


def _line(*parts: str | tuple[str, str]) -> Text:
    from scio_recorder.display.printing import Text

    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


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
    widest : int
        The most characters of a text.
    """

    title: str
    texts: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: Collection[int] = ()
    notes: Sequence[str] = ()
    widest: int = _WIDEST

    def __rich__(self) -> Group:
        """Return the table for rich."""
        from scio_recorder.display.printing import Group, Table, Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
        for place, name in enumerate(self.texts):
            width = max(len(name), *(len(row[place]) for row in self.rows), 0)
            # Short words are never cut off.
            least = width if width <= _SHORT or not place else None
            table.add_column(_line(visible(name)), min_width=least, max_width=self.widest)
        for name in self.numbers:
            table.add_column(name, justify="right", no_wrap=True)
        for place, row in enumerate(self.rows):
            style = "bold" if place in self.marked else ""
            table.add_row(*(_line(visible(cell)) for cell in row), style=style)
        title = Text(visible(self.title), "bold")
        return Group(title, *([table] * bool(self.rows)), *(Text(visible(n)) for n in self.notes))


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
        return printed(self._listing(), 10_000)


def printed(shown: RenderableType, width: int) -> str:
    """Return what a console of this width prints, without colours."""
    from scio_recorder.display.printing import Console

    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
