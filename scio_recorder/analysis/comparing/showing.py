"""The texts and drawings of two runs side by side, as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np

from scio_recorder.analysis.comparing.findings import (
    Findings,
    FirstDifference,
    LayerDifference,
    Number,
)
from scio_recorder.display.figure import Profile
from scio_recorder.display.outline import Listing, full_name, visible
from scio_recorder.display.page import number_text
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import Layer, counted

Measure = Literal["relative_error", "max_abs", "max_rel", "share_different"]
FRAME_COLUMNS = (
    *("label", "name", "type", "candidate_label", "candidate_name", "differs"),
    *("max_abs", "max_rel", "relative_error", "cosine", "num_different", "num_elements"),
    *("first_sample_id", "inputs_equal", "noise", "error"),
)
# Numbers of digits that may distinguish two numbers; the last always does.
_DIGITS = (4, 6, 9, 17)
_FEW = 5


def sentence(found: Findings) -> str:
    """Return the sentence that says where two runs begin to differ."""
    first = found.first
    if first is None:
        compared = f"{counted(len(found), 'layer')}, {counted(found.num_samples, 'sample')}"
        return f"No difference in {compared}{_beyond(found)}."
    said = f"First difference: {layer_text(first.layer)}"
    if first.sample_id is not None:
        said += f", sample {first.sample_id}"
    if first.index is not None:
        part = f" of output {first.part}" if first.part else ""
        said += f", index {first.index}{part}: {arrow(first.reference, first.candidate)}"
    if first.error is not None:
        said += f": {first.error}"
    return f"{said}; {_inputs_said(first)}."


def layer_text(layer: Layer) -> str:
    """Return the words by which a sentence names a layer."""
    call = f", call {layer.call + 1}" if layer.call else ""
    return visible(f"{layer.label} ({layer.name or layer.type_name}{call})")


def arrow(reference: Number | None, candidate: Number | None) -> str:
    """Return two numbers with enough digits to distinguish them.

    Examples
    --------
    >>> arrow(0.12, 0.13), arrow(1.0, 1.0000001), arrow(True, False)
    ('0.12 -> 0.13', '1 -> 1.0000001', 'True -> False')
    """
    texts: tuple[str, ...] = ()
    for digits in _DIGITS:
        texts = tuple(
            f"{one:.{digits}g}" if isinstance(one, float | complex) else str(one)
            for one in (reference, candidate)
        )
        if texts[0] != texts[1]:
            break
    return " -> ".join(texts)


def count(found: Findings) -> str:
    """Return the sentence that says how many layers differ."""
    differing = sum(one.differs for one in found.values())
    verb = f"differ{'s' * (differing == 1)}"
    return f"{differing:,} of {counted(len(found), 'layer')} {verb}{_beyond(found)}"


def _beyond(found: Findings) -> str:
    """Return the words for the difference that is tolerated, if any."""
    limits = [f"{name}={value:g}" for name in ("rtol", "atol") if (value := getattr(found, name))]
    limits += ["the noise of the floor"] * has_noise(found)
    return f" beyond {' and '.join(limits)}" if limits else ""


def has_noise(found: Findings) -> bool:
    """Whether a third run shows the noise."""
    return any(one.noise is not None for one in found.values())


def _inputs_said(first: FirstDifference) -> str:
    if first.inputs_equal is None:
        return "its inputs are not known"
    return "its inputs are equal" if first.inputs_equal else "some of its inputs differ already"


def notes(found: Findings) -> list[str]:
    """Return the notes for the reader: reservations, and what to do about them."""
    first, said = found.first, []
    if first is not None:
        said.append(f"{count(found)}, in {counted(found.num_samples, 'sample')}.")
        if first.inputs_equal is None:
            said.append(
                "Only inputs distinguish a layer that makes a difference from one that passes it "
                "on: compare the networks themselves, or collect after record(..., inputs=True)."
            )
        elif not first.inputs_equal:
            said.append("The layer that makes the difference was not compared: record more layers.")
    names = ("reference", "candidate")
    for name, left_out in zip(names, found.unmatched, strict=True):
        if left_out:
            few = ", ".join(one or "(root)" for one in left_out[:_FEW])
            few += ", ..." * (len(left_out) > _FEW)
            said.append(f"Without a partner: {len(left_out):,} of the {name}, {few}")
    errors = [(found.architecture[key], one.error) for key, one in found.items() if one.error]
    said += [f"{layer_text(layer)}: {error}" for layer, error in errors[:_FEW]]
    if len(errors) > _FEW:
        said.append(f"{len(errors) - _FEW:,} more layers can't be compared.")
    return said


def is_first(found: Findings, one: LayerDifference) -> bool:
    """Whether this is the layer that makes the difference."""
    return found.first is not None and found.first.layer.label == one.label


def differs_text(found: Findings, one: LayerDifference) -> str:
    """Return one word on whether a layer differs."""
    return "first" if is_first(found, one) else "yes" if one.differs else "no"


def inputs_text(one: LayerDifference | FirstDifference) -> str:
    """Return one word on whether the inputs of a layer are equal."""
    return {True: "equal", False: "differ", None: "?"}[one.inputs_equal]


def has_other_names(found: Findings) -> bool:
    """Whether layers of the candidate have other names."""
    return any(one.name != one.candidate_name for one in found.values())


def _has_figures(found: Findings) -> bool:
    """Whether more is known than what differs, which is all that digests tell."""
    figures = [(one.max_abs, one.relative_error, one.cosine) for one in found.values()]
    return not all(map(math.isnan, chain.from_iterable(figures)))


def listing(found: Findings) -> Listing:
    """Return the table for a terminal."""
    other_names, noise, has_figures = has_other_names(found), has_noise(found), _has_figures(found)
    rows = []
    for one in found.values():
        numbers = [one.max_abs, one.relative_error, *([one.noise] * noise)]
        figures = [*map(number_text, numbers), f"{one.cosine:.6g}"]
        rows.append(
            [
                str(one.label),
                full_name(found.architecture[one.label]),
                *([one.candidate_name] * other_names),
                differs_text(found, one),
                inputs_text(one),
                *(figures if has_figures else ()),
                f"{one.num_different:,}" if one.error is None else "",
            ]
        )
    figure_names = ("Max abs", "Rel. error", *(["Noise"] * noise), "Cosine")
    return Listing(
        sentence(found),
        ("Label", "Name", *(["Candidate"] * other_names), "Differs", "Inputs"),
        (*(figure_names if has_figures else ()), "Different"),
        rows,
        {place for place, one in enumerate(found.values()) if is_first(found, one)},
        notes(found),
    )


def frame_rows(found: Findings) -> list[dict[str, Any]]:
    """Return a row for each layer."""
    return [
        {
            **{name: getattr(one, name, None) for name in FRAME_COLUMNS},
            "label": str(one.label),
            "type": found.architecture[one.label].type_name,
            "candidate_label": str(one.candidate_label),
        }
        for one in found.values()
    ]


def profile(found: Findings, measure: str) -> Profile:
    """Return the plot's data.

    Raises
    ------
    ComparisonError
        There is no such measure.
    """
    if measure not in get_args(Measure):
        known = ", ".join(map(repr, get_args(Measure)))
        raise ComparisonError(f"plot({measure!r}): write one of {known}")
    layers = list(found.values())
    values = _numbers([getattr(one, measure, None) for one in layers])
    # Digests only tell how many samples differ.
    if np.isnan(values).all():
        measure = "share_different"
        values = _numbers([one.num_different / max(1, one.num_elements) for one in layers])
        values[[one.error is not None for one in layers]] = np.nan
    noise = _numbers([one.noise for one in layers])
    return Profile(
        sentence(found),
        measure.replace("_", " "),
        [full_name(found.architecture[one.label]) for one in layers],
        values,
        np.array([one.differs for one in layers], dtype=bool),
        noise if measure == "relative_error" and has_noise(found) else None,
        next((place for place, one in enumerate(layers) if is_first(found, one)), None),
    )


def _numbers(values: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
