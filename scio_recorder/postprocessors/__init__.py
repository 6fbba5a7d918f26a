"""Ready-made post-processors: what to do to an activation on its way through the net.

Each is called with what a layer returned and gives back what the net goes on with. None of them
works in place, so that records stay as they were. Where a layer returns a structure, all its
floating-point tensors are changed and the rest is passed on as it is. The dtype and the device of
an activation are kept.

Arguments that can't work raise :class:`~scio_recorder.errors.PostprocessorError`.
"""

from scio_recorder.postprocessors.directions import Ablate, Add
from scio_recorder.postprocessors.places import At, Heads, OnInput
from scio_recorder.postprocessors.values import Clip, GaussianNoise, Replace, Scale

__all__ = ["Ablate", "Add", "At", "Clip", "GaussianNoise", "Heads", "OnInput", "Replace", "Scale"]
