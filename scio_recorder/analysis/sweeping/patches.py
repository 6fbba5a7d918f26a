"""Patches: a layer's output in one run replaces its output in another run."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor

from scio_recorder.errors import ComparisonError
from scio_recorder.layer import DepthIdx, Layer, describe, shapes_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.tensors.copies import is_dense, twin
from scio_recorder.tensors.structures import flatten, tensors

Positions: TypeAlias = Literal["all"] | Iterable[int] | None

_WRITE = 'write positions=None, "all" or a list such as [0, -1]'


def patched(corrupted: Any, clean: Any, position: int | None) -> Any:
    """Return the structure that goes on in place of a layer's output.

    Parameters
    ----------
    corrupted : Any
        The layer's output, which does not change.
    clean : Any
        Its output in another run, of the same structure.
    position : int or None
        The position of dimension 1 that is taken from there; None for all.

    Returns
    -------
    Any
        The structure with copies of the clean tensors. With a position, tensors whose first two
        dimensions are not those of the first tensor stay the corrupted ones.

    Examples
    --------
    >>> import torch
    >>> patched(torch.zeros(1, 3), torch.ones(1, 3), 1)
    tensor([[0., 1., 0.]])
    """
    leaves, rebuild = flatten(corrupted)
    pairs = zip(leaves, tensors(clean), strict=True)
    if position is None:
        return rebuild([twin(other) for _, other in pairs])
    return rebuild(
        [
            _mixed(own, other, position) if has_positions(own, leaves[0]) else own
            for own, other in pairs
        ]
    )


def has_positions(tensor: Tensor, first: Tensor) -> bool:
    """Whether a tensor of a structure has the positions of the first one."""
    return is_dense(tensor) and tensor.dim() > 1 and tensor.shape[:2] == first.shape[:2]


def _mixed(own: Tensor, other: Tensor, position: int) -> Tensor:
    mixed = own.detach().clone()
    mixed[:, position] = other[:, position]
    return mixed


def check_alike(
    architecture: Architecture, clean: Mapping[DepthIdx, Any], corrupted: Mapping[DepthIdx, Any]
) -> None:
    """Refuse layers whose structures, shapes or dtypes differ between the two runs."""
    for label, one in clean.items():
        specs = describe(one), describe(corrupted[label])
        if not tensors(one):
            raise ComparisonError(
                f"layer {architecture[label]} returns no tensor, so there is nothing to patch: "
                "record other layers"
            )
        if specs[0] != specs[1]:
            shown = " and ".join(str(shapes_of(spec)) for spec in specs)
            shown = shown if shapes_of(specs[0]) != shapes_of(specs[1]) else f"{specs}"
            raise ComparisonError(
                f"layer {architecture[label]} returns {shown} in the clean and in the corrupted "
                "run, but only outputs of equal shapes can be patched: give both runs inputs of "
                "one shape (texts of equally many tokens), or record other layers"
            )


def resolved(
    architecture: Architecture, found: Mapping[DepthIdx, Any], positions: Positions
) -> list[int] | None:
    """Return positions as a list; raise if a layer lacks one of them.

    Parameters
    ----------
    architecture : Architecture
        Names the layers in errors.
    found : mapping
        The output of each layer.
    positions : None, "all" or iterable of int
        The requested positions.
    """
    if positions is None:
        return None
    lengths = {label: _length(architecture[label], value) for label, value in found.items()}
    if isinstance(positions, str):
        if positions != "all":
            raise ComparisonError(f"positions={positions!r}: {_WRITE}")
        return list(range(_common(architecture, lengths)))
    chosen = _integers(positions)
    for label, length in lengths.items():
        for position in chosen:
            if not -length <= position < length:
                raise ComparisonError(
                    f"there is no position {position} in layer {architecture[label]}, whose "
                    f"dimension 1 has a length of {length}"
                )
    return chosen


def _length(layer: Layer, value: Any) -> int:
    first = tensors(value)[0]
    if not is_dense(first) or first.dim() < 2:
        raise ComparisonError(
            f"layer {layer} returns {shapes_of(describe(value))}, which has no dimension 1 whose "
            "positions could be patched: write positions=None, or record other layers"
        )
    return first.shape[1]


def _common(architecture: Architecture, lengths: Mapping[DepthIdx, int]) -> int:
    (first, length), *others = lengths.items()
    for label, other in others:
        if other != length:
            raise ComparisonError(
                'positions="all" needs layers with the same number of positions: layer '
                f"{architecture[first]} has {length}, layer {architecture[label]} has {other}. "
                "Sweep them one after the other, or write the positions as a list"
            )
    return length


def _integers(positions: Any) -> list[int]:
    given = positions.tolist() if isinstance(positions, Tensor) else positions
    try:
        found = list(given)
        if not found or any(isinstance(position, bool) for position in found):
            raise TypeError
        return [operator.index(position) for position in found]
    except TypeError:
        raise ComparisonError(f"positions={positions!r}: {_WRITE}") from None
