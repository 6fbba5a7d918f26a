"""What ``collect`` returns, and what ``open_recording`` reads."""

from scio_recorder.recording.recording import Recording, open_recording

__all__ = [
    "Recording",
    "open_recording",
]
