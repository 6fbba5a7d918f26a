"""Where the own codes of two layers part.

NOTE [Where codes part]

Steps are paired in order, by function and shapes: equal ones from the start, and then those that
`difflib` pairs. In the first pair whose outputs differ, the outputs of all pairs before are equal.
So if its inputs are equal, it has made the difference. If they differ, either a step without a
partner has made one of them, and the codes have parted there; or the pair was given other operands,
and has made the difference itself. For a module that is called, a value that is returned, or one
that was made by no step, there is no operation to name. If the layers have received other inputs,
only the first case is certain.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import pairwise, takewhile, zip_longest
from typing import NamedTuple, TypeAlias

from torch import Tensor

from scio_recorder.analysis.comparing.measures import Tolerance, measure, paired_outputs
from scio_recorder.analysis.comparing.traced_code import Given, Step
from scio_recorder.layer import Operation

Steps: TypeAlias = Sequence[Step]
_Inputs: TypeAlias = tuple[Given | None, Given | None]


class OperationPair(NamedTuple):
    """An operation of each code, or why there is none."""

    own: Operation | None
    other: Operation | None
    why_none: str = ""


_STRANGERS = OperationPair(None, None, "the two codes have no operation in common")
_UNSEEN = OperationPair(
    None, None, "no operation that is seen in the layer's own code makes the difference"
)


def first_operations(
    own: Steps, other: Steps, tolerance: Tolerance, *, received_same: bool
) -> OperationPair:
    """Return the operations of two codes at which a difference begins, see NOTE.

    Parameters
    ----------
    own, other : sequence of Step
        The reference's code and the candidate's.
    tolerance : Tolerance
        What counts as equal.
    received_same : bool
        Whether the inputs of the layers are equal.
    """
    pairs = _aligned(own, other) if own and other else []
    if not any(own[at].row for at, _ in pairs) and not _are_alike(own, other):
        return _STRANGERS
    for at, to in pairs:
        outputs = zip_longest(own[at].made, other[to].made)
        is_end = at == len(own) - 1
        if not is_end and not any(_differ(*one, tolerance) for one in outputs):
            continue
        inputs = zip_longest(own[at].given, other[to].given)
        unequal = [(a, b) for a, b in inputs if _differ(a and a.value, b and b.value, tolerance)]
        # At the end, nothing is made of what is given.
        if not unequal and not is_end:
            return _pair(own[at].row, other[to].row)
        if unequal and received_same:
            found = _parting(own, other, pairs, unequal)
            return found or _pair(own[at].row, other[to].row)
    return _UNSEEN


def _pair(own: Operation | None, other: Operation | None) -> OperationPair:
    return OperationPair(own, other) if own or other else _UNSEEN


def _aligned(own: Steps, other: Steps) -> list[tuple[int, int]]:
    """Pair the numbers of steps; both codes end with a return."""
    keys, others = [one.key for one in own[:-1]], [one.key for one in other[:-1]]
    start = len([*takewhile(lambda pair: pair[0] == pair[1], zip(keys, others, strict=False))])
    matcher = difflib.SequenceMatcher(None, keys[start:], others[start:], autojunk=False)
    pairs = [(at, at) for at in range(start)]
    for a, b, length in matcher.get_matching_blocks():
        pairs += [(start + a + at, start + b + at) for at in range(length)]
    return [*pairs, (len(own) - 1, len(other) - 1)]


def _are_alike(own: Steps, other: Steps) -> bool:
    """Whether two codes without a function in common do the same number of things."""
    return [one.key[1:] for one in own] == [one.key[1:] for one in other]


def _parting(
    own: Steps, other: Steps, pairs: list[tuple[int, int]], unequal: Sequence[_Inputs]
) -> OperationPair | None:
    """Return the operations at which codes part, if steps without partners made the inputs.

    None stands for none of these. If nobody has seen what made an input, there is none to name.
    """
    makers = {one.maker for one, _ in unequal if one is not None}
    makers_there = {one.maker for _, one in unequal if one is not None}
    for (a, b), (c, d) in pairwise([(-1, -1), *pairs]):
        if makers.isdisjoint(range(a + 1, c)) and makers_there.isdisjoint(range(b + 1, d)):
            continue
        # Codes that part where modules are called have no line to be named.
        if not _rows(own[a + 1 : c]) + _rows(other[b + 1 : d]):
            return _UNSEEN
        return OperationPair(
            _row_at(own, a + 1, c, other, b + 1), _row_at(other, b + 1, d, own, a + 1)
        )
    return _UNSEEN if None in makers | makers_there else None


def _rows(code: Steps) -> list[Operation]:
    return [one.row for one in code if one.row is not None]


def _row_at(code: Steps, start: int, end: int, other: Steps, there: int) -> Operation | None:
    """Return the first operation of a code where it parts from another, or the nearest to it."""
    inside = _rows(code[start:end])
    if inside:
        return inside[0]
    # What the other code has in addition may stand in the line of what comes before it.
    before, beside, added = code[start - 1].row, other[there - 1].row, _rows(other[there:])[0]
    if before and beside and (beside.file, beside.line) == (added.file, added.line):
        return before
    near = code[end].row or before
    return near or next(iter(_rows(code[end:]) or _rows(code)[::-1]), None)


def _differ(own: Tensor | None, other: Tensor | None, tolerance: Tolerance) -> bool:
    """Whether two tensors differ; one without a partner does."""
    if own is None or other is None:
        return True
    pairs = paired_outputs(own, other)
    return isinstance(pairs, str) or any(measure(*one, tolerance).num_different for one in pairs)
