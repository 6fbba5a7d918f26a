"""Recordings: ``collect`` returns them, and ``open_recording`` reads them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scio_recorder.recording.recording import Recording, open_recording

__all__ = [
    "Recording",
    "open_recording",
]


def __getattr__(name: str) -> Any:
    # A recorder needs the options of `collect` only, until it collects.
    if name in __all__:
        from scio_recorder.recording import recording

        return getattr(recording, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
