"""Ready-made post-processors, which change activations on their way through the net.

Each is called with a layer's output and returns the one that the net goes on with. None of them
works in place, so records stay as they were. If a layer returns a structure, all its floating-point
tensors are changed and the rest is passed on unchanged. An activation keeps its dtype and device.

Arguments that can't work raise :class:`~scio_recorder.errors.PostprocessorError`.
"""

from scio_recorder.postprocessors.knockout import Knockout
from scio_recorder.postprocessors.values import Ablate, Add, Clip, GaussianNoise, Replace, Scale
from scio_recorder.postprocessors.wrapping import At, Heads, OnInput
from scio_recorder.tensors.arguments import names_arguments

__all__ = [
    "Ablate",
    "Add",
    "At",
    "Clip",
    "GaussianNoise",
    "Heads",
    "Knockout",
    "OnInput",
    "Replace",
    "Scale",
]

for _name in __all__:
    names_arguments(globals()[_name])
