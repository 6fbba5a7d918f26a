"""The function `compare`: two runs side by side, and where they begin to differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scio_recorder.analysis.comparing.comparison import Comparison
from scio_recorder.analysis.comparing.difference import Difference
from scio_recorder.analysis.comparing.findings import SampleId
from scio_recorder.analysis.comparing.matching import Match, Pair, match_layers, match_sides
from scio_recorder.analysis.comparing.measures import Tolerance
from scio_recorder.analysis.comparing.sides import (
    NetworkSide,
    RecordingSide,
    SampleBlock,
    Side,
    refuse_missing,
)
from scio_recorder.capture.program import RecordOptions
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.state.moment import random_state, restore_random
from scio_recorder.nets.state.untouched import untouched
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
    floor: Recorder | Recording | None = None,
    max_batches: int | None = None,
    to_inputs: ToInputs | Sequence[ToInputs] | None = None,
    sample_ids: Callable[[Any], Any] | None = None,
    rows: Rows | None = None,
    progress: bool = True,
) -> Difference:
    """Find the layers in which two runs differ, and the one that makes the difference.

    The layers that the reference records are compared, or all layers if it records none. The
    candidate need not record anything. Networks run under ``no_grad`` in their current mode,
    and start each batch from the same state of random numbers. Afterwards their buffers are as
    before, and random numbers are as one pass over the batches leaves them.

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
    floor : Recorder or Recording, optional
        A third run, whose differences from the reference are noise: the reference in another
        precision, or on other hardware. A layer differs only if the candidate clearly exceeds
        the noise.
    max_batches : int, optional
        Stop after this number of batches.
    to_inputs : callable or sequence of callables, optional
        ``batch ->`` inputs of the net, as for ``collect``. Two functions are for the reference and
        for the candidate, if their inputs differ, for example in the device. A floor takes the
        inputs of the candidate, or has a third function.
    sample_ids : callable, optional
        ``batch ->`` one integer or string for each sample. Samples of recordings are looked up by
        these ids. By default samples are numbered from 0 on.
    rows : Tokens or Nodes, optional
        Compare tokens or nodes, without padding, if networks run.
    progress : bool, default True
        Show a progress bar, on a terminal.

    Returns
    -------
    Difference
        ``first`` is the layer that makes the difference, None if nothing differs.

    Raises
    ------
    ComparisonError
        There is no layer in common, samples are missing on one side, or something else can't be
        compared as asked.

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
    rows = rows_or_none(rows, ComparisonError)
    feeds = _feeds(batches, max_batches, to_inputs, sample_ids)
    third = None if floor is None else _side(floor, "floor", feeds[2])
    sides = _Sides(
        _side(reference, "reference", feeds[0]), _side(candidate, "candidate", feeds[1]), third
    )
    if sides.networks and batches is None:
        raise ComparisonError(
            "there are no batches, but a network needs some to run on: write compare(reference, "
            "candidate, batches)"
        )
    pairs, unmatched = match_sides(sides.reference, sides.candidate, Match(match))
    floors = None if third is None else _floors(sides.reference, third, pairs, Match(match))
    digested = sides.digested(pairs)
    comparison = Comparison(
        sides.reference.architecture, pairs, floors, digested, Tolerance(rtol, atol)
    )
    total = feeds[0].num_batches if sides.networks else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        _open(stack, sides, pairs, floors, digested)
        advance = stack.enter_context(progress_bar("comparing", total, is_wanted=progress))
        for block in _batches(sides, feeds[0], rows) if sides.networks else _samples(sides):
            sides.load(block)
            comparison.add(block, sides.reference, sides.candidate, sides.floor)
            advance(len(block.ids), 0)
    return comparison.result(unmatched)


