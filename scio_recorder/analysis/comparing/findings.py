"""The findings of a comparison, by layer and as a whole, and the words for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from scio_recorder.display.outline import visible
from scio_recorder.layer import DepthIdx, Label, Layer, counted, few
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import LayerMapping

Number = bool | int | float | complex
SampleId = int | str
# Numbers of digits that may distinguish two numbers; the last always does.
_DIGITS = (4, 6, 9, 17)
_FEW = 5


class Unmatched(NamedTuple):
    """Names of layers that have no partner on the other side, and were not compared."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]


@dataclass(frozen=True)
class Worst:
    """The element of a layer at which the two runs lie farthest apart.

    Parameters
    ----------
    sample_id : int, str or None
        The sample. If dimension 0 of the layer does not count samples, it is the first sample
        of the batch.
    index : tuple of int
        The place within the sample; within the whole tensor if dimension 0 does not count
        samples.
    reference, candidate : number
        The two values.
    part : int, default 0
        The number of the tensor in the layer's output, in order, if it has several.
    """

    sample_id: SampleId | None
    index: tuple[int, ...]
    reference: Number
    candidate: Number
    part: int = 0


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
        Whether it differs, beyond the tolerances and beyond the noise of ``floor=``.
    error : str or None
        Why the values of this layer can't be compared, such as shapes that differ. Such a layer
        counts as different.
    worst : Worst or None
        The element that differs most; None if no element differs, and with digests.
    noise : float or None
        The `relative_error` of the run given as ``floor=``; None without one.
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
    worst: Worst | None = None
    noise: float | None = None


@dataclass(frozen=True)
class FirstDifference:
    """The layer that makes the difference between two runs.

    Parameters
    ----------
    layer : Layer
        The layer in the reference.
    sample_id : int, str or None
        The first sample that differs there, in the batch in which the layer makes the difference.
    index : tuple of int or None
        The first place within that sample that differs, as in :class:`Worst`. With ``floor=``, both
        are those of the worst element. None with digests, and where the layer has an error.
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
    """

    layer: Layer
    sample_id: SampleId | None
    index: tuple[int, ...] | None
    reference: Number | None
    candidate: Number | None
    inputs_equal: bool | None
    error: str | None = None
    part: int = 0


class Findings(LayerMapping[LayerDifference]):
    """The differences of two runs, by layer of the reference, in the order in which layers return.

    A key is ``(1, 3)``, ``"1-3"`` or an unambiguous qualified name, all of the reference.

    Parameters
    ----------
    architecture : Architecture
        The architecture of the reference.
    layers : mapping
        The difference of each layer.
    first : FirstDifference or None
        The layer that makes the difference.
    num_samples : int
        The number of compared samples.
    rtol, atol : float
        The tolerances.
    unmatched : Unmatched
        The layers that were not compared.

    Attributes
    ----------
    first : FirstDifference or None
        The first layer to return that differs in a batch in which its inputs are equal. If there
        is none, the first to return that differs. None only if no layer differs.
    num_samples : int
        The number of compared samples.
    rtol, atol : float
        The tolerances.
    unmatched : Unmatched
        Names of layers of each side that were not compared.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Mapping[DepthIdx, LayerDifference],
        first: FirstDifference | None,
        *,
        num_samples: int,
        rtol: float = 0.0,
        atol: float = 0.0,
        unmatched: Unmatched,
    ) -> None:
        super().__init__(architecture, layers, "comparison")
        self.first = first
        self.num_samples = num_samples
        self.rtol = rtol
        self.atol = atol
        self.unmatched = unmatched

    @property
    def sentence(self) -> str:
        """The sentence that says where the runs begin to differ."""
        first = self.first
        if first is None:
            compared = f"{counted(len(self), 'layer')}, {counted(self.num_samples, 'sample')}"
            return f"No difference in {compared}{self._beyond}."
        said = f"First difference: {_layer_text(first.layer)}"
        if first.sample_id is not None:
            said += f", sample {first.sample_id}"
        if first.index is not None:
            part = f" of output {first.part}" if first.part else ""
            values = " -> ".join(two_numbers(first.reference, first.candidate))
            said += f", index {first.index}{part}: {values}"
        if first.error is not None:
            said += f": {first.error}"
        return f"{said}; {_INPUTS_SAID[first.inputs_equal]}."

    @property
    def count(self) -> str:
        """The words that say how many layers differ."""
        differing = sum(one.differs for one in self.values())
        verb = f"differ{'s' * (differing == 1)}"
        return f"{differing:,} of {counted(len(self), 'layer')} {verb}{self._beyond}"

    @property
    def has_noise(self) -> bool:
        """Whether a third run shows the noise."""
        return any(one.noise is not None for one in self.values())

    @property
    def notes(self) -> list[str]:
        """Notes for the reader: reservations, and what to do about them."""
        said = []
        if self.first is not None:
            said.append(f"{self.count}, in {counted(self.num_samples, 'sample')}.")
            if self.first.inputs_equal is not True:
                said.append(_ADVICE[self.first.inputs_equal])
        for side, names in zip(("reference", "candidate"), self.unmatched, strict=True):
            if names:
                shown = few([name or "(root)" for name in names], _FEW)
                said.append(f"Without a partner: {len(names):,} of the {side}, {shown}")
        errors = [(self.architecture[key], one.error) for key, one in self.items() if one.error]
        said += [f"{_layer_text(layer)}: {error}" for layer, error in errors[:_FEW]]
        if len(errors) > _FEW:
            said.append(f"{len(errors) - _FEW:,} more layers can't be compared.")
        return said

    def is_first(self, one: LayerDifference) -> bool:
        """Whether a layer is the one that makes the difference."""
        return self.first is not None and self.first.layer.label == one.label

    @property
    def _beyond(self) -> str:
        """The words for the difference that is tolerated, if any."""
        limits = {"rtol": self.rtol, "atol": self.atol}
        said = [f"{name}={value:g}" for name, value in limits.items() if value]
        said += ["the noise of the floor"] * self.has_noise
        return f" beyond {' and '.join(said)}" if said else ""


_INPUTS_SAID = {
    True: "its inputs are equal",
    False: "some of its inputs differ already",
    None: "its inputs are not known",
}
_ADVICE = {
    False: "The layer that makes the difference was not compared: record more layers.",
    None: "Only inputs distinguish a layer that makes a difference from one that passes it on: "
    "compare the networks themselves, or collect after record(..., inputs=True).",
}


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


def _layer_text(layer: Layer) -> str:
    """Return the words by which a sentence names a layer."""
    call = f", call {layer.call + 1}" if layer.call else ""
    return visible(f"{layer.label} ({layer.name or layer.type_name}{call})")
