"""Operations that write to their own argument, and what post-processors give in their place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from scio_recorder.errors import PostprocessorError
from scio_recorder.nets.operations import function_name
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import twin
from scio_recorder.tensors.structures import flatten, tensors


def writes_to_argument(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call asks a function to write to one of its arguments.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import relu
    >>> x, functions = torch.ones(1), [torch.relu_, Tensor.__ior__, Tensor.__invert__, torch.relu]
    >>> [writes_to_argument(function, (x,), {}) for function in functions]
    [True, True, False, False]
    >>> writes_to_argument(relu, (x,), {"inplace": True})
    True
    """
    name = function_name(function)
    # Operators such as that of ``x += y``.
    is_operator = name[:1] == "i" and hasattr(Tensor, f"__{name[1:]}__")
    if is_operator or name.endswith("_") or kwargs.get("out") is not None:
        return True
    try:
        return bool(signature(function).bind(*args, **kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):
        return False


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def saving_copies() -> Iterator[None]:
    """Let autograd save copies inside the block, so that its tensors may be written to after it.

    Hooks on saved tensors, such as those of activation checkpointing, are given the copies.
    """
    pack, unpack = private.active_saved_tensors_hooks() or (_same, _same)

    @functools.wraps(pack)  # checkpointing is recognised by its own
    def pack_copy(tensor: Tensor) -> Any:
        return pack(twin(tensor))

    with saved_tensors_hooks(pack_copy, unpack):
        yield


def write(
    changed: Any, output: Any, given: Sequence[Any], received: Sequence[Any], what: str
) -> Any:
    """Put what a post-processor gave into the arguments to which an operation has written.

    Parameters
    ----------
    changed, output : Any
        What it gave, and what the operation returned.
    given, received : sequence
        The arguments of the code, and those that the operation received in their place.
    what : str
        The operation.

    Returns
    -------
    Tensor, or a tuple or list of some
        Those arguments of the code.

    Raises
    ------
    PostprocessorError
        Other tensors than these came back, or autograd can't have it.
    """
    leaves, rebuild = flatten(output)
    pairs = zip(tensors(tuple(given)), tensors(tuple(received)), strict=False)
    own = {id(other): argument for argument, other in pairs}
    places = [own[id(leaf)] for leaf in leaves if id(leaf) in own]
    values = tensors(changed)
    if not len(leaves) == len(places) == len(values):
        raise PostprocessorError(
            f"{what} writes to {len(leaves)} of its arguments, and what the post-processor gave "
            "can't be written there: return as many tensors, or change another operation"
        )
    for value, place in zip(values, places, strict=True):
        _write(value, place, what)
    return rebuild(places)


def _write(changed: Tensor, place: Tensor, what: str) -> None:
    if changed.shape != place.shape:
        raise PostprocessorError(
            f"{what} writes to its own argument, of shape {tuple(place.shape)}, where a tensor of "
            f"shape {tuple(changed.shape)} can't be written: return one of the same shape"
        )
    try:
        if changed is not place:
            place.copy_(changed)
    except RuntimeError as error:
        raise PostprocessorError(
            f"{what} writes to its own argument, and what the post-processor gave must go there, "
            f"but {error}: run the pass under torch.no_grad(), or change another operation"
        ) from error