@dataclass
class _Sides:
    """The sides of one comparison; the floor differs from the reference by noise alone."""

    reference: Side
    candidate: Side
    floor: Side | None

    def __post_init__(self) -> None:
        sides = [one for one in (self.reference, self.candidate, self.floor) if one is not None]
        self.networks = [side for side in sides if isinstance(side, NetworkSide)]
        self.recordings = [side for side in sides if isinstance(side, RecordingSide)]
        for side in self.networks:
            side.shares_batches = len(self.networks) > 1

    def digested(self, pairs: Iterable[Pair]) -> frozenset[DepthIdx]:
        """Return the reference's layers of which at least one side knows only digests."""
        found = frozenset(
            pair.reference.label
            for pair in pairs
            if pair.reference.label in self.reference.digests
            or pair.partner.label in self.candidate.digests
        )
        if found and self.floor is not None:
            raise ComparisonError(
                "floor= needs values, but there are only digests, which don't say how far apart "
                "two runs are: leave floor= out, or collect samples"
            )
        return found

    def load(self, block: SampleBlock) -> None:
        """Let each side have the values of a block; networks run with the same random numbers.

        Afterwards generators are in the state that the first network left, as if it alone had run.
        """
        for recording in self.recordings:
            recording.load(block)
        before, after = random_state(), None
        for number, side in enumerate(self.networks, 1):
            restore_random(before)
            with self._put_back(side, self.networks[number:]):
                side.load(block)
            after = after or random_state()
        restore_random(after or before)

    def _put_back(
        self, side: NetworkSide, later: Sequence[NetworkSide]
    ) -> contextlib.AbstractContextManager[Any]:
        """Undo a network's changes of state, since another side may share its modules."""
        own = set(side.net.modules())
        if any(module in own for other in later for module in other.net.modules()):
            return untouched(side.net, keep_random=True)
        return contextlib.nullcontext()


def _feeds(
    batches: Iterable[Any] | None,
    max_batches: int | None,
    to_inputs: ToInputs | Sequence[ToInputs] | None,
    sample_ids: Callable[[Any], Any] | None,
) -> list[Feed]:
    """Return the feed of each side; the first one counts the samples."""
    several: list[Any] = [*to_inputs] if isinstance(to_inputs, Sequence) else [to_inputs] * 3
    if len(several) == 2:
        several.append(several[1])
    if len(several) != 3 or not all(one is None or callable(one) for one in several):
        raise ComparisonError(
            f"to_inputs={to_inputs!r}: give one function of the batch, or two of them, for the "
            "reference and for the candidate"
        )
    given = () if batches is None else batches
    return [
        Feed(given, CollectOptions(max_batches=max_batches, to_inputs=one, sample_ids=sample_ids))
        for one in several
    ]


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
        hint = f"write Recorder(net, input_size=...) around a network for the {what}"
    elif isinstance(given, str) or hasattr(given, "__fspath__"):
        hint = f"write scio_recorder.open_recording({str(given)!r})"
    raise ComparisonError(f"the {what} is a {type(given).__name__}: {hint}")


def _floors(
    reference: Side, floor: Side, pairs: Sequence[Pair], match: Match
) -> dict[DepthIdx, DepthIdx]:
    """Return the floor's partner of each layer; the floor is usually the reference itself."""
    if floor.architecture == reference.architecture:
        match = Match(None)
    labels = [pair.reference.label for pair in pairs]
    found, _ = match_layers(reference.architecture, labels, floor.architecture, floor.labels, match)
    return {pair.reference.label: pair.partner.label for pair in found if pair.error is None}


