"""Checks of arguments that are numbers."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from scio_recorder.errors import CollectError, RecorderError


def whole(name: str, value: object, least: int, error: type[RecorderError] = CollectError) -> int:
    """Return a whole number, also NumPy's; refuse other values and numbers that are too small.

    Parameters
    ----------
    name : str
        The argument, for the message.
    value : object
        The given value.
    least : int
        The smallest number allowed.
    error : type, default CollectError
        The class of the error.

    Returns
    -------
    int
        The value.

    Raises
    ------
    CollectError or `error`
        It is not such a number.

    Examples
    --------
    >>> whole("every", 2, 1)
    2
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or index(value) < least:
        raise error(f"{name}={value!r}: give a whole number from {least} on")
    return index(value)
