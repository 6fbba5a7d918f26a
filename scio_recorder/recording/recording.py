"""The recording of a whole dataset: samples or summaries by layer, in memory or in a folder."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from scio_recorder.errors import LayerNotFoundError, RecordingError
from scio_recorder.layer import RowIdx, TensorSpec, text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.recording.further_methods import FurtherMethods
from scio_recorder.recording.loader import (
    BUFFER_BYTES,
    Arguments,
    RecordingLoader,
    place_of,
    rows_of,
)
from scio_recorder.recording.settings import from_recipes, recipes_of, states_of
from scio_recorder.recording.showing import Showing
from scio_recorder.reductions.base import Reductions
from scio_recorder.stores import Disk, Job
from scio_recorder.stores.disk import CHUNK_BYTES, held_by
from scio_recorder.stores.disk_format.ids import to_ids
from scio_recorder.stores.files import RunReader
from scio_recorder.stores.kept_inputs import KeptCall, unpack


class Recording(FurtherMethods, Showing):
    """The activations of a dataset by label, read-only; made by ``collect`` and ``open_recording``.

    A key is ``(1, 3)``, ``"1-3"`` or an unambiguous qualified name. The value is a tensor
    [rows, ...], with a row for each sample, unless ``collect`` was given ``rows=``. On disk it is
    read when it is used. For a reduced layer, the value is the reduction's result, or the
    list of results of several reductions.

    Parameters
    ----------
    architecture : Architecture
        The labelled net, without the net itself.
    held : Held
        The content of the store.
    reductions : mapping
        The reductions by layer.
    relative_errors : mapping
        The error of rounding to ``dtype``, by layer.
    settings : mapping, optional
        The settings with which the recording was made, if known.

    Attributes
    ----------
    sample_ids : SampleIds
        One integer or string for each sample: a sequence.
    complete : bool
        Whether nothing is missing: False for an interrupted run.
    path : str or None
        The folder or the URL of a recording that lies in one.
    inputs : LayerMapping
        After ``record(..., inputs=True)``: for each layer a sequence with ``(args, kwargs)`` of
        every batch, as copies in host memory.
    calls : Calls
        The calls that :meth:`recompute` runs again: inputs and the states in which modules ran.
    relative_errors : LayerMapping
        The norm of the rounding errors divided by the norm of the values, for each layer, if
        ``dtype`` loses precision. Finite values count, and one that became infinite counts as lost.

    Examples
    --------
    >>> from torch import nn
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Sequential(nn.Flatten(), nn.ReLU()), input_size=(1, 2, 2))
    >>> rnet.record("1")
    >>> recording = rnet.collect([torch.ones(3, 2, 2), -torch.ones(1, 2, 2)])
    >>> recording["1-2"].sum(1)
    tensor([4., 4., 4., 0.])
    >>> len(recording), recording.num_samples, list(recording.sample_ids)
    (1, 4, [0, 1, 2, 3])
    """

    def loader(
        self,
        *selectors: object,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        with_rows: bool = False,
    ) -> RecordingLoader:
        """Return an iterable over batches of rows, in order or shuffled, in bounded memory.

        It is a dataset for ``DataLoader(..., batch_size=None, num_workers=2)`` as well, whose
        workers divide the batches.

        Parameters
        ----------
        *selectors : label, str, pattern, type or callable
            Layers, as in ``record``; by default all that have rows. Reduced layers have none.
        batch_size : int
            Rows in a batch; the last one may have fewer.
        shuffle : bool, default False
            Whether rows come in random order: runs of consecutive rows, of at most 16 MiB, are
            permuted, and then the rows of those that are in the buffer at once.
        seed : int, default 0
            Decides the order, with the epoch that ``set_epoch`` was given.
        rank, world_size : int, optional
            The number of this process, and how many there are. Each process gets its own rows;
            their numbers differ by one at most. By default they come from ``torch.distributed``,
            if it has been initialised.
        drop_last : bool, default False
            Whether to leave out the last batch if it would be short. Then all ranks have equally
            many batches.
        buffer_bytes : int, default 256 MiB
            The memory for rows from disk, two batches included, in each worker.
        with_rows : bool, default False
            Whether to give pairs of a batch and what is known about its rows: a mapping of all
            columns of ``rows``, or if there are none, ``{"sample": Tensor [batch]}``, positions in
            ``sample_ids``.

        Returns
        -------
        RecordingLoader
            Gives tensors [batch, ...] if one layer is selected, otherwise dicts of these by label.
            It has ``len``, ``set_epoch``, ``state_dict`` and ``load_state_dict``.

        Raises
        ------
        ArgumentError
            An argument has a value that can't work, or the layers have no rows.
        LayerNotFoundError
            A selector matches none of the layers here.
        RecordingError
            While iterating: the disk fails, or its data is damaged.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Identity(), input_size=(1,))
        >>> rnet.record("0-1")
        >>> recording = rnet.collect([torch.arange(8)])
        >>> loader = recording.loader("0-1", batch_size=3, shuffle=True)
        >>> [len(batch) for batch in loader], torch.cat(list(loader)).sum()
        ([3, 3, 2], tensor(28))
        """
        place = place_of(rank, world_size)
        arguments = Arguments(batch_size, shuffle, seed, *place, drop_last, buffer_bytes, with_rows)
        layers, fingerprint = rows_of(self, selectors), self.architecture.fingerprint
        return RecordingLoader(layers, self.rows, fingerprint, arguments)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to a folder, from which ``open_recording`` reads it.

        Parameters
        ----------
        path : str or path-like
            The folder, or the URL of a place in a bucket. It is empty or does not exist yet.

        Raises
        ------
        RecordingError
            The folder is not empty, or the disk fails.
        CollectError
            The recording has inputs of a type that can't be kept on disk.

        Examples
        --------
        >>> import tempfile
        >>> import torch
        >>> import scio_recorder
        >>> rnet = scio_recorder.Recorder(torch.nn.ReLU(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> folder = tempfile.TemporaryDirectory()
        >>> rnet.collect([torch.ones(1, 2)]).save(folder.name + "/run")
        >>> scio_recorder.open_recording(folder.name + "/run")["0-1"][:]
        tensor([[1., 1.]])
        >>> folder.cleanup()
        """
        _save(self, path)

    def __repr__(self) -> str:
        layers = ", ".join(map(text_of, self))
        state = "" if self.complete else ", interrupted"
        return f"<{self._headline}: {layers}{state}>"


