"""Collecting a whole dataset: the loop, and what it hands to stores and reductions."""

from scio_recorder.collect.front import Collecting
from scio_recorder.collect.loop import Request, collect

__all__ = ["Collecting", "Request", "collect"]
