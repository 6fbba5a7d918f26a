"""A side of a comparison: a recording that is read sample by sample."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from scio_recorder.analysis.comparing.findings import SampleId
from scio_recorder.analysis.comparing.leaves import samples_of_inputs
from scio_recorder.analysis.comparing.sides import Block, Values
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.records import Inputs
from scio_recorder.recording import Recording
from scio_recorder.reductions import Digest, Reduction
from scio_recorder.reductions.base import Reductions, several


class RecordingSide:
    """A recording that is read sample by sample.

    Parameters
    ----------
    recording : Recording
        Of samples, or of digests.
    what : str
        Which side it is, for messages.
    """

    def __init__(self, recording: Recording, what: str) -> None:
        self.recording = recording
        self.architecture = recording.architecture
        self.what = what
        self._seen = torch.zeros(recording.num_samples, dtype=torch.bool, device="cpu")
        self._next = 0
        reduced = recording.reductions
        found = {label: _place_of_digest(reduced[label]) for label in reduced}
        self._digests = {label: place for label, place in found.items() if place is not None}
        # A layer's output need not have a row for each sample: embeddings of positions don't.
        for label in list(self._digests):
            if len(self._digests_of(label)) != recording.num_rows:
                del self._digests[label]
        self.digests = frozenset(self._digests)
        self.labels = (*recording.stored, *self._digests)
        if not self.labels:
            kinds = sorted({_kind_of(one) for each in reduced.values() for one in several(each)})
            raise ComparisonError(
                f"the {what} holds {', '.join(kinds) or 'no layers'}, which say nothing about "
                "single samples: collect samples, or reduce=scio_recorder.reductions.Digest()"
            )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of layers without values by sample: reduced layers, and digests of others."""
        reduced = (label for label in self.recording if label not in self.labels)
        return tuple(self.architecture[label].name for label in reduced)

    def knows_inputs(self, label: DepthIdx) -> bool:
        """Whether the inputs of layers are known: after ``record(..., inputs=True)``."""
        return label in self.recording.calls.labels

    def at(self, block: Block) -> Values:
        """Return the values of some samples, which are read when they are used."""
        where = self._places_of(block.ids)
        self._next = where.stop if isinstance(where, slice) else where[-1] + 1
        self._seen[where] = True
        rows = where
        if block.positions is not None:
            rows = self._rows_of(where)
            self._check_positions(block.ids, self._positions_at(where, rows), block.positions)
        return Values(
            lambda label: self._output(label, rows),
            lambda label: self._inputs(label, where),
            self.digests.__contains__,
        )

    def check_rows(self, is_given: bool) -> None:
        """Refuse a recording whose rows differ in kind from those of the running networks."""
        if self.recording.has_rows and not is_given:
            raise ComparisonError(
                f"the {self.what} has a row for each token or node: write the same rows= as for "
                "its collection, such as rows=Tokens()"
            )
        if is_given and not self.recording.has_rows:
            raise ComparisonError(f"the {self.what} has a row for each sample: leave rows= out")

    def missing(self, ids: Sequence[SampleId]) -> list[SampleId]:
        """Return the ids that the recording lacks."""
        if self._follow(ids):
            return []
        return [one for one in ids if one not in self._places]

    def unseen(self) -> list[SampleId]:
        """Return the ids that were not asked for."""
        places = (~self._seen).nonzero().squeeze(1).tolist()
        return [self.recording.sample_ids[place] for place in places]

    def _places_of(self, ids: Sequence[SampleId]) -> slice | list[int]:
        """Return the places of those samples that the recording has."""
        if self._follow(ids):
            return slice(self._next, self._next + len(ids))
        return _run_of([self._places[one] for one in ids])

    def block(self, ids: Sequence[SampleId]) -> Block:
        """Return the block of some samples, which says where their rows are."""
        if not self.recording.has_rows:
            return Block(ids)
        where = self._places_of(ids)
        return Block(ids, positions=self._positions_at(where, self._rows_of(where)))

    def _positions_at(self, where: slice | list[int], rows: slice | list[int]) -> Sequence[Tensor]:
        """Return the positions of samples' rows, given the places of both."""
        lengths = self.recording.rows_of_samples().lengths[where].tolist()
        return torch.split(self.recording.rows["position"][rows].cpu(), lengths)

    def _rows_of(self, where: slice | list[int]) -> slice | list[int]:
        """Return the places of the rows of samples."""
        samples = self.recording.rows_of_samples()
        rows = samples[where] if isinstance(where, slice) else [samples[place] for place in where]
        numbers = torch.arange(self.recording.num_rows, device="cpu")
        return _run_of(torch.cat([numbers[:0], *(numbers[one] for one in rows)]).tolist())

    def _check_positions(
        self, ids: Sequence[SampleId], found: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Refuse samples of which the other side has other rows."""
        for one, own, other in zip(ids, found, others, strict=True):
            if own.equal(other):
                continue
            counts = f"{len(own)} rows", f"{len(other)}"
            if len(own) == len(other):
                at = int((own != other).nonzero()[0])
                counts = f"a row at position {own[at]}", f"one at position {other[at]}"
            raise ComparisonError(
                f"sample {one!r} has {counts[0]} in the {self.what} and {counts[1]} on the other "
                "side: give both sides the same rows="
            )

    def _output(self, label: DepthIdx, rows: slice | list[int]) -> Any:
        values = self._digests_of(label) if label in self._digests else self.recording[label]
        return values[rows]

    def _digests_of(self, label: DepthIdx) -> Tensor:
        values = self.recording[label]
        found: Tensor = values[self._digests[label]] if isinstance(values, list) else values
        return found

    def _follow(self, ids: Sequence[SampleId]) -> bool:
        """Whether samples directly follow those that were read last, as they usually do."""
        after = self.recording.sample_ids[self._next : self._next + len(ids)]
        return list(after) == list(ids)

    @cached_property
    def _places(self) -> dict[SampleId, int]:
        ids = self.recording.sample_ids
        places = {one: place for place, one in enumerate(ids)}
        if len(places) < len(ids):
            twice = next(one for place, one in enumerate(ids) if places[one] != place)
            raise ComparisonError(
                f"the {self.what} has {len(ids) - len(places)} repeated ids, such as {twice!r}: "
                "samples can't be paired by them"
            )
        return places

    @cached_property
    def _batch_starts(self) -> list[int]:
        return list(accumulate(self.recording.calls.rows, initial=0))

    def _inputs(self, label: DepthIdx, where: slice | list[int]) -> Inputs | None:
        """Return a layer's inputs for some samples; None if they can't be known."""
        if not self.knows_inputs(label):
            return None
        starts, inputs = self._batch_starts, self.recording.inputs[label]
        places = range(where.start, where.stop) if isinstance(where, slice) else where
        numbers = [bisect_right(starts, place) - 1 for place in places]
        if len(set(numbers)) == 1 and list(places) == list(
            range(starts[numbers[0]], starts[numbers[0] + 1])
        ):
            return inputs[numbers[0]]
        each = zip(numbers, places, strict=True)
        wanted = [(number, place - starts[number]) for number, place in each]
        return samples_of_inputs(inputs, self.recording.calls.rows, wanted)


def _run_of(places: list[int]) -> slice | list[int]:
    """Return consecutive places as a slice, which is read at once."""
    start = places[0] if places else 0
    is_run = places == list(range(start, start + len(places)))
    return slice(start, start + len(places)) if is_run else places


def _place_of_digest(given: Reductions) -> int | None:
    # Digests by class have lost the order of the samples.
    kept = [isinstance(one, Digest) and one.keeps_rows for one in several(given)]
    return kept.index(True) if any(kept) else None


def _kind_of(one: Reduction) -> str:
    by_label = isinstance(one, Digest) and not one.keeps_rows
    return "Digest with by=" if by_label else type(one).__name__
