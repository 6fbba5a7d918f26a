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
whose floor has no noise for that reason is granted the noise of its inputs, or, if it has layers
inside, the noise made before it returned.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scio_recorder.analysis.comparing.difference import Difference
from scio_recorder.analysis.comparing.findings import (
    FirstDifference,
    LayerDifference,
    Unmatched,
    Worst,
)
from scio_recorder.analysis.comparing.leaves import (
    Leaf,
    are_equal_values,
    is_number,
    paired_inputs,
    paired_outputs,
)
from scio_recorder.analysis.comparing.matching import Pair
from scio_recorder.analysis.comparing.measures import (
    Figures,
    Tolerance,
    dense,
    first_different,
    measure,
    unknown,
)
from scio_recorder.analysis.comparing.sides import Block, Values, digests_of
from scio_recorder.analysis.comparing.tally import Tally
from scio_recorder.layer import DepthIdx
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


@dataclass
class _Compared:
    """The comparison of one value of one block: each pair of parts, with figures and noise."""

    pairs: Sequence[tuple[Leaf, Leaf]] = ()
    figures: Sequence[Figures] = ()
    noise: Sequence[Noise | None] = ()
    error: str | None = None

    @property
    def differing(self) -> list[int]:
        """The parts that differ by more than noise."""
        each = zip(self.figures, self.noise, strict=True)
        return [part for part, (own, noise) in enumerate(each) if exceeds(own, noise)]


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
        floors: dict[Any, Any] | None,
        digested: frozenset[Any],
        tolerance: Tolerance,
    ) -> None:
        self._architecture = architecture
        self._tallies = [Tally(pair, pair.error) for pair in pairs]
        for tally in self._tallies:
            if tally.error is not None:
                tally.differs, tally.received_same = True, None
                tally.figures = unknown(0, 0)
            if floors is not None:
                tally.noise = Figures()
        self._floors = floors
        self._digested = digested
        self._tolerance = tolerance
        self._num_samples = 0
        # By layer, whether received or returned, and part.
        self._levels: dict[tuple[DepthIdx, str, int], Noise] = {}
        # The largest relative error of the floor in the block so far.
        self._made = 0.0
        self._known: dict[tuple[int, int], tuple[Any, Any, Figures]] = {}

    def add(self, block: Block, own: Values, other: Values, floor: Values | None) -> None:
        """Compare all layers of a block."""
        self._known.clear()
        self._num_samples += len(block.ids)
        self._made = 0.0
        for tally in self._tallies:
            if tally.pair.error is None:
                self._add(tally, block, own, other, floor)
        self._known.clear()

    def result(self, unmatched: Unmatched) -> Difference:
        """Return the findings."""
        layers: dict[DepthIdx, LayerDifference] = {
            tally.pair.reference.label: tally.result() for tally in self._tallies
        }
        return Difference(
            self._architecture,
            layers,
            self._first(),
            num_samples=self._num_samples,
            rtol=self._tolerance.rtol,
            atol=self._tolerance.atol,
            unmatched=unmatched,
        )

    def _first(self) -> FirstDifference | None:
        makers = (tally.maker for tally in self._tallies if tally.maker is not None)
        found = next(makers, None)
        if found is not None:
            return found
        tally = next((tally for tally in self._tallies if tally.differs), None)
        if tally is None or tally.first is not None:
            return None if tally is None else tally.first
        layer = tally.pair.reference
        return FirstDifference(layer, None, None, None, None, None, tally.error)

    def _add(
        self, tally: Tally, block: Block, own: Values, other: Values, floor: Values | None
    ) -> None:
        third = None if self._floors is None else self._floors.get(tally.pair.reference.label)
        beside = (floor, third) if floor is not None and third is not None else None
        same, received = self._received(tally.pair, own, other, beside)
        module = tally.pair.reference.module
        if module is None or any(True for _ in module.children()):
            received = max(received, self._made)
        compared = self._outputs(tally, own, other, beside, received)
        tally.received_same = _both(tally.received_same, same)
        parts = compared.differing
        self._count(tally, block, compared)
        if compared.error is None and not parts:
            return
        tally.differs = True
        if tally.first is None or (same and tally.maker is None):
            spot = self._spot(tally, block, compared, parts, same)
            tally.first = tally.first or spot
            tally.maker = tally.maker or (spot if same else None)

    def _received(
        self, pair: Pair, own: Values, other: Values, beside: Any
    ) -> tuple[bool | None, float]:
        """Whether all inputs of a layer agree up to noise; None if unknown. And their noise."""
        layer, partner = pair.reference, pair.partner
        mine, theirs = own.inputs(layer.label), other.inputs(partner.label)
        if mine is None or theirs is None:
            return None, 0.0
        calls: list[tuple[Inputs, Inputs]] | None = [(mine, theirs)]
        if not isinstance(mine, Inputs):
            # All calls of a pass, in order. Noise says nothing about single ones.
            outputs = () if beside else (own.output(layer.label), other.output(partner.label))
            calls = self._calls(mine, theirs, outputs)
        found = [paired_inputs(*each, layer.module, partner.module) for each in calls or ()]
        pairs = [leaves for each in found for leaves in each or ()]
        if calls is None or None in found or any(_mismatch(*each) for each in pairs):
            return False, 0.0
        third = None if beside is None else beside[0].inputs(beside[1])
        beyond = None if third is None else paired_inputs(mine, third, layer.module, None)
        noise = self._noise(layer.label, "received", beyond, len(pairs))
        largest = max((one.relative_error for one in noise if one is not None), default=0.0)
        each = zip(pairs, noise, strict=True)
        return not any(exceeds(self._figures(*leaves), floor) for leaves, floor in each), largest

    def _calls(
        self, mine: Sequence[Inputs], theirs: Sequence[Inputs], outputs: Iterable[Sequence[Any]]
    ) -> list[tuple[Inputs, Inputs]] | None:
        """Pair the inputs of calls up to the first whose outputs differ.

        None if no outputs differ, but one side has more calls.
        """
        calls = list(zip(mine, theirs, strict=False))
        for number, results in enumerate(zip(*outputs, strict=False), 1):
            pairs = paired_outputs(*results)
            if isinstance(pairs, str) or any(
                _mismatch(*leaves) or self._figures(*leaves).num_different for leaves in pairs
            ):
                return calls[:number]
        return calls if len(mine) == len(theirs) else None

    def _outputs(
        self, tally: Tally, own: Values, other: Values, beside: Any, received: float
    ) -> _Compared:
        label, partner = tally.pair.reference.label, tally.pair.partner.label
        mine, theirs = own.output(label), other.output(partner)
        if label in self._digested:
            mine = mine if own.is_digest(label) else digests_of(mine)
            theirs = theirs if other.is_digest(partner) else digests_of(theirs)
        pairs = paired_outputs(mine, theirs)
        if isinstance(pairs, str):
            return _Compared(error=pairs)
        error = next((text for text in (_mismatch(*pair) for pair in pairs) if text), None)
        if error is not None:
            return _Compared(error=error)
        beyond = None if beside is None else paired_outputs(mine, beside[0].output(beside[1]))
        noise = [
            Noise(received, math.inf) if received and one == Noise() else one
            for one in self._noise(label, "returned", beyond, len(pairs), tally.noise)
        ]
        return _Compared(pairs, [self._figures(*pair) for pair in pairs], noise)

    def _noise(
        self, label: DepthIdx, what: str, pairs: Any, count: int, total: Figures | None = None
    ) -> list[Noise | None]:
        """Return the noise of each part so far; None if the floor has other parts."""
        if not isinstance(pairs, list) or len(pairs) != count:
            return [None] * count
        for part, pair in enumerate(pairs):
            if _mismatch(*pair) is None:
                before = self._levels.get((label, what, part), Noise())
                figures = self._figures(*pair)
                self._levels[label, what, part] = before.and_also(figures, _rounding(pair[1]))
                if total is not None:
                    total.add(figures)
                    self._made = max(self._made, figures.relative_error)
        return [self._levels.get((label, what, part)) for part in range(count)]

    def _figures(self, reference: Leaf, candidate: Leaf) -> Figures:
        """Measure two parts, once: one layer's output is often another one's input or output."""
        if not isinstance(reference, Tensor):
            equal = are_equal_values(reference, candidate, self._tolerance)
            return Figures(1) if equal else _apart(reference, candidate)
        key = id(reference), id(candidate)
        known = self._known.get(key)
        if known is not None and known[0]() is reference and known[1]() is candidate:
            return known[2]
        figures = measure(reference, candidate, self._tolerance)
        self._known[key] = weakref.ref(reference), weakref.ref(candidate), figures
        return figures

    def _count(self, tally: Tally, block: Block, compared: _Compared) -> None:
        """Add the figures of a block to those of earlier blocks."""
        if compared.error is not None:
            tally.error = tally.error or compared.error
            tally.figures = unknown(tally.figures.num_elements, tally.figures.num_different)
            return
        is_digest = tally.pair.reference.label in self._digested
        for part, figures in enumerate(compared.figures):
            if figures.max_abs > tally.figures.max_abs and not is_digest:
                tally.worst = self._worst(block, compared, part)
            tally.figures.add(
                unknown(figures.num_elements, figures.num_different) if is_digest else figures
            )

    def _worst(self, block: Block, compared: _Compared, part: int) -> Worst | None:
        flat = compared.figures[part].farthest
        if flat is None:
            return None
        own, other = compared.pairs[part]
        sample, index = _place(block, own, flat)
        return Worst(block.ids[sample], index, _number(own, flat), _number(other, flat), part)

    def _spot(
        self,
        tally: Tally,
        block: Block,
        compared: _Compared,
        parts: Sequence[int],
        same: bool | None,
    ) -> FirstDifference:
        """Return where a layer differs in a block: the first place, or with noise the worst."""
        layer = tally.pair.reference
        if compared.error is not None:
            return FirstDifference(
                layer, block.ids[0], None, None, None, same, error=compared.error
            )
        found = []
        for part in parts:
            own, other = compared.pairs[part]
            flat = None if compared.noise[part] is None else compared.figures[part].farthest
            if flat is None and isinstance(own, Tensor):
                flat = first_different(own, other, self._tolerance)
            sample, index = _place(block, own, flat)
            found.append((sample, part, index, flat))
        sample, part, index, flat = min(found, key=lambda one: one[:2])
        own, other = compared.pairs[part]
        if layer.label in self._digested:
            return FirstDifference(layer, block.ids[sample], None, None, None, same)
        values = _number(own, flat), _number(other, flat)
        return FirstDifference(layer, block.ids[sample], index, *values, same, part=part)


