"""How a pass ends: what is learned from it, what it leaves, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scio_recorder.capture.keeping import Kept
from scio_recorder.capture.program import COPY, LEARN, REFERENCE, Program
from scio_recorder.errors import FlowError
from scio_recorder.nets.records import Offloaded
from scio_recorder.tensors import private

__all__ = ["all_calls", "columns", "flow_error", "is_lost", "next_kind", "settled"]


def flow_error(program: Program, expected: Mapping[int, int], seen: Mapping[int, int]) -> FlowError:
    """Say which modules ran how often, by their index, and how often they should have."""
    wrong = []
    for index, positions in enumerate(program.positions):
        if seen[index] != expected[index]:
            chosen = [program.labels[at] for at in positions]
            names = [str(program.architecture[label]) for label in chosen if label is not None]
            wrong.append(
                f"{', '.join(names)}: {expected[index]} calls of the module at labelling, "
                f"{seen[index]} now"
            )
    return FlowError(
        "modules with recorded layers ran more or less often than at labelling, so labels have "
        "lost their meaning:\n  " + "\n  ".join(wrong) + "\nA layer that did not run at all was "
        "skipped by the network, replaced by a fused kernel, compiled, or lost its hook to "
        "somebody else. Label the net as it is used (mode=, input_data=), or record other "
        "layers"
    )


def is_lost(kept: Any) -> bool:
    """Return whether a record was only referenced and has been overwritten."""
    return type(kept) is Kept and any(leaf.is_violated for leaf in kept.leaves)


def next_kind(kind: int, kept: Kept, is_hit: bool, buffers: set[int]) -> int:
    """Return how an event is to be kept from now on, given whether it was overwritten."""
    if kind != LEARN:
        return kind
    # Tensors of inference mode have no version counter: whether they are overwritten stays unknown.
    is_unknown = any(
        leaf.original.is_inference() or private.memory_of(leaf.original) in buffers
        for leaf in kept.leaves
    )
    return COPY if is_hit or is_unknown else REFERENCE


def settled(value: Any, version: int) -> tuple[Any, Any]:
    """Return what a record holds, and the versions that tell whether it still does."""
    if isinstance(value, Offloaded):
        return value, ()
    if type(value) is not Kept:
        return value, version
    leaves = [leaf.settle() for leaf in value.leaves]
    watched = [
        (tensor, leaf.version if tensor is leaf.original else tensor._version)
        for tensor, leaf in zip(leaves, value.leaves, strict=True)
        if not tensor.is_inference()
    ]
    return value.rebuild(leaves), watched


def all_calls(calls: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return one record of what several calls left, and the versions that it depends on."""
    values = tuple(value for value, _ in calls)
    if any(isinstance(value, Offloaded) for value in values):
        return Offloaded.all_of(values), ()
    watched = [
        pair
        for value, versions in calls
        for pair in ([(value, versions)] if isinstance(versions, int) else versions)
    ]
    return values, watched


def columns(rows: list[Any]) -> tuple[Any, Any, Any]:
    """Turn rows of three into three columns."""
    return tuple(zip(*rows, strict=True)) if rows else ((), (), ())  # type: ignore[return-value]
