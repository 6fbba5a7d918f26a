"""What was asked of each layer: stored or reduced, transformed or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.nets.selection import select
from scio_recorder.reductions import Reduction

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture


Transform: TypeAlias = Callable[[Any, Any], Tensor]
Transforms: TypeAlias = Transform | Mapping[Any, Transform]
Reduce: TypeAlias = (
    Reduction | Sequence[Reduction] | Mapping[Any, "Reduction | Sequence[Reduction]"]
)


def reductions_of(
    architecture: Architecture, recording: Sequence[DepthIdx], given: Reduce | None
) -> dict[DepthIdx, Reduction | list[Reduction]]:
    """Return the reductions of each layer that has some, all of them fresh."""
    found = _by_layer(architecture, recording, given, "reduce")
    return {label: _fresh(value) for label, value in found.items()}


def transforms_of(
    architecture: Architecture, recording: Sequence[DepthIdx], given: Transforms | None
) -> dict[DepthIdx, Transform]:
    """Return the transform of each layer that has one."""
    found = _by_layer(architecture, recording, given, "transform")
    for label, function in found.items():
        if not callable(function):
            raise CollectError(
                f"the transform of layer {architecture[label]} is {function!r}: it must be "
                "callable, transform(activation, batch) -> Tensor [batch, ...]"
            )
    return found


def valid_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to keep, None for that of each activation."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CollectError(
            f"dtype={dtype!r}: give a floating-point dtype such as torch.bfloat16; activations of "
            "other kinds are kept as they are, and transform= can change them"
        )
    return dtype


def _by_layer(
    architecture: Architecture, recording: Sequence[DepthIdx], given: Any, what: str
) -> dict[DepthIdx, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(recording, given)
    found: dict[DepthIdx, Any] = {}
    for selector, value in given.items():
        chosen = [label for label in select(architecture, [selector]) if label in recording]
        if not chosen:
            raise CollectError(
                f"the selector {selector!r} of {what} names no recorded layer: record() it too"
            )
        for label in chosen:
            if label in found:
                raise CollectError(
                    f"two entries of {what} match layer {architecture[label]}, the second by "
                    f"{selector!r}: make the selectors disjoint"
                )
            found[label] = value
    return found


def _fresh(given: Any) -> Reduction | list[Reduction]:
    if isinstance(given, Reduction):
        return given.fresh()
    if isinstance(given, list | tuple) and given and all(isinstance(r, Reduction) for r in given):
        return [reduction.fresh() for reduction in given]
    shown = given.__name__ if isinstance(given, type) else repr(given)
    hint = f": write {shown}()" if isinstance(given, type) else ""
    raise CollectError(
        f"reduce has {shown} where a reduction is expected{hint}; give objects such as "
        "scio_recorder.reductions.Mean(), a list of them, or a mapping by selector"
    )
