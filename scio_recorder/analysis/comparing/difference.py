"""The difference of two runs: the findings about its layers, their table, figure, tree and page."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from scio_recorder import Architecture
from scio_recorder.analysis.comparing.faults import Fault, LocalErrors, LocalFigures
from scio_recorder.display.figure import draw_profile
from scio_recorder.display.outline import (
    Listed,
    Listing,
    Outline,
    full_name,
    visible,
    with_operations,
)
from scio_recorder.display.page import (
    Outlined,
    TableColumn,
    check_page,
    number_text,
    rendered,
    write_page,
)
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import Label, Layer, Operation, OperationIdx, RowIdx, counted, few
from scio_recorder.lowlevel import LayerMapping, in_words, needing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Number = bool | int | float | complex
SampleId = int | str
Measure = Literal["relative_error", "max_abs", "max_rel", "share_different"]
_FIGURES = {
    "Max abs": "max_abs",
    "Max rel": "max_rel",
    "Rel. error": "relative_error",
    "Cosine": "cosine",
}
_FEW = 5
# Numbers of digits that may distinguish two numbers; the last always does.
_DIGITS = (4, 6, 9, 17)
# Of the columns of a page, those that a terminal has no room for.
_ON_PAGES_ONLY = {"Max rel", "First sample"}
_NOT_LOCAL = {*_ON_PAGES_ONLY, "Differs", "Inputs", "Max abs", "Rel. error", "Cosine", "Different"}
_LOCAL = {
    "Local error": "error",
    "Rounding": "rounding",
    "Excess": "excess",
    "Score": "score",
}
_INPUTS = {True: "equal", False: "differ", None: "?"}


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
        compared. None: inputs are not known, and this is the first layer to return that differs;
        or they are equal but for `one_sided`.
    error : str or None
        Why the values can't be compared, as in :class:`LayerDifference`.
    part : int, default 0
        The number of the tensor in the layer's output, in order, if it has several.
    one_sided : tuple of str
        The arguments that only one side has, such as a mask, if all others are equal. They say
        nothing about whether the inputs are equal.
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
    one_sided: tuple[str, ...] = ()


class Difference(Listed, Outlined, LayerMapping[LayerDifference]):
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
    made_with : (mapping, mapping)
        The versions and nets of both sides, as in ``Recording.made_with``.

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

    def __init__(
        self,
        architecture: Architecture,
        layers: Mapping[RowIdx, LayerDifference],
        first: FirstDifference | None,
        *,
        num_samples: int,
        rtol: float = 0.0,
        atol: float = 0.0,
        unmatched: Unmatched,
        made_with: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
        local: LocalErrors | None = None,
    ) -> None:
        super().__init__(architecture, layers, "comparison")
        self.first = first
        self.num_samples = num_samples
        self.rtol = rtol
        self.atol = atol
        self.unmatched = unmatched
        self.made_with = made_with
        self._local = local

    @property
    def faults(self) -> tuple[Fault, ...]:
        """With ``local=True``, the layers that make an error of their own, the surest first."""
        return self._locally.faults

    @property
    def local(self) -> LayerMapping[LocalFigures]:
        """With ``local=True``, the local error of each layer that was judged."""
        return LayerMapping(self.architecture, self._locally.layers, "local error")

    @property
    def unjudged(self) -> LayerMapping[str]:
        """With ``local=True``, the layers that were not judged by themselves, and why."""
        reasons = LayerMapping(self.architecture, self._locally.unjudged, "reason")
        reasons.why_none = "all layers were judged"
        return reasons

    @property
    def _locally(self) -> LocalErrors:
        if self._local is None:
            raise ComparisonError("local errors were not asked for: write compare(..., local=True)")
        return self._local

    @property
    def sentence(self) -> str:
        """The sentence that says where the runs begin to differ, or which layers have faults."""
        return self._first_sentence if self._local is None else self._local.sentence

    @property
    def _first_sentence(self) -> str:
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
        inputs = _INPUTS_SAID[first.inputs_equal]
        if first.one_sided:
            names = few(first.one_sided, _FEW)
            inputs = f"its inputs are equal but for {names}, which only one side has"
        said += f"; {inputs}"
        if first.operation is not None:
            said += f", and {visible(first.operation.made_at)}"
        return f"{said}."

    @property
    def count(self) -> str:
        """The words that say how many layers differ."""
        differing = sum(layer.differs for layer in self.values())
        verb = f"differ{'s' * (differing == 1)}"
        return f"{differing:,} of {counted(len(self), 'layer')} {verb}{self._beyond}"

    @property
    def notes(self) -> list[str]:
        """Notes for the reader: reservations, and what to do about them."""
        said = [] if self._local is None else [*self._local.lines, self._first_sentence]
        if self.first is not None:
            there = self.first.candidate_operation
            if there is not None:
                said.append(visible(f"In the candidate, {there.made_at}"))
            if self.first.why_no_operation:
                said.append(f"No operation is named: {self.first.why_no_operation}.")
            said.append(f"{self.count}, in {counted(self.num_samples, 'sample')}.")
            if self._local is None and not (self.first.inputs_equal or self.first.one_sided):
                said.append(_ADVICE[self.first.inputs_equal])
        for side, names in zip(("reference", "candidate"), self.unmatched, strict=True):
            if names:
                shown = few([name or "(root)" for name in names], _FEW)
                said.append(f"Without a partner: {len(names):,} of the {side}, {shown}")
        own, other = self.made_with
        others = in_words(own, other), in_words(other, own)
        if own and other and any(others):
            said.append(f"Made with {others[0]} (reference) and {others[1]} (candidate).")
        failed = [layer for layer in self.values() if layer.error]
        for layer in failed[:_FEW]:
            said.append(f"{_layer_text(self.architecture[layer.label])}: {layer.error}")
        if len(failed) > _FEW:
            said.append(f"{len(failed) - _FEW:,} more layers can't be compared.")
        return said

    @property
    def marked(self) -> dict[RowIdx, Layer]:
        """The layers that stand out: the one that makes the difference, or those with faults."""
        if self._local is not None:
            return {fault.layer.label: fault.layer for fault in self._local.faults}
        return {} if self.first is None else {self.first.layer.label: self.first.layer}

    @property
    def _beyond(self) -> str:
        """The words for the difference that is tolerated, if any."""
        limits = {"rtol": self.rtol, "atol": self.atol}
        said = [f"{name}={value:g}" for name, value in limits.items() if value]
        return f" beyond {' and '.join(said)}" if said else ""

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each layer, in the order in which layers return.

        Returns
        -------
        pandas.DataFrame
            Indexed by label, ``"1-3"``. Columns: name and type of the reference's layer, the
            candidate's label and name, and the figures of ``LayerDifference``. With
            ``local=True`` also those of ``LocalFigures``, its error as ``local_error``; whether the
            layer is a fault; and why it was not judged by itself.

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
                **vars(layer),
                "label": str(layer.label),
                "candidate_label": str(layer.candidate_label),
                "type": self.architecture[layer.label].type_name,
                **self._local_row(layer.label),
            }
            for layer in self.values()
        ]
        # Optional values stay None or as they are.
        frame = pd.DataFrame(rows, dtype=object)
        kept = frame[["first_sample_id", "inputs_equal", "error"]]
        return frame.infer_objects().assign(**kept).set_index("label")

    def _local_row(self, label: RowIdx) -> dict[str, Any]:
        if self._local is None:
            return {}
        known, unjudged = self._local.layers.get(label), self._local.unjudged.get(label)
        keys = ("local_error" if key == "error" else key for key in _LOCAL.values())
        values = (math.nan if known is None else getattr(known, key) for key in _LOCAL.values())
        return {
            **dict(zip(keys, values, strict=True)),
            "is_fault": label in self.marked,
            "unjudged": unjudged,
        }

    def plot(self, measure: Measure | None = None) -> Figure:
        """Draw the difference of each layer, in the order in which layers return.

        The scale is logarithmic. The first difference is marked. Equal layers lie on a line of
        their own below, and layers without a finite figure on one above. With ``local=True``, local
        errors are drawn beside what rounding explains, and faults are marked.

        Parameters
        ----------
        measure : {"relative_error", "max_abs", "max_rel", "share_different"}, optional
            What to draw; "relative_error" by default, without ``local=True``. Digests only give
            "share_different", the share of samples that differ, which is then drawn in any case.

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
        if measure is None and self._local is not None:
            return _local_profile(self, self._local)
        return _profile(self, "relative_error" if measure is None else measure)

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
        return write_page(path, [_page(self, title)])

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def _listing(self) -> Listing:
        hidden = _ON_PAGES_ONLY if self._local is None else _NOT_LOCAL
        columns = [column for column in _columns(self) if column.name not in hidden]
        names = [[str(label), full_name(self.architecture[label])] for label in self]
        cells = zip(*(column.texts for column in columns), strict=True)
        return Listing(
            self.sentence,
            ("Label", "Name", *(column.name for column in columns if column.values is None)),
            [column.name for column in columns if column.values is not None],
            [[*name, *row] for name, row in zip(names, cells, strict=True)],
            {place for place, label in enumerate(self) if label in self.marked},
            self.notes,
        )

    def _outline(self) -> Outline:
        known = self.architecture.operations
        inner = [known[label] for label in self if isinstance(label, OperationIdx)]
        return Outline(
            self.sentence,
            with_operations(self.architecture.values(), inner),
            [layer.label for layer in self.values() if layer.differs],
            "different",
            {layer.label: _remark(self, layer) for layer in self.values()},
            tuple(self.marked),
        )


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


