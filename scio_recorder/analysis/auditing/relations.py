"""Which of a net's values a name means, and how another value is related to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from torch import Tensor

from scio_recorder.analysis.auditing.finding import Kind
from scio_recorder.analysis.auditing.reference import Reference, Value
from scio_recorder.analysis.comparing.matching import translated
from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx, RowIdx
from scio_recorder.lowlevel import digest_of

_NUMBERED = re.compile(r"(.*?)(\d+)")
_HIDDEN_STATES = re.compile(r"(?:.*\.)?hidden_states\.(\d+)")


class Relations:
    """The values of a net in a batch, those that are equal bit for bit, and their names.

    Values are equal if their digests are, which stand for all values that are.

    Parameters
    ----------
    reference : Reference
        The net.
    values : mapping
        Its values in a batch.
    """

    def __init__(self, reference: Reference, values: Mapping[Value, Tensor]) -> None:
        self._rows = reference.operations
        self._layers = [row for row in reference.architecture.values() if row.executed]
        # Layers may work on the tokens of all samples in a row, or on heads.
        flat = {id(x): x.flatten() for x in values.values()}
        digests = {key: digest_of(x) for key, x in flat.items()}
        self._digests = {value: digests[id(x)] for value, x in values.items()}
        self._first = {value[:2]: value for value in reversed(self._digests)}
        self._equal: dict[str | None, list[Value]] = {}
        for value, digest in self._digests.items():
            self._equal.setdefault(digest, []).append(value)
        self._blocks = self._listed()
        # What each norm receives and returns, and by its sum the terms of each addition.
        self._norms = {
            row.label: (self._digest(row.label, is_received=True), self._digest(row.label))
            for row in self._layers
            if "norm" in row.type_name.lower()
        }
        self._sums: dict[str | None, list[list[str]]] = {}
        for at in reference.labels:
            terms = [x for value, x in self._digests.items() if value[:2] == (at, True)]
            if isinstance(at, OperationIdx) and len(terms) == 2:
                # A branch is computed from the residual stream, so it is made later.
                terms.sort(key=[*self._equal].index)
                self._sums.setdefault(self._digest(at), []).append(terms)

    def _listed(self) -> list[DepthIdx]:
        """Return the blocks: the outermost list of several modules of one type, not experts."""
        lists: dict[tuple[str, str], list[DepthIdx]] = {}
        for row in self._layers:
            if match := _NUMBERED.fullmatch(row.name):
                lists.setdefault((match[1], row.type_name), []).append(row.label)
        return max(lists.values(), key=lambda x: (len(x) > 1, -x[0][0], len(x)), default=[])

    def _digest(self, label: RowIdx, *, is_received: bool = False) -> str | None:
        """Return that of the first tensor that a layer returns or receives."""
        value = self._first.get((label, is_received))
        return None if value is None else self._digests[value]

    def are_equal(self, value: Value, other: Value) -> bool:
        """Whether two values are equal bit for bit."""
        return self._digests[value] == self._digests[other]

    def target(self, column: Layer, match: Mapping[str, str], *, are_numbers: bool) -> Value | None:
        """Return the value that the name of a column means; None if it is not known.

        Parameters
        ----------
        column : Layer
            Its name is that of a layer or an operation, an ending, or ``"hidden_states.4"``.
        match : mapping
            Globs -> the net's. What a name may mean by these comes first.
        are_numbers : bool
            Whether a number alone is what that block receives, as vLLM counts.
        """
        names = [translated(column.name, glob, partner) for glob, partner in match.items()]
        operations = {row.name: at for at, row in self._rows.operations.items()}
        for known in [*filter(None, names), column.name]:
            if are_numbers and known.isdecimal():
                return self._received(int(known), is_normed=False)
            if known in operations:
                return self._first.get((operations[known], False))
            labels = self._rows.labels_of(known)
            if not labels and (states := _HIDDEN_STATES.fullmatch(known)):
                return self._received(int(states[1]), is_normed=True)
            endings = [full for full in self._rows.names if full.endswith(f".{known}")]
            if not labels and len(endings) == 1:
                labels = self._rows.labels_of(endings[0])
            if labels:
                return self._first.get((labels[min(column.call, len(labels) - 1)], False))
        return None

    def _received(self, number: int, *, is_normed: bool) -> Value | None:
        if number < len(self._blocks):
            return self._first.get((self._blocks[number], True))
        if number > len(self._blocks) or not self._blocks:
            return None
        last = self._blocks[-1]
        # Transformers' last hidden states are behind the last norm, vLLM's before it.
        norms = [at for at, (before, _) in self._norms.items() if before == self._digest(last)]
        return self._first.get((norms[0] if norms and is_normed else last, False))

    def layer(self, value: Value, beside: Value | None = None) -> Layer:
        """Return the layer that best names a value: of about the depth of another one."""
        depth = 0 if beside is None else beside.label[0]

        def rank(other: Value) -> tuple[bool, bool, bool, bool, int]:
            layer = self._rows[other.label]
            is_operation, is_root = isinstance(layer, Operation), not layer.name
            off = abs(layer.depth - depth)
            return other.is_received, other != beside, is_operation, is_root, off

        return self._rows[min(self._equal[self._digests[value]], key=rank).label]

    def absent(self, held: Iterable[Layer]) -> list[Layer]:
        """Return the layers that none of some equals, although one of their type is among these.

        Those of types of which most are there come first: they are the least expected to lack.
        """
        layers = [*held]
        digests = {self._digest(layer.label) for layer in layers}
        types = {layer.type_name for layer in layers}
        rows = [row for row in self._layers if row.type_name in types]
        lacking = [row for row in rows if self._digest(row.label) not in digests]
        total, missing = (Counter(row.type_name for row in some) for some in (rows, lacking))
        return sorted(lacking, key=lambda row: missing[row.type_name] / total[row.type_name])

    def kind(self, value: Value, target: Value) -> Kind:
        """Return the kind of a column that is named as one value and holds another."""
        held, named = self._digests[value], self._digests[target]
        if (named, held) in self._norms.values():
            return "after the norm"
        if (held, named) in self._norms.values():
            return "before the norm"
        totals = [named, *(before for before, after in self._norms.values() if after == named)]
        for early, late in chain(*(self._sums.get(total, []) for total in totals)):
            # Branches side by side are added first.
            if held in (late, *chain(*self._sums.get(late, []))):
                return "branch without residual"
            if held == early and not self._is_elsewhere(held, named):
                return "residual without branch"
        return "other layer"

    def _is_elsewhere(self, held: str, named: str) -> bool:
        """Whether a module outside of those that return what is named returns what is held."""
        inside, names = (
            [
                self._rows[v.label].name
                for v in self._equal[digest]
                if not v.is_received and not isinstance(v.label, OperationIdx)
            ]
            for digest in (named, held)
        )
        return not all(name.startswith(tuple(f"{around}." for around in inside)) for name in names)
