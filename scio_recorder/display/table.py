"""The labelled architecture as a table for a terminal of any width."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from scio_recorder.display.outline import Node, Outline, call_text, nodes, shape_text, visible

# A structure of outputs, mostly that of the net itself, must not push everything else apart.
_WIDEST_SHAPE = 36
_ASCII = str.maketrans("●│├└…", "*||`~")


def table_lines(shown: Outline, console: Console, options: ConsoleOptions) -> RenderResult:
    """Yield a line for each row, none of them wider than the console.

    Parameters
    ----------
    shown : Outline
        The rows to show. A recorded row has a ● in front and is bold, one that did not run is dim.
    console : rich.console.Console
        Where they go.
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
    title = Text(visible(shown.title), "bold", no_wrap=True, overflow="ellipsis")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  Label", no_wrap=True)
    # Text that does not wrap, in columns that may: these are the ones to be narrowed.
    table.add_column(_line("Module"))
    table.add_column(_line("Output shape"), max_width=_WIDEST_SHAPE)
    table.add_column("Params", justify="right", no_wrap=True)
    for node in nodes(shown):
        layer = node.layer
        style = "bold" if node.is_recorded else "" if layer.executed else "dim"
        shape = shape_text(layer.output_shape) if layer.executed else "did not run"
        params = f"{layer.num_params:,}" if layer.num_params else "-"
        label = f"{'●' if node.is_recorded else '':<2}{layer.label}"
        # However deep, most of the column is left for the name.
        module = _module(node, options.max_width // 3)
        table.add_row(label, module, _line(shape), params, style=style)
    for renderable in (title, table):
        for segment in console.render(renderable, options):
            text = segment.text.translate(_ASCII) if options.ascii_only else segment.text
            yield Segment(text, segment.style, segment.control)


def _module(node: Node, width: int) -> Text:
    layer = node.layer
    last = "├ " if node.followed[-1] else "└ "
    guides = "".join("│ " if flag else "  " for flag in node.followed[1:-1]) + last
    if len(guides) > width:
        guides = f"…{guides[len(guides) - width + 1 :]}"
    name = layer.name.rpartition(".")[2]
    return _line(
        (guides if node.level else "", "dim"),
        f"{visible(name)} " if name else "",
        (visible(layer.type_name), "cyan" if layer.executed else ""),
        (f" ({call_text(layer)})" if layer.call else "", "italic"),
    )


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
