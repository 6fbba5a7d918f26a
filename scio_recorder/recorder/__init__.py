"""The recorder: it delegates, and holds no state of a pass."""

from scio_recorder.recorder.recorder import Recorder

__all__ = ["Recorder"]
