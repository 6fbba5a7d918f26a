"""Blocks in which no garbage is collected, so that only what nobody refers to goes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_left() -> Iterator[None]:
    """Collect garbage now, and none until the block ends, however it ends.

    What a block asserts about it must be inside: leaving the block lets garbage be collected.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
