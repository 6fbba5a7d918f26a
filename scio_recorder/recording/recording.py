"""The recording of a whole dataset: samples or summaries by layer, in memory or in a folder."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

from rich.filesize import decimal
from torch import Tensor

from scio_recorder import reductions as library
from scio_recorder.display.figure import LayerSummary, draw_depth, draw_histograms
from scio_recorder.display.outline import Listed, Listing, Outline, num_recorded, outline
from scio_recorder.display.page import Outlined, check_page, write_page
from scio_recorder.display.recording_page import recording_page
from scio_recorder.errors import (
    ArgumentError,
    CollectError,
    LayerNotFoundError,
    RecordingError,
    needing,
)
from scio_recorder.layer import RowIdx, TensorSpec, counted, text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.recording.loader import BUFFER_BYTES, Arguments, RecordingLoader, rows_of
from scio_recorder.recording.options import in_words, recipe_of
from scio_recorder.recording.readable import Readable
from scio_recorder.recording.statistics import summarise
from scio_recorder.reductions import Reduction
from scio_recorder.reductions.base import Reductions, of_each, several, states_of
from scio_recorder.stores import Disk, Job
from scio_recorder.stores.disk import CHUNK_BYTES, held_by
from scio_recorder.stores.disk_format.reader import to_ids
from scio_recorder.stores.files import RunReader
from scio_recorder.stores.kept_inputs import KeptCall, unpack
from scio_recorder.tensors.arguments import (
    ProcessRank,
    booleans,
    names_arguments,
    this_process,
    whole,
)
from scio_recorder.tensors.properties import dtype_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_MOST_HISTOGRAMS = 100
FRAME_COLUMNS = (
    *("label", "name", "type", "samples", "rows", "shape", "dtype", "bytes"),
    *("mean", "std", "min", "max", "zeros", "nan", "inf", "max_abs", "units", "dead", "saturated"),
)
_WHOLE_NUMBERS = ("bytes", "nan", "inf", "units", "dead", "saturated")


class Recording(Outlined, Listed, Readable):
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

    def __repr__(self) -> str:
        layers = ", ".join(map(text_of, self))
        state = "" if self.complete else ", interrupted"
        return f"<{self._headline}: {layers}{state}>"

    @property
    def _headline(self) -> str:
        rows = f", {counted(self.num_rows, 'row')}" if self.has_rows else ""
        return f"Recording of {counted(self.num_samples, 'sample')}{rows}"

    def _listing(self) -> Listing:
        """Return what ``print`` shows: the name of each layer, and the shape of what is kept."""
        rows = []
        for layer in map(self._architecture.__getitem__, self._chosen(None)):
            kept = ", ".join(map(repr, several(self._reductions.get(layer.label, []))))
            if not kept:
                values = self[layer.label]
                kept = f"{list(values.shape)} {dtype_name(values.dtype)}"
            rows.append((str(layer.label), layer.name, layer.type_name, kept))
        place = "" if self.path is None else f", in {self.path}"
        state = "" if self.complete else ", interrupted"
        names = "Label", "Name", "Type", "Kept"
        return Listing(f"{self._headline}{place}{state}", names, (), rows)

    @names_arguments
    def plot(
        self,
        kind: Literal["histograms", "depth"] = "histograms",
        *,
        layers: Iterable[RowIdx | str] | None = None,
        bins: int = 50,
    ) -> Figure:
        """Draw the layers: a histogram of each, or mean and spread over the depth of the net.

        Parameters
        ----------
        kind : {"histograms", "depth"}
            "histograms": all values of each layer. "depth": mean, one standard deviation to both
            sides, smallest and largest value, layer after layer.
        layers : iterable of (int, int) or str, optional
            Layers of the recording; by default all.
        bins : int, default 50
            Number of bins of equal width; the bins of a ``Histogram`` are its own.

        Returns
        -------
        matplotlib.figure.Figure
            Made without pyplot, so it need not be closed. Layers that can't be drawn are named
            below the figure. Histograms are those that `report` describes.

        Raises
        ------
        ArgumentError
            There is no such kind, ``bins`` is not a whole number from 1 on, or there are more than
            100 histograms.
        LayerNotFoundError
            One of the layers was not recorded.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> figure = rnet.collect([torch.randn(9, 2)]).plot()
        >>> figure.axes[0].get_title()
        '0-1 ReLU'
        """
        if kind not in ("histograms", "depth"):
            raise ArgumentError(f'plot(kind={kind!r}): write "histograms" or "depth"')
        labels = self._chosen(layers)
        if kind == "histograms" and len(labels) > _MOST_HISTOGRAMS:
            raise ArgumentError(
                f"{len(labels):,} histograms don't fit into a figure: choose up to "
                f"{_MOST_HISTOGRAMS} layers "
                'with layers=, write a report, or plot("depth")'
            )
        draw = draw_histograms if kind == "histograms" else draw_depth
        return draw(summarise(self, labels, whole("bins", bins, 1, ArgumentError)))

    @names_arguments
    def report(
        self, path: str | os.PathLike[str], *, title: str | None = None, bins: int = 50
    ) -> Path:
        """Write an HTML page: statistics, histograms, dead and saturated units, the architecture.

        The page is one file. You can send it to others, and it opens without an internet
        connection. Samples on disk are read twice, in parts.

        Parameters
        ----------
        path : str or path-like
            The file, which is replaced if it exists.
        title : str, optional
            The heading; the type of the net by default.
        bins : int, default 50
            Number of bins of each histogram.

        Returns
        -------
        pathlib.Path
            The file.

        Raises
        ------
        RecordingError
            The file can't be written, or samples can't be read; no partial page is left.
        ArgumentError
            ``path`` names no file, ``title`` is not a string, or ``bins`` is not a whole number
            from 1 on.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = rnet.collect([torch.randn(9, 2)]).report(f"{folder}/page.html")
        ...     page.read_text(encoding="utf-8")[:15]
        '<!DOCTYPE html>'
        """
        check_page(path, title, ArgumentError)
        # Nothing is read before the file is known to be writable.
        return write_page(path, self._page(title, whole("bins", bins, 1, ArgumentError)))

    @names_arguments
    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each layer: its type, its size, and statistics.

        Returns
        -------
        pandas.DataFrame
            Indexed by label, ``"1-3"``. Columns: name, type, samples, rows if these are not
            samples, shape and dtype of a row, bytes; mean, std, min, max and the largest absolute
            value in float64, without NaNs; zeros, the share of values that are 0; nan and inf, the
            numbers of such values; units, the number of channels or features; dead, how many units
            have only one value; saturated, how many have 95 % of their values at a bound of their
            activation function. Reduced layers have only the numbers of samples and rows, and
            after ``Alive`` those of units.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> rnet.collect([torch.tensor([[1.0, 2.0]])]).to_frame().loc["0-1", "mean"].item()
        1.5
        """
        with needing("frame", "a frame"):
            import pandas as pd

        columns = [name for name in FRAME_COLUMNS if name != "rows" or self.has_rows]
        frame = pd.DataFrame(self.layer_rows(), columns=columns).set_index("label")
        # Whole numbers stay whole even if some are missing.
        return frame.astype(dict.fromkeys(_WHOLE_NUMBERS, "Int64"))

    def layer_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `to_frame` without pandas; unknown entries are absent or None.

        Returns
        -------
        list of dict
            One for each layer.
        """
        return [_row(self, summary) for summary in summarise(self, list(self), None)]

    def _page(self, title: str | None, bins: int) -> Iterator[str]:
        rows = list(self._architecture.values())
        # Only once the file is known to be writable.
        yield recording_page(
            title=title or f"Recording of {rows[0].type_name if rows else 'a net'}",
            facts=_facts(self),
            outline=self._outline(),
            layers=summarise(self, self._chosen(None), bins),
            notes=_notes(self),
        )

    def _chosen(self, layers: Iterable[RowIdx | str] | None) -> list[RowIdx]:
        """Return labels in the order of execution."""
        wanted = set(self) if layers is None else {self._label(key) for key in layers}
        return self._architecture.in_order(wanted)

    def _outline(self) -> Outline:
        rows, inner = list(self._architecture.values()), self._architecture.operations
        return outline("Recording", rows, tuple(self), inner)

    @names_arguments
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
        place = this_process()
        if rank is not None or world_size is not None:
            place = ProcessRank.checked(rank, world_size, ArgumentError)
        arguments = Arguments(batch_size, shuffle, seed, *place, drop_last, buffer_bytes, with_rows)
        layers, fingerprint = rows_of(self, selectors), self.architecture.fingerprint
        return RecordingLoader(layers, dict(self.rows), fingerprint, arguments)

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
        arrays: dict[RowIdx | str, Tensor] = {label: self[label] for label in self.stored}
        arrays.update(self.rows)
        writer = Disk(path).open(Job(self.architecture, self.stored, None, self._saved_settings))
        try:
            columns = {
                key: writer.column(key, TensorSpec(tuple(whole.shape[1:]), whole.dtype), whole[:0])
                for key, whole in arrays.items()
            }
            row_bytes = sum([column.row_bytes for column in columns.values()])
            for rows, calls in self._batches(max(1, CHUNK_BYTES // max(1, row_bytes))):
                for key, column in columns.items():
                    column.place(writer.start, len(rows)).copy_(arrays[key][rows.start : rows.stop])
                # If rows are not samples, all of these begin with the first rows.
                stop = self.num_samples if self.has_rows else rows.stop
                ids = to_ids(self.sample_ids[len(writer.sample_ids) : stop])
                # States may be large, and only the last one counts.
                state = self._state if rows.stop == self.num_rows else dict
                kept = {
                    text_of(label): writer.calls.keep(self.architecture[label], call)
                    for label, call in calls.items()
                }
                writer.commit(ids, state, kept, rows=len(rows) if self.has_rows else None)
            writer.finish(self._state, is_complete=self.complete)
        except BaseException:
            writer.abandon(None)
            raise

    def _batches(self, step: int) -> Iterator[tuple[range, Mapping[RowIdx, KeptCall]]]:
        """Yield the rows of each batch, and its kept calls."""
        calls, num_rows, stop = self.calls, self.num_rows, 0
        if not calls.labels:
            # Samples without rows count as well.
            for start in range(0, max(num_rows, min(1, self.num_samples)), step):
                yield range(start, min(start + step, num_rows)), {}
        for number, rows in enumerate(calls.rows):
            stop += rows
            kept = {label: calls.call(number, label) for label in calls.labels}
            yield range(stop - rows, stop), kept

    def _saved_settings(self) -> dict[str, Any]:
        # Digests of weights, and settings of a recording made by hand, are unknown, so resuming is
        # refused. A layer that returns a structure may have only calls.
        return {
            **self.settings,
            "layers": list(map(text_of, dict.fromkeys((*self, *self.calls.labels)))),
            "reductions": {
                text_of(label): of_each(recipe_of, each) for label, each in self.reductions.items()
            },
            "inputs": bool(self.calls.labels),
            "made_with": dict(self.made_with),
        }

    def _state(self) -> dict[str, Any]:
        errors = self.relative_errors
        rounding = {text_of(label): [error**2, 1.0] for label, error in errors.items()}
        return {"reductions": states_of(self.reductions), "rounding": rounding}


@names_arguments
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
    booleans(ArgumentError, verify=verify)
    if isinstance(path, Recording):
        raise RecordingError("this is a Recording, which is open already: read it as it is")
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
            reductions[label] = _from_recipes(recipes, reduced, name, patterns.get(label))
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


def _from_recipes(
    recipes: Any, states: Sequence[Any], where: str, known: Reductions | None = None
) -> Reductions:
    """Return the reductions of recipes, in their saved states.

    Only classes of this library are constructed, by names from a fixed list. States of several
    processes are merged. ``known`` are the same reductions if the caller has them; they may be of
    other classes.
    """
    try:
        patterns = [_pattern(recipe, where) for recipe in several(recipes)]
        patterns = patterns if known is None else several(known)
        each = zip(patterns, *map(several, states), strict=True)
        merged = [_merged(pattern, states_of_layer, where) for pattern, *states_of_layer in each]
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise RecordingError(f"{where}: its reduction can't be restored: {error}") from error
    return merged if isinstance(recipes, list) else merged[0]


def _pattern(recipe: Any, where: str) -> Reduction:
    """Return a reduction without data, or what stands for one of an unknown class."""
    options = dict(recipe)
    kind = options.pop("kind")
    if options.pop("custom", False) or kind not in library.__all__:
        return _Unreadable(
            f"layer {where} was reduced by {kind}, which is not a reduction of this library and "
            "can't be restored without its class: collect with resume=True and the same reductions"
        )
    pattern: Reduction = getattr(library, kind).from_recipe(**options)
    return pattern


def _merged(pattern: Reduction, states: Sequence[dict[str, Any]], where: str) -> Reduction:
    if isinstance(pattern, _Unreadable):
        return pattern
    each = [pattern.fresh() for _ in states]
    for restored, state in zip(each, states, strict=True):
        restored.load_state_dict(state)
    for other in each[1:]:
        try:
            each[0].merge(other)
        except CollectError as error:
            return _Unreadable(
                f"layer {where} was reduced by {type(pattern).__name__} in {len(states)} "
                f"processes, whose results can't be merged: {error}"
            )
    return each[0]


class _Unreadable(Reduction):
    """Stands for a user's reduction: the rest of a recording can be read without it."""

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise RecordingError(self._message)

    update = merge = compute = reset = state_dict = load_state_dict = fresh = cast("Any", _refuse)


