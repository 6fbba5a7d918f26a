"""Comparing two sides block by block: which layers differ, and which of them makes a difference.

NOTE [Who makes a difference]

A layer makes a difference in a block of samples if its output differs and none of its inputs do.
Layers are examined in the order in which the reference's calls return, so the first that qualifies
is the innermost and earliest. A layer that passes a difference on has received one.

NOTE [Noise]

With a floor, the difference between a third side and the reference counts as noise. The candidate
differs by more than noise if it exceeds, by the factors below, the floor's difference in the same
tensor in this block or an earlier one. Two draws of rounding noise (sums in other orders) stayed
within 1.5 in norm and 3.4 in the largest element over networks of usual widths, and the factors
leave room for that. They are larger for small tensors, which vary more: the norm of four numbers is
ten times that of four others once in some thousand draws. In the presence of noise, a single
rounding of a number says nothing either. In a small tensor all roundings may agree by luck. A layer
whose floor has no noise for that reason is granted the largest noise made before it returned.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scio_recorder.analysis.comparing.difference import Difference
from scio_recorder.analysis.comparing.findings import (
    FirstDifference,
    LayerDifference,
    Unmatched,
    Worst,
)
from scio_recorder.analysis.comparing.matching import Pair
from scio_recorder.analysis.comparing.measures import (
    Figures,
    Tolerance,
    dense,
    measure,
    measure_values,
    unknown,
)
from scio_recorder.analysis.comparing.part_pairs import PartPair, paired_inputs, paired_outputs
from scio_recorder.analysis.comparing.sides import SampleBlock, Side
from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs

# See NOTE [Noise].
_NORM_FACTOR, _LARGEST_FACTOR, _FEW = 4.0, 8.0, 8


@dataclass(frozen=True)
class Noise:
    """The noise in one tensor: its relative error and its largest difference."""

    relative_error: float = 0.0
    max_abs: float = 0.0

    def and_also(self, figures: Figures, rounding: float) -> Noise:
        """Return the larger of this noise and a further block's, given the size of one rounding.

        In the presence of noise, single roundings more or less say nothing.
        """
        if not figures.num_different:
            return self
        size = math.sqrt(figures.own / figures.num_elements)
        return Noise(
            max(self.relative_error, figures.relative_error, rounding / _NORM_FACTOR),
            max(self.max_abs, figures.max_abs, rounding * size),
        )


def exceeds(figures: Figures, noise: Noise | None) -> bool:
    """Whether a difference is more than noise; without noise, every difference is."""
    if not figures.num_different:
        return False
    if noise is None or not noise.relative_error:
        return True
    more = 1 + _FEW / figures.num_elements
    return (
        figures.relative_error > more * _NORM_FACTOR * noise.relative_error
        or figures.max_abs > more * _LARGEST_FACTOR * noise.max_abs
    )


class _MeasuredPart(NamedTuple):
    """A pair of parts of a layer's output in one block, how they differ, and the noise there."""

    part: int
    pair: PartPair
    figures: Figures
    noise: Noise | None

    def differs(self) -> bool:
        """Whether they differ by more than noise."""
        return exceeds(self.figures, self.noise)

    @property
    def shown(self) -> int | None:
        """The element to show: the first that differs, or with noise the worst."""
        figures = self.figures
        is_worst = self.noise is not None and figures.farthest is not None
        return figures.farthest if is_worst else figures.first

    def element(self, block: SampleBlock, flat: int | None) -> tuple[int, Worst]:
        """Return an element, and the place of its sample; a plain value is no sample's."""
        own, other = self.pair
        sample, index = 0, tuple[int, ...]()
        if isinstance(own, Tensor):
            sample, index = block.place(own.shape, flat or 0)
            own, other = (dense(one).reshape(-1)[flat or 0].item() for one in self.pair)
        return sample, Worst(block.ids[sample], index, own, other, self.part)


