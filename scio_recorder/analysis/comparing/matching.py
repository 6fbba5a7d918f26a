"""Matching the layers of two sides, by qualified name or by a given mapping of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from typing import NamedTuple

from scio_recorder.analysis.comparing.findings import Unmatched
from scio_recorder.analysis.comparing.sides import NetworkSide, Side
from scio_recorder.errors import ComparisonError, ShardWarning, warn
from scio_recorder.layer import DepthIdx, Layer, Shard, counted, few
from scio_recorder.nets.architecture import Architecture, closest

_SHOWN = 5


class Pair(NamedTuple):
    """A layer of the reference, its partner on another side, and why they can't be compared."""

    reference: Layer
    partner: Layer
    error: str | None = None


class Match:
    """Names of the reference -> names of the other side.

    Parameters
    ----------
    given : mapping or None
        Names or globs -> those of the other side; ``*`` and ``?`` stand for the same text on both.
        If several match a name, the most specific is tried first.

    Examples
    --------
    >>> list(Match({"layers.*": "h.*"}).partners("layers.3.norm"))
    ['h.3.norm', 'layers.3.norm']
    """

    def __init__(self, given: Mapping[str, str] | None) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise ComparisonError(
                f"match is a {type(given).__name__}: give a mapping from names of the reference "
                'to names of the candidate, such as {"layers.*": "h.*"}'
            )
        for name, other in (given or {}).items():
            if not isinstance(name, str) or not isinstance(other, str):
                raise ComparisonError(
                    f"match has {name!r}: {other!r}: write qualified names or globs, such as "
                    '{"layers.*": "h.*"}'
                )
            if re.findall(r"[*?]", name) != re.findall(r"[*?]", other):
                raise ComparisonError(
                    f"match has {name!r}: {other!r}: each * stands for the same text on both "
                    "sides, so write the same number of * on both"
                )
        # The glob with the most literal letters is the most specific; sorting keeps the order of
        # equals.
        self.given = dict(
            sorted((given or {}).items(), key=lambda item: -len(re.sub(r"[*?]", "", item[0])))
        )

    def partners(self, name: str) -> Iterable[str]:
        """Yield possible names of the partner, the likeliest first, and the name itself last."""
        for glob, other in self.given.items():
            yield from _partner(glob, other, name)
        yield name

    def check(self, reference: Architecture, candidate: Architecture) -> None:
        """Refuse an entry that matches no name on a side: it is probably a typing error."""
        for glob, other in self.given.items():
            found = {one for name in reference.names for one in _partner(glob, other, name)}
            sides = (
                (glob, "reference", reference, not found),
                (other, "candidate", candidate, found.isdisjoint(candidate.names)),
            )
            for name, side, architecture, is_unknown in sides:
                if is_unknown:
                    close = closest(name, filter(None, architecture.names), cutoff=0.4)
                    shown = ", ".join(map(repr, close or architecture.names[: _SHOWN + 1]))
                    raise ComparisonError(
                        f"match has {name!r}, which matches no name of the {side}; its names "
                        f"include {shown}"
                    )


def match_layers(
    reference: Architecture,
    labels: Iterable[DepthIdx],
    other: Architecture,
    others: Iterable[DepthIdx],
    match: Match,
) -> tuple[list[Pair], Unmatched]:
    """Pair layers of a reference with those of another side.

    Parameters
    ----------
    reference : Architecture
        The reference.
    labels : iterable of (int, int)
        Its layers to be compared.
    other : Architecture
        The other side.
    others : iterable of (int, int)
        Its layers that can be compared.
    match : Match
        How names correspond.

    Returns
    -------
    pairs : list of Pair
        In the order in which the reference's calls return. Calls of a module pair by their order.
    unmatched : Unmatched
        Names that have no partner.
    """
    others = set(others)
    layers, other_layers = dict(reference.items()), dict(other.items())
    partners = {}
    for name in reference.names:
        # The calls of the first possible partner that ran.
        calls = next(filter(None, map(other.labels_of, match.partners(name))), ())
        partners[name] = [other_layers[call] for call in calls]
    pairs, alone = [], []
    for label in reference.in_order(labels):
        layer = layers[label]
        pair = _pair(layer, reference.labels_of(layer.name), partners[layer.name])
        if pair is not None and (pair.error or pair.partner.label in others):
            pairs.append(pair)
        else:
            alone.append(layer.name)
    named = {calls[0].name for calls in partners.values() if calls}
    left = (other_layers[label].name for label in other.in_order(others))
    return pairs, Unmatched(_distinct(alone), _distinct(name for name in left if name not in named))


