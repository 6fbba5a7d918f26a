"""The inputs and outputs of layers of two sides, taken apart and paired."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.analysis.comparing.measures import Tolerance, dense
from scio_recorder.layer import counted
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.copies import same_bits
from scio_recorder.tensors.structures import flatten, tensors

_PLAIN = bool | int | float | complex | str | bytes | range | slice | Enum | torch.dtype
# Tensors, and plain values of any kind.
Leaf: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]


def paired_outputs(reference: Any, candidate: Any) -> list[tuple[Leaf, Leaf]] | str:
    """Pair the parts of two layers' outputs, or explain why that can't be done.

    Parts at the same place belong together, such as under one key. If the structures differ, as a
    tensor and a tuple of one, tensors are paired in order.

    Parameters
    ----------
    reference, candidate : any
        Tensors, or structures of them.

    Examples
    --------
    >>> paired_outputs({"a": 1, "b": 2}, {"b": 3, "a": 4})
    [(1, 4), (2, 3)]
    >>> paired_outputs(torch.ones(1), (torch.ones(1), torch.ones(1)))
    'it returns 1 tensor in the reference and 2 tensors in the candidate'
    """
    own, other = dict(_leaves(reference)), dict(_leaves(candidate))
    pairs = _by_path(own, other) or _in_order(own, other)
    if pairs is None:
        said = [counted(len(_tensors_of(leaves)), "tensor") for leaves in (own, other)]
        return f"it returns {said[0]} in the reference and {said[1]} in the candidate"
    return pairs


def paired_inputs(
    reference: Inputs, candidate: Inputs, module: nn.Module | None, other: nn.Module | None
) -> list[tuple[Leaf, Leaf]] | None:
    """Pair the parts of two layers' inputs; None if they can't be paired.

    Parameters
    ----------
    reference, candidate : Inputs
        The inputs that their forwards received.
    module, other : torch.nn.Module or None
        The modules, if known: their signatures name arguments and give defaults.
    """
    pairs = _by_path(dict(_leaves(tuple(reference))), dict(_leaves(tuple(candidate))))
    if pairs is not None:
        return pairs
    if module is not None and other is not None:
        reference, candidate = _complete(module, reference), _complete(other, candidate)
    own, others = dict(_leaves(tuple(reference))), dict(_leaves(tuple(candidate)))
    pairs = _by_path(own, others)
    if pairs is not None:
        return pairs
    if module is None or other is None:
        return _in_order(own, others)
    if type(module) is type(other):
        return None
    # Another author's code may well receive other numbers and words, and may itself make what the
    # other one receives, such as a mask, unless both have that argument.
    shared = _parameters(module).keys() & _parameters(other).keys()
    if any(path[1] in shared for path in own.keys() ^ others.keys()):
        return None
    return list(zip(_tensors_of(own), _tensors_of(others), strict=False)) or None


def samples_of_inputs(
    inputs: Sequence[Inputs], lengths: Sequence[int], wanted: Sequence[tuple[int, int]]
) -> Inputs | None:
    """Return a layer's inputs for samples of several batches; None if unclear.

    Parameters
    ----------
    inputs : sequence of Inputs
        Its inputs, by batch.
    lengths : sequence of int
        The number of samples of each batch. A tensor as long in dimension 0 is taken to have a row
        for each.
    wanted : sequence of (int, int)
        The batch of each sample, and its place there.
    """
    each = {number: inputs[number] for number, _ in wanted}
    flat = {number: flatten(one) for number, one in each.items()}
    first = wanted[0][0]
    leaves, rebuild = flat[first]
    if not all(_are_alike(each[first], other) for other in each.values()):
        return None
    found = []
    for place, leaf in enumerate(leaves):
        parts = {number: own[place] for number, (own, _) in flat.items()}
        if all(part.ndim and len(part) == lengths[number] for number, part in parts.items()):
            found.append(torch.stack([parts[number][at] for number, at in wanted]))
        elif all(same_bits(leaf, part) for part in parts.values()):
            found.append(leaf)
        else:
            return None
    gathered: Inputs = rebuild(found)
    return gathered


def _are_alike(one: Inputs, other: Inputs) -> bool:
    """Whether two inputs have tensors in the same places and agree in everything else."""
    pairs = _by_path(dict(_leaves(tuple(one))), dict(_leaves(tuple(other))))
    exact = Tolerance()
    return pairs is not None and all(
        isinstance(a, Tensor) or are_equal_values(a, b, exact) for a, b in pairs
    )


def are_equal_values(reference: Leaf, candidate: Leaf, tolerance: Tolerance) -> bool:
    """Whether two parts that are not tensors are equal."""
    if reference == candidate:
        return True
    if isinstance(reference, torch.dtype) and isinstance(candidate, torch.dtype):
        # Who tolerates differences of numbers compares two precisions.
        return not tolerance.is_exact
    if not (is_number(reference) and is_number(candidate)):
        return False
    if reference != reference and candidate != candidate:
        return True
    apart = abs(candidate - reference)
    return math.isfinite(apart) and apart <= tolerance.atol + tolerance.rtol * abs(reference)


def is_number(leaf: Leaf) -> bool:
    """Whether a part that is not a tensor is a number that a tensor can hold."""
    is_whole = isinstance(leaf, int) and -(1 << 63) <= leaf < 1 << 63
    return is_whole or isinstance(leaf, float | complex)


def _by_path(own: dict[Path, Leaf], other: dict[Path, Leaf]) -> list[tuple[Leaf, Leaf]] | None:
    if own.keys() != other.keys():
        return None
    pairs = [(leaf, other[path]) for path, leaf in own.items()]
    return pairs if all(isinstance(a, Tensor) == isinstance(b, Tensor) for a, b in pairs) else None


def _in_order(own: dict[Path, Leaf], other: dict[Path, Leaf]) -> list[tuple[Leaf, Leaf]] | None:
    one, two = _tensors_of(own), _tensors_of(other)
    return list(zip(one, two, strict=True)) if len(one) == len(two) else None


def _tensors_of(leaves: dict[Path, Leaf]) -> list[Tensor]:
    return [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]


def _leaves(
    value: Any, path: Path = (), around: frozenset[int] = frozenset()
) -> Iterator[tuple[Path, Leaf]]:
    """Yield the parts of a structure and their places.

    None is no part, and neither is a container inside itself.
    """
    if value is None or id(value) in around:
        return
    if isinstance(value, Tensor) and value.is_nested:
        # With strides it has no shape, and a jagged one has a symbol of its own in it.
        yield (*path, "padded"), dense(value)
        yield (*path, "shapes"), torch.tensor([part.shape for part in value.unbind()], device="cpu")
    elif isinstance(value, Tensor | _PLAIN):
        yield path, value
    elif isinstance(value, np.ndarray | np.generic):
        try:
            yield path, torch.as_tensor(value, device="cpu")
        except TypeError:
            # An array of words, dates or objects.
            yield path, str(value.tolist())
    else:
        for place, item in _items(value):
            yield from _leaves(item, (*path, place), around | {id(value)})


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return ((name, getattr(value, name, None)) for name in names)
    # Only the tensors of an object such as a key-value cache can be compared.
    return enumerate(value if isinstance(value, tuple | list) else tensors(value))


def _complete(module: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs by the names of forward's parameters, with its defaults filled in."""
    given = inputs.named(module)
    defaults = {
        name: parameter.default
        for name, parameter in _parameters(module).items()
        if name in given or parameter.default is not parameter.empty
    }
    # In the order of the signature.
    return Inputs((), {**defaults, **given})


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward; none if its signature can't be read."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
