"""Reading a recording from a folder, without the net that it was made from."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import chain
from typing import Any

from scio_recorder.errors import LayerNotFoundError, RecordingError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.architecture import Architecture
from scio_recorder.recording.recipes import from_recipes
from scio_recorder.recording.recording import Recording
from scio_recorder.stores.disk import held_by
from scio_recorder.stores.disk_format.reader import RunReader
from scio_recorder.stores.nodes import unpack


def open_recording(path: str | os.PathLike[str], *, verify: bool = False) -> Recording:
    """Open a recording on disk. No net is needed, and no code of the recording is run.

    Parameters
    ----------
    path : str or path-like
        The folder that ``store="disk:PATH"`` or :meth:`Recording.save` wrote.
    verify : bool, default False
        Read everything and compare it with its checksums now, rather than when it is used.

    Returns
    -------
    Recording
        Complete, or what an interrupted run has made durable. Samples are read when they are used.

    Raises
    ------
    RecordingError
        There is no recording, or it is damaged.

    Examples
    --------
    >>> import tempfile, torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    >>> rnet.record("0-1")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = rnet.collect([torch.ones(3, 2)], store=f"disk:{folder}/run")
    ...     recording = open_recording(f"{folder}/run", verify=True)
    ...     recording.complete, recording["0-1"].shape
    (True, torch.Size([3, 2]))
    """
    reader = RunReader(path, verify=verify)
    header = dict(reader.header)
    architecture = Architecture.from_dict(header.pop("architecture", None))
    found = [reader.read_state(rank) for rank in range(reader.world_size)]
    states = [unpack(state) for state in found if state is not None]
    try:
        held = held_by(reader, architecture)
        errors = _relative_errors(architecture, [_mapping(state, "rounding") for state in states])
        recipes = _mapping(header, "reductions")
        reduced = [_mapping(state, "reductions") for state in states]
        reductions = {
            architecture.resolve(name): from_recipes(
                recipes[name], [state[name] for state in reduced], name
            )
            for name in recipes
            if reduced and all(name in state for state in reduced)
        }
    except (LayerNotFoundError, LookupError, TypeError, ValueError) as error:
        raise RecordingError(f"{reader.path} contradicts itself: {error}") from error
    return Recording(
        architecture,
        held,
        reductions=reductions,
        relative_errors=errors,
        settings=header,
    )


def _relative_errors(
    architecture: Architecture, rounding: list[Mapping[str, Any]]
) -> dict[DepthIdx, float]:
    sums: dict[str, list[float]] = {}
    for name, (lost, total) in chain.from_iterable(one.items() for one in rounding):
        own = sums.setdefault(name, [0.0, 0.0])
        own[0] += lost
        own[1] += total
    return {
        architecture.resolve(name): math.sqrt(lost / total) if total else 0.0
        for name, (lost, total) in sums.items()
    }


def _mapping(values: Any, key: str) -> Mapping[str, Any]:
    found = values.get(key, {}) if isinstance(values, dict) else None
    if not isinstance(found, dict):
        raise TypeError(f"{key} is not an object")
    return found