def match_sides(reference: Side, candidate: Side, match: Match) -> tuple[list[Pair], Unmatched]:
    """Pair the layers to be compared: those that the reference has recorded, or all.

    A layer of which the two sides have different parts is left out with a warning.

    Raises
    ------
    ComparisonError
        They have no layer in common, or ``match`` has a name that is on no side.
    """
    recorded = reference.recorded if isinstance(reference, NetworkSide) else ()
    own, other = reference.architecture, candidate.architecture
    found, unmatched = match_layers(
        own, recorded or reference.labels, other, candidate.labels, match
    )
    are_same = [_part(pair.reference) == _part(pair.partner) for pair in found]
    pairs = list(compress(found, are_same))
    names = _distinct(
        pair.reference.name for pair, same in zip(found, are_same, strict=True) if not same
    )
    if names:
        warn(
            f"{_some(names)} can't be compared: this process has only a shard of what they return. "
            "Let them return DTensors (use_local_output=False), or compare recordings on disk, "
            "which put shards together",
            ShardWarning,
        )
    mine, theirs = (*unmatched.reference, *names), unmatched.candidate
    _refuse_strangers(pairs, mine, theirs, match)
    match.check(own, other)
    return pairs, Unmatched((*mine, *reference.left_out), (*theirs, *candidate.left_out))


def _part(layer: Layer) -> Shard | None:
    """Return the part of a layer's output that a side has; None if it has the whole."""
    shard = layer.shard
    # Recordings on disk put shards together.
    is_joined = shard is None or (shard.index is None and shard.dim is not None)
    return None if is_joined else shard


def _refuse_strangers(
    pairs: Sequence[Pair], mine: tuple[str, ...], theirs: tuple[str, ...], match: Match
) -> None:
    """Refuse two sides that have no layer in common, except perhaps the root."""
    if any(pair.reference.name for pair in pairs) or (pairs and not mine):
        return
    example = {mine[0] if mine else "layers.*": theirs[0] if theirs else "h.*"}
    mapped = " by match=" if match.given else " by name"
    raise ComparisonError(
        f"reference and candidate have no layer in common{mapped}. The reference has "
        f"{_some(mine)}; the candidate has {_some(theirs)}. Write match= with names of the "
        f'reference and those of the candidate, such as match={example!r} or {{"layers.*": "h.*"}}'
    )


def _pair(layer: Layer, own: Sequence[DepthIdx], theirs: Sequence[Layer]) -> Pair | None:
    """Pair one of the calls of a module with one of its partner's, by their order."""
    if not theirs:
        return None
    place = own.index(layer.label) if layer.label in own else 0
    partner = theirs[min(place, len(theirs) - 1)]
    if len(own) == len(theirs) or not own:
        return Pair(layer, partner)
    times = [counted(len(calls), "time") for calls in (own, theirs)]
    said = f"the module is called {times[0]} in the reference and {times[1]} in the candidate"
    return Pair(layer, partner, said)


def _partner(glob: str, other: str, name: str) -> list[str]:
    """Return the name that a glob's partner stands for, if the glob matches a name."""
    found = _pattern(glob).fullmatch(name)
    texts = iter(found.groups() if found else ())
    return [re.sub(r"[*?]", lambda _: next(texts), other)] if found else []


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"([*?])", glob)
    signs = {"*": "(.*)", "?": "(.)"}
    return re.compile("".join(signs.get(part, re.escape(part)) for part in parts), re.DOTALL)


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _some(names: tuple[str, ...]) -> str:
    return few(list(filter(None, names)), _SHOWN, repr) or "no other layers"
