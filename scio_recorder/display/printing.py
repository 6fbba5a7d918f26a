"""What tables and bars are printed with: names of `rich`, imported on first use.

Random numbers are drawn as `rich` is imported. Those of a program must be the same with a recorder
as without one, so they are put back.
"""

from __future__ import annotations

import random

__all__ = [
    "BarColumn",
    "Console",
    "Group",
    "MofNCompleteColumn",
    "Progress",
    "Segment",
    "Table",
    "Text",
    "TextColumn",
    "TimeElapsedColumn",
    "TimeRemainingColumn",
]

_state = random.getstate()
try:
    from rich.console import Console, Group
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text
finally:
    random.setstate(_state)
