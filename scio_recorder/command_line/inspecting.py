"""The table that ``inspect`` prints: a line for each layer of a recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from scio_recorder.display.outline import full_name, short_name, visible

Row: TypeAlias = Mapping[str, Any]
# Columns of characters into which tables fit.
WIDTH = 100
_SHORTEST = 12
_FIGURES, _FAULTS = ("bytes", "mean", "std", "min", "max", "zeros"), ("nan", "inf")


def layer_table(recording: Any, title: str, console: Console) -> Table:
    """Return the table of a recording's layers, in the order of execution.

    In a narrow table figures are shorter, and names keep their ends, which distinguish layers.
    """
    rows = recording.layer_rows()
    names = [full_name(recording.architecture[row["label"]]) for row in rows]
    table = _whole(title, rows, names)
    wide = console.options.update(max_width=10_000)
    if Measurement.get(console, wide, table).maximum > console.width:
        bare = _compact(title, rows, [""] * len(rows))
        left = console.width - Measurement.get(console, wide, bare).maximum + len("name")
        # Some characters are two columns wide.
        names = [
            short_name(name, max(_SHORTEST, left) + len(name) - cell_len(name)) for name in names
        ]
        table = _compact(title, rows, names)
    return table


def _whole(title: str, rows: Sequence[Row], names: Sequence[str]) -> Table:
    table = _empty(title, ("label", "name", "type", "shape", "dtype"), (*_FIGURES, *_FAULTS))
    for row, name in zip(rows, names, strict=True):
        texts = [row["label"], name, row["type"], _shape(row), row.get("dtype", "")]
        figures = (_number(row.get(one)) for one in (*_FIGURES, *_FAULTS))
        table.add_row(*map(plain, texts), *figures)
    return table


def _compact(title: str, rows: Sequence[Row], names: Sequence[str]) -> Table:
    """Return a table without columns that are empty, or the same for all layers."""
    dtypes = {row["dtype"] for row in rows if "dtype" in row}
    shared = f", {dtypes.pop()}" if len(dtypes) == 1 else ""
    figures = [*_FIGURES, *(fault for fault in _FAULTS if any(row.get(fault) for row in rows))]
    table = _empty(f"{title}{shared}", ("label", "name", "type", "shape"), figures)
    for row, name in zip(rows, names, strict=True):
        shape = _shape(row) if shared else f"{row.get('dtype', '')} {_shape(row)}".strip()
        texts = map(plain, [row["label"], name, _cut(row["type"], _SHORTEST), shape])
        table.add_row(*texts, *(_short_number(row.get(one), one) for one in figures))
    return table


def _empty(title: str, texts: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _shape(row: Row) -> str:
    # Reduced layers have no samples to describe.
    return str(list(row["shape"])) if "shape" in row else "reduced"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def plain(text: str) -> str:
    """Return a text, perhaps from an untrusted recording, without control characters."""
    return escape(visible(text))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _short_number(value: float | None, name: str) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return decimal(int(value))
    if name == "zeros":
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
