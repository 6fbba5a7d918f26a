"""Pairing the parts of two layers' inputs or outputs, by their places in structures."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.masked import MaskedTensor

from scio_recorder.analysis.comparing.measures import dense
from scio_recorder.layer import counted
from scio_recorder.lowlevel import Inputs
from scio_recorder.tensors import fold, gathered, inner_tensors, is_container, tensors

_PLAIN = bool | int | float | complex | str | bytes | range | slice | Enum | torch.dtype
# Parts by their places in a structure: tensors, and plain values of any kind.
Parts: TypeAlias = dict[tuple[Any, ...], Any]


class PartPair(NamedTuple):
    """A tensor or plain value of the reference, and its partner on the other side."""

    reference: Any
    candidate: Any

    @property
    def is_of_one_shape(self) -> bool:
        """Whether the two can be compared number by number."""
        reference, candidate = self
        return not isinstance(reference, Tensor) or reference.shape == candidate.shape


def paired_outputs(reference: Any, candidate: Any) -> list[PartPair] | str:
    """Pair the parts of two layers' outputs, or explain why that can't be done.

    Parts at the same place belong together, such as under one key. If the structures differ, as a
    tensor and a tuple of one, tensors are paired in order.

    Parameters
    ----------
    reference, candidate : any
        Tensors, or structures of them.

    Examples
    --------
    >>> [tuple(pair) for pair in paired_outputs({"a": 1, "b": 2}, {"b": 3, "a": 4})]
    [(1, 4), (2, 3)]
    >>> paired_outputs(torch.ones(1), (torch.ones(1), torch.ones(1)))
    'it returns 1 tensor in the reference and 2 tensors in the candidate'
    """
    both = _parts_of(reference), _parts_of(candidate)
    pairs = _by_place(*both) or _in_order(*both)
    if pairs is None:
        said = [counted(len(_tensors_of(parts)), "tensor") for parts in both]
        return f"it returns {said[0]} in the reference and {said[1]} in the candidate"
    for pair in pairs:
        if not pair.is_of_one_shape:
            shapes = tuple(pair.reference.shape), tuple(pair.candidate.shape)
            return f"shape {shapes[0]} in the reference and {shapes[1]} in the candidate"
    return pairs


def paired_inputs(
    reference: Inputs, candidate: Inputs, module: nn.Module | None, other: nn.Module | None
) -> list[PartPair] | None:
    """Pair the parts of two layers' inputs; None if they can't be paired.

    Parameters
    ----------
    reference, candidate : Inputs
        The inputs that their forwards received.
    module, other : torch.nn.Module or None
        The modules, if known: their signatures name arguments and give defaults.
    """
    own, others = _parts_of(tuple(reference)), _parts_of(tuple(candidate))
    pairs = _by_place(own, others)
    if pairs is not None:
        return pairs
    if module is None or other is None:
        return _in_order(own, others)
    reference, candidate = _complete(module, reference), _complete(other, candidate)
    own, others = _parts_of(tuple(reference)), _parts_of(tuple(candidate))
    pairs = _by_place(own, others)
    # Another author's code may well receive other numbers and words, and may itself make what the
    # other one receives, such as a mask, unless both have that argument.
    shared = reference.kwargs.keys() & candidate.kwargs.keys()
    are_alike = any(place[1] in shared for place in own.keys() ^ others.keys())
    if pairs is not None or are_alike or type(module) is type(other):
        return pairs
    return list(map(PartPair, _tensors_of(own), _tensors_of(others))) or None


def _by_place(own: Parts, other: Parts) -> list[PartPair] | None:
    if own.keys() != other.keys():
        return None
    pairs = [PartPair(part, other[place]) for place, part in own.items()]
    return pairs if all(isinstance(a, Tensor) == isinstance(b, Tensor) for a, b in pairs) else None


def _in_order(own: Parts, other: Parts) -> list[PartPair] | None:
    pairs = list(map(PartPair, _tensors_of(own), _tensors_of(other)))
    return pairs if len(_tensors_of(own)) == len(_tensors_of(other)) else None


def _tensors_of(parts: Parts) -> list[Tensor]:
    return [part for part in parts.values() if isinstance(part, Tensor)]


def _parts_of(value: Any) -> Parts:
    """Return the parts of a structure by their places."""
    parts: Parts = fold(value, _parts_of_leaf, _placed)
    return parts


def _placed(container: Any, parts: list[tuple[Any, Parts]]) -> Parts:
    return {(key, *place): part for key, inner in parts for place, part in inner.items()}


def _parts_of_leaf(value: Any) -> Parts:
    if isinstance(value, Tensor) and value.is_nested:
        # With strides it has no shape, and a jagged one has a symbol of its own in it.
        shapes = [part.shape for part in value.unbind()]
        return {("padded",): dense(value), ("shapes",): torch.tensor(shapes, device="cpu")}
    if isinstance(value, MaskedTensor):
        # What is under the mask counts for nothing.
        masked: Any = value
        return {("values",): masked.to_tensor(0), ("mask",): masked.get_mask()}
    if isinstance(value, Tensor):
        # Other wrappers have their numbers in the tensors inside.
        return {(number,): inner for number, inner in enumerate(inner_tensors(gathered(value)))}
    if isinstance(value, _PLAIN):
        return {(): value}
    if isinstance(value, np.ndarray | np.generic):
        try:
            return {(): torch.as_tensor(value, device="cpu")}
        except TypeError:
            # An array of words, dates or objects.
            return {(): str(value.tolist())}
    # Only the tensors of an object such as a key-value cache can be compared, and nothing of a
    # container inside itself.
    return {} if is_container(value) else _parts_of(tensors(value))


def _complete(module: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs by the names of forward's parameters, if it has any, with its defaults."""
    try:
        bound = inspect.signature(module.forward).bind(*inputs.args, **inputs.kwargs)
    except (TypeError, ValueError):
        return inputs
    bound.apply_defaults()
    return Inputs((), bound.arguments)