def _columns(difference: Difference) -> list[TableColumn]:
    """Return the columns that say anything, after those that name the layer."""
    layers, first = list(difference.values()), difference.first
    names = [layer.candidate_name for layer in layers]
    answers = ["yes" if layer.differs else "no" for layer in layers]
    label = None if first is None else first.layer.label
    firsts = {place for place, layer in enumerate(layers) if layer.label == label}
    marks = ["first" if place in firsts else answer for place, answer in enumerate(answers)]
    ids = [layer.first_sample_id for layer in layers]
    columns = [
        TableColumn("Candidate", [] if names == [layer.name for layer in layers] else names),
        *_local_columns(difference),
        TableColumn("Differs", marks, alarms=firsts),
        TableColumn("Inputs", [_INPUTS[layer.inputs_equal] for layer in layers]),
        *(_figures(name, list(map(attrgetter(key), layers))) for name, key in _FIGURES.items()),
        TableColumn(
            "Different",
            ["" if layer.error else f"{layer.num_different:,}" for layer in layers],
            [layer.num_different for layer in layers],
        ),
        TableColumn("First sample", ["" if sample is None else str(sample) for sample in ids]),
    ]
    return [column for column in columns if any(column.texts)]


def _local_columns(difference: Difference) -> list[TableColumn]:
    """Return the columns of local errors, if these are known."""
    local = difference._local
    if local is None:
        return []
    known = [local.layers.get(label) for label in difference]
    answers = ["?" if label in local.unjudged else "no" for label in difference]
    faulty = {place for place, label in enumerate(difference) if label in difference.marked}
    marks = ["fault" if place in faulty else answer for place, answer in enumerate(answers)]
    figures = (
        _figures(name, [math.nan if layer is None else getattr(layer, key) for layer in known])
        for name, key in _LOCAL.items()
    )
    return [TableColumn("Fault", marks, alarms=faulty), *figures]


