"""Comparing two sides block by block: which layers differ, and which of them makes a difference.

NOTE [Who makes a difference]

A layer makes a difference in a block of samples if its output differs and none of its inputs do.
Layers are examined in the order in which the reference's calls return, so the first that qualifies
is the innermost and earliest. A layer that passes a difference on has received one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, NamedTuple

from torch import Tensor

from scio_recorder.analysis.comparing.difference import (
    Difference,
    FirstDifference,
    LayerDifference,
    SampleId,
    Unmatched,
)
from scio_recorder.analysis.comparing.matching import Pair
from scio_recorder.analysis.comparing.measures import (
    Figures,
    PartPair,
    Tolerance,
    dense,
    measure,
    measure_values,
    paired_inputs,
    paired_outputs,
    unknown,
)
from scio_recorder.analysis.comparing.parting import OperationPair
from scio_recorder.analysis.comparing.sides import SampleBlock, Side
from scio_recorder.layer import Operation, RowIdx
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.structures import tensors


class _MeasuredPart(NamedTuple):
    """A pair of parts of a layer's outputs in one block, and how they differ."""

    number: int
    pair: PartPair
    figures: Figures

    def place(self, block: SampleBlock) -> tuple[int, tuple[int, ...]]:
        """Return the sample of the first element that differs, and the index in it."""
        own, first = self.pair.own, self.figures.first or 0
        # A plain value counts as one of the first sample.
        return block.place(own.shape, first) if isinstance(own, Tensor) else (0, ())

    def values(self) -> list[Any]:
        """Return both values of that element."""
        if not isinstance(self.pair.own, Tensor):
            return [*self.pair]
        return [dense(one).reshape(-1)[self.figures.first or 0].item() for one in self.pair]


@dataclass
class _ComparedLayer:
    """The findings about a pair of layers in all blocks so far."""

    pair: Pair
    is_digest: bool
    error: str | None
    figures: Figures = field(default_factory=Figures)
    # The first place of a difference, and the first one although the inputs are equal.
    first: FirstDifference | None = None
    maker: FirstDifference | None = None
    # Whether its inputs were equal in all blocks so far; None once they were not known.
    received_same: bool | None = True

    def __post_init__(self) -> None:
        if self.error is not None:
            self.received_same = None
            self.fail(self.error, None, None)

    def receive(self, same: bool | None) -> None:
        """Take whether the inputs in a block are equal; None if that is not known."""
        is_known = same is not None and self.received_same is not None
        self.received_same = (same and self.received_same) if is_known else None

    def fail(self, error: str, sample_id: SampleId | None, same: bool | None) -> None:
        """Take the reason why the outputs in a block can't be compared."""
        self.error = self.error or error
        self.figures = unknown(self.figures.num_elements, self.figures.num_different)
        layer = self.pair.reference
        self._differ(FirstDifference(layer, sample_id, None, None, None, same, error))

    def add(self, block: SampleBlock, parts: Sequence[_MeasuredPart], same: bool | None) -> None:
        """Take how the parts of the outputs in a block differ."""
        for _, _, figures in parts:
            counts = figures.num_elements, figures.num_different
            self.figures.add(unknown(*counts) if self.is_digest else figures)
        differing = [part for part in parts if part.figures.num_different]
        if differing and (self.first is None or (same and self.maker is None)):
            self._differ(self._spot(block, differing, same))

    def _spot(
        self, block: SampleBlock, parts: Sequence[_MeasuredPart], same: bool | None
    ) -> FirstDifference:
        """Return the first place at which parts differ."""
        part = min(parts, key=lambda part: part.place(block)[0])
        sample, index = part.place(block)
        layer, sample_id = self.pair.reference, block.ids[sample]
        if self.is_digest:
            return FirstDifference(layer, sample_id, None, None, None, same)
        own, other = part.values()
        return FirstDifference(layer, sample_id, index, own, other, same, part=part.number)

    def _differ(self, found: FirstDifference) -> None:
        self.first = self.first or found
        if found.inputs_equal:
            self.maker = self.maker or found

    def result(self) -> LayerDifference:
        """Return the findings about the layer."""
        (layer, partner, _), figures, found = self.pair, self.figures, self.maker or self.first
        return LayerDifference(
            *(layer.label, layer.name, partner.label, partner.name),
            *(figures.max_abs, figures.max_rel, figures.relative_error, figures.cosine),
            *(figures.num_different, figures.num_elements),
            None if self.first is None else self.first.sample_id,
            self.received_same if found is None else found.inputs_equal,
            found is not None,
            self.error,
        )


