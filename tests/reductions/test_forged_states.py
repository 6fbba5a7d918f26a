"""States that somebody has written by hand: refused, or as good as any other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import LayerNotFoundError, Recorder, open_recording
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.reductions import Histogram, Last, Moments, Quantiles, Reduction
from scio_recorder.reductions.base import states_of
from scio_recorder.stores import Disk
from scio_recorder.stores.disk_format import writer
from scio_recorder.testing.undisturbed import assert_same
from tests.recording.nets import interrupt, recorder_of


def test_summaries_of_much_data() -> None:
    quantiles = Quantiles([0.1, 0.6])
    quantiles.update(torch.randn(2**15, 6))
    state = quantiles.state_dict()
    restored = Quantiles([0.1, 0.6])
    restored.load_state_dict(state)
    assert_same(restored.compute(), quantiles.compute())

    def parts(value: Any) -> Iterator[tuple[Any, Any]]:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            if isinstance(value[key], dict | list):
                yield from parts(value[key])

    tensors = [(holder, key) for holder, key in parts(state) if isinstance(holder[key], Tensor)]
    assert len(tensors) > 1
    for holder, key in tensors:
        value = holder[key]
        for other in (value[..., None], value.to(torch.complex64), value.tolist()):
            holder[key] = other
            with pytest.raises(RecordingError, match="is damaged"):
                quantiles.load_state_dict(state)
            # Nothing is half loaded.
            with pytest.raises(CollectError, match="no samples yet"):
                quantiles.compute()
        holder[key] = value


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
    "no dimensions": lambda state: state | {"mean": state["mean"].sum()},
    "whole numbers": lambda state: state | {"squares": state["squares"].long()},
    "an unknown dtype": lambda state: state | {"dtype": "float31"},
    "no dtype": lambda state: {k: v for k, v in state.items() if k != "dtype"},
    "classes of a reduction without": lambda state: state | {"classes": [{"label": 1}]},
    "nothing": lambda state: {},
}


OF_ALL: dict[str, Any] = {
    "null for all": lambda states: None,
    "a text for all": lambda states: "0-1",
    "a list for all": lambda states: list(states.values()),
    "none of this layer": lambda states: {"1-1": states["0-1"]},
}
FORGERIES = {name: of_each(forge) for name, forge in FORGERIES.items()} | OF_ALL


# What a commit says of its state, whose value has a place for each tensor in a file.
COMMITS: dict[str, Any] = {
    "no value": lambda state: {"file": state["file"]},
    "neither value nor file": lambda state: {"file": None},
    "no file": lambda state: {"value": state["value"]},
    "tensors of no file": lambda state: state | {"file": None},
    "a file of another name": lambda state: state | {"file": "0" * 16},
    "a list": lambda state: list(state.values()),
    "another key": lambda state: {"values": state["value"], "file": state["file"]},
}


def interrupted(path: Path, data: list[Tensor], reduce: Reduction) -> Recorder:
    """Collect two batches, of which one commit is written, and return the recorder."""
    rnet = recorder_of(nn.Linear(3, 2), "0-1", input_size=(1, 3), verbose=0)
    interrupt(rnet, data, Disk(path), 2, reduce=reduce)
    return rnet


def assert_refused(path: Path, rnet: Recorder, data: list[Tensor], reduce: Reduction) -> None:
    with pytest.raises((RecordingError, LayerNotFoundError)):
        open_recording(path)["0-1"]
    with pytest.raises(RecordingError):
        rnet.collect(data, store=Disk(path), reduce=reduce, resume=True)


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_recording_with_right_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Any
) -> None:
    data = [torch.randn(4, 3) for _ in range(3)]
    monkeypatch.setattr(
        "scio_recorder.recording.collect_sink.states_of", lambda given: forge(states_of(given))
    )
    rnet = interrupted(tmp_path / "run", data, Moments())
    assert_refused(tmp_path / "run", rnet, data, Moments())


@pytest.mark.parametrize("reduce", [Moments(), Last(), Histogram(3)], ids=repr)
@pytest.mark.parametrize("forge", COMMITS.values(), ids=COMMITS)
def test_a_commit_with_right_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Any, reduce: Reduction
) -> None:
    data, write = [torch.randn(4, 3) for _ in range(3)], writer.file_writer

    def forged(tensors: Any, content: Any) -> Any:
        is_commit = content.get("state") is not None and "ids" in content
        return write(
            tensors, content | {"state": forge(content["state"])} if is_commit else content
        )

    with monkeypatch.context() as patch:
        patch.setattr(writer, "file_writer", forged)
        rnet = interrupted(tmp_path / "run", data, reduce)
    assert_refused(tmp_path / "run", rnet, data, reduce)
