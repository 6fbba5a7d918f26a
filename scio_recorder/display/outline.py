"""The rows of a net as tables and trees show them: which are recorded, and how they nest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from scio_recorder.layer import DepthIdx, Layer


@dataclass(frozen=True)
class Outline:
    """The rows of a net to be drawn, which are recorded, and a line to stand above them."""

    title: str
    rows: Sequence[Layer]
    recorded: Collection[DepthIdx] = ()


@dataclass(frozen=True)
class Node:
    """A row in its place: for each level above it and its own, whether more rows follow there."""

    layer: Layer
    followed: tuple[bool, ...]
    has_children: bool
    is_recorded: bool

    @property
    def level(self) -> int:
        """How many rows lie around this one."""
        return len(self.followed) - 1


def outline(what: str, rows: Sequence[Layer], recorded: Collection[DepthIdx] | None) -> Outline:
    """Return rows with a title such as ``Recorder: ResNet, 3 of 63 layers recorded``.

    Examples
    --------
    >>> outline("Architecture", [], None).title
    'Architecture: 0 layers'
    """
    net = f" {visible(rows[0].type_name)}," if rows else ""
    count = f"{len(rows):,} layer{'s' * (len(rows) != 1)}"
    if recorded is None:
        return Outline(f"{what}:{net} {count}", rows)
    return Outline(f"{what}:{net} {len(recorded):,} of {count} recorded", rows, recorded)


def nodes(shown: Outline) -> list[Node]:
    """Return the rows with their nesting, which follows from their order and their depths."""
    recorded, found = set(shown.recorded), list[Node]()
    # Seen from the last row on: the depths at which another row follows under the same parent.
    followed, depth_below = set[int](), -1
    for row in reversed(shown.rows):
        flags = tuple(depth in followed for depth in range(row.depth + 1))
        found.append(Node(row, flags, depth_below > row.depth, tuple(row.label) in recorded))
        followed = {depth for depth in followed if depth < row.depth} | {row.depth}
        depth_below = row.depth
    return found[::-1]


def visible(text: str) -> str:
    r"""Return a text with all that can't be seen spelled out, so that names can't disturb a page.

    Control characters would reach the terminal, and marks of direction would reorder what follows.

    Examples
    --------
    >>> print(visible("conv\x1b[31m\u202e"))
    conv\x1b[31m\u202e
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shape_text(shape: Any) -> str:
    """Return the shape of a tensor, or of each in a structure, in one line."""
    return "-" if shape is None else visible(str(shape))


def call_text(layer: Layer) -> str:
    """Say which call of its module a layer is, unless it is the first."""
    return f"call {layer.call + 1}" if layer.call else ""
