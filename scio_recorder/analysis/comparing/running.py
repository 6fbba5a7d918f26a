"""Taking the sides of a comparison through the same samples, a block at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from scio_recorder.analysis.comparing.comparison import Comparison
from scio_recorder.analysis.comparing.difference import Difference
from scio_recorder.analysis.comparing.findings import SampleId, Unmatched
from scio_recorder.analysis.comparing.matching import (
    Match,
    Pair,
    match_layers,
    refuse_strangers,
    without_shards,
)
from scio_recorder.analysis.comparing.measures import Tolerance
from scio_recorder.analysis.comparing.network_side import NetworkSide
from scio_recorder.analysis.comparing.recording_side import RecordingSide
from scio_recorder.analysis.comparing.sides import Block, Values
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import DepthIdx, few
from scio_recorder.nets.state.restoring import random_state, restore_random
from scio_recorder.nets.state.sharded import restored_after_passes
from scio_recorder.recording.advice import advise_second_element, refuse_sample
from scio_recorder.recording.feed import Feed
from scio_recorder.recording.rows import Rows, Source
from scio_recorder.stores.disk_tensor import bytes_of_row

# The bytes of a layer that are read at once from each recording.
_BLOCK_BYTES = 1 << 26
_SHOWN = 5

Side: TypeAlias = NetworkSide | RecordingSide


@dataclass
class Sides:
    """The sides of one comparison.

    Parameters
    ----------
    reference, candidate : Side
        The sides to compare.
    floor : Side or None
        A side that differs from the reference by noise alone.
    """

    reference: Side
    candidate: Side
    floor: Side | None = None

    def __post_init__(self) -> None:
        for side in self.networks:
            side.shares_batches = len(self.networks) > 1

    @property
    def all(self) -> list[Side]:
        """The sides that are given, the reference first."""
        sides = [self.reference, self.candidate]
        return sides if self.floor is None else [*sides, self.floor]

    @property
    def networks(self) -> list[NetworkSide]:
        """The sides that run."""
        return [side for side in self.all if isinstance(side, NetworkSide)]

    @property
    def recordings(self) -> list[RecordingSide]:
        """The sides that are read."""
        return [side for side in self.all if isinstance(side, RecordingSide)]

    def at(self, block: Block) -> list[Values]:
        """Return the values of each side for a block; networks run with the same random numbers.

        Afterwards generators are in the state that the first network left, as if it alone had run.
        """
        if len(self.networks) < 2:
            return [side.at(block) for side in self.all]
        before, after = random_state(), None
        found = []
        for number, side in enumerate(self.all):
            if isinstance(side, NetworkSide):
                restore_random(before)
                with self._put_back(side, number):
                    found.append(side.at(block))
                after = after or random_state()
            else:
                found.append(side.at(block))
        assert after is not None
        restore_random(after)
        return found

    def _put_back(self, side: NetworkSide, number: int) -> contextlib.AbstractContextManager[None]:
        """Undo a network's changes of state, since another side may share its modules."""
        later = [other for other in self.all[number + 1 :] if isinstance(other, NetworkSide)]
        own = set(map(id, side.net.modules()))
        if any(id(module) in own for other in later for module in other.net.modules()):
            return restored_after_passes(side.net)
        return contextlib.nullcontext()


@torch.no_grad()
def compare_sides(
    sides: Sides,
    match: Match,
    tolerance: Tolerance,
    feed: Feed | None,
    rows: Rows | None,
    *,
    progress: bool,
) -> Difference:
    """Compare all layers that two sides share, over all samples.

    Parameters
    ----------
    sides : Sides
        The sides to compare.
    match : Match
        How names correspond.
    tolerance : Tolerance
        What counts as equal.
    feed : Feed or None
        The batches, if networks run.
    rows : Rows or None
        The kind of row in layers' outputs, if it is not a sample and networks run.
    progress : bool
        Whether to show a progress bar.
    """
    reference, candidate, floor = sides.reference, sides.candidate, sides.floor
    chosen = _chosen(reference)
    pairs, unmatched = match_layers(
        reference.architecture, chosen, candidate.architecture, candidate.labels, match
    )
    pairs, unmatched = without_shards(pairs, unmatched)
    refuse_strangers(pairs, unmatched, match)
    match.check(reference.architecture, candidate.architecture)
    mine, theirs = unmatched
    unmatched = Unmatched((*mine, *reference.left_out), (*theirs, *candidate.left_out))
    floors = None if floor is None else _floors(reference, floor, pairs, match)
    digested = frozenset(
        pair.reference.label
        for pair in pairs
        if pair.reference.label in reference.digests or pair.partner.label in candidate.digests
    )
    if floors is not None and digested:
        raise ComparisonError(
            "floor= needs values, but there are only digests, which don't say how far apart two "
            "runs are: leave floor= out, or collect samples"
        )
    comparison = Comparison(reference.architecture, pairs, floors, digested, tolerance)
    total = None if feed is None else feed.num_batches
    with contextlib.ExitStack() as stack:
        _open(stack, sides, pairs, floors, digested)
        advance = stack.enter_context(progress_bar("comparing", total, is_wanted=progress))
        blocks = _read(sides) if feed is None else _run(sides, feed, rows)
        for block in blocks:
            own, other, *third = sides.at(block)
            comparison.add(block, own, other, third[0] if third else None)
            advance(len(block.ids), 0)
    return comparison.result(unmatched)


