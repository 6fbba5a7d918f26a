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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder import Nodes, Recorder, Tokens
from scio_recorder.analysis.auditing.evidence import Evidence, Look, RecordedColumn
from scio_recorder.analysis.auditing.finding import Audit, Finding, Kind
from scio_recorder.analysis.auditing.reference import (
    FLOAT8,
    NARROW,
    Reference,
    Value,
    View,
    digests_of,
    otherwise_padded,
    row_errors,
)
from scio_recorder.analysis.auditing.relations import Relations, names_for
from scio_recorder.analysis.comparing.difference import SampleId
from scio_recorder.analysis.comparing.matching import checked_match, translated
from scio_recorder.analysis.comparing.sides import SampleBlock, refuse_missing
from scio_recorder.errors import CollectError, ComparisonError, RecorderError
from scio_recorder.layer import OperationIdx, RowIdx, counted, few
from scio_recorder.lowlevel import BatchRows, CollectOptions, Feed, Readable, Rows, Source
from scio_recorder.tensors import dtype_name, names_arguments, taken_apart

# A column fits within this multiple of rounding, and this much more; single rows within twice that.
_TIMES, _LEAST = 4.0, 2e-3
# Two values nearer than this are one, whatever the precision.
_SAME = 1e-5
# Unless a column is at least this near to a layer, nothing says that it is one.
_NEAR = 0.7
# The batches in which a column that fits nothing is examined, and whose errors are remembered.
_EXAMINED, _REMEMBERED = 2, 64
_UNEXPLAINED, _SHARE_TWICE = 0.05, 0.95


class Rounding(NamedTuple):
    """What rounding gives at one of the net's values: the median error of rows, and the largest."""

    median: float = 0.0
    largest: float = 0.0

    @property
    def limit(self) -> float:
        """The largest median error of a column that fits."""
        return _TIMES * self.median + _LEAST

    @property
    def row_limit(self) -> float:
        """The largest error of one row that fits."""
        return 2 * max(self.limit, self.largest)


@dataclass
class _Examined:
    """What is known about a column so far."""

    column: RecordedColumn
    precisions: set[torch.dtype]
    target: Value | None = None
    errors: dict[Value, deque[float]] = field(default_factory=dict)
    rounding: dict[Value, Rounding] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)
    num_rows: int = 0
    num_unexplained: int = 0
    num_examined: int = 0
    # By the dtype in between, or None: the share of numbers that are equal to the net's.
    equal: dict[torch.dtype | None, float] = field(default_factory=dict)

    def fitting(self, errors: Mapping[Value, float]) -> Value | None:
        """Return the value that the column fits; None if there is none."""
        fits = {v: x for v, x in errors.items() if x <= self.rounding_at(v).limit}
        best = min(fits, key=lambda value: fits[value], default=None)
        if best is None or self.target is None:
            return best
        own = errors.get(self.target, math.inf)
        explained = self.rounding_at(self.target).median + _SAME
        if fits[best] < own / 2 and own > explained:
            return best
        return self.target if self.target in fits else None

    def take(self, look: Look) -> bool:
        """Take what a batch shows of the column; say whether that explains its rows."""
        errors = look.view.errors(look.rows)
        for value, error in errors.items():
            self.errors.setdefault(value, deque(maxlen=_REMEMBERED)).append(error)
        fitted = self.fitting(errors)
        if fitted is not None:
            evidence, num_unexplained = look.off(fitted)
            self.num_unexplained += num_unexplained
            self.num_rows += len(look.rows)
            self.evidence += evidence
            if evidence or num_unexplained <= _UNEXPLAINED * len(look.rows):
                return True
        if self.num_examined >= _EXAMINED:
            return True
        self.num_examined += 1
        if fitted is None:
            evidence = [*filter(None, [look.explained(self.target)])]
            self.evidence += evidence
        return bool(evidence)

    def row_limit(self, value: Value) -> float:
        """Return the largest error of a row that fits a value."""
        return self.rounding_at(value).row_limit

    def round(self, rounding: Mapping[Value, Rounding]) -> None:
        """Take what rounding gives in one of the precisions: the larger counts."""
        for value, each in rounding.items():
            self.rounding[value] = max(each, self.rounding_at(value))

    def rounding_at(self, value: Value) -> Rounding:
        """Return what rounding gives at a value, in the precision of this column."""
        return self.rounding.get(value, Rounding())


