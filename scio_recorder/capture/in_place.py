"""Operations that write to their own argument, and what post-processors give in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.nets.operations import function_name
from scio_recorder.tensors import private
from scio_recorder.tensors.properties import memories_of


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


def write(
    changed: Any, output: Any, given: Sequence[Any], received: Sequence[Any], what: str
) -> Any:
    """Put what a post-processor gave into the argument to which an operation has written.

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
    Tensor
        That argument of the code.

    Raises
    ------
    PostprocessorError
        There are several, or autograd can't have it.
    """
    places = [own for own, one in zip(given, received, strict=False) if one is output]
    if not places:
        raise PostprocessorError(
            f"{what} writes to several tensors, and what the post-processor gave can't be written "
            "there: change another operation"
        )
    place = places[0]
    try:
        if changed is not place:
            _refuse_saved(place)
            place.copy_(changed)
    except RuntimeError as error:
        raise PostprocessorError(
            f"{what} writes to its own argument, so what the post-processor gave must be written "
            f"there too, but {error}: run the pass under torch.no_grad(), inside "
            "torch.autograd.graph.allow_mutation_on_saved_tensors(), or change another operation"
        ) from error
    return place


def _refuse_saved(output: Tensor) -> None:
    """Refuse to change what autograd needs: it would fail in the backward pass."""
    names = (name for name in dir(output.grad_fn) if name.startswith("_saved_"))
    saved = [getattr(output.grad_fn, name) for name in names]
    own = memories_of(output)
    is_saved = any(isinstance(one, Tensor) and memories_of(one) & own for one in saved)
    if is_saved and not private.allows_mutation():
        raise RuntimeError("autograd has saved what the operation returned")
