"""Matching the layers of two sides, by qualified name or by a given mapping of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from scio_recorder import Architecture
from scio_recorder.analysis.comparing.difference import Unmatched
from scio_recorder.analysis.comparing.sides import Side
from scio_recorder.errors import ComparisonError, ShardWarning
from scio_recorder.layer import Layer, Operation, OperationIdx, RowIdx, counted, few
from scio_recorder.lowlevel import warn

_SHOWN = 5
_SIGN = re.compile(r"([*?])")


class Pair(NamedTuple):
    """A layer of the reference, its partner on the other side, and why they can't be compared."""

    reference: Layer
    partner: Layer
    error: str | None = None


def match_sides(
    reference: Side, candidate: Side, match: Mapping[str, str] | None
) -> tuple[list[Pair], Unmatched]:
    """Pair the layers to be compared: those that the reference has recorded, or all.

    A layer of which the two sides have different parts is left out with a warning.

    Parameters
    ----------
    reference, candidate : Side
        The two sides.
    match : mapping or None
        Names or globs of the reference -> those of the candidate; ``*`` and ``?`` stand for the
        same text on both. If several match a name, the most specific is tried first.

    Returns
    -------
    pairs : list of Pair
        In the order in which the reference's calls return. Calls of a module pair by their order.
    unmatched : Unmatched
        Names that have no partner.

    Raises
    ------
    ComparisonError
        They have no layer in common, or ``match`` has a name that is on no side.
    """
    own, other = reference.architecture, candidate.architecture
    globs = checked_match(match)
    partners = {name: other.labels_of(_partner(name, globs, other)) for name in own.names}
    pairs, alone, split = list[Pair](), list[str](), list[str]()
    for label in own.in_order(reference.recorded or reference.labels):
        layer = own[label]
        around = layer.layer if isinstance(layer, Operation) else layer
        pair = _pair(around, own.labels_of(around.name), partners[around.name], other)
        if isinstance(layer, Operation) and pair is not None:
            pair = _inside(layer, pair, other)
        if pair is None or not (pair.error or candidate.has(pair.partner.label)):
            alone.append(layer.name)
        elif layer.shard != pair.partner.shard:
            split.append(layer.name)
        else:
            pairs.append(pair)
    # Layers by the names of their modules, and operations by their own.
    matched = {label for labels in partners.values() for label in labels}
    paired = {pair.partner.name for pair in pairs}
    rest = other.in_order(label for label in candidate.labels if label not in matched)
    mine = _distinct(alone + split)
    theirs = _distinct(name for label in rest if (name := other[label].name) not in paired)
    if split:
        warn(
            f"{_some(split)} can't be compared: this process has only a shard of what they return. "
            "Let them return DTensors (use_local_output=False)",
            ShardWarning,
        )
    _refuse_strangers(pairs, mine, theirs, "match=" if globs else "name")
    _refuse_unknown(globs, own, other)
    return pairs, Unmatched((*mine, *reference.left_out), (*theirs, *candidate.left_out))


def checked_match(match: Mapping[str, str] | None) -> dict[str, str]:
    """Return names or globs and their partners, the most specific first."""
    if match is not None and not isinstance(match, Mapping):
        raise ComparisonError(
            f"match is a {type(match).__name__}: give a mapping from names of the reference "
            'to names of the candidate, such as {"layers.*": "h.*"}'
        )
    items = (match or {}).items()
    for name, other in items:
        are_texts = isinstance(name, str) and isinstance(other, str)
        if not are_texts or _SIGN.findall(name) != _SIGN.findall(other):
            raise ComparisonError(
                f"match has {name!r}: {other!r}: write qualified names or globs, such as "
                '{"layers.*": "h.*"}. Each * stands for the same text on both sides, so write the '
                "same number of * on both"
            )
    # The glob with the most literal letters is the most specific; equals stay in their order.
    return dict(sorted(items, key=lambda item: -len(_SIGN.sub("", item[0]))))


def _partner(name: str, globs: Mapping[str, str], other: Architecture) -> str:
    """Return the first possible partner of a name that ran; a name is its own last."""
    for glob, partner in globs.items():
        other_name = translated(name, glob, partner)
        if other_name is not None and other.labels_of(other_name):
            return other_name
    return name


def translated(name: str, glob: str, partner: str) -> str | None:
    """Return the name that a glob's partner stands for, if the glob matches a name."""
    match = _pattern(glob).fullmatch(name)
    if match is None:
        return None
    texts = iter(match.groups())
    return _SIGN.sub(lambda _: next(texts), partner)


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    parts = _SIGN.split(glob)
    signs = {"*": "(.*)", "?": "(.)"}
    return re.compile("".join(signs.get(part, re.escape(part)) for part in parts), re.DOTALL)


def _pair(
    layer: Layer, own: Sequence[RowIdx], theirs: Sequence[RowIdx], other: Architecture
) -> Pair | None:
    """Pair one of the calls of a module with one of its partner's, by their order."""
    if not theirs:
        return None
    partner = other[theirs[min(own.index(layer.label), len(theirs) - 1)]]
    if len(own) == len(theirs):
        return Pair(layer, partner)
    times = [counted(len(calls), "time") for calls in (own, theirs)]
    said = f"the module is called {times[0]} in the reference and {times[1]} in the candidate"
    return Pair(layer, partner, said)


def _inside(operation: Operation, around: Pair, other: Architecture) -> Pair | None:
    """Pair an operation with the same one in the partner of the layer that made it."""
    label = OperationIdx(*around.partner.label, operation.function, operation.index)
    partner = other.operations.get(label)
    return None if partner is None else Pair(operation, partner, around.error)


def _refuse_strangers(
    pairs: Sequence[Pair], mine: tuple[str, ...], theirs: tuple[str, ...], by: str
) -> None:
    """Refuse two sides that have no layer in common, except perhaps the root."""
    if any(pair.reference.name for pair in pairs) or (pairs and not mine):
        return
    example = {mine[0] if mine else "layers.*": theirs[0] if theirs else "h.*"}
    raise ComparisonError(
        f"reference and candidate have no layer in common by {by}. The reference has "
        f"{_some(mine)}; the candidate has {_some(theirs)}. Write match= with names of the "
        f'reference and those of the candidate, such as match={example!r} or {{"layers.*": "h.*"}}'
    )


def _refuse_unknown(globs: Mapping[str, str], own: Architecture, other: Architecture) -> None:
    """Refuse an entry that matches no name on a side: it is probably a typing error."""
    for glob, partner in globs.items():
        partners = {translated(name, glob, partner) for name in own.names} - {None}
        if not partners:
            name, side, architecture = glob, "reference", own
        elif partners.isdisjoint(other.names):
            name, side, architecture = partner, "candidate", other
        else:
            continue
        close = difflib.get_close_matches(name, [*filter(None, architecture.names)], cutoff=0.4)
        shown = ", ".join(map(repr, close or architecture.names[: _SHOWN + 1]))
        raise ComparisonError(
            f"match has {name!r}, which matches no name of the {side}; its names include {shown}"
        )


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _some(names: Sequence[str]) -> str:
    return few(list(filter(None, _distinct(names))), _SHOWN, repr) or "no other layers"
