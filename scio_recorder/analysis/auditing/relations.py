"""Which of a net's values a name means, and how another value is related to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from scio_recorder.analysis.auditing.finding import Kind
from scio_recorder.analysis.auditing.reference import Reference, Value
from scio_recorder.analysis.comparing.matching import translated
from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx

_NUMBERED = re.compile(r"(.*?)(\d+)")
_HIDDEN_STATES = re.compile(r"(?:.*\.)?hidden_states\.(\d+)")


class Relations:
    """The values of a net in a batch, those that are equal bit for bit, and their names.

    Parameters
    ----------
    reference : Reference
        The net.
    digests : mapping
        A digest of each value, from all batches so far.
    """

    def __init__(self, reference: Reference, digests: Mapping[Value, int]) -> None:
        self._reference = reference
        self._digests = digests
        self._made = {label: at for at, label in enumerate(reference.labels)}
        numbered = [
            (match[1], row.type_name, row.label)
            for row in reference.architecture.values()
            if row.executed and (match := _NUMBERED.fullmatch(row.name))
        ]
        lists: dict[tuple[str, str], list[DepthIdx]] = {}
        for prefix, type_name, label in numbered:
            lists.setdefault((prefix, type_name), []).append(label)
        # The outermost list of several modules of one type: not the experts inside of a block.
        self._blocks: Sequence[DepthIdx] = max(
            lists.values(), key=lambda x: (len(x) > 1, -x[0][0], len(x)), default=[]
        )

    def are_equal(self, one: Value | None, other: Value | None) -> bool:
        """Whether two values have been equal bit for bit."""
        return one == other or self.digest(one) == self.digest(other) is not None

    def equals(self, value: Value) -> list[Value]:
        """Return all values that are equal to one, itself included."""
        return [other for other in self._digests if self.are_equal(value, other)]

    def target(self, names: Iterable[str], call: int, *, are_numbers: bool = False) -> Value | None:
        """Return the value that the first known of some names means; None if none is known.

        Parameters
        ----------
        names : iterable of str
            Names of layers or operations, endings of names, or ``"hidden_states.4"``.
        call : int
            Which call of a module.
        are_numbers : bool
            Whether a number alone is what that block receives, as vLLM counts.
        """
        architecture = self._reference.operations
        operations = {row.name: at for at, row in architecture.operations.items()}
        for name in names:
            if are_numbers and name.isdecimal():
                return self._received(int(name), is_normed=False)
            if name in operations:
                return self.first(operations[name])
            labels = architecture.labels_of(name)
            if not labels and (match := _HIDDEN_STATES.fullmatch(name)):
                return self._received(int(match[1]), is_normed=True)
            endings = [known for known in architecture.names if known.endswith(f".{name}")]
            if not labels and len(endings) == 1:
                labels = architecture.labels_of(endings[0])
            if labels:
                return self.first(labels[min(call, len(labels) - 1)])
        return None

    def _received(self, number: int, *, is_normed: bool) -> Value | None:
        if number < len(self._blocks):
            return self.first(self._blocks[number], is_received=True)
        if number > len(self._blocks) or not self._blocks:
            return None
        last = self.first(self._blocks[-1])
        after = [norm for norm in self._norms() if self.are_equal(self._input(norm), last)]
        # Transformers' last hidden states are behind the last norm, vLLM's before it.
        return self.first(after[0].label) if after and is_normed else last

    def first(self, label: object, *, is_received: bool = False) -> Value | None:
        """Return the first tensor that a layer returns or receives."""
        values = (v for v in self._digests if v.label == label and v.is_received is is_received)
        return next(values, None)

    def layer(self, value: Value, beside: Value | None = None) -> Layer:
        """Return the layer that best names a value: of about the depth of another one."""
        depth = 0 if beside is None else beside.label[0]

        def rank(other: Value) -> tuple[bool, bool, bool, bool, int]:
            layer = self._reference.layer(other)
            is_root, off = not layer.name, abs(layer.depth - depth)
            is_operation = isinstance(layer, Operation)
            return other.is_received, other != beside, is_operation, is_root, off

        return self._reference.layer(min(self.equals(value), key=rank))

    def absent(self, held: Iterable[Layer]) -> list[Layer]:
        """Return the layers that none of some equals, although one of their type is among these.

        Those of types of which most are there come first: they are the least expected to lack.
        """
        layers = [*held]
        values = {self.digest(self.first(layer.label)) for layer in layers}
        rows = [row for row in self._reference.architecture.values() if row.executed]
        types = {layer.type_name for layer in layers}
        rows = [row for row in rows if row.type_name in types]
        lacking = [row for row in rows if self.digest(self.first(row.label)) not in values]
        total, missing = (Counter(row.type_name for row in some) for some in (rows, lacking))
        return sorted(lacking, key=lambda row: missing[row.type_name] / total[row.type_name])

    def kind(self, value: Value, target: Value) -> Kind:
        """Return the kind of a column that is named as one value and holds another."""
        for norm in self._norms():
            received, returned = self._input(norm), self.first(norm.label)
            if self.are_equal(value, returned) and self.are_equal(target, received):
                return "after the norm"
            if self.are_equal(value, received) and self.are_equal(target, returned):
                return "before the norm"
        for terms in self._terms_of(target):
            # Branches side by side are added first.
            branches = [terms[-1], *chain(*self._terms_of(terms[-1]))]
            if any(self.are_equal(value, branch) for branch in branches):
                return "branch without residual"
            if self.are_equal(value, terms[0]) and not self._is_elsewhere(value, target):
                return "residual without branch"
        return "other layer"

    def _terms_of(self, target: Value) -> list[list[Value]]:
        """Return both terms of each addition that makes a value, perhaps before a norm.

        A branch is computed from the residual stream, so it is made later.
        """
        norms = [norm for norm in self._norms() if self.are_equal(self.first(norm.label), target)]
        sums = [target, *(x for x in map(self._input, norms) if x is not None)]
        made = {v.label for total in sums for v in self.equals(total) if not v.is_received}
        additions = [label for label in made if isinstance(label, OperationIdx)]
        terms = [[v for v in self._digests if v.label == at and v.is_received] for at in additions]
        return [sorted(pair, key=self._time) for pair in terms if len(pair) == 2]

    def _time(self, value: Value) -> float:
        """Return when a value was made: what nobody returned is at hand when it is received."""
        return min(self._made[v.label] - 0.5 * v.is_received for v in self.equals(value))

    def _is_elsewhere(self, value: Value, target: Value) -> bool:
        """Whether a module outside of the one that makes the target returns a value."""
        around = self.layer(target)
        inside = f"{around.layer.name if isinstance(around, Operation) else around.name}."
        made = [self._reference.layer(v) for v in self.equals(value) if not v.is_received]
        layers = [layer for layer in made if not isinstance(layer, Operation)]
        return any(not f"{layer.name}.".startswith(inside) for layer in layers)

    def _norms(self) -> list[Layer]:
        rows = self._reference.architecture.values()
        return [row for row in rows if row.executed and "norm" in row.type_name.lower()]

    def _input(self, layer: Layer) -> Value | None:
        return self.first(layer.label, is_received=True)

    def digest(self, value: Value | None) -> int | None:
        """Return what equal values share; None for what is no value."""
        return None if value is None else self._digests.get(value)


def names_for(name: str, match: Mapping[str, str]) -> list[str]:
    """Return the names that a column may mean: those that ``match`` says, then its own."""
    known = [translated(name, glob, partner) for glob, partner in match.items()]
    return [*filter(None, known), name]