@dataclass
class _LayerSums:
    """What was found about a pair of layers in all blocks so far."""

    pair: Pair
    error: str | None
    figures: Figures = field(default_factory=Figures)
    noise: Figures | None = None
    differs: bool = False
    # The first place of a difference, and the first one although the inputs are equal.
    first: FirstDifference | None = None
    maker: FirstDifference | None = None
    worst: Worst | None = None
    # Whether its inputs were equal in all blocks so far.
    received_same: bool | None = True

    def __post_init__(self) -> None:
        if self.error is not None:
            self.differs, self.received_same = True, None
            self.figures = unknown(0, 0)
            layer = self.pair.reference
            self.first = FirstDifference(layer, None, None, None, None, None, self.error)

    def result(self) -> LayerDifference:
        """Return the findings about the layer."""
        (layer, partner, _), figures, first = self.pair, self.figures, self.first
        if not self.differs:
            inputs_equal = self.received_same
        elif self.maker is not None:
            inputs_equal = True
        else:
            inputs_equal = None if first is None else first.inputs_equal
        return LayerDifference(
            *(layer.label, layer.name, partner.label, partner.name),
            *(figures.max_abs, figures.max_rel, figures.relative_error, figures.cosine),
            *(figures.num_different, figures.num_elements),
            None if first is None else first.sample_id,
            inputs_equal,
            self.differs,
            self.error,
            self.worst,
            None if self.noise is None else self.noise.relative_error,
        )


