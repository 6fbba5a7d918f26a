"""What ``collect`` returns, and what ``open_recording`` reads."""

from scio_recorder.recording.opening import open_recording, read_recording
from scio_recorder.recording.recipes import from_recipes, recipes_of
from scio_recorder.recording.recording import Recording

__all__ = [
    "Recording",
    "from_recipes",
    "open_recording",
    "read_recording",
    "recipes_of",
]
