"""The rows of a column, those of the net's values in a batch, and which belong together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from scio_recorder.analysis.auditing.reference import FLOAT8, NARROW, Value
from scio_recorder.layer import Layer
from scio_recorder.lowlevel import Readable

_PART, _MOST_POSITIONS = 1024, 1 << 40
_PROBES_OF_A_SAMPLE, _MOST_PROBES = 4, 256
# A column fits within this multiple of rounding, and this much more; single rows within twice that.
_TIMES, _LEAST = 4.0, 2e-3


def limit_of(rounding: float) -> float:
    """Return the largest median error of a column that fits; that of single rows is twice that."""
    return _TIMES * rounding + _LEAST


def numbers(lines: Tensor) -> Tensor:
    """Return real numbers in host memory, [rows, features], in float64."""
    return (torch.view_as_real(lines) if lines.is_complex() else lines).cpu().flatten(1).double()


def lengths_of(reference: Tensor) -> Tensor:
    """Return the norm of each row, and of one that is short beside the others 0.3 of the median."""
    norms = torch.linalg.vector_norm(reference, dim=-1)
    least = 0.3 * norms.median(dim=-1, keepdim=True).values
    return torch.maximum(norms, least).clamp_min(torch.finfo(norms.dtype).tiny)


def row_errors(values: Tensor, reference: Tensor) -> Tensor:
    """Return the distance of each row to its reference, relative to the norm of that.

    Rows that are short beside the others, below 0.3 of the median norm, count as that long.

    Examples
    --------
    >>> row_errors(torch.tensor([[3.0, 5.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([0.2000, 0.0000])
    """
    distances = torch.linalg.vector_norm(values - reference, dim=-1)
    errors: Tensor = (distances / lengths_of(reference)).nan_to_num(math.inf, math.inf)
    return errors


class RecordedColumn:
    """A column of a recording: the rows of its samples.

    Parameters
    ----------
    recording : Readable
        The recording.
    layer : Layer
        The layer of the recording that names the column.
    """

    def __init__(self, recording: Readable, layer: Layer) -> None:
        self.layer = layer
        self.recording = recording
        self.values: Tensor = recording[layer.label]
        self.has_rows = recording.has_rows
        # Whether a sample is an array [positions, features], with padding.
        self.has_arrays = not self.has_rows and self.values.ndim == 3
        some = self.values[: max(1, _PART // max(1, self.values[:1].numel()))]
        self.precision = precision_of(torch.view_as_real(some) if some.is_complex() else some)

    def read(self, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the rows of some samples, [rows, features], and their keys, [rows, 2].

        A key has the number of the sample in the batch, and the position.
        """
        rows, keys = [], []
        for number, sample in enumerate(samples):
            lines, positions = self._of(sample)
            rows.append(numbers(lines))
            keys.append(torch.stack([torch.full_like(positions, number), positions], 1))
        return torch.cat(rows), torch.cat(keys)

    def _of(self, sample: int) -> tuple[Tensor, Tensor]:
        if not self.has_rows:
            lines = self.values[sample] if self.has_arrays else self.values[sample][None]
            return lines.cpu(), torch.arange(len(lines))
        rows = self.recording.rows_of_samples()[sample]
        lines, column = self.values[rows].cpu(), self.recording.rows.get("position")
        return lines, torch.arange(len(lines)) if column is None else column[rows].cpu()

    def owner_of(self, rows: Tensor, positions: Tensor, limit: float, place: int) -> int | None:
        """Return the sample that holds the rows of one of the net's samples; None if none does.

        Parameters
        ----------
        rows : Tensor
            The rows of the sample, [rows, features].
        positions : Tensor
            Their positions, [rows].
        limit : float
            The largest error of a row.
        place : int
            Where the sample should be; it need not be looked for elsewhere if it is there.
        """
        if self._has(place, rows, positions, limit):
            return place
        best, owner = limit, place
        for lines, owners in self._at(int(positions[-1])):
            errors = row_errors(lines, rows[-1].expand_as(lines))
            at = int(errors.argmin())
            if errors[at] <= best:
                best, owner = float(errors[at]), int(owners[at])
        # Two samples may well end alike.
        return owner if owner != place and self._has(owner, rows, positions, limit) else None

    def _has(self, place: int, rows: Tensor, positions: Tensor, limit: float) -> bool:
        """Whether a sample of the recording has these rows."""
        lines, keys = self.read([place])
        there, here = torch.isin(keys[:, 1], positions), torch.isin(positions, keys[:, 1])
        is_most = int(here.sum()) > len(positions) / 2
        fit = row_errors(lines[there], rows[here]) <= limit if is_most else torch.zeros(1)
        return bool(fit.double().mean() > 0.9)

    def _at(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows at a position of all samples, part by part, and whose they are."""
        owners = places = torch.arange(self.recording.num_samples)
        if self.has_rows:
            column = self.recording.rows.get("position", torch.empty(0))
            places = (column[:].cpu() == position).nonzero().squeeze(1)
            owners = self.recording.rows["sample"][:].cpu()[places]
        elif self.has_arrays and position >= self.values.shape[1]:
            return
        for start in range(0, len(owners), _PART):
            some = slice(start, start + _PART)
            lines = self.values[places[some]].cpu()
            lines = lines[:, position] if self.has_arrays else lines
            yield numbers(lines), owners[some]


def precision_of(values: Tensor) -> torch.dtype | None:
    """Return the narrowest precision that holds all numbers; None for float32 and wider.

    Examples
    --------
    >>> precision_of(torch.tensor([1.0, 1 / 3])), precision_of(torch.tensor([1 / 3]).half())
    (None, torch.float16)
    """
    if values.dtype in FLOAT8:
        return values.dtype
    shown = values[values.isfinite() & (values != 0)].double()
    fits = (x for x in (*FLOAT8, *NARROW) if torch.equal(shown.to(x).double(), shown))
    return next(fits, None) if len(shown) else None


@dataclass
class View:
    """A batch as a column sees it: which rows the net has, which the column, and their pairs.

    Parameters
    ----------
    values : mapping
        What the net's layers return and receive.
    shape : tuple of int
        The leading dimensions of these values that count rows, which may be one.
    index : Tensor
        The real rows, as flat indices into these dimensions.
    keys, others : Tensor
        The sample and the position of each row, [rows, 2], of the net and of the column.
    """

    values: Mapping[Value, Tensor]
    shape: tuple[int, ...]
    index: Tensor
    keys: Tensor
    others: Tensor

    def __post_init__(self) -> None:
        mine, theirs = (
            keys[:, 0] * _MOST_POSITIONS + keys[:, 1] for keys in (self.keys, self.others)
        )
        pairs = numpy.intersect1d(mine, theirs, assume_unique=True, return_indices=True)[1:]
        # Of rows that both have: their places in the net's and in the column's.
        self.here, self.there = map(torch.from_numpy, pairs)
        step = max(1, len(self.here) // (_PROBES_OF_A_SAMPLE * len({*self.keys[:, 0].tolist()})))
        self.probes = torch.arange(step // 2, len(self.here), step)[:_MOST_PROBES]
        self._stacks: dict[int, tuple[list[Value], Tensor]] = {}

    def lines(self, value: Value, rows: Tensor | None = None) -> Tensor:
        """Return rows of a value in host memory, [rows, features]: all of them, or some."""
        lines = self.values[value].reshape(math.prod(self.shape), -1)
        index = self.index if rows is None else self.index[rows]
        return numbers(lines[index.to(lines.device)])

    def stack(self, features: int) -> tuple[list[Value], Tensor]:
        """Return the values with this many features, and their probe rows [values, rows, ...]."""
        if features not in self._stacks:
            number, rows, probes = len(self.shape), math.prod(self.shape), self.here[self.probes]
            values = [
                value
                for value, x in self.values.items()
                if (x.shape[:number] == self.shape or x.shape[:1] == (rows,))
                and x.numel() * (1 + x.is_complex()) == rows * features
            ]
            lines = [self.lines(value, probes) for value in values]
            empty = torch.empty(0, len(probes), features, dtype=torch.float64)
            self._stacks[features] = values, torch.stack(lines) if lines else empty
        return self._stacks[features]

    def errors(self, probed: Tensor) -> dict[Value, float]:
        """Return the median error of probe rows as each value, or of those of all values."""
        values, stacked = self.stack(probed.shape[-1])
        if not stacked.numel():
            return {}
        medians = row_errors(probed, stacked).median(1).values
        return dict(zip(values, medians.tolist(), strict=True))
