"""What a comparison by local errors finds: the error of each layer's own, and the faults.

NOTE [Beyond rounding]

All figures are norms of differences over the norm of what the reference made, for each tensor that
a call makes in forced passes, over all blocks. There are two tests, and the larger score counts.

*Native*: the error E of the candidate as it is, against the rounding A of the reference, cast to
the candidate's dtypes or in its own, or of what it made in the dtype of the candidate's tensor, or
W if that is more: ``E / (4 A + 1.2e-4)``.

*Exact*: the distance D of the candidate's exact copy from the reference's, or from what the
reference returned if that is nearer. Only other weights can explain it by rounding, so the control
W is how far the copy goes if those move within half a unit in the last place:
``D / (2 W + 1.2e-5)``. A recording's weights are not known, so all move, and A is Q: what the
recording's precision, or the candidate's, does to the candidate. Q is added to W if the recording
was made in a half precision.

A quantised layer is compared with others of its kind: thrice their median error is a fault. Whole
numbers say something if a tenth of them differ. A tensor that only the candidate hands on, such as
a mask, and at all of whose receivers something is wrong, is the fault of who makes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from scio_recorder.analysis.comparing.forced import Handing, Slot
from scio_recorder.analysis.comparing.measures import Figures
from scio_recorder.layer import Layer, Operation, RowIdx, counted, few, text_of

# E, A three times, D twice, W and Q.
Kind: TypeAlias = Literal["error", "cast", "rounding", "held", "apart", "excess", "moved", "low"]
SlotFigures: TypeAlias = dict[Kind, Figures]
# A layer, its partner, and why they can't be compared.
_Pair: TypeAlias = tuple[Layer, Layer, str | None]

_NATIVE_FACTOR, _NATIVE_FLOOR = 4.0, 1.2e-4
_EXACT_FACTOR, _EXACT_FLOOR = 2.0, 1.2e-5
_QUANTISED_FACTOR = 3.0
# Of whole numbers.
_LEAST_SHARE = 0.1
# Of the modules whose classes are those of quantised layers.
_QUANTISERS = ("quant", "bitsandbytes", "awq")
_SHOWN = 5


@dataclass(frozen=True)
class LocalFigures:
    """The error that a layer of the candidate makes by itself.

    Figures are norms of differences over the norm of what the reference made, over all batches:
    what the layer returns, or what it hands to a layer inside, whichever shows more.

    Parameters
    ----------
    layer : Layer
        The layer in the reference.
    error : float
        How far the candidate's call is from the reference's, on the reference's inputs.
    rounding : float
        How much of that rounding alone explains; NaN if it is not known.
    excess : float
        What is left if both compute exactly, on equally rounded weights; NaN if they can't.
    score : float
        Above 1, it is more than rounding explains. Infinite, if a number is a NaN or an infinity on
        one side alone.
    operation : Operation or None
        With ``operations=True``, the operation in the layer's own code that makes a fault.
    why_no_operation : str
        With ``operations=True``, why a fault has none.
    """

    layer: Layer
    error: float
    rounding: float
    excess: float
    score: float
    operation: Operation | None = None
    why_no_operation: str = ""

    @property
    def words(self) -> str:
        """The figures in words."""
        said = f"local error {self.error:.3g}, where rounding explains {self.rounding:.3g}"
        if not math.isnan(self.excess):
            said += f"; {self.excess:.3g} of it computed exactly"
        return f"{said} (score {self.score:.3g})"

    def __str__(self) -> str:
        layer, operation, where = self.layer, self.operation, ""
        call = f", call {layer.call + 1}" if layer.call else ""
        if operation is not None:
            where = f"; {operation.made_at}"
        elif self.why_no_operation:
            where = f"; no operation is named: {self.why_no_operation}"
        return f"{layer.label} ({layer.name or layer.type_name}{call}): {self.words}{where}"


@dataclass(frozen=True)
class Fault(LocalFigures):
    """A layer whose local error is more than rounding explains, see :class:`LocalFigures`."""


class LocalErrors(NamedTuple):
    """The local errors of all layers.

    Parameters
    ----------
    layers : mapping
        The local error of each layer that was judged.
    faults : sequence of Fault
        The most certain first.
    unjudged : mapping
        Why others were not judged.
    notes : sequence of str
        Reservations.
    """

    layers: Mapping[RowIdx, LocalFigures]
    faults: tuple[Fault, ...]
    unjudged: Mapping[RowIdx, str]
    notes: Sequence[str]

    @property
    def sentence(self) -> str:
        """The sentence that says which layer is faulty."""
        num_judged, num_faults = len(self.layers), len(self.faults)
        judged = counted(num_judged, "layer")
        if self.unjudged:
            judged = f"{num_judged:,} of {counted(num_judged + len(self.unjudged), 'layer')}"
        if not num_faults:
            return f"No fault: rounding explains all that differs. Judged: {judged}."
        more = f"; {num_faults - 1:,} more" if num_faults > 1 else ""
        return f"Fault: {self.faults[0]}{more}. Judged: {judged}."

    @property
    def lines(self) -> list[str]:
        """Further faults, what was not judged by itself and why, and reservations."""
        said = [f"Fault: {fault}." for fault in self.faults[1:_SHOWN]]
        by_reason: dict[str, list[str]] = {}
        for label, reason in self.unjudged.items():
            by_reason.setdefault(reason, []).append(text_of(label))
        for reason, labels in by_reason.items():
            said.append(f"Not judged by itself: {few(labels, _SHOWN)}: {reason}.")
        unknown = [text_of(at) for at, known in self.layers.items() if math.isnan(known.excess)]
        if unknown:
            said.append(
                f"Not computed exactly, but judged by what rounding does to the reference: "
                f"{few(unknown, _SHOWN)}."
            )
        return [*said, *(f"Note that {note}." for note in self.notes)]


# -- judging ---------------------------------------------------------------------------------------


def judged(
    pairs: Sequence[_Pair],
    figures: Mapping[Slot, SlotFigures],
    handings: Collection[Handing],
    dtype: torch.dtype,
) -> tuple[dict[RowIdx, LocalFigures], list[Fault]]:
    """Return the local error of each layer that was measured, and the faults.

    Parameters
    ----------
    pairs : sequence of Pair
        The layers and their partners.
    figures : mapping
        The figures of what each call made.
    handings : collection of Handing
        Who handed on what the reference does not hand on.
    dtype : torch.dtype
        The candidate's.
    """
    layers: dict[RowIdx, Layer] = {layer.label: layer for layer, *_ in pairs}
    of_slots: dict[RowIdx, list[LocalFigures]] = defaultdict(list)
    for slot, known in figures.items():
        error = _local_error(layers[slot.owner], slot, known, torch.finfo(dtype).eps)
        if not math.isnan(error.score):
            of_slots[slot.owner].append(error)
    errors = {at: max(of_slots[at], key=attrgetter("score")) for at in layers if at in of_slots}
    errors |= _against_their_kind(pairs, errors)
    faulty = {label: error for label, error in errors.items() if error.score > 1}
    for maker, receivers in _makers(handings, {*faulty}).items():
        worst = max((errors[label] for label in receivers), key=attrgetter("score"))
        faulty = {label: error for label, error in faulty.items() if label not in receivers}
        faulty[maker] = replace(worst, layer=layers[maker])
    # The first to return comes first among equals.
    ordered = sorted(faulty.values(), key=lambda error: -error.score)
    return errors, [Fault(**vars(error)) for error in ordered]


def _local_error(layer: Layer, slot: Slot, known: SlotFigures, epsilon: float) -> LocalFigures:
    def relative(kind: Kind) -> float:
        figures = known.get(kind)
        if figures is None:
            return math.nan
        share = figures.num_different / max(1, figures.num_elements)
        return share if slot.is_whole else figures.relative_error

    error, apart = relative("error"), relative("apart")
    nearest = _least(apart, relative("excess"))
    excess = nearest if math.isnan(apart) else apart
    if slot.is_whole:
        score = (error if math.isnan(nearest) else nearest) / _LEAST_SHARE
        return LocalFigures(layer, error, 0.0, excess, score)
    known_rounding = -_least(-relative("cast"), -relative("rounding"))
    # Without any copy of the reference, there is only what its numbers can hold.
    known_rounding = epsilon if math.isnan(known_rounding) else known_rounding
    rounding = -_least(-known_rounding, -relative("moved"), -relative("held"))
    native = _quotient(error, _NATIVE_FACTOR * rounding + _NATIVE_FLOOR)
    low = relative("low")
    control = math.hypot(relative("moved"), 0.0 if math.isnan(low) else low)
    exact = _quotient(nearest, _EXACT_FACTOR * control + _EXACT_FLOOR)
    return LocalFigures(layer, error, rounding, excess, -_least(-native, -exact))


def _least(*numbers: float) -> float:
    """Return the least of the numbers that are known; NaN if none is."""
    return min((number for number in numbers if not math.isnan(number)), default=math.nan)


def _quotient(error: float, allowed: float) -> float:
    # A NaN or an infinity on one side alone is never rounding.
    return math.inf if error == math.inf else error / allowed


def _against_their_kind(
    pairs: Sequence[_Pair], errors: Mapping[RowIdx, LocalFigures]
) -> dict[RowIdx, LocalFigures]:
    """Return the local errors of quantised layers."""
    kinds: dict[type, list[LocalFigures]] = defaultdict(list)
    for layer, partner, _ in pairs:
        if layer.label in errors and _is_quantised(partner.module):
            kinds[type(partner.module)].append(errors[layer.label])
    judged: dict[RowIdx, LocalFigures] = {}
    for members in kinds.values():
        usual = median(member.error for member in members)
        for member in members:
            score = _quotient(member.error, _QUANTISED_FACTOR * usual) if member.error else 0.0
            judged[member.layer.label] = replace(
                member, rounding=usual, excess=math.nan, score=score
            )
    return judged


def _is_quantised(module: nn.Module | None) -> bool:
    """Whether the weights of a module are whole numbers, packed or scaled."""
    if module is None:
        return False
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    is_narrow = any(x.dtype.itemsize == 1 and x.dtype is not torch.bool for x in own)
    where = " ".join(type(part).__module__ for part in (module, *own))
    return is_narrow or any(word in where for word in _QUANTISERS)


def _makers(handings: Collection[Handing], faulty: Collection[RowIdx]) -> dict[RowIdx, set[RowIdx]]:
    """Return who makes what only the candidate hands on, if all who get it at last are faulty."""
    makers: dict[RowIdx, set[RowIdx]] = {}
    by_number: dict[int, list[Handing]] = defaultdict(list)
    for handing in handings:
        by_number[handing.number].append(handing)
    for of_tensor in by_number.values():
        owners = {handing.owner for handing in of_tensor}
        receivers = {handing.receiver for handing in of_tensor}
        last, first = receivers - owners, owners - receivers
        # One alone may well be faulty by itself.
        if len(last) > 1 and len(first) == 1 and last.issubset(faulty):
            makers.setdefault(first.pop(), set()).update(last)
    return makers
