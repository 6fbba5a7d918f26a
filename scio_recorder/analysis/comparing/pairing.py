"""Pairing the parts of two layers' inputs or outputs, by their places in structures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.masked import MaskedTensor

from scio_recorder.analysis.comparing.measures import dense
from scio_recorder.layer import counted
from scio_recorder.lowlevel import Inputs
from scio_recorder.tensors import fold, gathered, inner_tensors, is_container, is_plain, tensors

_PLAIN = bool | int | float | complex | str | bytes | range | slice | Enum | torch.dtype


class Parts(dict[tuple[Any, ...], Any]):
    """The tensors and plain values of a structure, by their places in it."""


class PartPair(NamedTuple):
    """A tensor or plain value of the reference, and its partner on the other side."""

    reference: Any
    candidate: Any

    @property
    def key(self) -> tuple[int, int]:
        """What distinguishes it from other pairs while it lives."""
        return id(self.reference), id(self.candidate)

    @property
    def is_of_one_shape(self) -> bool:
        """Whether the two can be compared number by number."""
        reference, candidate = self
        return not isinstance(reference, Tensor) or reference.shape == candidate.shape


class InputPairs(NamedTuple):
    """The parts of two layers' inputs, and the names of arguments that only one side has."""

    pairs: list[PartPair]
    one_sided: tuple[str, ...] = ()


def parts_of(value: Any, copy: Callable[[Tensor], Tensor] | None = None) -> Parts:
    """Return the parts of a structure, and perhaps copies of its tensors.

    Parameters
    ----------
    value : Any
        A tensor, or a structure of tensors, plain values and parts.
    copy : callable, optional
        ``Tensor -> Tensor``

    Examples
    --------
    >>> parts_of({"a": [1, 2], "b": None})
    {('a', 0): 1, ('a', 1): 2}
    """
    parts: Parts = fold(
        value, partial(_leaf, copy), joined_places, lambda part: type(part) is Parts
    )
    return parts


def parts_of_inputs(inputs: Inputs, copy: Callable[[Tensor], Tensor] | None = None) -> Inputs:
    """Return the parts of each argument, as `parts_of` does."""
    kwargs = {name: parts_of(value, copy) for name, value in inputs.kwargs.items()}
    return Inputs(tuple(parts_of(value, copy) for value in inputs.args), kwargs)


def tensors_alone(inputs: Inputs) -> Inputs:
    """Return the parts of inputs that are tensors, each as an argument without a name."""
    return Inputs(tuple(Parts({(): x}) for x in _tensors_of(_joined(inputs))), {})


def comparable(reference: Any, candidate: Any) -> list[PartPair] | None:
    """Pair the parts of two structures; None if they differ in more than numbers.

    Examples
    --------
    >>> comparable(torch.ones(2), torch.ones(3)) is None
    True
    """
    pairs = paired_outputs(parts_of(reference), parts_of(candidate))
    return None if isinstance(pairs, str) else pairs


def paired_outputs(reference: Parts, candidate: Parts) -> list[PartPair] | str:
    """Pair the parts of two layers' outputs, or explain why that can't be done.

    Parts at the same place belong together, such as under one key. If the structures differ, as a
    tensor and a tuple of one, tensors are paired in order.

    Examples
    --------
    >>> pairs = paired_outputs(parts_of({"a": 1, "b": 2}), parts_of({"b": 3, "a": 4}))
    >>> [tuple(pair) for pair in pairs]
    [(1, 4), (2, 3)]
    >>> paired_outputs(parts_of(torch.ones(1)), parts_of((torch.ones(1), torch.ones(1))))
    'it returns 1 tensor in the reference and 2 tensors in the candidate'
    """
    own, others = _opened(reference), _opened(candidate)
    pairs: list[PartPair] | None = None
    if _alone(own, others):
        pairs = _in_order(own, others)
    else:
        pairs = [PartPair(part, others[place]) for place, part in own.items()]
    if pairs is None:
        said = [counted(len(_tensors_of(parts)), "tensor") for parts in (own, others)]
        return f"it returns {said[0]} in the reference and {said[1]} in the candidate"
    for pair in pairs:
        if not pair.is_of_one_shape:
            shapes = tuple(pair.reference.shape), tuple(pair.candidate.shape)
            return f"shape {shapes[0]} in the reference and {shapes[1]} in the candidate"
    return pairs


