"""Record and change what happens inside a PyTorch network."""

import importlib
from typing import TYPE_CHECKING, Any

from scio_recorder import errors
from scio_recorder.errors import *  # noqa: F403 - the whole tree, as `errors.__all__` names it

if TYPE_CHECKING:
    from scio_recorder.analysis.comparing.compare import compare
    from scio_recorder.analysis.similarity import similarity
    from scio_recorder.events import Tracker, track
    from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx
    from scio_recorder.nets.architecture import Architecture
    from scio_recorder.recompute.checkpointer import ActivationCheckpointer, CheckpointConfig
    from scio_recorder.recorder.recorder import Recorder
    from scio_recorder.recording import Recording, open_recording
    from scio_recorder.recording.row_kinds import Nodes, Tokens

__all__ = [
    "ActivationCheckpointer",
    "Architecture",
    "CheckpointConfig",
    "DepthIdx",
    "Layer",
    "Nodes",
    "Operation",
    "OperationIdx",
    "Recorder",
    "Recording",
    "Tokens",
    "Tracker",
    "compare",
    "open_recording",
    "similarity",
    "track",
]
__all__ += errors.__all__

# These names are imported at their first use: a program that only reads a recording does not wait
# for the modules that record one. Type checkers and editors read the imports above.
_MODULE_OF = {
    "ActivationCheckpointer": "recompute.checkpointer",
    "Architecture": "nets.architecture",
    "CheckpointConfig": "recompute.checkpointer",
    "DepthIdx": "layer",
    "Layer": "layer",
    "Nodes": "recording.row_kinds",
    "Operation": "layer",
    "OperationIdx": "layer",
    "Recorder": "recorder.recorder",
    "Recording": "recording",
    "Tokens": "recording.row_kinds",
    "Tracker": "events",
    "compare": "analysis.comparing.compare",
    "open_recording": "recording",
    "similarity": "analysis.similarity",
    "track": "events",
}
# The rooms that need no import of their own, as in `scio_recorder.reductions.Mean`.
_ROOMS = ("analysis", "events", "postprocessors", "recorder", "recording", "reductions", "stores")
_WITH_CLASSES = ("postprocessors", "reductions", "stores")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        rooms = [] if name.startswith("_") else map(__getattr__, _WITH_CLASSES)
        for room in rooms:
            if name in room.__all__:
                # An AttributeError would become an ImportError without this text.
                text = f"write from {room.__name__} import {name}"
                raise errors.caught_as(errors.ArgumentError, ImportError(), text)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