class Comparison:
    """Takes block after block of two sides, and perhaps of a floor.

    Parameters
    ----------
    architecture : Architecture
        The architecture of the reference.
    pairs : iterable of Pair
        Layers of the reference and of the candidate, in the order in which the first return.
    floors : mapping or None
        Labels of the reference -> labels of the floor. None without a floor.
    digested : set of label
        Layers of the reference whose digests are compared.
    tolerance : Tolerance
        What counts as equal.
    """

    def __init__(
        self,
        architecture: Architecture,
        pairs: Iterable[Pair],
        floors: Mapping[DepthIdx, DepthIdx] | None,
        digested: frozenset[DepthIdx],
        tolerance: Tolerance,
    ) -> None:
        self._architecture = architecture
        self._layers = [
            _LayerSums(pair, pair.error, noise=None if floors is None else Figures())
            for pair in pairs
        ]
        self._floors = floors or {}
        self._digested = digested
        self._tolerance = tolerance
        self._num_samples = 0
        # By layer, whether received or returned, and part.
        self._levels: dict[tuple[DepthIdx, str, int], Noise] = {}
        # The largest relative error of the floor in the block so far.
        self._made = 0.0
        self._known: dict[tuple[int, int], tuple[Any, Any, Figures]] = {}

    def add(self, block: SampleBlock, own: Side, other: Side, floor: Side | None) -> None:
        """Compare all layers of a block, whose values the sides have."""
        self._num_samples += len(block.ids)
        self._made = 0.0
        for sums in self._layers:
            if sums.pair.error is None:
                self._add(sums, block, own, other, floor)
        self._known.clear()

    def result(self, unmatched: Unmatched) -> Difference:
        """Return the findings."""
        return Difference(
            self._architecture,
            {sums.pair.reference.label: sums.result() for sums in self._layers},
            self._first(),
            num_samples=self._num_samples,
            rtol=self._tolerance.rtol,
            atol=self._tolerance.atol,
            unmatched=unmatched,
        )

    def _first(self) -> FirstDifference | None:
        makers = (sums.maker for sums in self._layers if sums.maker is not None)
        others = (sums.first for sums in self._layers if sums.first is not None)
        return next(chain(makers, others), None)

    def _add(
        self, sums: _LayerSums, block: SampleBlock, own: Side, other: Side, floor: Side | None
    ) -> None:
        layer, partner, _ = sums.pair
        as_digests = layer.label in self._digested
        mine = own.output(layer.label, as_digests)
        third, noisy_inputs, noisy = self._floors.get(layer.label), None, None
        if floor is not None and third is not None:
            noisy_inputs = floor.inputs(third)
            noisy = paired_outputs(mine, floor.output(third, as_digests))
        inputs = own.inputs(layer.label), other.inputs(partner.label)
        same = self._received(sums.pair, *inputs, noisy_inputs)
        if same is None or sums.received_same is None:
            sums.received_same = None
        else:
            sums.received_same &= same
        parts = self._returned(sums, mine, other.output(partner.label, as_digests), noisy)
        if isinstance(parts, str):
            sums.error = sums.error or parts
            sums.figures = unknown(sums.figures.num_elements, sums.figures.num_different)
        else:
            self._count(sums, block, parts)
            parts = [part for part in parts if part.differs()]
        if parts:
            sums.differs = True
            if sums.first is None or (same and sums.maker is None):
                found = self._spot(layer, block, parts, same)
                sums.first = sums.first or found
                sums.maker = sums.maker or (found if same else None)

    def _received(self, pair: Pair, mine: Any, theirs: Any, noisy: Inputs | None) -> bool | None:
        """Whether all inputs of a layer agree up to noise; None if that is not known."""
        layer, partner, _ = pair
        # Of all calls of a pass, nobody knows which inputs belong to the output that differs.
        if not isinstance(mine, Inputs) or not isinstance(theirs, Inputs):
            return None
        pairs = paired_inputs(mine, theirs, layer.module, partner.module)
        if pairs is None or any(parts.mismatch for parts in pairs):
            return False
        beyond = None if noisy is None else paired_inputs(mine, noisy, layer.module, None)
        noise = self._noise(layer.label, "received", beyond, len(pairs))
        each = zip(pairs, noise, strict=True)
        return not any(exceeds(self._figures(parts), floor) for parts, floor in each)

    def _returned(
        self, sums: _LayerSums, mine: Any, theirs: Any, noisy: list[PartPair] | str | None
    ) -> list[_MeasuredPart] | str:
        """Measure the outputs of a layer, or say why that can't be done."""
        pairs = paired_outputs(mine, theirs)
        if isinstance(pairs, str):
            return pairs
        mismatch = next((one.mismatch for one in pairs if one.mismatch), None)
        if mismatch is not None:
            return mismatch
        label = sums.pair.reference.label
        noise = self._noise(label, "returned", noisy, len(pairs), sums.noise)
        return [
            _MeasuredPart(
                part,
                pair,
                self._figures(pair),
                # See NOTE [Noise].
                Noise(self._made, math.inf) if self._made and one == Noise() else one,
            )
            for part, (pair, one) in enumerate(zip(pairs, noise, strict=True))
        ]

    def _noise(
        self,
        label: DepthIdx,
        what: str,
        pairs: list[PartPair] | str | None,
        count: int,
        total: Figures | None = None,
    ) -> list[Noise | None]:
        """Return the noise of each part so far; None if the floor has other parts."""
        if not isinstance(pairs, list) or len(pairs) != count:
            return [None] * count
        for part, pair in enumerate(pairs):
            if pair.mismatch is None:
                before = self._levels.get((label, what, part), Noise())
                figures = self._figures(pair)
                self._levels[label, what, part] = before.and_also(figures, _rounding(pair.other))
                if total is not None:
                    total.add(figures)
                    self._made = max(self._made, figures.relative_error)
        return [self._levels.get((label, what, part)) for part in range(count)]

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

    def _count(self, sums: _LayerSums, block: SampleBlock, parts: Sequence[_MeasuredPart]) -> None:
        """Add the figures of a block to those of earlier blocks."""
        is_digest = sums.pair.reference.label in self._digested
        for one in parts:
            figures = one.figures
            if is_digest:
                figures = unknown(figures.num_elements, figures.num_different)
            elif figures.max_abs > sums.figures.max_abs and figures.farthest is not None:
                sums.worst = one.element(block, figures.farthest)[1]
            sums.figures.add(figures)

    def _spot(
        self,
        layer: Layer,
        block: SampleBlock,
        parts: Sequence[_MeasuredPart] | str,
        same: bool | None,
    ) -> FirstDifference:
        """Return where a layer differs in a block."""
        if isinstance(parts, str):
            return FirstDifference(layer, block.ids[0], None, None, None, same, parts)
        found = (one.element(block, one.shown) for one in parts)
        _, one = min(found, key=itemgetter(0))
        if layer.label in self._digested:
            return FirstDifference(layer, one.sample_id, None, None, None, same)
        values = one.reference, one.candidate
        return FirstDifference(layer, one.sample_id, one.index, *values, same, part=one.part)


def _rounding(value: Any) -> float:
    is_rounded = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return torch.finfo(value.dtype).eps if is_rounded else 0.0
