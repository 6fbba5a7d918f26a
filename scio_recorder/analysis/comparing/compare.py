"""The function `compare`: two runs side by side, and where they begin to differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from scio_recorder.analysis.comparing.comparison import Comparison
from scio_recorder.analysis.comparing.difference import Difference, SampleId
from scio_recorder.analysis.comparing.matching import Pair, match_sides
from scio_recorder.analysis.comparing.measures import Tolerance
from scio_recorder.analysis.comparing.parting import OperationPair, first_operations
from scio_recorder.analysis.comparing.sides import (
    NetworkSide,
    RecordingSide,
    SampleBlock,
    Side,
    refuse_missing,
)
from scio_recorder.capture.program import RecordOptions
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import ComparisonError, warn
from scio_recorder.layer import Operation
from scio_recorder.nets.sharded import InStep, is_sharded
from scio_recorder.nets.state.moment import random_state, restore_random
from scio_recorder.nets.state.untouched import NetState, reached, untouched
from scio_recorder.recorder.recorder import Recorder
from scio_recorder.recording import Recording
from scio_recorder.recording.advice import advise_second_element, refuse_sample
from scio_recorder.recording.feed import Feed
from scio_recorder.recording.options import CollectOptions
from scio_recorder.recording.rows import Rows, Source, rows_or_none
from scio_recorder.stores.disk_tensor import bytes_of_row
from scio_recorder.tensors import private

ToInputs = Callable[[Any], Any]
# The bytes of a layer that are read at once from each recording.
_BLOCK_BYTES = 1 << 26


def compare(
    reference: Recorder | Recording,
    candidate: Recorder | Recording,
    batches: Iterable[Any] | None = None,
    match: Mapping[str, str] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    *,
    floor: object = None,
    max_batches: int | None = None,
    to_inputs: ToInputs | Sequence[ToInputs] | None = None,
    sample_ids: Callable[[Any], Any] | None = None,
    rows: Rows | None = None,
    progress: bool = True,
    operations: bool = False,
) -> Difference:
    """Find the layers in which two runs differ, and the one that makes the difference.

    The layers that the reference records are compared, or all layers if it records none. The
    candidate need not record anything. Networks run under ``no_grad`` in their current mode,
    and start each batch from the same state of random numbers. Afterwards their buffers and the
    generators of random numbers are as before.

    Parameters
    ----------
    reference, candidate : Recorder or Recording
        Networks that run on the batches, or recordings of samples or of
        :class:`~scio_recorder.reductions.Digest`.
    batches : iterable, optional
        As for ``collect``; needed if a network runs.
    match : mapping, optional
        Names or globs of the reference -> names of the candidate: ``{"layers.*": "h.*"}``, where
        ``*`` stands for the same text on both sides. Other names match themselves.
    rtol, atol : float, default 0
        Numbers are equal within ``atol + rtol * |reference|``. With both 0 they are equal bit for
        bit; other dtypes are compared as numbers. NaNs in the same places are equal.
    floor : optional
        Ignored with a warning: noise between runs is no longer measured. Give tolerances.
    max_batches : int, optional
        Stop after this number of batches.
    to_inputs : callable or sequence of callables, optional
        ``batch ->`` inputs of the net, as for ``collect``. Two functions are for the reference and
        for the candidate, if their inputs differ, for example in the device.
    sample_ids : callable, optional
        ``batch ->`` one integer or string for each sample. Samples of recordings are looked up by
        these ids. By default samples are numbered from 0 on.
    rows : Tokens or Nodes, optional
        Compare tokens or nodes, without padding, if networks run.
    progress : bool, default True
        Show a progress bar, on a terminal.
    operations : bool, default False
        Find the line of code as well: both networks run once more on the batch in which the first
        layer makes the difference, and all operations of its own code are compared.
        ``first.operation`` is the reference's, ``first.candidate_operation`` the candidate's.

    Returns
    -------
    Difference
        ``first`` is the layer that makes the difference, None if nothing differs.

    Raises
    ------
    ComparisonError
        There is no layer in common, samples are missing on one side, operations are wanted of a
        recording or of compiled code, or something else can't be compared as asked.

    Examples
    --------
    >>> import copy
    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> other = copy.deepcopy(net)
    >>> _ = other[2].bias.data.add_(0.01)
    >>> one, two = Recorder(net, input_size=(1, 4)), Recorder(other, input_size=(1, 4))
    >>> difference = compare(one, two, [torch.rand(5, 4)])
    >>> difference.first.layer.name, difference.first.inputs_equal, difference["1"].max_abs
    ('2', True, 0.0)
    """
    if floor is not None:
        warn(
            "floor= is ignored: compare no longer measures the noise between runs. Give rtol= and "
            "atol= what you tolerate"
        )
    rows = rows_or_none(rows, ComparisonError)
    feeds = _feeds(batches, max_batches, to_inputs, sample_ids)
    one, two = _side(reference, "reference", feeds[0]), _side(candidate, "candidate", feeds[1])
    is_run = isinstance(two, NetworkSide) and not two.is_compiled
    if is_run and isinstance(candidate, Recorder) and one.architecture.operations:
        # Those of the reference are compared.
        two.architecture = candidate.operations().architecture
    _refuse_other_rows(one, two, rows)
    pairs, unmatched = match_sides(one, two, match)
    compared = [pair for pair in pairs if pair.error is None]
    # Layers of the reference of which at least one side knows only digests.
    digested = frozenset(
        own.label
        for own, partner, _ in compared
        if own.label in one.digests or partner.label in two.digests
    )
    tolerance = Tolerance(rtol, atol)
    comparison = Comparison(pairs, digested, tolerance)
    search = _OperationSearch(comparison, one, two, tolerance) if operations else None
    apart = _apart(one, two)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        _open(stack, one, two, compared, keeps_digests=len(digested) == len(compared))
        total = feeds[0].num_batches or None
        advance = stack.enter_context(progress_bar("comparing", total, is_wanted=progress))
        for block in _blocks(one, two, feeds[0], rows):
            with contextlib.nullcontext() if search is None else search.around(block):
                _load(one, two, block, apart)
                comparison.add(block, one, two)
            advance(len(block.ids), 0)
    found = OperationPair(None, None) if search is None else search.found
    return comparison.result(one.architecture, unmatched, (one.made_with, two.made_with), found)


def _feeds(
    batches: Iterable[Any] | None,
    max_batches: int | None,
    to_inputs: ToInputs | Sequence[ToInputs] | None,
    sample_ids: Callable[[Any], Any] | None,
) -> tuple[Feed, Feed]:
    """Return the feed of each side; the first one counts the samples."""
    # One feed does for both sides, if their inputs are made in one way.
    makers: list[Any] = [*to_inputs] if isinstance(to_inputs, Sequence) else [to_inputs]
    is_wrong = isinstance(to_inputs, Sequence) and len(to_inputs) != 2
    if is_wrong or not all(one is None or callable(one) for one in makers):
        raise ComparisonError(
            f"to_inputs={to_inputs!r}: give one function of the batch, or two of them, for the "
            "reference and for the candidate"
        )
    given = () if batches is None else batches
    feeds = [
        Feed(given, CollectOptions(max_batches=max_batches, to_inputs=one, sample_ids=sample_ids))
        for one in makers
    ]
    return feeds[0], feeds[-1]


def _side(given: Any, what: str, feed: Feed) -> Side:
    if isinstance(given, Recording):
        return RecordingSide(given, what)
    recorder = private.uncompiled(given) if isinstance(given, nn.Module) else given
    if isinstance(recorder, Recorder):
        is_compiled = recorder is not given or private.calls_compiled(recorder)
        if is_compiled and not recorder.recording:
            raise ComparisonError(
                f"the {what} is compiled and records no layer, but only recorded layers of "
                "compiled code can be compared: call record(...) before"
            )
        return NetworkSide(recorder.capture, given if is_compiled else None, feed)
    hint = "give a Recorder or a Recording"
    if isinstance(given, nn.Module):
        hint = f"write Recorder(net, input_data=x) around a network for the {what}"
    elif isinstance(given, str) or hasattr(given, "__fspath__"):
        hint = f"write scio_recorder.open_recording({str(given)!r})"
    raise ComparisonError(f"the {what} is a {type(given).__name__}: {hint}")


def _refuse_other_rows(one: Side, two: Side, rows: Rows | None) -> None:
    """Refuse sides of which only one has rows that are no samples."""
    kinds = [
        side.recording.has_rows if isinstance(side, RecordingSide) else rows is not None
        for side in (one, two)
    ]
    if kinds[0] != kinds[1]:
        names = ("reference", "candidate") if kinds[0] else ("candidate", "reference")
        raise ComparisonError(
            f"the {names[0]} has a row for each token or node, and the {names[1]} one for each "
            "sample: collect both with the same rows=, and beside a recording write the same for "
            "a network, such as compare(..., rows=Tokens()), or leave rows= out"
        )


def _open(
    stack: contextlib.ExitStack, one: Side, two: Side, pairs: Sequence[Pair], *, keeps_digests: bool
) -> None:
    """Prepare all networks; when the stack ends, they are as they were before."""
    labels = [pair.reference.label for pair in pairs], [pair.partner.label for pair in pairs]
    sides = zip((one, two), labels, strict=True)
    networks = [(side, own) for side, own in sides if isinstance(side, NetworkSide)]
    for net in {id(side.net): side.net for side, _ in networks}.values():
        stack.enter_context(untouched(net))
    calls: Literal["labelled", "any"] = next((side.calls for side, _ in networks), "labelled")
    # Of all calls of a pass, nobody knows which inputs belong to the output that differs.
    has_inputs = one.knows_inputs and two.knows_inputs and calls == "labelled"
    options = RecordOptions(inputs=has_inputs and not keeps_digests, calls=calls)
    for side, own in networks:
        side.open(stack, own, options, keeps_digests=keeps_digests)


def _load(one: Side, two: Side, block: SampleBlock, apart: Callable[[], Any]) -> None:
    """Let both sides have the values of a block; networks run with the same random numbers."""
    before = random_state()
    with apart():
        one.load(block)
    restore_random(before)
    two.load(block)


class _OperationSearch:
    """Finds the operations that make the first difference known so far."""

    def __init__(self, comparison: Comparison, one: Side, two: Side, tolerance: Tolerance) -> None:
        boths = [side for side in (one, two) if isinstance(side, NetworkSide)]
        if len(boths) < 2 or any(side.is_compiled for side in boths):
            raise ComparisonError(
                "operations=True runs both networks again: give two recorders that are not "
                "compiled, since recordings and compiled code don't have all operations"
            )
        self.found = OperationPair(None, None)
        self._comparison = comparison
        self._sides = boths
        self._tolerance = tolerance

    @contextlib.contextmanager
    def around(self, block: SampleBlock) -> Iterator[None]:
        """Run a block again, from the same state, if it has shown an earlier first difference."""
        nets = {id(side.net): side.net for side in self._sides}
        states = [NetState(reached([net]), only_buffers=is_sharded(net)) for net in nets.values()]
        before = self._comparison.first
        yield
        first = self._comparison.first
        pair = None if first is None or first is before else self._comparison.pair_of(first)
        if pair and isinstance(pair.reference, Operation) and isinstance(pair.partner, Operation):
            self.found, pair = OperationPair(pair.reference, pair.partner), None
        is_wanted = self._is_wanted(pair is not None)
        if first is None or pair is None or not is_wanted:
            return
        for state in states:
            state.put_back()
        one, two = self._sides
        random = random_state()
        with _apart(one, two)():
            own = one.trace(block, pair.reference)
        restore_random(random)
        other = two.trace(block, pair.partner)
        self.found = first_operations(
            own, other, self._tolerance, received_same=first.inputs_equal is True
        )

    def _is_wanted(self, here: bool) -> bool:
        """Whether to run the networks again: all processes that run them in step do, or none."""
        processes = [InStep(side.net) for side in self._sides]
        if all(some.all(not here) for some in processes):
            return False
        if not all(some.all(here) for some in processes):
            raise ComparisonError(
                "some of the processes that run the networks together see an earlier first "
                "difference in this batch than before, and others don't, but all must run them "
                "again to find the operation: give all processes the same batches, or leave "
                "operations=True out"
            )
        return True


def _apart(one: Side, two: Side) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return blocks that undo the first network's changes, if the second shares its modules."""
    if (
        isinstance(one, NetworkSide)
        and isinstance(two, NetworkSide)
        and not set(one.net.modules()).isdisjoint(two.net.modules())
    ):
        return partial(untouched, one.net)
    return contextlib.nullcontext


