"""Why the rows of a column are not those of a layer: shifted, swapped, missing or permuted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from scio_recorder.analysis.auditing.column import (
    RecordedColumn,
    View,
    lengths_of,
    limit_of,
    row_errors,
)
from scio_recorder.analysis.auditing.finding import Kind
from scio_recorder.analysis.auditing.reference import Value
from scio_recorder.layer import counted

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