def open_recording(path: str | os.PathLike[str], *, verify: bool = False) -> Recording:
    """Open a recording on disk. No net is needed, and no code of the recording is run.

    Parameters
    ----------
    path : str or path-like
        The folder that ``store="disk:PATH"`` or :meth:`Recording.save` wrote, or the URL of a place
        in a bucket, such as ``"s3://bucket/run"``.
    verify : bool, default False
        Read all data and compare its checksums now, rather than when it is used.

    Returns
    -------
    Recording
        It is complete, or holds what an interrupted run made durable. Samples are read when they
        are used.

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
    return opened(RunReader(path, verify=verify), {})


def opened(reader: RunReader, patterns: Mapping[RowIdx, Reductions]) -> Recording:
    """Return the recording of a reader; ``given`` are its reductions, if the caller has them."""
    header: dict[str, Any] = dict(reader.header)
    architecture = Architecture.from_dict(header.pop("architecture", None))
    try:
        states = _states(reader)
    except RecordingError as error:
        again = RunReader(reader.path)
        if error.errno != errno.ENOENT or again.fingerprint() == reader.fingerprint():
            raise
        # A writer has committed more meanwhile, and replaced a state.
        return opened(again, patterns)
    try:
        held = held_by(reader, architecture)
        errors = _relative_errors(architecture, states)
        reductions = {}
        for name, recipes in header.get("reductions", {}).items() if states else ():
            label = architecture.resolve(name)
            reduced = [state["reductions"][name] for state in states]
            reductions[label] = from_recipes(recipes, reduced, name, patterns.get(label))
    except (LayerNotFoundError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"{reader.path} contradicts itself: {error}") from error
    return Recording(
        architecture, held, reductions=reductions, relative_errors=errors, settings=header
    )


def _states(reader: RunReader) -> list[Any]:
    """Return the last state of each rank that has one; `save` writes it at the end."""
    states = map(reader.read_state, range(reader.world_size))
    contents = [unpack(state) for state in states if state is not None]
    return [content for content in contents if content]


def _relative_errors(architecture: Architecture, states: list[Any]) -> dict[RowIdx, float]:
    """Return the norm of rounding errors over that of all values, of all ranks, by layer."""
    errors = {}
    for name in dict.fromkeys(chain.from_iterable(state["rounding"] for state in states)):
        sums = [state["rounding"].get(name, (0.0, 0.0)) for state in states]
        lost, total = map(sum, zip(*sums, strict=True))
        errors[architecture.resolve(name)] = math.sqrt(lost / total) if total else 0.0
    return errors


def _save(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write every sample, the reductions' states and the settings, as a new collection would."""
    arrays: dict[RowIdx | str, Tensor] = {label: recording[label] for label in recording.stored}
    arrays.update(recording.rows)
    job = Job(recording.architecture, recording.stored, None, lambda: _settings(recording))
    writer = Disk(path).open(job)
    try:
        columns = {
            key: writer.column(key, TensorSpec(tuple(whole.shape[1:]), whole.dtype), whole[:0])
            for key, whole in arrays.items()
        }
        row_bytes = sum([column.row_bytes for column in columns.values()])
        for rows, calls in _batches(recording, max(1, CHUNK_BYTES // max(1, row_bytes))):
            for key, column in columns.items():
                column.place(writer.start, len(rows)).copy_(arrays[key][rows.start : rows.stop])
            # If rows are not samples, all of these begin with the first rows.
            stop = recording.num_samples if recording.has_rows else rows.stop
            ids = to_ids(recording.sample_ids[len(writer.sample_ids) : stop])
            # States may be large, and only the last one counts.
            state = partial(_state_of, recording) if rows.stop == recording.num_rows else dict
            kept = {
                text_of(label): writer.calls.keep(recording.architecture[label], call)
                for label, call in calls.items()
            }
            writer.commit(ids, state, kept, rows=len(rows) if recording.has_rows else None)
        writer.finish(partial(_state_of, recording), is_complete=recording.complete)
    except BaseException:
        writer.abandon(None)
        raise


def _batches(recording: Recording, step: int) -> Iterator[tuple[range, Mapping[RowIdx, KeptCall]]]:
    """Yield the rows of each batch, and its kept calls."""
    calls, num_rows, stop = recording.calls, recording.num_rows, 0
    if not calls.labels:
        # Samples without rows count as well.
        for start in range(0, max(num_rows, min(1, recording.num_samples)), step):
            yield range(start, min(start + step, num_rows)), {}
    for number, rows in enumerate(calls.rows):
        stop += rows
        yield range(stop - rows, stop), {label: calls.call(number, label) for label in calls.labels}


def _settings(recording: Recording) -> dict[str, Any]:
    # Digests of weights, and settings of a recording made by hand, are unknown, so resuming is
    # refused. A layer that returns a structure may have only calls.
    layers = dict.fromkeys((*recording, *recording.calls.labels))
    return {
        **recording.settings,
        "layers": [text_of(label) for label in layers],
        "reductions": {
            text_of(label): recipes_of(patterns) for label, patterns in recording.reductions.items()
        },
        "inputs": bool(recording.calls.labels),
        "made_with": dict(recording.made_with),
    }


def _state_of(recording: Recording) -> dict[str, Any]:
    errors = recording.relative_errors
    rounding = {text_of(label): [error**2, 1.0] for label, error in errors.items()}
    return {"reductions": states_of(recording.reductions), "rounding": rounding}
