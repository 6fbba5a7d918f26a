"""A log of the outputs of modules and of their gradients, in time order."""

from scio_recorder.events.event import Event, Stash
from scio_recorder.events.log import Tracker, track

__all__ = ["Event", "Stash", "Tracker", "track"]
