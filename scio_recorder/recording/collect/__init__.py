"""Collecting a whole dataset: the loop, and what it hands to stores and reductions."""

from scio_recorder.recording.collect.collection import Collection

__all__ = ["Collection"]