class Comparison:
    """Takes block after block of two sides.

    Parameters
    ----------
    pairs : iterable of Pair
        Layers of the reference and of the candidate, in the order in which the first return.
    digested : set of label
        Layers of the reference whose digests are compared.
    tolerance : Tolerance
        What counts as equal.
    """

    def __init__(
        self, pairs: Iterable[Pair], digested: frozenset[RowIdx], tolerance: Tolerance
    ) -> None:
        self._layers = [
            _ComparedLayer(pair, pair.reference.label in digested, pair.error) for pair in pairs
        ]
        self._tolerance = tolerance
        self._num_samples = 0
        self._known: dict[tuple[int, int], tuple[Any, Any, Figures]] = {}

    def add(self, block: SampleBlock, own: Side, other: Side) -> None:
        """Compare all layers of a block, whose values the sides have."""
        self._num_samples += len(block.ids)
        for layer in self._layers:
            if layer.pair.error is None:
                self._add(layer, block, own, other)
        self._known.clear()

    @property
    def first(self) -> FirstDifference | None:
        """The first layer that makes a difference so far, or else that differs."""
        makers = (layer.maker for layer in self._layers)
        others = (layer.first for layer in self._layers)
        return next(filter(None, chain(makers, others)), None)

    def pair_of(self, found: FirstDifference) -> Pair:
        """Return the layers of a difference."""
        return next(one.pair for one in self._layers if one.pair.reference is found.layer)

    def result(
        self,
        architecture: Architecture,
        unmatched: Unmatched,
        made_with: tuple[Mapping[str, Any], Mapping[str, Any]],
        operations: OperationPair,
    ) -> Difference:
        """Return the findings, given the architecture of the reference, and what made both."""
        first = self.first
        if first is not None:
            own, other, why_none = operations
            first = replace(
                first, operation=own, candidate_operation=other, why_no_operation=why_none
            )
        return Difference(
            architecture,
            {layer.pair.reference.label: layer.result() for layer in self._layers},
            first,
            num_samples=self._num_samples,
            rtol=self._tolerance.rtol,
            atol=self._tolerance.atol,
            unmatched=unmatched,
            made_with=made_with,
        )

    def _add(self, layer: _ComparedLayer, block: SampleBlock, own: Side, other: Side) -> None:
        mine, theirs = layer.pair.reference.label, layer.pair.partner.label
        same = self._are_same(layer.pair, own.inputs(mine), other.inputs(theirs))
        layer.receive(same)
        pairs = paired_outputs(
            own.output(mine, layer.is_digest), other.output(theirs, layer.is_digest)
        )
        if isinstance(pairs, str):
            layer.fail(pairs, block.ids[0], same)
        else:
            figures = map(self._figures, pairs)
            layer.add(block, list(map(_MeasuredPart, count(), pairs, figures)), same)

    def _are_same(self, pair: Pair, mine: Inputs | None, theirs: Inputs | None) -> bool | None:
        """Whether all inputs of a layer are equal; None if that is not known."""
        if mine is None or theirs is None:
            return None
        if isinstance(pair.reference, Operation):
            # Numbers are a part of the operation, and arguments have no names.
            mine, theirs = (Inputs(tuple(tensors(one)), {}) for one in (mine, theirs))
            pairs = paired_inputs(mine, theirs, None, None)
        else:
            pairs = paired_inputs(mine, theirs, pair.reference.module, pair.partner.module)
        return pairs is not None and all(
            one.is_of_one_shape and not self._figures(one).num_different for one in pairs
        )

    def _figures(self, pair: PartPair) -> Figures:
        """Measure two parts, once: one layer's output is often another one's input or output."""
        own, other = pair
        if not isinstance(own, Tensor):
            return measure_values(own, other, self._tolerance)
        known = self._known.get((id(own), id(other)))
        if known is not None and known[0]() is own and known[1]() is other:
            return known[2]
        figures = measure(own, other, self._tolerance)
        self._known[id(own), id(other)] = weakref.ref(own), weakref.ref(other), figures
        return figures
