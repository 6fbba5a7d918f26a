"""An audit: a net runs on the batches, and each column of a recording is looked for in it.

NOTE [What a column is]

A column fits a value of the net if its median error is within four times of what rounding gives
there, in the precision that the column's own numbers show. It is what its name says, unless another
value is nearer by half, and it differs from its name's by more than rounding. If nothing fits, the
rows may lie elsewhere, the net may have seen other padding, or features may have another order.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder import Nodes, Recorder, Tokens
from scio_recorder.analysis.auditing.evidence import Evidence, Look, RecordedColumn, View, limit_of
from scio_recorder.analysis.auditing.finding import Audit, Finding, Kind
from scio_recorder.analysis.auditing.reference import (
    NARROW,
    Reference,
    Relations,
    Value,
    otherwise_padded,
)
from scio_recorder.analysis.comparing.difference import SampleId
from scio_recorder.analysis.comparing.matching import checked_match, translated
from scio_recorder.analysis.comparing.sides import SampleBlock, refuse_missing
from scio_recorder.errors import CollectError, ComparisonError, RecorderError
from scio_recorder.layer import OperationIdx, RowIdx, counted, few
from scio_recorder.lowlevel import BatchRows, CollectOptions, Feed, Readable, Rows, Source
from scio_recorder.tensors import dtype_name, taken_apart

# Two values nearer than this are one, whatever the precision.
_SAME = 1e-5
# Unless a column is at least this near to a layer, nothing says that it is one.
_NEAR = 0.7
# The batches in which a column that fits nothing is examined, and whose errors are remembered.
_EXAMINED, _REMEMBERED = 2, 64
_UNEXPLAINED, _SHARE_TWICE = 0.05, 0.95


@dataclass
class _Examined:
    """What is known about a column so far."""

    column: RecordedColumn
    # That in which it was computed; None for float32 and wider.
    precision: torch.dtype | None
    target: Value | None = None
    rounding: dict[Value, float] = field(default_factory=lambda: defaultdict(float))
    errors: deque[dict[Value, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    evidence: Evidence | None = None
    num_rows: int = 0
    num_unexplained: int = 0
    num_examined: int = 0
    # In words, the narrower precision through which the numbers went.
    through: str = ""

    def fitting(self, errors: Mapping[Value, float]) -> Value | None:
        """Return the value that the column fits; None if there is none."""
        fits = {v: x for v, x in errors.items() if x <= limit_of(self.rounding[v])}
        best = min(fits, key=fits.__getitem__, default=None)
        if best is None or self.target is None:
            return best
        named = errors.get(self.target, math.inf)
        if fits[best] < named / 2 and named > self.rounding[self.target] + _SAME:
            return best
        return self.target if self.target in fits else None

    def take(self, look: Look) -> bool:
        """Take what a batch shows of the column; say whether it is worth another look."""
        errors = look.view.errors(look.probed)
        self.errors.append(errors)
        fitted, number = self.fitting(errors), len(look.view.keys)
        evidence, unexplained = None, number
        if fitted is not None:
            evidence, unexplained = look.off(fitted)
        is_open = evidence is None and unexplained > _UNEXPLAINED * number
        is_open = is_open and self.num_examined < _EXAMINED
        if is_open and fitted is None:
            evidence = look.explained(self.target)
        self.evidence = self.evidence or evidence
        self.num_rows += number
        self.num_unexplained += unexplained
        self.num_examined += is_open
        return is_open and not evidence

    def compare_bits(self, look: Look, views: Iterable[View]) -> None:
        """Note through which narrower dtype alone the net's numbers are equal to the column's."""
        there = look.probed
        stacks = [view.stack(look.rows.shape[1]) for view in views]
        lines = [x[values.index(self.target)] for values, x in stacks if self.target in values]
        stored, dtype = self.column.values.dtype, self.column.precision
        if dtype in (None, stored) or not lines:
            return
        direct, through = (
            max(float((x.to(at).to(stored).double() == there).double().mean()) for x in lines)
            for at in (torch.float64, dtype)
        )
        # Each number is rounded to the dtype in between, and some by chance as without it.
        if through > _SHARE_TWICE and 1 - direct > 4 * (1 - through) + 0.01:
            rounded = f"rounded to {dtype_name(dtype)}"
            self.through = f"{through:.1%} of the numbers are the layer's, {rounded}"


@dataclass
class _Pass:
    """What the net returned and received in a batch, as columns see it."""

    values: Mapping[Value, Tensor]
    # Where the samples are in the recording.
    places: list[int]
    # Which rows are real.
    rows: BatchRows | None
    # Columns with the same rows share one.
    views: dict[object, View] = field(default_factory=dict)

    def look(self, examined: _Examined) -> Look:
        """Return a column in the batch."""
        rows, keys = examined.column.read(self.places)
        view = self.view(examined, keys)
        return Look(examined.column, view, rows, self.places, examined.rounding)

    def view(self, examined: _Examined, keys: Tensor) -> View:
        """Return the batch as a column sees it whose rows have these keys."""
        column, rows, number = examined.column, self.rows, len(self.places)
        target = self.values.get(examined.target) if examined.target else None
        shape: tuple[int, ...] = (number, len(keys) // number)
        if rows is not None and (column.has_rows or column.has_arrays):
            shape = rows.shape
        if column.has_arrays and target is not None and target.ndim == 3:
            # Layers may have others than the net's input, such as patches.
            shape = number, target.shape[1]
        index = torch.arange(math.prod(shape))
        if rows is not None and rows.index is not None and rows.shape == shape:
            index = rows.index.cpu()
        mine = torch.stack([index // shape[-1], index % shape[-1]], 1)
        if column.has_rows and rows is not None:
            mine = torch.stack([rows.columns["sample"], rows.columns["position"]], 1)
        kind = shape, len(keys)
        if kind not in self.views:
            self.views[kind] = View(self.values, shape, index, mine, keys)
        return self.views[kind]


class _Auditor:
    """Takes a recording through one batch after another."""

    def __init__(self, recording: Readable, reference: Reference, match: Mapping[str, str]) -> None:
        self._recording, self._reference, self._match = recording, reference, match
        rows = [recording.architecture[label] for label in recording.stored]
        columns = [RecordedColumn(recording, row) for row in rows]
        shown = Counter(column.precision for column in columns).most_common(1)[0][0]
        # What a net in a narrow precision computes in float32 is as far off as the rest.
        shown = shown or (reference.dtype if reference.dtype in NARROW else None)
        self._columns = [_Examined(column, column.precision or shown) for column in columns]
        self._relations: Relations | None = None
        self.num_samples = 0

    def take(self, block: SampleBlock, places: list[int], rows: BatchRows | None) -> None:
        """Look at all columns in a batch, given the places of its samples and its real rows."""
        exact = _Pass(self._reference.run(block), places, rows)
        if self._relations is None:
            self._begin(block, exact)
        self.num_samples += len(places)
        unknown = [x for x in self._columns if x.take(exact.look(x))]
        variants = otherwise_padded(block, rows) if unknown else ()
        for kind, words, padded, real in variants:
            try:
                other = _Pass(self._reference.run(padded), places, real)
            except (RecorderError, RuntimeError, ValueError):
                # Without a mask, a net may run in another way.
                continue
            for examined in unknown:
                look = other.look(examined)
                value = examined.fitting(look.view.errors(look.probed))
                # A few padded samples hardly move the median.
                if value is not None and look.off(value)[1] <= _UNEXPLAINED * len(look.rows):
                    examined.evidence = examined.evidence or Evidence(kind, words, value)

    def _begin(self, block: SampleBlock, exact: _Pass) -> None:
        """Find what the names of columns mean, and what rounding explains of each."""
        self._relations = Relations(self._reference, exact.values)
        are_numbers = (self._recording.settings.get("rows") or {}).get("made_by") == "vLLM"
        narrow = {
            dtype: _Pass(self._reference.run(block, dtype), exact.places, exact.rows)
            for dtype in {x.precision for x in self._columns if x.precision}
        }
        for examined in self._columns:
            layer, dtype = examined.column.layer, examined.precision
            examined.target = self._relations.target(layer, self._match, are_numbers=are_numbers)
            if dtype is not None:
                look = exact.look(examined)
                view = narrow[dtype].view(examined, look.view.others)
                values, rounded = view.stack(look.rows.shape[1])
                if values == look.view.stack(look.rows.shape[1])[0]:
                    examined.rounding.update(look.view.errors(rounded))
                # Nothing computes in float8.
                examined.compare_bits(look, [look.view, *[view] * (dtype in NARROW)])

    def result(self) -> Audit:
        """Return the findings."""
        assert self._relations is not None
        findings: dict[RowIdx, Finding] = {
            x.column.layer.label: _finding(x, self._relations) for x in self._columns
        }
        held = [x.layer for x in findings.values() if x.layer is not None]
        return Audit(
            self._recording.architecture,
            findings,
            self._relations.absent(held),
            self.num_samples,
            is_training=self._reference.is_training,
        )


def _finding(examined: _Examined, relations: Relations) -> Finding:
    """Return what a column is, after all batches."""
    values = dict.fromkeys(chain(*examined.errors))
    errors = {v: median(each[v] for each in examined.errors if v in each) for v in values}
    target, value = examined.target, examined.fitting(errors)
    nearest = min(errors, key=errors.__getitem__, default=None)
    near = target if target in errors else nearest
    kind: Kind = "unknown"
    words = "no layer is near"
    if evidence := examined.evidence:
        kind, words, value = evidence.kind, evidence.words, value or evidence.value
    elif value is not None:
        kind, words = _as_named(examined, errors, relations, value)
    elif near and nearest and errors[nearest] <= _NEAR:
        value = nearest if errors[nearest] < errors[near] / 2 else near
        kind, explained = "beyond rounding", examined.rounding[value]
        words = f"{errors[value]:.2g} off, of which rounding explains {explained:.2g}"
    if target is None and kind != "constant":
        kind = "no such name"
    elif target and value and not relations.are_equal(value, target):
        kind = relations.kind(value, target)
    layer = relations.layer(value, target) if value else None
    at = value or near
    if at is None:
        return Finding(None, kind, math.inf, 0.0, words)
    return Finding(layer, kind, errors.get(at, math.inf), examined.rounding[at], words)


def _as_named(
    examined: _Examined,
    errors: Mapping[Value, float],
    relations: Relations,
    held: Value,
) -> tuple[Kind, str]:
    """Return the kind of a column that fits the layer it holds, by its numbers and single rows."""
    if examined.through:
        return "rounded twice", examined.through
    if examined.num_unexplained > _UNEXPLAINED * examined.num_rows:
        words = f"{examined.num_unexplained} of {counted(examined.num_rows, 'row')} are off"
        return "beyond rounding", words
    near = [
        value
        for value, error in errors.items()
        if error <= limit_of(examined.rounding[value]) and error < 2 * errors[held]
    ]
    alike = [
        relations.layer(value, examined.target).name
        for value in near
        if not isinstance(value.label, OperationIdx) and not relations.are_equal(value, held)
    ]
    names = few(list(dict.fromkeys(alike)), 3)
    return "as named", f"rounding can't tell it from {names}" if names and examined.target else ""


def audit(
    recording: Readable,
    rnet: nn.Module,
    batches: Iterable[Any],
    *,
    match: Mapping[str, str] | None,
    rows: Rows | None,
    **options: Any,
) -> Audit:
    """Find which layer of a net each column of a recording is; see `Recording.audit`."""
    if not isinstance(rnet, Recorder):
        raise ComparisonError(
            f"audit was given a {type(rnet).__name__}: write Recorder(net, input_data=x) around "
            "the network whose layers the recording holds"
        )
    if not recording.stored:
        raise ComparisonError(
            f"none of the {counted(len(recording), 'layer')} of the recording has samples, only "
            "reductions, and these can't be audited: collect without reduce="
        )
    rows = Rows.or_none(rows, ComparisonError) or _rows_of(recording)
    globs = checked_match(match)
    names = [recording.architecture[label].name for label in recording.stored]
    for glob, partner in globs.items():
        if all(translated(name, glob, partner) is None for name in names):
            raise ComparisonError(
                f"match has {glob!r}, which matches no column: there are {few(names, 8, repr)}"
            )
    feed = Feed(batches, CollectOptions(**options))
    with torch.no_grad(), contextlib.ExitStack() as stack:
        auditor = _Auditor(recording, Reference(rnet, feed, stack, names), globs)
        for batch in _batches(recording, rnet, feed, rows):
            auditor.take(*batch)
        return auditor.result()


def _rows_of(recording: Readable) -> Rows | None:
    """Return what a row of a recording is, from its settings; tokens, if these say nothing."""
    if not recording.has_rows:
        return None
    made = recording.settings.get("rows") or {}
    names = ("mask", "segments", "where", "sample")
    arguments = {name: made[name] for name in names if made.get(name)}
    if "function" in arguments.values():
        raise ComparisonError(
            f"rows of the recording were chosen by a function ({made}): give the same rows="
        )
    return (Nodes if made.get("kind") == "Nodes" else Tokens)(**arguments)


def _batches(
    recording: Readable, rnet: Recorder, feed: Feed, rows: Rows | None
) -> Iterator[tuple[SampleBlock, list[int], BatchRows | None]]:
    """Yield the batches with the places of their samples, which must be there, and real rows."""
    places = {sample: place for place, sample in enumerate(recording.sample_ids)}
    root, missing, has_optional = rnet.architecture[0, 1], list[SampleId](), dict[str, bool]()
    for batch, _ in feed:
        inputs, real = feed.inputs(batch), None
        source = Source(rnet.net, batch, inputs, feed.number, root, root.input_shape, has_optional)
        # Of arrays of samples, real rows are known only where there is a mask.
        with contextlib.nullcontext() if rows else contextlib.suppress(CollectError):
            real = (rows or Tokens(fields=())).of(source)
        ids, _ = feed.ids(batch, inputs, None if real is None else real.num_samples)
        feed.num_samples += len(ids)
        missing += [sample for sample in ids if sample not in places]
        if not missing:
            block = SampleBlock(ids, batch, feed, taken_apart(inputs), feed.number)
            yield block, [places[sample] for sample in ids], real
    if not feed.num_samples:
        raise ComparisonError("batches is empty: the network needs some of the samples to run on")
    refuse_missing(missing, "the recording", "the batches have")