def _figures(name: str, values: list[float | None]) -> TableColumn:
    """Return the column of a figure, without a text where it is not known."""
    digits = 6 if name == "Cosine" else 4
    texts = ["" if x is None or math.isnan(x) else f"{x:.{digits}g}" for x in values]
    # A quotient is infinite as well if the reference is zero, as dead units are.
    odd = {place for place, x in enumerate(values) if x == math.inf and name == "Max abs"}
    return TableColumn(name, texts, values, odd)


def _profile(difference: Difference, measure: str) -> Figure:
    if measure not in get_args(Measure):
        known = ", ".join(map(repr, get_args(Measure)))
        raise ComparisonError(f"plot({measure!r}): write one of {known}")
    layers = list(difference.values())
    values = np.array([getattr(layer, measure) for layer in layers])
    # Digests only tell how many samples differ.
    if np.isnan(values).all():
        measure, values = "share_different", np.array([layer.share_different for layer in layers])
    return draw_profile(
        difference.sentence,
        measure.replace("_", " "),
        [full_name(difference.architecture[layer.label]) for layer in layers],
        values,
        np.array([layer.differs for layer in layers], dtype=bool),
        [place for place, label in enumerate(difference) if label in difference.marked],
    )


def _local_profile(difference: Difference, local: LocalErrors) -> Figure:
    layers = list(local.layers.values())
    errors, rounding = (
        np.array([getattr(layer, key) for layer in layers]) for key in ("error", "rounding")
    )
    faulty = [place for place, label in enumerate(local.layers) if label in difference.marked]
    return draw_profile(
        difference.sentence,
        "local error",
        [full_name(layer.layer) for layer in layers],
        errors,
        np.isin(np.arange(len(layers)), faulty),
        faulty,
        beside=("rounding", rounding),
    )