def _blocks(one: Side, two: Side, feed: Feed, rows: Rows | None) -> Iterator[SampleBlock]:
    """Yield the samples to compare, part by part."""
    if isinstance(one, NetworkSide):
        return _batches(one, two if isinstance(two, RecordingSide) else None, feed, rows)
    return _batches(two, one, feed, rows) if isinstance(two, NetworkSide) else _parts(one, two)


def _batches(
    net: NetworkSide, recording: RecordingSide | None, feed: Feed, rows: Rows | None
) -> Iterator[SampleBlock]:
    """Yield the batches, and check that a recording has just their samples."""
    block, missing, has_rows = None, list[SampleId](), dict[str, bool]()
    for batch, _ in feed:
        if feed.number == 0 and feed.asked.to_inputs is None:
            advise_second_element(net.net, batch)
        block = _block(net, batch, feed, rows, has_rows)
        feed.num_samples += len(block.ids)
        if recording is not None:
            missing += recording.missing(block.ids)
        if not missing:
            yield block
    if block is None:
        raise ComparisonError(
            "batches is empty: there are no batches, but a network needs some to run on: write "
            "compare(reference, candidate, batches)"
        )
    if recording is not None:
        refuse_missing(missing, f"the {recording.what}", "the batches have")
        if feed.asked.max_batches is None:
            refuse_missing(recording.unseen(), "the batches", f"the {recording.what} has")