def _open(
    stack: contextlib.ExitStack,
    sides: _Sides,
    pairs: Sequence[Pair],
    floors: Mapping[DepthIdx, DepthIdx] | None,
    digested: frozenset[DepthIdx],
) -> None:
    """Prepare all networks; afterwards they are as they were before."""
    both = [pair for pair in pairs if pair.error is None]
    only_digests = len(digested) == len(both)
    has_inputs = sides.reference.knows_inputs and sides.candidate.knows_inputs
    calls: Any = next((side.calls for side in sides.networks), "labelled")
    for net in {id(side.net): side.net for side in sides.networks}.values():
        stack.enter_context(untouched(net, keep_random=True))
    labels = (
        [pair.reference.label for pair in both],
        [pair.partner.label for pair in both],
        (floors or {}).values(),
    )
    for side, own in zip((sides.reference, sides.candidate, sides.floor), labels, strict=True):
        if isinstance(side, NetworkSide):
            options = RecordOptions(
                inputs=has_inputs and not only_digests,
                # Nobody knows before a pass what it overwrites, and a comparison must not fail.
                copy="always",
                calls=calls,
                notes_moments=False,
            )
            stack.enter_context(side.opened(own, options, keeps_digests=only_digests))


def _batches(sides: _Sides, feed: Feed, rows: Rows | None) -> Iterator[SampleBlock]:
    """Yield the batches, and check that recordings have just their samples."""
    for side in sides.recordings:
        side.check_rows(rows is not None)
    net = sides.networks[0]
    has_rows: dict[str, bool] = {}
    is_empty, is_advised = True, feed.asked.to_inputs is not None
    missing: dict[str, list[SampleId]] = {side.what: [] for side in sides.recordings}
    root = net.architecture[0, 1].input_shape
    for batch, _ in feed:
        is_empty = False
        is_advised = is_advised or advise_second_element(net.net, batch)
        inputs = net.feed.inputs(batch)
        block = SampleBlock((), batch, feed.number)
        if rows is not None:
            named = inputs.named(net.net)
            source = Source(net.net, batch, named, feed.number, "", root, has_rows)
            block.rows = rows.of(source)
            block.received = rows.all_real(source, block.rows)
        elif feed.number == 0 and feed.asked.sample_ids is None:
            refuse_sample(net.net, root, inputs)
        number = None if block.rows is None else block.rows.num_samples
        block.ids, _ = feed.ids(batch, inputs, number)
        feed.num_samples += len(block.ids)
        for side in sides.recordings:
            missing[side.what] += side.missing(block.ids)
        if not any(missing.values()):
            yield block
    if is_empty:
        raise ComparisonError("batches is empty: it gave no batch to run on")
    for what, lacking in missing.items():
        refuse_missing(lacking, what, "batches have")
    if feed.asked.max_batches is None:
        for side in sides.recordings:
            refuse_missing(side.unseen(), "batches", f"{side.what} has")


def _samples(sides: _Sides) -> Iterator[SampleBlock]:
    """Yield the samples of recordings, in parts of bounded size or in the reference's batches."""
    first, *others = sides.recordings
    ids = first.recording.sample_ids
    for side in others:
        refuse_missing(side.missing(ids), side.what, f"{first.what} has")
        refuse_missing(first.missing(side.recording.sample_ids), first.what, f"{side.what} has")
        if side.recording.has_rows != first.recording.has_rows:
            which = (first, side) if first.recording.has_rows else (side, first)
            raise ComparisonError(
                f"the {which[0].what} has a row for each token or node, and the {which[1].what} "
                "one for each sample: collect both with the same rows="
            )
    start = 0
    for length in _block_lengths(sides.recordings):
        yield first.block(ids[start : start + length])
        start += length


def _block_lengths(sides: Sequence[RecordingSide]) -> Iterable[int]:
    recording = sides[0].recording
    if all(side.recording.calls.labels for side in sides):
        # Inputs are kept batch by batch.
        return recording.calls.rows
    layers = (side.recording[at] for side in sides for at in side.recording.stored)
    largest = max(map(bytes_of_row, layers), default=8)
    per_sample = largest * max(1, recording.num_rows) / max(1, recording.num_samples)
    step = max(1, int(_BLOCK_BYTES // max(1, per_sample)))
    return (min(step, recording.num_samples - at) for at in range(0, recording.num_samples, step))
