"""Passes that continue the samples of an earlier pass, as those of ``generate`` do.

NOTE [Which pass continues which]

A pass that receives a filled cache continues: its positions are the next ones of the same samples.
The cache, the same object from pass to pass, identifies them. The number of lines must be the same,
the cache must be as long as all positions that ran, and it must hold the tensors that the pass
before left in it. Anything else (beams, candidates that are taken back, rows that are reordered, a
copy, a cache that other code has filled, one that is no object with a length) would assign rows to
wrong samples, and is refused.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from scio_recorder.errors import CollectError
from scio_recorder.layer import counted
from scio_recorder.recording.rows import BatchRows, Rows, Source
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import version_of
from scio_recorder.tensors.structures import tensors

# Arguments of forward by which libraries hand over the results of earlier passes. Only the first
# one, and with it an object that knows its length, tells which pass continues which.
_CACHE = "past_key_values"
_OTHER_CACHES = "cache_params", "past_key_value", "layer_past", "state", "mems", "cache"
_WATCH = "record it inside `with rnet.watch() as passes:`, which keeps passes as they come"


class Past(NamedTuple):
    """The results of earlier passes that a pass receives: a cache, and its number of positions."""

    cache: Any = None
    length: int = 0


class _Held:
    """What a cache holds at some time: its tensors, without keeping them, and their versions."""

    def __init__(self, cache: Any = None) -> None:
        found = _tensors_in(cache)
        self._tensors = [(weakref.ref(one), version_of(one)) for one in found]

    def is_in(self, cache: Any) -> bool:
        """Whether a cache holds just this."""
        found = _tensors_in(cache)
        return len(found) == len(self._tensors) and all(
            known() is one and version == version_of(one)
            for one, (known, version) in zip(found, self._tensors, strict=True)
        )


@dataclass
class Sequences:
    """Samples that a pass has begun, and that others may continue.

    Parameters
    ----------
    first : int
        The place of the first among all samples.
    lengths : torch.Tensor
        The number of real positions of each so far.
    is_taken : bool
        Whether their rows are collected.
    num_positions : int
        The number of positions that ran so far, padding included.
    step : int
        The number of passes.
    held : _Held
        What the latest pass left in their cache.
    """

    first: int
    lengths: Tensor
    is_taken: bool
    num_positions: int = 0
    step: int = 0
    held: _Held = field(default_factory=_Held)


class _PendingPass(NamedTuple):
    """A pass that runs: what it received, the samples that it belongs to, and its rows."""

    past: Past
    sequences: Sequences
    rows: BatchRows


class Continuing:
    """Distinguishes passes that continue samples from those that begin them; see the NOTE."""

    def __init__(self) -> None:
        self._by_cache: MutableMapping[Any, Sequences] = WeakIdKeyDictionary()
        self._pending: _PendingPass | None = None

    def rows(self, kind: Rows, source: Source, first: int, *, is_taken: bool) -> BatchRows:
        """Return the rows of a pass that is about to run; without samples if it continues some.

        Parameters
        ----------
        kind : Rows
            The kind of row.
        source : Source
            The pass.
        first : int
            The number of samples before it.
        is_taken : bool
            Whether its rows are collected, if it begins samples.
        """
        past = _past_of(source.arguments)
        going_on = self._find(past)
        if going_on is None:
            _refuse_several()
        _check_mask(kind, source)
        found = kind.of(replace(source, is_part=past.cache is not None))
        if past.cache is not None:
            _check_mask(kind, source, past.length + found.shape[-1])
        if going_on is not None:
            _check_goes_on(going_on, past, found)
        lengths = torch.zeros(found.num_samples, dtype=torch.int64, device="cpu")
        now = going_on or Sequences(first, lengths, is_taken)
        self._pending = _PendingPass(past, now, found)
        sample, position = found.columns["sample"], found.columns["position"]
        own = {
            "sample": sample + (now.first - first),
            "position": position + now.lengths[sample],
            "step": torch.full_like(sample, now.step),
        }
        number = found.num_samples if going_on is None else 0
        return replace(found, num_samples=number, columns={**own, **_fields(found)})

    @property
    def is_taken(self) -> bool:
        """Whether the rows of the current pass are collected."""
        return self._pending is None or self._pending.sequences.is_taken

    def count_pass(self, output: Any) -> None:
        """Count the pass, which has ended well.

        Parameters
        ----------
        output : any
            The network's output, which may hold a cache that the network made.
        """
        if self._pending is None:
            return
        (past, sequences, found), self._pending = self._pending, None
        sequences.lengths = sequences.lengths + found.lengths
        sequences.num_positions += found.shape[-1]
        sequences.step += 1
        made = _made_by(output)
        cache = past.cache if made is None else made
        if cache is not None:
            self._by_cache[cache] = sequences
            sequences.held = _Held(cache)

    def drop(self) -> None:
        """Forget the pass, which has failed."""
        self._pending = None

    def _find(self, past: Past) -> Sequences | None:
        """Return the samples that a pass continues; None if it begins new ones."""
        if past.cache is None:
            return None
        known = self._by_cache.get(past.cache)
        if past.length == 0:
            if known is not None:
                # It was emptied, or never says what it holds.
                raise _of_unknown_length(past.cache)
            return None
        if known is None:
            raise CollectError(
                "the network received a cache that no pass of the block has filled, or a copy of "
                "one, so there are no samples to continue: begin the block before the prompt runs "
                f"and pass on the cache itself, or {_WATCH}"
            )
        return known


def _check_mask(kind: Rows, source: Source, num_positions: float = math.inf) -> None:
    """Refuse a mask that does not say which positions are real, up to the last one of a pass."""
    given = getattr(kind, "mask", "")
    given = "attention_mask" if given is None else given
    mask = source.arguments.get(given) if isinstance(given, str) else None
    is_of_pairs = isinstance(mask, Mapping) or getattr(mask, "ndim", 2) > 2
    if is_of_pairs or (isinstance(mask, Tensor) and mask.shape[-1] > num_positions):
        raise CollectError(
            f"{given} says who attends to whom, or is longer than the cache, as for a cache of "
            "fixed length, and not which positions are real: give Tokens(mask=lambda batch: ...) "
            f"with a bool tensor [batch, positions], or {_WATCH}"
        )


def _made_by(output: Any) -> Any:
    """Return the cache that a net has made and put into its output; None if there is none."""
    if isinstance(getattr(type(output), _CACHE, None), property):
        # It is an old name of a field, and warns when it is read.
        return None
    made = getattr(output, _CACHE, None)
    return made if hasattr(made, "get_seq_length") else None


def _past_of(arguments: Mapping[str, Any]) -> Past:
    """Return the results of earlier passes that a pass receives; call this before the pass."""
    for name in (_CACHE, *_OTHER_CACHES):
        cache = arguments.get(name)
        if cache is not None:
            return Past(cache, _length_of(cache))
    return Past()


def _tensors_in(cache: Any) -> list[Tensor]:
    """Return the tensors of a cache."""
    own = getattr(cache, "self_attention_cache", cache)
    layers = getattr(own, "layers", None) or [own]
    return tensors([dict(getattr(layer, "__dict__", {})) for layer in layers])


def _length_of(cache: Any) -> int:
    try:
        # The cache answers for its first layer, which may be one that keeps a state and no keys.
        lengths = [cache, *getattr(cache, "layers", ())]
        return next((n for one in lengths if (n := int(one.get_seq_length()))), 0)
    except (AttributeError, TypeError, ValueError):
        raise _of_unknown_length(cache) from None


def _of_unknown_length(cache: Any) -> CollectError:
    return CollectError(
        f"the network received a {type(cache).__name__}, which does not say how many positions it "
        f"holds: {_WATCH}"
    )


def _check_goes_on(sequences: Sequences, past: Past, found: BatchRows) -> None:
    lines, known = found.shape[0], len(sequences.lengths)
    has_same_lines = len(found.dims) == 2 and found.num_samples == lines == known
    if not has_same_lines or past.length != sequences.num_positions:
        raise CollectError(
            f"the network received a cache of {past.length} positions for "
            f"{counted(found.num_samples, 'sample')}, but the pass before it had {known} with "
            f"{sequences.num_positions}: rows of passes that don't continue where others ended "
            f"(beams, candidates, segments) can't be told apart; {_WATCH}"
        )
    if not sequences.held.is_in(past.cache):
        raise CollectError(
            "the network received a cache that has changed since the pass before it, as if its "
            f"rows were reordered, so it is not known which samples it continues; {_WATCH}"
        )


def _refuse_several() -> None:
    """Refuse a ``generate`` of transformers that runs several continuations of one prompt."""
    library: Any = sys.modules.get("transformers.generation.utils")
    generation = library and private.generation_in(library.GenerationMixin.generate)
    if not generation:
        return
    mode, number = generation
    if mode not in ("greedy_search", "sample") or number > 1:
        raise CollectError(
            f"generate runs {mode} for {number} sequence(s) of each prompt, whose rows can't be "
            "told apart: generate one sequence for each prompt, greedily or by sampling, or "
            f"{_WATCH}"
        )


def _fields(found: BatchRows) -> dict[str, Tensor]:
    return {k: value for k, value in found.columns.items() if k not in ("sample", "position")}
