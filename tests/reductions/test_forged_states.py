"""States that somebody has written by hand: refused, or as good as any other."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import LayerNotFoundError, Recorder, open_recording
from scio_recorder.errors import CollectError, RecorderError, RecordingError
from scio_recorder.recording.recipes import states_of
from scio_recorder.reductions import Digest, Fold, Last, Moments, Quantiles
from scio_recorder.stores import Disk
from tests.reductions.test_interface import (
    DATA,
    LABELS,
    Make,
    by,
    every,
    reduced,
)

GONE = object()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every place in a nested state, with what is there."""
    if path:
        yield path, value
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def others(value: Any) -> Iterator[Any]:
    """Yield values of another kind, shape or dtype, and counts that can't be."""
    yield from (GONE, None, "text", [], {}, [None], {"a": 1}, -1, 2**70, 0.5, math.nan, math.inf)
    yield from (True, torch.zeros(()), torch.zeros(2, 7))
    if isinstance(value, Tensor):
        yield from (value.to(torch.int8), value.to(torch.complex64), value.to(torch.float16))
        yield from (value[..., None], -value - 1, value.tolist(), [value])
    if isinstance(value, Tensor) and value.ndim:
        yield from (value[:0], torch.cat([value, value]))
    if isinstance(value, list) and value:
        yield from (value[:-1], [*value, value[0]], value[::-1], tuple(value))


def forged(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(state)
    parent = made
    for key in path[:-1]:
        parent = parent[key]
    if value is GONE:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return made


@every
@pytest.mark.parametrize("options", [{}, pytest.param({"by": by}, marks=pytest.mark.campaign)])
def test_nothing_but_our_errors(make: Make, options: dict[str, Any]) -> None:
    good = reduced(make, options)
    state = good.state_dict()
    num_refused = 0
    for path, value in places(state):
        for other in others(value):
            reduction = make(**options)
            # States of other constructions are told apart.
            ours = (RecordingError, CollectError) if "construction" in path else RecordingError
            try:
                reduction.load_state_dict(forged(state, path, other))
            except ours:
                num_refused += 1
                with pytest.raises(CollectError, match="no samples yet"):
                    reduction.compute()
                continue
            # What was let through works as any state does.
            for use in (
                reduction.compute,
                # An accumulator is given to the user's function.
                lambda one=reduction: isinstance(one, Fold) or one.update(DATA[:2], LABELS[:2]),
                lambda one=reduction: isinstance(one, Fold) or one.merge(good),
                reduction.compute,
                reduction.state_dict,
            ):
                try:
                    use()
                except RecorderError:
                    break
    assert num_refused > 50


@every
def test_tensors_of_another_shape_or_dtype(make: Make) -> None:
    reduction = reduced(make, {})
    if isinstance(reduction, Quantiles):
        # Enough for summaries.
        reduction.update(torch.randn(2**15, 3, 2))
    state = reduction.state_dict()
    for path, value in places(state):
        if not isinstance(value, Tensor) or isinstance(reduction, Last | Fold):
            continue
        others = [value[..., None], value.to(torch.complex64), value.tolist()]
        is_count = value.dtype == torch.int64 and not isinstance(reduction, Digest)
        for other in (*others, *([-value - 1] if is_count else [])):
            with pytest.raises(RecordingError, match="is damaged"):
                make().load_state_dict(forged(state, path, other))


def of_each(forge: Any) -> Any:
    return lambda states: {name: forge(state) for name, state in states.items()}


FORGERIES: dict[str, Any] = {
    "null": lambda state: None,
    "a text": lambda state: "Moments",
    "a list": lambda state: [1, state],
    "a key that is missing": lambda state: {k: v for k, v in state.items() if k != "mean"},
    "no construction": lambda state: {k: v for k, v in state.items() if k != "construction"},
    "null for a tensor": lambda state: state | {"mean": None},
    "a list for a tensor": lambda state: state | {"mean": state["mean"].tolist()},
    "another shape": lambda state: state | {"squares": torch.ones(7, dtype=torch.float64)},
    "another dtype": lambda state: state | {"mean": state["mean"].float()},
    "a negative count": lambda state: state | {"seen": -3},
    "a count that is not finite": lambda state: state | {"count": math.inf},
}


OF_ALL: dict[str, Any] = {
    "null for all": lambda states: None,
    "a text for all": lambda states: "0-1",
    "a list for all": lambda states: list(states.values()),
    "none of this layer": lambda states: {"1-1": states["0-1"]},
}
FORGERIES = {name: of_each(forge) for name, forge in FORGERIES.items()} | OF_ALL


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_recording_with_right_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Any
) -> None:
    rnet = Recorder(nn.Linear(3, 2), input_size=(1, 3), verbose=0)
    rnet.record("0-1")
    store, data = Disk(tmp_path / "run"), [torch.randn(4, 3) for _ in range(3)]

    def interrupted() -> Iterator[Tensor]:
        yield from data[:2]
        raise KeyboardInterrupt

    monkeypatch.setattr(
        "scio_recorder.recording.intake.states_of", lambda given: forge(states_of(given))
    )
    with pytest.raises(KeyboardInterrupt):
        rnet.collect(interrupted(), store=store, reduce=Moments())
    with pytest.raises((RecordingError, LayerNotFoundError)):
        open_recording(tmp_path / "run")["0-1"]
    with pytest.raises(RecordingError):
        rnet.collect(data, store=store, reduce=Moments(), resume=True)
