"""Regions under reentrant activation checkpointing, whose graph is made in the backward pass.

NOTE [Gradients of calls in a region]

The first run of such a region makes no graph, so there is nothing to listen to: the backward pass
runs the region's modules again, and gradients flow through what they return then. That may be after
the block of a log. So a log marks the regions that run inside its block, on the object that torch
keeps in the graph for each of them; in a re-run that object is found on the stack. The marks live
and die with the graph, and with the last of them go the hooks that are left for re-runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from scio_recorder.capture.checkpoint_regions import regions
from scio_recorder.tensors import private

__all__ = ["Regions"]

_ATTRIBUTE = "_scio_recorder_logs"


class _Mark:
    """One region of one log."""


class Regions:
    """The regions that one log saw, as long as they can run again."""

    def __init__(self, when_over: Callable[[], None]) -> None:
        self._alive: set[weakref.ref[_Mark]] = set()
        self._when_over = weakref.WeakMethod(when_over)

    def __bool__(self) -> bool:
        return bool(self._alive)

    def are_run_again(self) -> bool:
        """Whether the caller is part of a re-run of a region that the log saw, or of one inside."""
        return any(
            runs_again and self in getattr(region, _ATTRIBUTE, ())
            for region, runs_again in regions(None)
        )

    def mark(self) -> bool:
        """Mark the regions that are running around the caller; whether there are any."""
        found = [
            region
            for region, runs_again in regions(None)
            if private.is_function_context(region) and not runs_again
        ]
        for region in found:
            marks: Any = getattr(region, _ATTRIBUTE, None)
            if marks is None:
                # Several logs may watch one net, and a graph must not keep any of them alive.
                marks = weakref.WeakKeyDictionary()
                setattr(region, _ATTRIBUTE, marks)
            if self not in marks:
                marks[self] = mark = _Mark()
                self._alive.add(weakref.ref(mark, self._is_gone))
        return bool(found)

    def _is_gone(self, reference: weakref.ref[_Mark]) -> None:
        self._alive.discard(reference)
        when_over = self._when_over()
        if not self._alive and when_over is not None:
            when_over()
