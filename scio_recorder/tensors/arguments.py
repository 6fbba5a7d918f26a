"""Checks of arguments: numbers, True or False, dtypes, devices, functions, ranks of processes."""

from __future__ import annotations

import difflib
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import index
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
import torch.distributed

from scio_recorder.errors import ArgumentError, CollectError, RecorderError, caught_as, warn

P = ParamSpec("P")
_F = TypeVar("_F", bound=Callable[..., Any])
T_co = TypeVar("T_co", covariant=True)
# Arguments of other functions, and how they are given there.
_ELSEWHERE = {
    **dict.fromkeys(("input_data", "input_size"), "Recorder(net, {}=...)"),
    **dict.fromkeys(("batch_size", "shuffle"), "DataLoader(dataset, {}=...)"),
}


def names_arguments(function: _F) -> _F:
    """Let a function say what to write in place of an argument that it does not take.

    Parameters
    ----------
    function : callable
        A function, all of whose arguments its signature shows; or a class, whose constructor is
        meant.

    Returns
    -------
    callable
        The same function or class, whose error is a `TypeError` as before.

    Examples
    --------
    >>> @names_arguments
    ... def record(*selectors, inputs=False, gradients=False): ...
    >>> record("0", input=True)
    Traceback (most recent call last):
    scio_recorder.errors.ArgumentError: record() got an unexpected keyword argument 'input': write \
inputs=
    """
    name: str = function.__name__
    is_class = isinstance(function, type)
    run: Any = function.__init__ if is_class else function
    signature = inspect.signature(run)

    @functools.wraps(run)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as reason:
            text = f"{name}() {_on_arguments(reason, signature, kwargs)}"
            raise caught_as(ArgumentError, TypeError(), text) from None
        return run(*args, **kwargs)

    if not is_class:
        return checked  # type: ignore[return-value]  # with the same parameters
    function.__init__ = checked  # type: ignore[method-assign]  # meant
    return function


def _on_arguments(
    reason: TypeError, signature: inspect.Signature, kwargs: Mapping[str, object]
) -> str:
    names = [name for name in signature.parameters if name != "self"]
    unknown = next((name for name in kwargs if name not in names), "")
    # It says more than that another argument is missing.
    problem = f"got an unexpected keyword argument {unknown!r}" if unknown else reason
    if unknown in _ELSEWHERE:
        return f"{problem}: write {_ELSEWHERE[unknown].format(unknown)}, which takes it"
    keywords = [
        name
        for name, each in signature.parameters.items()
        if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    near = difflib.get_close_matches(unknown, keywords)
    near = near or [name for name in keywords if unknown and unknown in name]
    if near:
        return f"{problem}: write {'= or '.join(near)}="
    every = f"its arguments are {', '.join(names)}" if names else "it takes none"
    return f"{problem}: {every}"


class MethodBlock(AbstractContextManager[T_co]):
    """What a method that opens a block returns: it says so unless it is entered, and only that.

    Parameters
    ----------
    manager : context manager
        The block itself, which can be entered once.
    name : str
        The method.
    """

    def __init__(self, manager: AbstractContextManager[T_co], name: str) -> None:
        self._manager: AbstractContextManager[T_co] | None = manager
        self._open: list[AbstractContextManager[T_co]] = []
        self._name = name
        text = f"nothing has happened, since the block was never entered: {self!r}"
        self._unentered = weakref.finalize(self, warn, text)

    def __enter__(self) -> T_co:
        if self._manager is None:
            raise ArgumentError(f"a block is entered once: write rnet.{self._name}(...) again")
        self._open, self._manager = [self._manager], None
        self._unentered.detach()
        # Also at the interpreter's exit: when objects are gone there, so are modules.
        weakref.finalize(self, _end, self._open)
        return self._open[0].__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._open.pop().__exit__(*exception)

    def __repr__(self) -> str:
        return f"{self._name}() opens a block: write `with rnet.{self._name}(...) as {self._name}:`"

    def _refuse(self, kind: type[Exception]) -> Exception:
        self._unentered.detach()
        return caught_as(ArgumentError, kind(), f"{self}, and read what comes behind `as`")

    def __getattr__(self, name: str) -> Any:
        raise self._refuse(AttributeError)

    def __getitem__(self, key: object) -> Any:
        raise self._refuse(TypeError)

    def __len__(self) -> int:
        raise self._refuse(TypeError)


def _end(blocks: list[AbstractContextManager[Any]]) -> None:
    while blocks:
        blocks.pop().__exit__(GeneratorExit, GeneratorExit(), None)


def opens_block(
    function: Callable[P, AbstractContextManager[T_co]],
) -> Callable[P, MethodBlock[T_co]]:
    """Let a method that returns a context manager return a `MethodBlock`, and name its arguments.

    Examples
    --------
    >>> import contextlib
    >>> @opens_block
    ... def watch(last=None): return contextlib.nullcontext([])
    >>> watch()[0]
    Traceback (most recent call last):
    scio_recorder.errors.ArgumentError: watch() opens a block: write `with rnet.watch(...) as ...
    """
    checked = names_arguments(function)

    @functools.wraps(checked)
    def opened(*args: P.args, **kwargs: P.kwargs) -> MethodBlock[T_co]:
        return MethodBlock(checked(*args, **kwargs), function.__name__)

    return opened


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
        is_gpu = str(value).lower().startswith("gpu") and torch.cuda.is_available()
        name = "cuda" if is_gpu else "cpu"
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