class _Batch(NamedTuple):
    """A batch of an audit: its samples, their places in the recording, and which rows are real."""

    block: SampleBlock
    places: list[int]
    rows: BatchRows | None


class _Auditor:
    """Takes a recording through one batch after another."""

    def __init__(self, recording: Readable, reference: Reference, match: Mapping[str, str]) -> None:
        self._recording, self._reference, self._match = recording, reference, match
        architecture = recording.architecture
        columns = [RecordedColumn(recording, architecture[label]) for label in recording.stored]
        shown = Counter(frozenset(column.precisions) for column in columns).most_common(1)[0][0]
        # What a net in a narrow precision computes in float32 is as far off as the rest.
        others = shown or {reference.dtype} & {*NARROW}
        self._columns = [_Examined(column, column.precisions or {*others}) for column in columns]
        self._digests: dict[Value, int] = {}
        self.num_samples = 0

    def take(self, batch: _Batch) -> None:
        """Look at all columns in a batch."""
        values = self._reference.run(batch.block)
        is_first, digests = not self.num_samples, digests_of(values)
        self._digests = {
            value: hash((self._digests.get(value), digest))
            for value, digest in digests.items()
            if is_first or value in self._digests
        }
        self.num_samples += len(batch.places)
        rounded = {}
        if is_first:
            self._name()
            dtypes = set().union(*(x.precisions for x in self._columns))
            rounded = {at: self._reference.rounded(batch.block, at) for at in dtypes}
        views, rounding = dict[Any, View](), dict[Any, dict[Value, Rounding]]()
        unknown = list[_Examined]()
        for examined in self._columns:
            recorded, keys = examined.column.read(batch.places)
            view = self._view(views, batch, values, examined, keys)
            for dtype in examined.precisions & {*rounded}:
                key = dtype, view.shape, recorded.shape[1]
                if key not in rounding:
                    other = replace(view, values=rounded[dtype])
                    rounding[key] = _rounding(view, other, recorded.shape[1])
                examined.round(rounding[key])
            look = Look(examined.column, view, recorded, batch.places, examined.row_limit)
            if is_first:
                bases = [view, *(replace(view, values=x) for x in rounded.values())]
                self._count_equal(examined, look, bases)
            unknown += [] if examined.take(look) else [examined]
        if unknown:
            self._pad_otherwise(unknown, batch)

    def _name(self) -> None:
        relations = Relations(self._reference, self._digests)
        made_by = self._recording.settings.get("rows") or {}
        are_numbers = made_by.get("made_by") == "vLLM"
        for examined in self._columns:
            layer = examined.column.layer
            names = names_for(layer.name, self._match)
            examined.target = relations.target(names, layer.call, are_numbers=are_numbers)

    def _view(
        self,
        views: dict[Any, View],
        batch: _Batch,
        values: dict[Value, Tensor],
        examined: _Examined,
        keys: Tensor,
    ) -> View:
        """Return the batch as a column sees it; columns with the same rows share it."""
        column, rows, number = examined.column, batch.rows, len(batch.places)
        shape: tuple[int, ...] = (number,)
        index, mine = None, keys
        if column.has_rows and rows is not None:
            shape = (rows.num_rows,)
            mine = torch.stack([rows.columns["sample"], rows.columns["position"]], 1)
        elif column.has_positions:
            target = None if examined.target is None else values.get(examined.target)
            # Layers may have others than the net's input, such as patches.
            width = len(keys) // number if target is None or target.ndim != 3 else target.shape[1]
            shape = number, width
            index = rows.index if rows is not None and rows.shape == shape else None
            flat = torch.arange(number * width) if index is None else index.cpu()
            mine = torch.stack([flat // width, flat % width], 1)
        kind = shape, len(keys)
        if kind not in views:
            views[kind] = View(values, shape, index, mine, keys)
        return views[kind]

    def _count_equal(self, examined: _Examined, look: Look, views: Iterable[View]) -> None:
        """Count the numbers that are equal to the net's, directly and by a narrower dtype."""
        stored, target = examined.column.values.dtype, examined.target
        for view in views:
            if target in view.values and target in look.values:
                exact = view.lines(target, view.here[view.probes])
                there = look.rows[view.there[view.probes]]
                for dtype in (None, *(x for x in (*NARROW, *FLOAT8) if x != stored)):
                    through = exact if dtype is None else exact.to(dtype)
                    share = float((through.to(stored).to(there.dtype) == there).double().mean())
                    examined.equal[dtype] = max(share, examined.equal.get(dtype, 0.0))

    def _pad_otherwise(self, unknown: Sequence[_Examined], batch: _Batch) -> None:
        """Run the net with other padding, and look whether columns fit then."""
        for kind, words, block, rows in otherwise_padded(batch.block, batch.rows):
            try:
                values, views = self._reference.run(block), dict[Any, View]()
            except (RecorderError, RuntimeError, ValueError):
                # Without a mask, a net may run in another way.
                continue
            for examined in unknown:
                recorded, keys = examined.column.read(batch.places)
                view = self._view(views, batch._replace(rows=rows), values, examined, keys)
                value = examined.fitting(view.errors(recorded))
                look = Look(examined.column, view, recorded, batch.places, examined.row_limit)
                # A few padded samples hardly move the median.
                if value is not None and look.off(value)[1] <= _UNEXPLAINED * len(recorded):
                    examined.evidence.append(Evidence(kind, words, value))
            unknown = [x for x in unknown if not x.evidence]

    def result(self) -> Audit:
        """Return the findings."""
        relations = Relations(self._reference, self._digests)
        findings: dict[RowIdx, Finding] = {
            x.column.layer.label: _finding(x, relations) for x in self._columns
        }
        return Audit(
            self._recording.architecture,
            findings,
            relations.absent(x.layer for x in findings.values() if x.layer is not None),
            self.num_samples,
            is_training=self._reference.is_training,
        )


def _rounding(view: View, narrow: View, features: int) -> dict[Value, Rounding]:
    """Return what rounding gives at all values that have this many features."""
    rounding = {}
    for value in view.stack(features)[0]:
        if value in narrow.values:
            errors = row_errors(narrow.lines(value), view.lines(value))
            finite = errors[errors.isfinite()]
            largest = float(finite.amax()) if len(finite) else 0.0
            rounding[value] = Rounding(float(errors.median()), largest)
    return rounding


def _finding(examined: _Examined, relations: Relations) -> Finding:
    """Return what a column is, after all batches."""
    errors = {value: median(each) for value, each in examined.errors.items()}
    target, value = examined.target, examined.fitting(errors)
    evidence = max(examined.evidence, key=lambda found: found.num_rows, default=None)
    if value is None and evidence is not None:
        value = evidence.value
    if value is None:
        return _unfitting(examined, errors, relations, evidence)
    layer, error = relations.layer(value, target), errors.get(value, math.inf)
    is_named = target is not None and relations.are_equal(value, target)
    kind, words = _as_named(examined, errors, relations, target if is_named else value)
    if evidence is not None:
        kind, words = evidence.kind, evidence.words
    if target is None:
        kind = "no such name"
    elif not is_named:
        kind = relations.kind(value, target)
    return Finding(layer, kind, error, examined.rounding_at(value).median, words)


def _unfitting(
    examined: _Examined,
    errors: Mapping[Value, float],
    relations: Relations,
    evidence: Evidence | None,
) -> Finding:
    """Return the finding about a column that holds no layer, or one with other numbers."""
    target = examined.target
    best = min(errors, key=lambda value: errors[value], default=None)
    near = target if target in errors else best
    error = math.inf if near is None else errors[near]
    rounding = 0.0 if near is None else examined.rounding_at(near).median
    kind: Kind = "unknown" if target is not None else "no such name"
    if evidence is not None:
        return Finding(None, evidence.kind, error, rounding, evidence.words)
    if best is None or errors[best] > _NEAR or target is None:
        return Finding(None, kind, error, rounding, "no layer is near")
    words = f"{error:.2g} off, of which rounding explains {rounding:.2g}"
    if errors[best] < error / 2:
        kind, near, error = relations.kind(best, target), best, errors[best]
        return Finding(relations.layer(near, target), kind, error, rounding, words)
    return Finding(relations.layer(target, target), "beyond rounding", error, rounding, words)


def _as_named(
    examined: _Examined,
    errors: Mapping[Value, float],
    relations: Relations,
    held: Value | None,
) -> tuple[Kind, str]:
    """Return the kind of a column that fits the layer it holds, by its numbers and single rows."""
    direct = examined.equal.get(None, 1.0)
    for dtype, share in examined.equal.items():
        # Each number is rounded to the dtype in between, and some by chance as without it.
        if dtype and share > _SHARE_TWICE and 1 - direct > 4 * (1 - share) + 0.01:
            words = f"{share:.1%} of the numbers are the layer's, rounded to {dtype_name(dtype)}"
            return "rounded twice", words
    if examined.num_unexplained > _UNEXPLAINED * examined.num_rows:
        words = f"{examined.num_unexplained} of {counted(examined.num_rows, 'row')} are off"
        return "beyond rounding", words
    target = examined.target
    if target is None or held is None or held not in errors:
        return "as named", ""
    alike = [
        relations.layer(value, target).name
        for value, error in errors.items()
        if error <= examined.rounding_at(value).limit
        and not isinstance(value.label, OperationIdx)
        and error < 2 * errors[held]
        and not relations.are_equal(value, held)
    ]
    names = list(dict.fromkeys(alike))
    return "as named", f"rounding can't tell it from {few(names, 3)}" if alike else ""


@names_arguments
def audit(
    recording: Readable,
    rnet: nn.Module,
    batches: Iterable[Any],
    *,
    match: Mapping[str, str] | None = None,
    to_inputs: Callable[[Any], Any] | None = None,
    sample_ids: Callable[[Any], Any] | None = None,
    rows: Rows | None = None,
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
    feed = Feed(batches, CollectOptions(to_inputs=to_inputs, sample_ids=sample_ids))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        auditor = _Auditor(recording, Reference(rnet, feed, stack, names), globs)
        for batch in _batches(recording, rnet, feed, rows):
            auditor.take(batch)
        return auditor.result()


def _rows_of(recording: Readable) -> Rows | None:
    """Return what a row of a recording is, from its settings; tokens, if these say nothing."""
    if not recording.has_rows:
        return None
    made = recording.settings.get("rows") or {}
    arguments = {
        name: made[name] for name in ("mask", "segments", "where", "sample") if made.get(name)
    }
    if "function" in arguments.values():
        raise ComparisonError(
            f"rows of the recording were chosen by a function ({made}): give the same rows="
        )
    kind = Nodes if made.get("kind") == "Nodes" else Tokens
    return kind(**arguments)


def _batches(
    recording: Readable, rnet: Recorder, feed: Feed, rows: Rows | None
) -> Iterator[_Batch]:
    """Yield the batches with the places of their samples, all of which must be there."""
    places = {sample: place for place, sample in enumerate(recording.sample_ids)}
    root, missing, has_optional = rnet.architecture[0, 1], list[SampleId](), dict[str, bool]()
    for batch, _ in feed:
        inputs = feed.inputs(batch)
        shapes = root.input_shape
        source = Source(rnet.net, batch, inputs, feed.number, root, shapes, has_optional)
        real = _real_rows(source, rows, has_rows=recording.has_rows)
        number = None if real is None else real.num_samples
        ids, _ = feed.ids(batch, inputs, number)
        feed.num_samples += len(ids)
        missing += [sample for sample in ids if sample not in places]
        chosen = real if recording.has_rows else None
        apart = taken_apart(inputs)
        block = SampleBlock(ids, batch, feed, apart, feed.number, chosen, chosen)
        if not missing:
            yield _Batch(block, [places[sample] for sample in ids], real)
    if not feed.num_samples:
        raise ComparisonError("batches is empty: the network needs some of the samples to run on")
    refuse_missing(missing, "the recording", "the batches have")


def _real_rows(source: Source, rows: Rows | None, *, has_rows: bool) -> BatchRows | None:
    """Return the real rows of a batch; of arrays of samples, only where it has a mask."""
    if rows is not None:
        return rows.of(source)
    with contextlib.suppress(CollectError):
        return Tokens(fields=()).of(source)
    return None
