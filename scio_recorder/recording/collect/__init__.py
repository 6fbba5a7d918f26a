"""Collecting a whole dataset: the loop, and what it hands to stores and reductions."""

from scio_recorder.recording.collect.loop import Request, collect

__all__ = ["Request", "collect"]
