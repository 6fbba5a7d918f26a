"""Why the rows of a column are not those of a layer: shifted, swapped, missing or permuted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scio_recorder.analysis.auditing.finding import Kind
from scio_recorder.analysis.auditing.reference import (
    FLOAT8,
    NARROW,
    Value,
    View,
    numbers,
    row_errors,
)
from scio_recorder.layer import Layer, counted
from scio_recorder.lowlevel import Readable

_MOST_ROWS, _PART = 64, 1024
# The samples whose rows are looked for in a batch.
_SAMPLES = 4


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
        # Others than three dimensions have no positions.
        self.has_positions = self.has_rows or self.values.ndim == 3
        some = self.values[: max(1, _PART // max(1, self.values[:1].numel()))]
        self.precisions = precisions_of(torch.view_as_real(some) if some.is_complex() else some)

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
            lines = self.values[sample] if self.has_positions else self.values[sample][None]
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
        best, owner = limit, None
        for lines, owners in self._at(int(positions[-1])):
            if lines.shape[1] != rows.shape[1]:
                return None
            errors = row_errors(lines, rows[-1].double().expand_as(lines))
            at = int(errors.argmin())
            if errors[at] <= best:
                best, owner = float(errors[at]), int(owners[at])
        # Two samples may well end alike.
        is_whole = owner is not None and self._has(owner, rows, positions, limit)
        return owner if is_whole else None

    def _has(self, place: int, rows: Tensor, positions: Tensor, limit: float) -> bool:
        """Whether a sample of the recording has these rows."""
        lines, keys = self.read([place])
        there, here = torch.isin(keys[:, 1], positions), torch.isin(positions, keys[:, 1])
        fit = row_errors(lines[there], rows[here]) <= limit
        return len(fit) > len(positions) / 2 and bool(fit.double().mean() > 0.9)

    def _at(self, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows at a position of all samples, part by part, and whose they are."""
        owners = torch.arange(self.recording.num_samples)
        rows = self.recording.rows
        places: Tensor | None = None
        if self.has_rows:
            column = rows.get("position")
            is_there = torch.ones(0) if column is None else column[:].cpu() == position
            places = is_there.nonzero().squeeze(1)
            owners = rows["sample"][:].cpu()[places]
        elif self.has_positions and position >= self.values.shape[1]:
            return
        for start in range(0, len(owners), _PART):
            some = slice(start, start + _PART)
            lines = self.values[some if places is None else places[some]].cpu()
            lines = lines[:, position] if places is None and self.has_positions else lines
            yield numbers(lines).double(), owners[some]


def precisions_of(values: Tensor) -> set[torch.dtype]:
    """Return the precisions narrower than float32 that numbers show: their own, and the narrowest.

    Examples
    --------
    >>> precisions_of(torch.tensor([1.0, 1 / 3])), precisions_of(torch.tensor([1 / 3]).half())
    (set(), {torch.float16})
    """
    own = {values.dtype} & {*NARROW, *FLOAT8}
    shown = values.flatten().float() if own else values.flatten()
    shown = shown[shown.isfinite() & (shown != 0)]
    for dtype in (*FLOAT8, *NARROW):
        if len(shown) and torch.equal(shown.to(dtype).to(shown.dtype), shown):
            # Small numbers in one kind of float8 look like those of the other.
            return own | ({*FLOAT8} if dtype in FLOAT8 else {dtype})
    return own