def _place(block: Block, leaf: Leaf, flat: int | None) -> tuple[int, tuple[int, ...]]:
    """Return the sample of an element and its index there; a plain value is no sample's."""
    if flat is None or not isinstance(leaf, Tensor):
        return 0, ()
    return block.place(leaf.shape, flat)


def _rounding(leaf: Leaf) -> float:
    is_rounded = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return torch.finfo(leaf.dtype).eps if is_rounded else 0.0


def _both(before: bool | None, now: bool | None) -> bool | None:
    return None if before is None or now is None else before and now


def _mismatch(own: Leaf, other: Leaf) -> str | None:
    """Explain why two parts can't be compared number by number; None if they can."""
    if isinstance(own, Tensor) and own.shape != other.shape:
        return (
            f"shape {tuple(own.shape)} in the reference and {tuple(other.shape)} in the candidate"
        )
    return None


def _apart(reference: Leaf, candidate: Leaf) -> Figures:
    """Return the figures of two values that differ, even if one of them is not a number."""
    if not (is_number(reference) and is_number(candidate)):
        return Figures(1, 1, float("inf"), float("inf"), float("inf"), farthest=0)
    own, other = (torch.tensor([value], device="cpu") for value in (reference, candidate))
    figures = measure(own, other, Tolerance())
    figures.num_different = 1
    return figures


def _number(leaf: Leaf, flat: int | None) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return dense(leaf).reshape(-1)[flat or 0].item()
