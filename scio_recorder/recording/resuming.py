"""Resuming a recording: the committed state, and checks that the same data comes again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scio_recorder.errors import CollectError
from scio_recorder.layer import DepthIdx, text_of
from scio_recorder.recording.intake import RowColumns, StoringIntake
from scio_recorder.recording.recipes import restore, states_of
from scio_recorder.reductions.base import Reductions
from scio_recorder.stores import State


def state_of(
    reductions: Mapping[DepthIdx, Reductions],
    storing: Mapping[DepthIdx, StoringIntake],
    columns: RowColumns,
    length: list[int | None],
) -> State:
    """Return the state that is written with the samples.

    Parameters
    ----------
    reductions, storing : mapping
        The reductions, and the intakes that store, by layer.
    columns : RowColumns
        The columns of rows.
    length : list
        `Feed.length`.
    """
    rounding = {
        text_of(label): [intake.lost, intake.total]
        for label, intake in storing.items()
        if intake.rounds
    }
    reduced = states_of(reductions)
    return {"reductions": reduced, "rounding": rounding, "columns": columns.names, "length": length}


def restore_state(
    state: State,
    reductions: Mapping[DepthIdx, Reductions],
    storing: Mapping[DepthIdx, StoringIntake],
    columns: RowColumns,
) -> None:
    """Restore the result of `state_of`."""
    # Recordings of versions without rows have none.
    columns.names = state.get("columns", [])
    restore(reductions, state["reductions"])
    for label, intake in storing.items():
        sums = state["rounding"].get(text_of(label))
        if sums is not None:
            intake.rounds = True
            intake.lost, intake.total = sums


def check_order(given: Any, durable: Any, first: int) -> None:
    """Refuse samples that differ from the durable ones, which begin at this place."""
    for position, (one, other) in enumerate(zip(given, durable, strict=True), first):
        if one != other:
            raise CollectError(
                f"sample {position} of the loader is {one!r}, but was {other!r} when the "
                "recording began: give the same samples in the same order (no shuffling)"
            )


def check_boundary(skip: int, number: int) -> None:
    """Refuse a batch with only its first samples durable, if inputs are kept."""
    if skip < number:
        raise CollectError(
            f"the first {skip} of {number} samples of a batch are durable already, but inputs "
            "are kept by whole batches: give the previous batch size"
        )


def check_number(
    came: tuple[int, int], durable: tuple[int, int], *, is_complete: bool, is_end: bool
) -> None:
    """Refuse data with another number of samples, or of rows, than are durable.

    Parameters
    ----------
    came, durable : (int, int)
        The numbers of samples, and of rows if these are counted.
    is_complete : bool
        Whether there can't be more than the durable ones.
    is_end : bool
        Whether all samples have come.
    """
    samples, rows = (f"{came[i]}{'' if is_end else ' or more'}" for i in range(2))
    counted = (f" in {durable[1]} rows", f" in {rows} rows") if durable[1] else ("", "")
    what = f"holds {durable[0]} samples{counted[0]} already, and {samples}{counted[1]} came now"
    if is_complete and came != durable and (is_end or came > durable):
        raise CollectError(
            f"the recording is complete: it {what}. Read it with open_recording, give the "
            "data that it was made from, or choose another folder"
        )
    if not is_complete and (came[0] < durable[0] or came[1] < durable[1]):
        raise CollectError(
            f"the recording {what}: give the same loader, or the same passes, as when it was begun"
        )
