"""A log of the outputs of modules and of their gradients, in time order.

It needs no labels. Who selects layers of a recorder would not miss this room.
"""

from scio_recorder.events.log import Event, Stash, Tracker, track

__all__ = ["Event", "Stash", "Tracker", "track"]
