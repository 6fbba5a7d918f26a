"""The findings of a comparison about its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from scio_recorder.layer import Label, Layer, Operation

Number = bool | int | float | complex
SampleId = int | str
# Numbers of digits that may distinguish two numbers; the last always does.
_DIGITS = (4, 6, 9, 17)


class Unmatched(NamedTuple):
    """Names of layers that have no partner on the other side, and were not compared."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]


@dataclass(frozen=True)
class LayerDifference:
    """The difference between one layer of the reference and its partner, over all samples.

    Figures are in float64. Equal NaNs and equal infinities differ by nothing; a NaN or an infinity
    on one side alone is infinitely far away. Figures are NaN if they can't be known: with
    digests, and if there is an `error`.

    Parameters
    ----------
    label, name
        The label and the name of the layer in the reference.
    candidate_label, candidate_name
        Those of its partner in the candidate.
    max_abs : float
        Largest absolute difference, whatever the tolerances.
    max_rel : float
        Largest absolute difference divided by the reference's absolute value; infinite if the
        reference is zero and the candidate is not.
    relative_error : float
        Norm of the difference divided by the norm of the reference, over all samples.
    cosine : float
        Cosine of the angle between the two, over all samples, of values finite on both sides.
    num_different : int
        Elements that differ by more than the tolerances; samples, with digests.
    num_elements : int
        Elements that were compared; samples, with digests.
    first_sample_id : int, str or None
        The first sample that differs, in the order of the reference's samples. None if none does.
    inputs_equal : bool or None
        For a layer that differs: whether it does so in some batch in which its inputs are equal,
        so that it makes a difference by itself. For a layer that does not differ: whether its
        inputs are always equal. None if inputs are not known.
    differs : bool
        Whether it differs beyond the tolerances.
    error : str or None
        Why the values of this layer can't be compared, such as shapes that differ. Such a layer
        counts as different.
    """

    label: Label
    name: str
    candidate_label: Label
    candidate_name: str
    max_abs: float
    max_rel: float
    relative_error: float
    cosine: float
    num_different: int
    num_elements: int
    first_sample_id: SampleId | None
    inputs_equal: bool | None
    differs: bool
    error: str | None = None

    @property
    def share_different(self) -> float:
        """The share of elements that differ; NaN if there is an error."""
        return math.nan if self.error else self.num_different / max(1, self.num_elements)


@dataclass(frozen=True)
class FirstDifference:
    """The layer that makes the difference between two runs.

    Parameters
    ----------
    layer : Layer
        The layer in the reference.
    sample_id : int, str or None
        The first sample that differs there, in the batch in which the layer makes the difference.
        If dimension 0 of the layer does not count samples, it is the first sample of the batch.
    index : tuple of int or None
        The first place within that sample that differs; within the whole tensor if dimension 0
        does not count samples. None with digests, and where the layer has an error.
    reference, candidate : number or None
        The two values there.
    inputs_equal : bool or None
        True: the layer's inputs are equal in that batch, so the layer itself makes the difference.
        False: some of its inputs differ already, and the layer that made that difference was not
        compared. None: inputs are not known, and this is the first layer to return that differs.
    error : str or None
        Why the values can't be compared, as in :class:`LayerDifference`.
    part : int, default 0
        The number of the tensor in the layer's output, in order, if it has several.
    operation : Operation or None
        With ``operations=True``, the operation in the layer's own code that makes the difference:
        the first whose inputs are equal and whose outputs differ, or the one at which the two codes
        part. None if the codes have nothing in common, and if no operation that is seen makes it.
    candidate_operation : Operation or None
        The operation of the candidate at that place.
    why_no_operation : str
        With ``operations=True``, why there is none.
    """

    layer: Layer
    sample_id: SampleId | None
    index: tuple[int, ...] | None
    reference: Number | None
    candidate: Number | None
    inputs_equal: bool | None
    error: str | None = None
    part: int = 0
    operation: Operation | None = None
    candidate_operation: Operation | None = None
    why_no_operation: str = ""


def two_numbers(reference: Number | None, candidate: Number | None) -> list[str]:
    """Return two numbers with enough digits to distinguish them.

    Examples
    --------
    >>> two_numbers(0.12, 0.13), two_numbers(1.0, 1.0000001), two_numbers(True, False)
    (['0.12', '0.13'], ['1', '1.0000001'], ['True', 'False'])
    """
    texts: list[str] = []
    for digits in _DIGITS:
        texts = [
            f"{one:.{digits}g}" if isinstance(one, float | complex) else str(one)
            for one in (reference, candidate)
        ]
        if texts[0] != texts[1]:
            break
    return texts