def paired_inputs(
    reference: Inputs, candidate: Inputs, module: nn.Module | None, other: nn.Module | None
) -> InputPairs:
    """Pair the parts of two layers' inputs.

    Parameters
    ----------
    reference, candidate : Inputs
        The parts of the inputs that their forwards received.
    module, other : torch.nn.Module or None
        The modules, if known: their signatures name arguments and give defaults.
    """
    own, others = _opened(_joined(reference)), _opened(_joined(candidate))
    alone, shared = _alone(own, others), set[str]()
    if alone and module is not None and other is not None:
        reference, candidate = _complete(module, reference), _complete(other, candidate)
        own, others = _opened(_joined(reference)), _opened(_joined(candidate))
        alone, shared = _alone(own, others), reference.kwargs.keys() & candidate.kwargs.keys()
    # Another author's code may well receive other numbers and words, and may itself make what the
    # other one receives, such as a mask, unless both have that argument.
    are_strangers = type(module) is not type(other) and all(at[1] not in shared for at in alone)
    if (alone and module is None) or other is None:
        pairs = _in_order(own, others)
    elif alone and are_strangers:
        pairs = list(map(PartPair, _tensors_of(own), _tensors_of(others)))
    else:
        pairs = None
    if pairs:
        return InputPairs(pairs)
    if alone:
        # A flag may stand for what only one side has, as "is causal" does for a mask.
        both = [at for at in own if type(own[at]) is type(others.get(at)) is bool]
        alone += [at for at in both if own[at] is not others[at]]
    pairs = [PartPair(part, others[at]) for at, part in own.items() if at not in alone]
    return InputPairs(pairs, tuple(dict.fromkeys(map(_argument, alone))))


def _alone(own: Parts, others: Parts) -> list[tuple[Any, ...]]:
    """Return the places at which only one side has a tensor, or a plain value."""
    one_sided = own.keys() ^ others.keys()
    return [
        at
        for at in dict.fromkeys([*own, *others])
        if at in one_sided or isinstance(own[at], Tensor) != isinstance(others[at], Tensor)
    ]


def _argument(place: tuple[Any, ...]) -> str:
    kind, name, *keys = place
    inside = "".join(f"[{key!r}]" for key in keys)
    return f"{name}{inside}" if kind else f"argument {name}{inside}"


def _in_order(own: Parts, other: Parts) -> list[PartPair] | None:
    tensors_of_own, others = _tensors_of(own), _tensors_of(other)
    are_as_many = len(tensors_of_own) == len(others)
    return list(map(PartPair, tensors_of_own, others)) if are_as_many else None


def _tensors_of(parts: Parts) -> list[Tensor]:
    return [part for part in parts.values() if isinstance(part, Tensor)]


def _joined(inputs: Inputs) -> Parts:
    """Return the parts of all arguments, by their places in these."""
    positional = joined_places(None, enumerate(inputs.args))
    return joined_places(None, [(0, positional), (1, joined_places(None, inputs.kwargs.items()))])


def joined_places(container: Any, parts: Iterable[tuple[Any, Mapping[Any, Any]]]) -> Parts:
    """Return the parts of a container by their places in it, given those of each of its items."""
    return Parts({(key, *at): part for key, inner in parts for at, part in inner.items()})


def _leaf(copy: Callable[[Tensor], Tensor] | None, value: Any) -> Parts:
    if isinstance(value, Parts):
        return value
    if isinstance(value, Tensor):
        return Parts({(): value if copy is None else copy(value)})
    if isinstance(value, _PLAIN):
        return Parts({(): value})
    if isinstance(value, np.ndarray | np.generic):
        try:
            return _leaf(copy, torch.as_tensor(value, device="cpu"))
        except TypeError:
            # An array of words, dates or objects.
            return Parts({(): str(value.tolist())})
    if is_container(value):
        # Nothing of a container inside itself can be compared.
        return Parts()
    # Only the tensors of an object such as a key-value cache can be compared.
    held = enumerate(tensors(value))
    return Parts({(at,): tensor if copy is None else copy(tensor) for at, tensor in held})


def _opened(parts: Parts) -> Parts:
    """Return the same with the numbers of tensors that don't hold them plainly."""
    opened = Parts()
    for place, part in parts.items():
        if not isinstance(part, Tensor) or is_plain(part):
            opened[place] = part
        elif part.is_nested:
            # With strides it has no shape, and a jagged one has a symbol of its own in it.
            shapes = [inner.shape for inner in part.unbind()]
            opened[*place, "padded"] = dense(part)
            opened[*place, "shapes"] = torch.tensor(shapes, device="cpu")
        elif isinstance(part, MaskedTensor):
            # What is under the mask counts for nothing.
            masked: Any = part
            opened[*place, "values"], opened[*place, "mask"] = (
                masked.to_tensor(0),
                masked.get_mask(),
            )
        else:
            # Other wrappers have their numbers in the tensors inside.
            first, *rest = inner_tensors(gathered(part))
            opened[place] = first
            opened |= {(*place, number): inner for number, inner in enumerate(rest, 1)}
    return opened


def _complete(module: nn.Module, inputs: Inputs) -> Inputs:
    """Return parts by the names of forward's parameters, if it has any, with its defaults."""
    try:
        bound = inspect.signature(module.forward).bind(*inputs.args, **inputs.kwargs)
    except (TypeError, ValueError):
        return inputs
    bound.apply_defaults()
    return parts_of_inputs(Inputs((), bound.arguments))
