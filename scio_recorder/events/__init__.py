"""A log of what modules return and of the gradients that come back, in time order."""

from scio_recorder.events.event import Event, Stash
from scio_recorder.events.log import Tracker, track

__all__ = ["Event", "Stash", "Tracker", "track"]
