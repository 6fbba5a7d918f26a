"""Record and change what happens inside a PyTorch network."""

from scio_recorder.architecture import Architecture, DepthIdx, Layer
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
from scio_recorder.recorder import Recorder

__all__ = [
    "Architecture",
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
    "RecordingError",
    "SelectorTypeError",
    "UnsupportedNetError",
]
