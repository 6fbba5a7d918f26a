"""Rows of a column and of the net, and why they differ: shifted, swapped, missing or permuted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from scio_recorder.analysis.auditing.finding import Kind
from scio_recorder.analysis.auditing.reference import FLOAT8, NARROW, Value
from scio_recorder.layer import Layer, counted
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


# -- why rows are not those of a layer -------------------------------------------------------------

_MOST_ROWS = 64
# The samples whose rows are looked for in a batch.
_SAMPLES = 4


class Evidence(NamedTuple):
    """What was found about the rows of a column in a batch, and in which of the net's values."""

    kind: Kind
    words: str
    value: Value | None


@dataclass
class Look:
    """A column in a batch, whose rows are looked for among those of the net.

    Parameters
    ----------
    column : RecordedColumn
        The column.
    view : View
        The batch, as the column sees it.
    rows : Tensor
        The column's rows for it, [rows, features].
    places : sequence of int
        Where its samples are in the recording.
    rounding : mapping
        What rounding gives at each value.
    """

    column: RecordedColumn
    view: View
    rows: Tensor
    places: Sequence[int]
    rounding: Mapping[Value, float]

    def limit(self, value: Value) -> float:
        """Return the largest error of a row that fits a value."""
        return 2 * limit_of(self.rounding[value])

    @property
    def probed(self) -> Tensor:
        """The column's probe rows."""
        return self.rows[self.view.there[self.view.probes]]

    def off(self, value: Value) -> tuple[Evidence | None, int]:
        """Say why some rows don't fit a value that most fit, and how many nothing explains."""
        view, rows = self.view, self.rows[self.view.there]
        errors = row_errors(rows, view.lines(value, view.here))
        is_off = errors > self.limit(value)
        is_blank = is_off & ((rows == 0) | ~rows.isfinite()).all(1)
        is_off &= ~is_blank
        samples = sorted({*view.keys[view.here[is_off], 0].tolist()})[:_SAMPLES]
        lengths = [
            keys[:, 0].bincount(minlength=len(self.places)) for keys in (view.keys, view.others)
        ]
        # Of arrays, padding is no part of the net's rows.
        if self.column.has_rows or len(view.here) < len(view.keys):
            samples += (lengths[0] != lengths[1]).nonzero().flatten()[:1].tolist()
        elsewhere = self.elsewhere(value, samples)
        number, num_blank = int(is_off.sum()), int(is_blank.sum())
        if elsewhere is None and num_blank:
            words = f"{counted(num_blank, 'row')} are blank"
            return Evidence("positions missing", words, value), number
        return elsewhere, 0 if elsewhere else number

    def explained(self, target: Value | None) -> Evidence | None:
        """Say what the rows are, of a column that fits nothing."""
        if not len(self.rows):
            return Evidence("positions missing", "all samples of a batch lack their rows", None)
        if not self.rows.isfinite().any() or bool((self.rows == self.rows[0]).all()):
            return Evidence("constant", "all rows are alike", None)
        values = self.view.stack(self.rows.shape[1])[0]
        # What its name says comes first.
        values = sorted(values, key=lambda value: value != target)
        first = values[: target in values]
        samples = range(len(self.places))[:_SAMPLES]
        attempts = [
            *(partial(self.elsewhere, value, samples) for value in [*first, *self._likely(values)]),
            *(partial(self.elsewhere, value, samples[:1]) for value in values[len(first) :]),
            *(partial(self._permuted, value) for value in values),
        ]
        return next(filter(None, (attempt() for attempt in attempts)), None)

    def elsewhere(self, value: Value, samples: Sequence[int]) -> Evidence | None:
        """Say where the rows of some samples are, if they are those of a value."""
        if not samples:
            return None
        lines, keys = self.view.lines(value), self.view.keys
        limit = self.limit(value)
        for sample in samples:
            at, place = (keys[:, 0] == sample).nonzero().flatten(), self.places[sample]
            owner = self.column.owner_of(lines[at], keys[at, 1], limit, place)
            if owner not in (place, None):
                here, there = (repr(self.column.recording.sample_ids[x]) for x in (place, owner))
                words = f"what belongs to sample {here} is at {there}"
                return Evidence("samples swapped", words, value)
        moved = self._moved(lines, samples, limit)
        return None if moved is None else Evidence(*moved, value)

    def _moved(
        self, reference: Tensor, samples: Iterable[int], limit: float
    ) -> tuple[Kind, str] | None:
        """Say how the positions of samples lie in the column, if its rows are those of a layer."""
        offsets, pads, spare = [], [], []
        for sample in samples:
            here, there = (keys[:, 0] == sample for keys in (self.view.keys, self.view.others))
            mine, theirs = self.view.keys[here, 1], self.view.others[there, 1]
            width = self.view.shape[1] if self.column.has_arrays else len(mine)
            chosen = torch.arange(0, len(theirs), max(1, len(theirs) // _MOST_ROWS))
            least, nearest = _distances(self.rows[there][chosen], reference[here]).min(1)
            moved = (mine[nearest] - theirs[chosen])[least <= limit]
            if 2 * len(moved) < min(len(chosen), len(mine)):
                return None
            offsets.append(int(moved.mode().values) if len(moved) else 0)
            pads.append(width - len(mine))
            spare.append(len(theirs) - width)
        return _kind_of(offsets, pads, spare)

    def _likely(self, values: Iterable[Value]) -> list[Value]:
        """Return the value of which most rows of a sample are somewhere in the same sample."""
        sample = int(self.view.keys[:, 0].mode().values)
        here = (self.view.keys[:, 0] == sample).nonzero().flatten()
        rows = self.rows[self.view.others[:, 0] == sample][:_MOST_ROWS]
        least = {x: _distances(rows, self.view.lines(x, here)).amin(1) for x in values}
        fitting = [x for x in least if least[x].median() <= self.limit(x)]
        return sorted(fitting, key=lambda value: float(least[value].median()))[:1]

    def _permuted(self, value: Value) -> Evidence | None:
        """Say that the column has a value's features in another order, if it does.

        Every second row tells the order, and the others prove it.
        """
        some = slice(4 * _MOST_ROWS)
        rows = self.rows[self.view.there[some]]
        lines = self.view.lines(value, self.view.here[some])
        if len(rows) < 4 or not rows.isfinite().all():
            return None
        order = torch.cdist(rows[::2].T, lines[::2].T).argmin(1)
        is_moved = (order != torch.arange(len(order))).double().mean() > 0.1
        error = row_errors(rows[1::2], lines[1::2, order]).median()
        if not is_moved or error > self.limit(value):
            return None
        # Of permuted heads, most features keep their neighbours.
        stay_together = (order.diff() == 1).double().mean() > 0.5
        kind: Kind = "heads permuted" if stay_together else "features permuted"
        return Evidence(kind, f"{error:.2g} off in the order that was found", value)


def _kind_of(
    offsets: Sequence[int], pads: Sequence[int], spare: Sequence[int]
) -> tuple[Kind, str] | None:
    """Say what the samples' offsets, padding and numbers of rows too many mean."""
    if max(spare) > 0:
        return "padding counted", f"a sample has {counted(max(spare), 'row')} more than real tokens"
    if min(spare) < 0:
        begin = max(offsets)
        where = f", from its beginning: it starts at position {begin}" if begin else ""
        return "positions missing", f"a sample lacks {counted(-min(spare), 'row')}{where}"
    if any(pads) and all(abs(x) == pad for x, pad in zip(offsets, pads, strict=True)):
        return "other padding side", "the padding is on the other side of the real tokens"
    if any(offsets) and len({*offsets}) == 1:
        where = "later" if offsets[0] > 0 else "earlier"
        words = f"a row holds what belongs {counted(abs(offsets[0]), 'position')} {where}"
        return "shifted by a token", words
    return None


def _distances(rows: Tensor, reference: Tensor) -> Tensor:
    """Return the error of each row as each row of the reference, [rows, rows]."""
    way = "donot_use_mm_for_euclid_dist"
    apart = torch.cdist(rows, reference, compute_mode=way)
    return (apart / lengths_of(reference)).nan_to_num(torch.inf, torch.inf)
