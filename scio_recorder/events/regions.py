"""Regions under reentrant activation checkpointing, whose graph is made in the backward pass.

NOTE [Gradients of calls in a region]

The first run of such a region makes no graph, so there is nothing to listen to: the backward pass
runs the region's modules again, and gradients flow through what they return then. That may be after
the block of a log. So a log marks the regions that run inside its block, on the object that torch
keeps in the graph for each of them; in a re-run that object is found on the stack. The marks live
and die with the graph, and with the last of them go the hooks that are left for re-runs.
"""

from __future__ import annotations

from scio_recorder.capture.checkpoint_regions import Marks, regions


class _Mark:
    """One region of one log."""


class Regions(Marks):
    """The regions that one log saw, as long as they can run again."""

    def are_run_again(self) -> bool:
        """Whether the caller is part of a re-run of a region that the log saw, or of one inside."""
        return any(region.is_rerun and self.on(region.kept) for region in regions())

    def mark(self) -> bool:
        """Mark the regions that are running around the caller; whether there are any."""
        found = [at.kept for at in regions() if at.is_reentrant and not at.is_rerun]
        for region in found:
            if self.on(region) is None:
                self.hold(self.put(region, _Mark()))
        return bool(found)
