"""Record and change what happens inside a PyTorch network."""

from scio_recorder.errors import (
    CollectError,
    FlowError,
    LabellingError,
    LayerNotFoundError,
    MissingInputError,
    MutationError,
    PostprocessorError,
    RecomputeError,
    RecorderError,
    RecordingError,
    SelectorTypeError,
    UnsupportedNetError,
)
from scio_recorder.events import Tracker, track
from scio_recorder.nets.architecture import Architecture, DepthIdx, Layer
from scio_recorder.recompute.checkpointer import ActivationCheckpointer, CheckpointConfig
from scio_recorder.recorder.recorder import Recorder
from scio_recorder.recording import Recording, open_recording

__all__ = [
    "ActivationCheckpointer",
    "Architecture",
    "CheckpointConfig",
    "CollectError",
    "DepthIdx",
    "FlowError",
    "LabellingError",
    "Layer",
    "LayerNotFoundError",
    "MissingInputError",
    "MutationError",
    "PostprocessorError",
    "RecomputeError",
    "Recorder",
    "RecorderError",
    "Recording",
    "RecordingError",
    "SelectorTypeError",
    "Tracker",
    "UnsupportedNetError",
    "open_recording",
    "track",
]
