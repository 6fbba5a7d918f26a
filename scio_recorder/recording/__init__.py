"""Recordings: ``collect`` returns them, and ``open_recording`` reads them."""

from scio_recorder.recording.recording import Recording, open_recording

__all__ = [
    "Recording",
    "open_recording",
]
