"""What ``collect`` returns, and what ``open_recording`` reads."""

from scio_recorder.recording.opening import open_recording
from scio_recorder.recording.recording import Recording

__all__ = [
    "Recording",
    "open_recording",
]
