"""What is checked alike wherever a dataset is described in numbers."""

from __future__ import annotations

from scio_recorder.errors import CollectError

__all__ = ["whole"]


def whole(name: str, value: object, least: int) -> int:
    """Return a whole number, and refuse what is none or too small.

    Parameters
    ----------
    name : str
        The argument, for the message.
    value : object
        What was given for it.
    least : int
        The smallest number allowed.

    Returns
    -------
    int
        The value.

    Raises
    ------
    CollectError
        It is no such number.

    Examples
    --------
    >>> whole("every", 2, 1)
    2
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CollectError(f"{name}={value!r}: give a whole number from {least} on")
    return value