def _remark(difference: Difference, layer: LayerDifference) -> str:
    local = None if difference._local is None else difference._local.layers.get(layer.label)
    if local is not None:
        return f"local error {local.error:.3g}, score {local.score:.3g}"
    if not layer.differs:
        allowed = f"no more than allowed, max abs {number_text(layer.max_abs)}"
        return allowed if layer.max_abs > 0 else "equal"
    if layer.error is not None:
        said = layer.error
    elif math.isnan(layer.relative_error):
        said = f"{layer.num_different:,} of {layer.num_elements:,} samples differ"
    else:
        said = f"max abs {number_text(layer.max_abs)}, rel. {number_text(layer.relative_error)}"
    return f"first: {said}" if layer.label in difference.marked else said


def _page(difference: Difference, title: str | None) -> str:
    rows = difference._outline().rows
    facts = [
        ("Samples", f"{difference.num_samples:,}"),
        ("Layers compared", f"{len(difference):,} of {len(rows):,}"),
        ("Layers that differ", f"{sum(layer.differs for layer in difference.values()):,}"),
        ("Fingerprint of the reference", difference.architecture.fingerprint[:12]),
        ("Reference made with", in_words(difference.made_with[0])),
        ("Candidate made with", in_words(difference.made_with[1])),
    ]
    return rendered(
        "difference.html",
        title=title or f"Comparison of {rows[0].type_name if rows else 'two runs'}",
        facts=facts,
        sentence=difference.sentence,
        marked=[*difference.marked.values()],
        notes=difference.notes,
        outline=replace(difference._outline(), title=difference.count),
        layers=[difference.architecture[label] for label in difference],
        columns=_columns(difference),
    )


def _layer_text(layer: Layer) -> str:
    """Return the words by which a sentence names a layer."""
    call = f", call {layer.call + 1}" if layer.call else ""
    return visible(f"{layer.label} ({layer.name or layer.type_name}{call})")


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
            f"{number:.{digits}g}" if isinstance(number, float | complex) else str(number)
            for number in (reference, candidate)
        ]
        if texts[0] != texts[1]:
            break
    return texts
