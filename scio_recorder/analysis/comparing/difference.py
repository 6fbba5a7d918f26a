"""The difference of two runs, with its table, figure, tree and page."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from scio_recorder.analysis.comparing.findings import Findings, LayerDifference, two_numbers
from scio_recorder.display.figure import draw_profile
from scio_recorder.display.outline import (
    Listed,
    Listing,
    Outline,
    Outlined,
    Remark,
    full_name,
    text,
    tree_html,
)
from scio_recorder.display.page import (
    NUMBER,
    PLACE,
    TEXT,
    Section,
    address_of,
    alarm,
    check_page,
    layer_cells,
    link_html,
    number_cell,
    number_text,
    page_html,
    search_box,
    table_html,
    words_html,
    write_page,
)
from scio_recorder.errors import ComparisonError, needing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Measure = Literal["relative_error", "max_abs", "max_rel", "share_different"]
_FRAME_COLUMNS = (
    *("label", "name", "type", "candidate_label", "candidate_name", "differs"),
    *("max_abs", "max_rel", "relative_error", "cosine", "num_different", "num_elements"),
    *("first_sample_id", "inputs_equal", "noise", "error"),
)
# Of the columns of a page, those that a terminal has no room for.
_ON_PAGES_ONLY = {"Max rel", "First sample", "Worst"}
_INPUTS = {True: "equal", False: "differ", None: "?"}
_WORDS = {
    "First": "The first layer to return that differs in a batch in which its inputs are equal. If "
    "there is none, the first that differs.",
    "Inputs": "For a layer that differs: equal if it differs in some batch in which its inputs are "
    "equal. For another layer: equal if its inputs are always equal. ? if inputs are not known.",
    "Max rel": "The largest difference divided by the absolute value of the reference, which is "
    "inf if an element of the reference is 0 and differs.",
    "Rel. error": "The norm of the difference divided by the norm of the reference; as noise, that "
    "of the run given as floor=.",
    "Cosine": "The cosine of the angle between the two, over values that are finite on both sides.",
    "Different": "Elements that differ by more than the tolerances; samples, with digests.",
    "Worst": "The element that differs most: its sample, its index there, and both values.",
}


class Difference(Listed, Outlined, Findings):
    """The difference of two runs, by layer of the reference, in the order in which layers return.

    A key is ``(1, 3)``, ``"1-3"`` or an unambiguous qualified name, all of the reference. The value
    has the figures of that layer. ``print`` shows a sentence and a table, and a notebook shows the
    tree of the network with each layer's difference in it.

    Attributes
    ----------
    first : FirstDifference or None
        The layer that makes the difference: the first to return that differs in a batch in which
        its inputs are equal. If there is none, the first to return that differs. None only if no
        layer differs.
    num_samples : int
        The number of compared samples.
    rtol : float
        The relative tolerance.
    atol : float
        The absolute tolerance.
    unmatched : Unmatched
        Names of layers of each side that were not compared.

    Examples
    --------
    >>> import copy
    >>> import torch
    >>> from scio_recorder import Recorder, compare
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> other = copy.deepcopy(net)
    >>> _ = other[0].weight.data.zero_()
    >>> recorders = [Recorder(one, input_size=(1, 2)) for one in (net, other)]
    >>> difference = compare(*recorders, [torch.ones(3, 2)])
    >>> [str(label) for label, layer in difference.items() if layer.differs]
    ['1-1', '1-2', '0-1']
    """

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each layer, in the order in which layers return.

        Returns
        -------
        pandas.DataFrame
            Indexed by label, ``"1-3"``. Columns: name and type of the reference's layer, the
            candidate's label and name, and the figures of ``LayerDifference``.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder, compare
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> compare(rnet, rnet, [torch.ones(3, 2)]).to_frame()["max_abs"].tolist()
        [0.0, 0.0]
        """
        with needing("frame", "a frame"):
            import pandas as pd

        rows = [
            {
                **vars(one),
                "label": str(one.label),
                "type": self.architecture[one.label].type_name,
                "candidate_label": str(one.candidate_label),
            }
            for one in self.values()
        ]
        frame = pd.DataFrame(rows, columns=_FRAME_COLUMNS, dtype=object)
        # Optional values stay None or as they are.
        others = ("first_sample_id", "inputs_equal", "error")
        kinds = frame.drop(columns=[*others]).infer_objects().dtypes
        return frame.astype(kinds.to_dict()).set_index("label")

    def plot(self, measure: Measure = "relative_error") -> Figure:
        """Draw the difference of each layer, in the order in which layers return.

        The scale is logarithmic. The first difference is marked. Equal layers lie on a line of
        their own below, and layers without a finite figure on one above. If there was a
        ``floor=``, its noise is drawn too.

        Parameters
        ----------
        measure : {"relative_error", "max_abs", "max_rel", "share_different"}
            What to draw. Digests only give "share_different", the share of samples that differ,
            which is then drawn in any case.

        Returns
        -------
        matplotlib.figure.Figure
            Made without pyplot, so it need not be closed.

        Raises
        ------
        ComparisonError
            There is no such measure.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder, compare
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> compare(rnet, rnet, [torch.ones(3, 2)]).plot().axes[0].get_ylabel()
        'relative error'
        """
        return _profile(self, measure)

    def report(self, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
        """Write an HTML page: where the runs begin to differ, the tree, and a table of layers.

        The page is one file. You can send it to others, and it opens without an internet
        connection.

        Parameters
        ----------
        path : str or path-like
            The file, which is replaced if it exists.
        title : str, optional
            The heading; by default made from the type of the reference.

        Returns
        -------
        pathlib.Path
            The file.

        Raises
        ------
        ComparisonError
            ``path`` names no file, or ``title`` is not a string.
        RecordingError
            The file can't be written; no partial page is left.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder, compare
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = compare(rnet, rnet, [torch.ones(3, 2)]).report(f"{folder}/page.html")
        ...     page.read_text(encoding="utf-8")[:15]
        '<!DOCTYPE html>'
        """
        check_page(path, title, ComparisonError)
        return write_page(path, _page(self, title))

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def _listing(self) -> Listing:
        return _listing(self)

    def _outline(self) -> Outline:
        return _tree(self)


class _Column(NamedTuple):
    """A column of figures or words about layers: its name, its texts, and numbers to sort by."""

    name: str
    texts: list[str]
    values: list[float | None] | None = None

    @classmethod
    def of_figures(
        cls, name: str, layers: Iterable[LayerDifference], attribute: str, digits: int = 4
    ) -> _Column:
        """Return the column of a figure, without a text where it is not known."""
        values: list[float | None] = [getattr(one, attribute) for one in layers]
        texts = [
            "" if value is None or math.isnan(value) else f"{value:.{digits}g}" for value in values
        ]
        return cls(name, texts, values)

    def cell(self, place: int) -> str:
        """Return a cell of the page."""
        shown = text(self.texts[place])
        if self.values is not None:
            value = self.values[place]
            # A quotient is infinite as well if the reference is zero, as dead units are.
            is_odd = self.name == "Max abs" and value is not None and math.isinf(value)
            return number_cell(value, shown, is_alarm=is_odd)
        if self.name == "Differs" and shown == "first":
            shown = alarm(shown)
        return f'<td class="kept">{shown}</td>' if self.name == "Worst" else f"<td>{shown}</td>"


def _columns(found: Findings, *, is_page: bool) -> list[_Column]:
    """Return the columns that say anything, after those that name the layer."""
    layers = list(found.values())
    names = [one.candidate_name for one in layers]
    has_other_names = names != [one.name for one in layers]
    ids = ["" if one.first_sample_id is None else str(one.first_sample_id) for one in layers]
    columns = [
        _Column("Candidate", names if has_other_names else []),
        _Column("Differs", [_differs(found, one) for one in layers]),
        _Column("Inputs", [_INPUTS[one.inputs_equal] for one in layers]),
        _Column.of_figures("Max abs", layers, "max_abs"),
        _Column.of_figures("Max rel", layers, "max_rel"),
        _Column.of_figures("Rel. error", layers, "relative_error"),
        _Column.of_figures("Noise", layers, "noise"),
        _Column.of_figures("Cosine", layers, "cosine", 6),
        _Column(
            "Different",
            [_number_different(one, is_share=is_page) for one in layers],
            [one.num_different for one in layers],
        ),
        _Column("First sample", ids),
        _Column("Worst", list(map(_worst, layers))),
    ]
    shown = [column for column in columns if any(column.texts)]
    return shown if is_page else [one for one in shown if one.name not in _ON_PAGES_ONLY]


def _number_different(one: LayerDifference, *, is_share: bool) -> str:
    share = f" of {one.num_elements:,}" if is_share else ""
    return "" if one.error else f"{one.num_different:,}{share}"


def _worst(one: LayerDifference) -> str:
    """Return the element that differs most, or why there is none."""
    if one.error or one.worst is None:
        return one.error or ""
    values = " -> ".join(two_numbers(one.worst.reference, one.worst.candidate))
    return f"{one.worst.sample_id}, {one.worst.index}: {values}"


def _differs(found: Findings, one: LayerDifference) -> str:
    return "first" if found.is_first(one) else "yes" if one.differs else "no"


def _listing(found: Findings) -> Listing:
    """Return the table for a terminal."""
    columns = _columns(found, is_page=False)
    layers = list(found.values())
    names = [[str(one.label), full_name(found.architecture[one.label])] for one in layers]
    rows = [
        [*name, *cells] for name, *cells in zip(names, *(c.texts for c in columns), strict=True)
    ]
    return Listing(
        found.sentence,
        ("Label", "Name", *(column.name for column in columns if column.values is None)),
        [column.name for column in columns if column.values is not None],
        rows,
        {place for place, one in enumerate(layers) if found.is_first(one)},
        found.notes,
    )


def _profile(found: Findings, measure: str) -> Figure:
    if measure not in get_args(Measure):
        known = ", ".join(map(repr, get_args(Measure)))
        raise ComparisonError(f"plot({measure!r}): write one of {known}")
    layers = list(found.values())
    values = np.array([getattr(one, measure, None) for one in layers], dtype=np.float64)
    # Digests only tell how many samples differ.
    if np.isnan(values).all():
        measure = "share_different"
        counts = [None if one.error else one.num_different for one in layers]
        values = np.array(counts, dtype=np.float64)
        values /= [max(1, one.num_elements) for one in layers]
    noise = np.array([one.noise for one in layers], dtype=np.float64)
    return draw_profile(
        found.sentence,
        measure.replace("_", " "),
        [full_name(found.architecture[one.label]) for one in layers],
        values,
        np.array([one.differs for one in layers], dtype=bool),
        noise if measure == "relative_error" and found.has_noise else None,
        next((place for place, one in enumerate(layers) if found.is_first(one)), None),
    )


def _tree(found: Findings) -> Outline:
    """Return the tree of the reference with every layer's difference in it."""
    return Outline(
        found.sentence,
        list(found.architecture.values()),
        [one.label for one in found.values() if one.differs],
        "different",
        {one.label: _remark(found, one) for one in found.values()},
        () if found.first is None else (found.first.layer.label,),
    )


def _remark(found: Findings, one: LayerDifference) -> Remark:
    if not one.differs:
        allowed = f"no more than allowed, max abs {number_text(one.max_abs)}"
        return Remark(allowed if one.max_abs > 0 else "equal")
    if one.error is not None:
        said = one.error
    elif math.isnan(one.relative_error):
        said = f"{one.num_different:,} of {one.num_elements:,} samples differ"
    else:
        said = f"max abs {number_text(one.max_abs)}, rel. {number_text(one.relative_error)}"
    if not found.is_first(one):
        return Remark(said)
    return Remark(f"first: {said}", is_alarm=True, table=_values(found, one))


def _values(found: Findings, one: LayerDifference) -> list[list[str]]:
    """Return a table of the first and the worst different element of the first layer."""
    rows = []
    for name, place in (("First", found.first), ("Worst", one.worst)):
        if place is not None and place.index is not None:
            output = f"output {place.part}, " if place.part else ""
            values = two_numbers(place.reference, place.candidate)
            rows.append([name, str(place.sample_id), f"{output}{place.index}", *values])
    return [["", "Sample", "Index", "Reference", "Candidate"], *rows] if rows else []


def _page(found: Findings, title: str | None) -> Iterator[str]:
    """Yield the pieces of the page."""
    rows = list(found.architecture.values())
    facts = [
        ("Samples", f"{found.num_samples:,}"),
        ("Layers compared", f"{len(found):,} of {len(rows):,}"),
        ("Layers that differ", f"{sum(one.differs for one in found.values()):,}"),
        ("Fingerprint of the reference", found.architecture.fingerprint[:12]),
    ]
    if found.rtol or found.atol:
        facts.append(("Tolerances", f"rtol {found.rtol:g}, atol {found.atol:g}"))
    tree = tree_html(replace(_tree(found), title=found.count), address_of)
    return page_html(
        title or f"Comparison of {rows[0].type_name if rows else 'two runs'}",
        facts,
        [],
        (
            Section("Result", _result(found)),
            Section("Architecture", tree),
            Section("Layers", _table(found)),
            Section("Definitions", [words_html(_WORDS)]),
        ),
    )


def _result(found: Findings) -> Iterator[str]:
    said = f"<p><strong>{text(found.sentence)}</strong></p>"
    if found.first is not None:
        row = f"<p>Its row: {link_html(found.first.layer)}</p>"
        said = f'<div class="warning">{said}{row}</div>'
    yield said
    yield from (f"<p>{text(note)}</p>" for note in found.notes)


def _table(found: Findings) -> Iterator[str]:
    columns = _columns(found, is_page=True)
    sorting = {one.name: TEXT if one.values is None else NUMBER for one in columns}
    rows = [
        [*layer_cells(place, found.architecture[label]), *(one.cell(place) for one in columns)]
        for place, label in enumerate(found)
    ]
    yield search_box("layers")
    headings = {"Layer": PLACE, "Name": TEXT, "Type": TEXT, **sorting}
    yield from table_html("Differences of layers", headings, rows)
