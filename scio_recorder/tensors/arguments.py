"""Checks of arguments: numbers, True or False, dtypes, devices, functions, ranks of processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple, Self

import torch
import torch.distributed

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
    try:
        number = index(value)  # type: ignore[arg-type]  # a value of any type
    except TypeError:  # an array of several numbers raises it too
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise error(f"{name}={value!r}: give a whole number from {least} on")
    return number


def booleans(error: type[RecorderError], **values: object) -> None:
    """Refuse values other than True and False, many of which would count as True.

    Parameters
    ----------
    error : type
        The class of the error.
    **values : object
        The values, by the names of the arguments.

    Raises
    ------
    `error`
        One of them is neither.

    Examples
    --------
    >>> booleans(CollectError, gradients=True, operations=False)
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise error(f"{name}={value!r}: write True or False")


def floating_or_none(value: Any, error: type[RecorderError]) -> torch.dtype | None:
    """Return a dtype of floating-point numbers, or None; refuse other values.

    Parameters
    ----------
    value : any
        The argument ``dtype=``.
    error : type
        The class of the error.

    Returns
    -------
    torch.dtype or None
        The value.

    Raises
    ------
    `error`
        It is neither.

    Examples
    --------
    >>> floating_or_none(torch.bfloat16, CollectError)
    torch.bfloat16
    """
    if value is None or (isinstance(value, torch.dtype) and value.is_floating_point):
        return value
    raise error(
        f"dtype={value!r}: give a floating-point dtype such as torch.bfloat16; values of other "
        "kinds keep their dtype"
    )


def usable_device(value: torch.device | str, error: type[RecorderError]) -> torch.device:
    """Return a device of this machine; refuse what is no device, and one that isn't there.

    Parameters
    ----------
    value : torch.device or str
        The argument ``device=``.
    error : type
        The class of the error.

    Returns
    -------
    torch.device
        With its number, if there are several of its kind.

    Raises
    ------
    `error`
        No tensor can be made there.

    Examples
    --------
    >>> usable_device("cpu", CollectError)
    device(type='cpu')
    """
    try:
        return torch.empty(0, device=value).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as reason:
        name = "cuda" if str(value).lower().startswith("gpu") else "cpu"
        raise error(
            f"device={value!r} can't be used here ({reason}): write a device of this machine, "
            f'such as "{name}"'
        ) from reason


def takes(function: Any, number: int) -> bool:
    """Whether something can be called with this many arguments, as far as it says.

    Examples
    --------
    >>> takes(lambda x: x, 1), takes(lambda x: x, 2), takes(3, 1)
    (True, False, False)
    """
    if not callable(function):
        return False
    try:
        signature_of(function).bind(*range(number))
    except TypeError:
        return False
    return True


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters of a function; any arguments if it does not tell them.

    Examples
    --------
    >>> signature_of(lambda x: x), signature_of(dict)
    (<Signature (x)>, <Signature (*args, **kwargs)>)
    """
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        # Functions that are not written in Python need not tell.
        return inspect.signature(lambda *args, **kwargs: None)


class ProcessRank(NamedTuple):
    """The number of a process, counted from 0, and the number of processes."""

    rank: int
    world_size: int

    @classmethod
    def checked(cls, rank: Any, world_size: Any, error: type[RecorderError]) -> Self:
        """Return the rank that arguments name; raise an error for an impossible one."""
        process = cls(whole("rank", rank, 0, error), whole("world_size", world_size, 1, error))
        if process.rank >= process.world_size:
            raise error(
                f"rank={rank} of world_size={world_size}: ranks are counted from 0 to "
                f"{process.world_size - 1}"
            )
        return process


def this_process() -> ProcessRank:
    """Return the rank of this process, which is the only one if nothing was initialised.

    Examples
    --------
    >>> this_process()
    ProcessRank(rank=0, world_size=1)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ProcessRank(0, 1)
    return ProcessRank(torch.distributed.get_rank(), torch.distributed.get_world_size())
