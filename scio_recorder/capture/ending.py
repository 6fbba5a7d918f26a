"""How a pass ends: what is learned from it, what it leaves, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scio_recorder.capture.keeping import Kept
from scio_recorder.capture.program import COPY, LEARN, REFERENCE, Program
from scio_recorder.errors import FlowError
from scio_recorder.nets.records import Copied, Entry, Recorded
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import Hold


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


def next_kind(kind: int, kept: Kept, is_hit: bool, lasting: set[int]) -> int:
    """Return how an event is to be kept from now on, given whether it was overwritten."""
    if kind != LEARN:
        return kind
    # Tensors of inference mode have no version counter: whether they are overwritten stays unknown.
    is_unknown = any(
        leaf.original.is_inference() or private.memory_of(leaf.original) in lasting
        for leaf in kept.leaves
    )
    return COPY if is_hit or is_unknown else REFERENCE


def entry_of(value: Any, version: int, hold: Hold) -> Entry:
    """Return what a record is of what a pass has logged."""
    if isinstance(value, Copied):
        return value
    if type(value) is not Kept:
        return hold(value, version)
    leaves = [hold(*leaf.settled()) for leaf in value.leaves]
    return Recorded(leaves, value.rebuild)


def all_calls(found: Sequence[tuple[Any, Entry]], order: Sequence[Any]) -> dict[Any, Entry]:
    """Return, for each layer, one record of what all its calls left."""
    calls: dict[Any, list[Entry]] = {label: [] for label in order}
    for label, entry in found:
        calls[label].append(entry)
    return {label: Recorded(entries, tuple) for label, entries in calls.items()}