def _chosen(side: Side) -> tuple[DepthIdx, ...]:
    """Return the layers to compare: those that a side has recorded, or all."""
    return (side.recorded if isinstance(side, NetworkSide) else ()) or side.labels


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
    sides: Sides,
    pairs: Sequence[Pair],
    floors: dict[DepthIdx, DepthIdx] | None,
    digested: frozenset[DepthIdx],
) -> None:
    """Prepare all networks; afterwards they are as they were before."""
    both = [pair for pair in pairs if pair.error is None]
    inputs = any(
        sides.reference.knows_inputs(pair.reference.label)
        and sides.candidate.knows_inputs(pair.partner.label)
        for pair in both
        if pair.reference.label not in digested
    )
    only_digests = len(digested) == len(both)
    calls = next((side.calls for side in sides.networks), "labelled")
    labels: list[list[DepthIdx]] = [
        [pair.reference.label for pair in both],
        [pair.partner.label for pair in both],
    ]
    labels.append([*(floors or {}).values()])
    for net in {id(side.net): side.net for side in sides.networks}.values():
        stack.enter_context(restored_after_passes(net))
    for side, own in zip(sides.all, labels, strict=False):
        if isinstance(side, NetworkSide):
            stack.enter_context(side.opened(own, inputs=inputs, calls=calls, digests=only_digests))


def _run(sides: Sides, feed: Feed, rows: Rows | None) -> Iterator[Block]:
    """Yield the batches, and check that recordings have just their samples."""
    net, seen = sides.networks[0], 0
    has_rows: dict[str, bool] = {}
    is_empty, is_advised = True, feed.to_inputs is not None
    missing: dict[str, list[SampleId]] = {}
    for batch, _ in feed:
        is_empty = False
        is_advised = is_advised or advise_second_element(net.net, batch)
        inputs = net.feed.inputs(batch)
        found, root = None, net.architecture[0, 1].input_shape
        if rows is None and feed.number == 0 and feed.sample_ids is None:
            refuse_sample(net.net, root, inputs)
        if rows is not None:
            named = inputs.named(net.net)
            source = Source(net.net, batch, named, feed.number, "", root, has_rows)
            found = rows.of(source)
        ids, _ = feed.ids(batch, inputs, seen, None if found is None else found.num_samples)
        seen += len(ids)
        for side in sides.recordings:
            missing.setdefault(side.what, []).extend(side.missing(ids))
        if not any(missing.values()):
            block = Block(ids, batch, number=feed.number)
            if rows is not None and found is not None:
                block.rows, block.received = found, rows.all_real(source, found)
                lengths = torch.bincount(found.columns["sample"], minlength=len(ids)).tolist()
                block.positions = torch.split(found.columns["position"], lengths)
            yield block
    if is_empty:
        raise ComparisonError("batches is empty: it gave no batch to run on")
    for what, lacking in missing.items():
        _refuse_missing(lacking, what, "batches have")
    if feed.max_batches is None:
        for side in sides.recordings:
            _refuse_missing(side.unseen(), "batches", f"{side.what} has")


def _read(sides: Sides) -> Iterator[Block]:
    """Yield the samples of recordings, in parts of bounded size or in the reference's batches."""
    first, *others = sides.recordings
    ids = first.recording.sample_ids
    for side in others:
        _refuse_missing(side.missing(ids), side.what, f"{first.what} has")
        _refuse_missing(first.missing(side.recording.sample_ids), first.what, f"{side.what} has")
        if side.recording.has_rows != first.recording.has_rows:
            which = (first, side) if first.recording.has_rows else (side, first)
            raise ComparisonError(
                f"the {which[0].what} has a row for each token or node, and the {which[1].what} "
                "one for each sample: collect both with the same rows="
            )
    start = 0
    for length in _block_lengths(sides):
        yield first.block(ids[start : start + length])
        start += length


def _block_lengths(sides: Sides) -> Iterator[int]:
    recording = sides.recordings[0].recording
    if all(side.recording.calls.labels for side in sides.recordings):
        # Inputs are kept batch by batch.
        yield from recording.calls.rows
        return
    layers = (side.recording[at] for side in sides.recordings for at in side.recording.stored)
    largest = max(map(bytes_of_row, layers), default=8)
    per_sample = largest * max(1, recording.num_rows) / max(1, recording.num_samples)
    step = max(1, int(_BLOCK_BYTES // max(1, per_sample)))
    for start in range(0, recording.num_samples, step):
        yield min(step, recording.num_samples - start)


def _refuse_missing(ids: Sequence[SampleId], where: str, who: str) -> None:
    if ids:
        raise ComparisonError(
            f"{len(ids)} samples are missing from the {where} that the {who}: "
            f"{few(ids, _SHOWN, repr)}. Samples are paired by id: give the same ones to both, with "
            "sample_ids= if they have ids of their own"
        )
