"""The labelled architecture as a tree in HTML that folds without a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from importlib.resources import files

from scio_recorder.display.outline import Node, Outline, call_text, nodes, shape_text, visible
from scio_recorder.layer import Layer

# A larger net starts folded, open along what is recorded.
_SMALL = 60

Link = Callable[[Layer], str]


@cache
def asset(name: str) -> str:
    """Return a style sheet or script that lies beside this file."""
    return (files("scio_recorder.display") / name).read_text(encoding="utf-8")


def text(value: str) -> str:
    """Return a text as HTML, in an element or a quoted attribute."""
    return escape(visible(value))


def searched(layer: Layer) -> str:
    """Return what a search looks through, as an attribute."""
    return text(f"{layer.label} {layer.name} {layer.type_name}")


def tree_html(shown: Outline, link: Link | None = None) -> Iterator[str]:
    """Yield the pieces of a tree; ``tree.css`` and ``tree.js`` make it look and be searched well.

    Parameters
    ----------
    shown : Outline
        The rows to show.
    link : callable, optional
        Gives the address that the label of a recorded row leads to.

    Returns
    -------
    iterator of str
        One element of class ``scio-net``.

    Examples
    --------
    >>> print("".join(tree_html(Outline("no net", []))))
    <div class="scio-net"><div class="sn-title">no net</div><ul class="sn-tree"></ul></div>
    """
    yield f'<div class="scio-net"><div class="sn-title">{text(shown.title)}</div>'
    yield '<ul class="sn-tree">'
    placed = nodes(shown)
    depth = 0
    for node, opens in zip(placed, _open_branches(placed), strict=True):
        yield "</ul></details></li>" * (depth - node.level)
        depth = node.level + node.has_children
        if node.has_children:
            yield f"<li><details{' open' * opens}><summary {_row(node, link)}</summary>"
            yield '<ul class="sn-children">'
        else:
            yield f"<li><div {_row(node, link)}</div></li>"
    yield "</ul></details></li>" * depth
    yield "</ul></div>\n"


def _open_branches(placed: list[Node]) -> list[bool]:
    """Whether each branch starts open: all of a small net, else what leads to recorded rows."""
    found = [len(placed) <= _SMALL or node.level == 0 for node in placed]
    wanted = -1
    for place in reversed(range(len(placed))):
        node = placed[place]
        if node.level < wanted:
            found[place], wanted = True, node.level
        if node.is_recorded:
            wanted = max(wanted, node.level)
    return found


def _row(node: Node, link: Link | None) -> str:
    layer = node.layer
    kinds = ["sn-row"]
    kinds += ["sn-recorded"] * node.is_recorded + ["sn-idle"] * (not layer.executed)
    shape = shape_text(layer.output_shape) if layer.executed else "did not run"
    params = f"{layer.num_params:,}" if layer.num_params else "-"
    mark = '<span role="img" aria-label="recorded">●</span>' if node.is_recorded else ""
    # Spaces between the parts, for where a notebook strips styles.
    return (
        f'class="{" ".join(kinds)}" title="{text(layer.name)}"><span class="sn-fold"></span>'
        f'<span class="sn-mark">{mark}</span> {_label(node, link)} '
        f'<span class="sn-module">{_module(layer)}</span> '
        f'<span class="sn-shape" title="{escape(shape)}">{escape(shape)}</span> '
        f'<span class="sn-params" title="parameters">{params}</span>'
    )


def _label(node: Node, link: Link | None) -> str:
    label = text(str(node.layer.label))
    if link is None or not node.is_recorded:
        return f'<span class="sn-label">{label}</span>'
    return f'<a class="sn-label" href="{escape(link(node.layer))}">{label}</a>'


def _module(layer: Layer) -> str:
    # Isolated, so that names in scripts from right to left don't reorder the row.
    name = layer.name.rpartition(".")[2]
    shown = f"<bdi>{text(name)}</bdi> " if name else ""
    call = f" ({call_text(layer)})" if layer.call else ""
    return f"{shown}<code><bdi>{text(layer.type_name)}</bdi></code>{call}"
