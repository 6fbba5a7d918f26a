"""Places in a log that are kept for events that are whole only later."""

from __future__ import annotations

import weakref
from itertools import count

__all__ = ["Place", "Places"]


class Place:
    """A place that is kept.

    Parameters
    ----------
    position : int
        How many events come before.
    number : int
        Which of the places at that position it is.
    """

    __slots__ = ("__weakref__", "number", "position")

    def __init__(self, position: int, number: int) -> None:
        self.position = position
        self.number = number


class Places:
    """The places that are kept in one log; those that nobody holds any more are given up.

    Examples
    --------
    >>> places, log = Places(), ["a"]
    >>> first, second = places.keep(len(log)), places.keep(len(log))
    >>> log.append("d")
    >>> log.insert(places.take(second), "c")
    >>> log.insert(places.take(first), "b")
    >>> log
    ['a', 'b', 'c', 'd']
    """

    def __init__(self) -> None:
        self._kept: weakref.WeakSet[Place] = weakref.WeakSet()
        self._numbers = count()

    def keep(self, position: int) -> Place:
        """Keep a place behind so many events, and behind the places kept there already."""
        place = Place(position, next(self._numbers))
        self._kept.add(place)
        return place

    def take(self, place: Place) -> int:
        """Return where the event that a place was kept for is to be put in."""
        self._kept.discard(place)
        for other in self._kept:
            if (other.position, other.number) > (place.position, place.number):
                other.position += 1
        return place.position

    def clear(self) -> None:
        """Note that the log is empty."""
        for place in self._kept:
            place.position = 0
