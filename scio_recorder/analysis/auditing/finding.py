"""What an audit found about each column of a recording, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scio_recorder import Architecture
from scio_recorder.display.outline import Listed, Listing, full_name
from scio_recorder.display.page import number_text
from scio_recorder.layer import Layer, RowIdx, counted, few
from scio_recorder.lowlevel import LayerMapping

Kind = Literal[
    "as named",
    "other layer",
    "branch without residual",
    "residual without branch",
    "before the norm",
    "after the norm",
    "shifted by a token",
    "other padding side",
    "padding counted",
    "samples swapped",
    "positions missing",
    "constant",
    "rounded twice",
    "heads permuted",
    "features permuted",
    "beyond rounding",
    "no such name",
    "unknown",
]
_SHOWN, _WIDEST = 8, 80
_TRAINING = (
    "Note that the network ran in training mode, in which dropout and BatchNorm give other "
    "numbers: call eval() before, unless the columns were made so."
)


@dataclass(frozen=True)
class Finding:
    """What a column of a recording really is.

    Parameters
    ----------
    layer : Layer or None
        The layer or the operation of the net whose values the column holds; None if it is unknown.
    kind : str
        ``"as named"``, or how the column differs from what its name says. If the layer and the rows
        are both wrong, it is about the layer, and ``words`` say the rest.
    error : float
        The median over rows of the distance to that layer, relative to the norm of the row. Of a
        column that is no layer, the distance to the one that its name says.
    rounding : float
        The part of this that rounding explains: the same distance for the net in the precision in
        which the column was computed.
    words : str
        What was found, in words; empty if there is nothing to say.
    """

    layer: Layer | None
    kind: Kind
    error: float
    rounding: float
    words: str = ""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f": {self.layer}"
        figures = f"error {number_text(self.error)}, rounding {number_text(self.rounding)}"
        return f"{self.kind}{layer} ({figures}){self.words and f'; {self.words}'}"


class Audit(Listed, LayerMapping[Finding]):
    """The findings about a recording, by column; printed as a table.

    Parameters
    ----------
    architecture : Architecture
        That of the recording, to whose layers the keys belong.
    findings : mapping
        The finding about each column.
    absent : sequence of Layer
        Layers of the net that no column holds, although columns hold others of their type.
    num_samples : int
        The number of samples that were compared.
    is_training : bool, default False
        Whether the net ran in training mode.
    """

    def __init__(
        self,
        architecture: Architecture,
        findings: Mapping[RowIdx, Finding],
        absent: Sequence[Layer],
        num_samples: int,
        *,
        is_training: bool = False,
    ) -> None:
        super().__init__(architecture, findings, "finding")
        self.absent = tuple(absent)
        self.num_samples = num_samples
        self.is_training = is_training

    @property
    def sentence(self) -> str:
        """How many of the columns are what their names say."""
        wrong = sum(finding.kind != "as named" for finding in self.values())
        said = f"{counted(len(self), 'column')}, {counted(self.num_samples, 'sample')}"
        return f"Audit of {said}: {wrong or 'none'} not as named."

    def __repr__(self) -> str:
        return f"<{self.sentence}>"

    def _listing(self) -> Listing:
        rows, wrong, notes = list[list[str]](), set[int](), list[str]()
        for place, (column, finding) in enumerate(self.items()):
            name = full_name(self.architecture[column])
            layer = "" if finding.layer is None else full_name(finding.layer)
            figures = map(number_text, (finding.error, finding.rounding))
            rows.append([str(column), name, finding.kind, layer, *figures])
            wrong |= {place} if finding.kind != "as named" else set()
            # In a table, words would push the figures out of sight.
            notes += [f"{name}: {finding.words}."] if finding.words else []
        names = few([full_name(layer) for layer in self.absent], _SHOWN)
        notes += [f"No column holds {names}."] if names else []
        notes += [_TRAINING] if self.is_training else []
        texts, figures_of = ("Label", "Name", "Kind", "Layer"), ("Error", "Rounding")
        return Listing(self.sentence, texts, figures_of, rows, wrong, notes, widest=_WIDEST)