def _row(recording: Recording, summary: LayerSummary) -> dict[str, Any]:
    layer, values = summary.layer, summary.values
    row: dict[str, Any] = {
        "label": str(layer.label),
        "name": layer.name,
        "type": layer.type_name,
        "samples": recording.num_samples,
    }
    if recording.has_rows:
        row["rows"] = recording.num_rows
    if summary.num_bytes is not None:
        row |= {"shape": summary.shape, "dtype": summary.dtype, "bytes": summary.num_bytes}
        row |= {"mean": values.mean, "std": values.std, "min": values.low, "max": values.high}
        row |= {"zeros": values.zeros, "nan": values.nans, "inf": values.infinities}
        if values.low is not None and values.high is not None:
            row["max_abs"] = max(abs(values.low), abs(values.high))
    if summary.units is not None:
        units = summary.units
        row |= {"units": units.count, "dead": units.dead, "saturated": units.saturated}
    return row


def _facts(recording: Recording) -> list[tuple[str, str]]:
    """Return names and values for the head of a page."""
    stored = [recording[label] for label in recording.stored]
    size = decimal(sum(samples.nbytes for samples in stored))
    facts = {"Samples": f"{recording.num_samples:,}"}
    if recording.has_rows:
        facts["Rows"] = f"{recording.num_rows:,}"
    if recording.rows and recording.num_samples:
        lengths = recording.rows_of_samples().lengths
        low, high = (f"{int(length):,}" for length in lengths.aminmax())
        mean = float(lengths.double().mean())
        facts["Rows of a sample"] = f"{low} to {high}, {mean:.4g} on average"
    facts |= {
        "Recorded": num_recorded(len(recording.architecture), tuple(recording)),
        "Layers with values": f"{len(stored):,}, {size}" if stored else "none",
        "Fingerprint of the net": recording.architecture.fingerprint[:12],
    }
    if recording.made_with:
        facts["Made with"] = in_words(recording.made_with)
    return list(facts.items())


def _notes(recording: Recording) -> list[str]:
    """Return the notes to read before the numbers."""
    notes = []
    if not recording.complete:
        notes.append("The recording was interrupted: these are the samples that it has so far.")
    if not recording.num_rows:
        notes.append("There are no rows." if recording.num_samples else "There are no samples.")
    return notes
