"""The engine that watches a network run."""

from scio_recorder.capture.engine import Capture, detach_when_dead
from scio_recorder.capture.program import CopyPolicy, Options

__all__ = ["Capture", "CopyPolicy", "Options", "detach_when_dead"]
