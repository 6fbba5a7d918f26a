"""What a comparison by local errors finds: the error of each layer's own, and the faults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scio_recorder.layer import Layer, Operation, RowIdx, counted, few, text_of

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
