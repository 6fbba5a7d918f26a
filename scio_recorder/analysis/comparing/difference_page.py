"""The tree and the page that show two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice

from scio_recorder.analysis.comparing.findings import Findings, LayerDifference
from scio_recorder.analysis.comparing.showing import (
    arrow,
    count,
    differs_text,
    has_other_names,
    inputs_text,
    is_first,
    notes,
    sentence,
)
from scio_recorder.display.outline import Outline, Remark, text, tree_html
from scio_recorder.display.page import (
    NUMBER,
    PLACE,
    TEXT,
    Section,
    address_of,
    alarm,
    layer_cells,
    link_html,
    number_cell,
    number_text,
    page_html,
    search_box,
    table_html,
    words_html,
)
from scio_recorder.layer import DepthIdx

_FIGURES = {
    "Max abs": "max_abs",
    "Max rel": "max_rel",
    "Rel. error": "relative_error",
    "Noise": "noise",
    "Cosine": "cosine",
}
_WORDS = {
    "First": "The layer that makes the difference: the first to return that differs in a batch in "
    "which its inputs are equal. If there is none, the first that differs.",
    "Inputs": "For a layer that differs: equal if it differs in some batch in which its inputs are "
    "equal. For another layer: equal if its inputs are always equal. ? if inputs are not known.",
    "Max abs, max rel": "The largest absolute difference of two elements, and the largest "
    "difference divided by the absolute value of the reference, whatever the tolerances. The "
    "latter is inf if an element of the reference is 0 and differs.",
    "Rel. error": "The norm of the difference divided by the norm of the reference, over all "
    "samples.",
    "Noise": "The relative error of the run given as floor=.",
    "Cosine": "The cosine of the angle between the two, over values that are finite on both sides.",
    "Different": "Elements that differ by more than the tolerances; samples, with digests.",
    "Worst": "The element that differs most: its sample, its index within the sample, and its "
    "values in the reference and in the candidate.",
}


def tree(found: Findings) -> Outline:
    """Return the tree of the reference with every layer's difference in it."""
    rows = list(found.architecture.values())
    first = found.first
    differing: list[DepthIdx] = [one.label for one in found.values() if one.differs]
    remarks: dict[DepthIdx, Remark] = {one.label: _remark(found, one) for one in found.values()}
    opened = () if first is None else (first.layer.label,)
    return Outline(sentence(found), rows, differing, "different", remarks, opened)


def _remark(found: Findings, one: LayerDifference) -> Remark:
    if not one.differs:
        is_equal = not one.max_abs > 0
        return Remark(
            "equal" if is_equal else f"no more than allowed, max abs {number_text(one.max_abs)}"
        )
    if one.error is not None:
        said = one.error
    elif math.isnan(one.relative_error):
        said = f"{one.num_different:,} of {one.num_elements:,} samples differ"
    else:
        said = f"max abs {number_text(one.max_abs)}, rel. {number_text(one.relative_error)}"
    if not is_first(found, one):
        return Remark(said)
    return Remark(f"first: {said}", is_alarm=True, table=_values(found, one))


def _values(found: Findings, one: LayerDifference) -> list[list[str]]:
    """Return a table of the first and the worst different element of the first layer."""
    places = [("First", found.first), ("Worst", one.worst)]
    rows = []
    for name, place in places:
        if place is not None and place.index is not None:
            output = f"output {place.part}, " if place.part else ""
            values = arrow(place.reference, place.candidate).split(" -> ")
            rows.append([name, str(place.sample_id), f"{output}{place.index}", *values])
    return [["", "Sample", "Index", "Reference", "Candidate"], *rows] if rows else []


def difference_page(found: Findings, title: str | None) -> Iterator[str]:
    """Yield the pieces of the page."""
    rows = list(found.architecture.values())
    yield from page_html(
        title or f"Comparison of {rows[0].type_name if rows else 'two runs'}",
        _facts(found),
        [],
        (
            Section("Result", _result(found)),
            Section(
                "Architecture", tree_html(replace(tree(found), title=count(found)), address_of)
            ),
            Section("Layers", _table(found)),
            Section("Definitions", [words_html(_WORDS)]),
        ),
    )


def _facts(found: Findings) -> list[tuple[str, str]]:
    differing = sum(one.differs for one in found.values())
    facts = [
        ("Samples", f"{found.num_samples:,}"),
        ("Layers compared", f"{len(found):,} of {len(found.architecture):,}"),
        ("Layers that differ", f"{differing:,}"),
        ("Fingerprint of the reference", found.architecture.fingerprint[:12]),
    ]
    if found.rtol or found.atol:
        facts.append(("Tolerances", f"rtol {found.rtol:g}, atol {found.atol:g}"))
    return facts


def _result(found: Findings) -> Iterator[str]:
    said, first = text(sentence(found)), found.first
    if first is None:
        yield f"<p><strong>{said}</strong></p>"
    else:
        where = link_html(first.layer)
        yield f'<div class="warning"><p><strong>{said}</strong></p><p>Its row: {where}</p></div>'
    yield from (f"<p>{text(note)}</p>" for note in notes(found))


def _table(found: Findings) -> Iterator[str]:
    other_names, layers = has_other_names(found), list(found.values())
    # Digests tell no figures and no element, and only a third run shows the noise.
    figures = {
        name: key for name, key in _FIGURES.items() if any(_is_known(one, key) for one in layers)
    }
    has_ends = any(one.worst is not None or one.error is not None for one in layers)
    columns = {"Layer": PLACE, "Name": TEXT, "Type": TEXT}
    columns |= dict.fromkeys(["Candidate"] * other_names, TEXT)
    columns |= {"Differs": TEXT, "Inputs": TEXT}
    columns |= dict.fromkeys((*figures, "Different"), NUMBER)
    columns |= {"First sample": TEXT, **dict.fromkeys(["Worst"] * has_ends, TEXT)}
    yield search_box("layers")
    rows = []
    for place, one in enumerate(layers):
        layer = found.architecture[one.label]
        cells = [f"<td>{text(one.candidate_name)}</td>"] * other_names
        differs = differs_text(found, one)
        cells.append(f"<td>{alarm(differs) if differs == 'first' else differs}</td>")
        cells.append(f"<td>{inputs_text(one)}</td>")
        cells += [_figure(getattr(one, key), key) for key in figures.values()]
        rows.append(chain(layer_cells(place, layer), cells, islice(_ends(one), 2 + has_ends)))
    yield from table_html("Differences of layers", columns, rows)


def _is_known(one: LayerDifference, key: str) -> bool:
    value = getattr(one, key)
    return value is not None and not math.isnan(value)


def _figure(value: float | None, key: str) -> str:
    # A quotient is infinite as well if the reference is zero, as dead units are.
    is_odd = key == "max_abs" and value is not None and math.isinf(value)
    return number_cell(value, number_text(value), is_alarm=is_odd)


def _ends(one: LayerDifference) -> Iterator[str]:
    share = "" if one.error else f"{one.num_different:,} of {one.num_elements:,}"
    yield number_cell(None if one.error else one.num_different, share)
    yield f"<td>{'' if one.first_sample_id is None else text(str(one.first_sample_id))}</td>"
    worst = one.worst
    if one.error is not None:
        yield f'<td class="kept">{text(one.error)}</td>'
    elif worst is not None:
        values = arrow(worst.reference, worst.candidate)
        yield f"<td>{text(f'{worst.sample_id}, {worst.index}: {values}')}</td>"
    else:
        yield "<td></td>"