def _block(
    net: NetworkSide, batch: Any, feed: Feed, rows: Rows | None, has_rows: dict[str, bool]
) -> SampleBlock:
    """Return the samples of a batch."""
    inputs, root = net.feed.inputs(batch), net.architecture[0, 1]
    shapes = root.input_shape
    if rows is None:
        if feed.number == 0 and feed.asked.sample_ids is None:
            source = Source(net.net, batch, inputs.named(net.net), 0, root, shapes)
            refuse_sample(source.shapes_at_labelling(), inputs)
        ids, _ = feed.ids(batch, inputs)
        return SampleBlock(ids, batch, net.feed, inputs, feed.number)
    source = Source(net.net, batch, inputs.named(net.net), feed.number, root, shapes, has_rows)
    found = rows.of(source)
    ids, _ = feed.ids(batch, inputs, found.num_samples)
    lengths = torch.bincount(found.columns["sample"], minlength=len(ids)).tolist()
    positions = torch.split(found.columns["position"], lengths)
    received = rows.all_real(source, found)
    return SampleBlock(ids, batch, net.feed, inputs, feed.number, found, received, positions)


def _parts(one: RecordingSide, two: RecordingSide) -> Iterator[SampleBlock]:
    """Yield the samples of recordings, in parts of bounded size or in the reference's batches."""
    ids = one.recording.sample_ids
    refuse_missing(two.missing(ids), "the candidate", "the reference has")
    alone = one.missing(two.recording.sample_ids)
    refuse_missing(alone, "the reference", "the candidate has")
    start = 0
    for length in _lengths(one.recording, two.recording):
        yield SampleBlock(ids[start : start + length])
        start += length


def _lengths(one: Recording, two: Recording) -> Iterable[int]:
    """Return the number of samples of each part."""
    if one.calls.labels and two.calls.labels:
        # Inputs are kept batch by batch.
        return one.calls.rows
    layers = [recording[label] for recording in (one, two) for label in recording.stored]
    largest = max(map(bytes_of_row, layers), default=8)
    per_sample = largest * max(1, one.num_rows) / max(1, one.num_samples)
    step = max(1, int(_BLOCK_BYTES // max(1, per_sample)))
    return (min(step, one.num_samples - at) for at in range(0, one.num_samples, step))
