"""The methods of a recording that show it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.filesize import decimal
from torch import Tensor

from scio_recorder.display.figure import LayerSummary, draw_depth, draw_histograms
from scio_recorder.display.outline import Listed, Listing, Outline, num_recorded, outline
from scio_recorder.display.page import Outlined, check_page, recording_page, write_page
from scio_recorder.errors import ArgumentError, needing
from scio_recorder.layer import RowIdx, counted
from scio_recorder.recording.readable import Readable
from scio_recorder.recording.settings import in_words
from scio_recorder.recording.statistics import summarise
from scio_recorder.reductions.base import several
from scio_recorder.tensors.arguments import whole
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


class Showing(Outlined, Listed, Readable):
    """The methods by which a recording shows itself."""

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


def _row(recording: Readable, summary: LayerSummary) -> dict[str, Any]:
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


def _facts(recording: Readable) -> list[tuple[str, str]]:
    """Return names and values for the head of a page."""
    stored = [recording[label] for label in recording.stored]
    size = decimal(sum(samples.nbytes for samples in stored))
    facts = {"Samples": f"{recording.num_samples:,}"}
    if recording.has_rows:
        facts["Rows"] = f"{recording.num_rows:,}"
    if recording.rows and recording.num_samples:
        facts["Rows of a sample"] = _extent(recording.rows_of_samples().lengths)
    facts |= {
        "Recorded": num_recorded(len(recording.architecture), tuple(recording)),
        "Layers with values": f"{len(stored):,}, {size}" if stored else "none",
        "Fingerprint of the net": recording.architecture.fingerprint[:12],
    }
    if recording.made_with:
        facts["Made with"] = in_words(recording.made_with)
    return list(facts.items())


def _extent(lengths: Tensor) -> str:
    low, high = (f"{int(length):,}" for length in lengths.aminmax())
    return f"{low} to {high}, {float(lengths.double().mean()):.4g} on average"


def _notes(recording: Readable) -> list[str]:
    """Return the notes to read before the numbers."""
    notes = []
    if not recording.complete:
        notes.append("The recording was interrupted: these are the samples that it has so far.")
    if not recording.num_rows:
        notes.append("There are no rows." if recording.num_samples else "There are no samples.")
    return notes