class Evidence(NamedTuple):
    """What was found about the rows of a column in a batch, and in which of the net's values."""

    kind: Kind
    words: str
    value: Value | None
    num_rows: int = 0


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
    row_limit : callable
        ``value ->`` the largest error of a row that fits.
    """

    column: RecordedColumn
    view: View
    rows: Tensor
    places: Sequence[int]
    row_limit: Callable[[Value], float]

    @property
    def values(self) -> list[Value]:
        """What has as many features as the column."""
        return self.view.stack(self.rows.shape[1])[0]

    def off(self, value: Value) -> tuple[list[Evidence], int]:
        """Say which rows don't fit a value that most fit; count those that nothing explains."""
        view, at = self.view, self.rows[self.view.there]
        is_off = row_errors(at, view.lines(value, view.here)) > self.row_limit(value)
        blank = is_off & ((at == 0) | ~at.isfinite()).all(1)
        found, number = list[Evidence](), int(blank.sum())
        if number:
            words = f"{counted(number, 'row')} are blank"
            found.append(Evidence("positions missing", words, value, number))
        is_off &= ~blank
        samples = sorted({*view.keys[view.here[is_off], 0].tolist()})[:_SAMPLES]
        lengths = [torch.bincount(keys[:, 0]) for keys in (view.keys, view.others)]
        # Of arrays, padding is no part of the net's rows.
        if self.column.has_rows or len(view.here) < len(view.keys):
            samples += (lengths[0] != lengths[1]).nonzero().flatten()[:1].tolist()
        elsewhere = self.elsewhere(value, samples)
        return [*found, *filter(None, [elsewhere])], 0 if elsewhere else int(is_off.sum())

    def explained(self, target: Value | None) -> Evidence | None:
        """Say what the rows are, of a column that fits nothing."""
        if not self.rows.isfinite().any() or bool((self.rows == self.rows[0]).all()):
            return Evidence("constant", "all rows are alike", None)
        values = self.values
        first = [value for value in values if value == target]
        samples = range(len(self.places))[:_SAMPLES]
        rest = [value for value in values if value not in first]
        attempts = [
            *(partial(self.elsewhere, value, samples) for value in [*first, *self._likely()]),
            *(partial(self.elsewhere, value, samples[:1]) for value in rest),
            *(partial(self._permuted, value) for value in first + rest),
        ]
        return next(filter(None, (attempt() for attempt in attempts)), None)

    def elsewhere(self, value: Value, samples: Sequence[int]) -> Evidence | None:
        """Say where the rows of some samples are, if they are those of a value."""
        if not samples:
            return None
        lines, limit, keys = self.view.lines(value), self.row_limit(value), self.view.keys
        for sample in samples:
            at = (keys[:, 0] == sample).nonzero().flatten()
            owner = self.column.owner_of(lines[at], keys[at, 1], limit, self.places[sample])
            if owner != self.places[sample] and owner is not None:
                ids = self.column.recording.sample_ids
                here, there = (repr(ids[place]) for place in (self.places[sample], owner))
                words = f"what belongs to sample {here} is at {there}"
                return Evidence("samples swapped", words, value, len(at))
        found = self._moved(lines, samples, limit)
        return None if found is None else Evidence(*found, value, len(self.rows))

    def _moved(
        self, reference: Tensor, samples: Iterable[int], limit: float
    ) -> tuple[Kind, str] | None:
        """Say how the positions of samples lie in the column, if its rows are those of a layer."""
        offsets, pads, spare = [], [], []
        for sample in samples:
            here, there = (keys[:, 0] == sample for keys in (self.view.keys, self.view.others))
            mine, theirs = self.view.keys[here, 1], self.view.others[there, 1]
            width = self.view.shape[1] if len(self.view.shape) > 1 else len(mine)
            chosen = torch.arange(0, len(theirs), max(1, len(theirs) // _MOST_ROWS))
            least, nearest = _distances(self.rows[there][chosen], reference[here]).min(1)
            moved = (mine[nearest] - theirs[chosen])[least <= limit]
            if 2 * len(moved) < min(len(chosen), len(mine)):
                return None
            offsets.append(int(moved.mode().values))
            pads.append(width - len(mine))
            spare.append(len(theirs) - width)
        return _kind_of(offsets, pads, spare)

    def _likely(self) -> list[Value]:
        """Return the value of which most rows of a sample are somewhere in the same sample."""
        sample = int(self.view.keys[:, 0].mode().values)
        here = (self.view.keys[:, 0] == sample).nonzero().flatten()
        rows = self.rows[self.view.others[:, 0] == sample][:_MOST_ROWS]
        least = {x: _distances(rows, self.view.lines(x, here)).amin(1) for x in self.values}
        fitting = [x for x in least if (least[x] <= self.row_limit(x)).double().mean() >= 0.5]
        return sorted(fitting, key=lambda value: float(least[value].median()))[:1]

    def _permuted(self, value: Value) -> Evidence | None:
        """Say that the column has a value's features in another order, if it does.

        Every second row tells the order, and the others prove it.
        """
        some = slice(4 * _MOST_ROWS)
        rows = self.rows[self.view.there[some]].double()
        lines = self.view.lines(value, self.view.here[some]).double()
        if len(rows) < 4 or not rows.isfinite().all():
            return None
        order = torch.cdist(rows[::2].T, lines[::2].T).argmin(1)
        is_moved = (order != torch.arange(len(order))).double().mean() > 0.1
        error = row_errors(rows[1::2], lines[1::2, order]).median()
        if not is_moved or error > self.row_limit(value):
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
    norms = torch.linalg.vector_norm(reference.double(), dim=1)
    way = "donot_use_mm_for_euclid_dist"
    apart = torch.cdist(rows.double(), reference.double(), compute_mode=way)
    errors = apart / torch.maximum(norms, 0.3 * norms.median())
    return errors.nan_to_num(torch.inf, torch.inf)
