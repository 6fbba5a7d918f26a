"""States of a recording that are none, although all checksums are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import LayerNotFoundError, Recorder, open_recording
from scio_recorder.errors import RecordingError
from scio_recorder.recording.recipes import states_of
from scio_recorder.reductions import Moments
from scio_recorder.stores import Disk


def of_each(forge: Any) -> Any:
    return lambda states: {name: forge(state) for name, state in states.items()}


FORGERIES: dict[str, Any] = {
    "null": lambda state: None,
    "a text": lambda state: "Moments",
    "a list": lambda state: [1, state],
    "no construction": lambda state: {k: v for k, v in state.items() if k != "construction"},
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
