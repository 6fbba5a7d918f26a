"""Passes that continue the samples of an earlier pass, as those of ``generate`` do.

NOTE [Which pass continues which]

A pass that receives a filled cache continues: its positions are the next ones of the same samples.
The cache itself, the same object from pass to pass, or a tensor in it identifies them. The number
of lines must be the same, the cache must be as long as all positions that ran, and it must hold the
tensors that the pass before left in it. Anything else (beams, candidates that are taken back, rows
that are reordered, a copy, a cache that other code has filled) would assign rows to wrong samples,
and is refused.
"""

from __future__ import annotations

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

# Arguments of forward by which libraries hand over the results of earlier passes.
_CACHES = (
    "past_key_values", "cache_params", "past_key_value", "layer_past", "state", "mems", "cache"
)  # fmt: skip
_WATCH = "record it inside `with rnet.watch() as passes:`, which keeps passes as they come"


@dataclass(frozen=True)
class Past:
    """The results of earlier passes that a pass receives.

    Parameters
    ----------
    cache : any
        The object that holds them; None for nothing.
    length : int or None
        The number of its positions; None if it does not tell.
    """

    cache: Any = None
    length: int | None = 0


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
        # Caches, and tensors of those that no weak reference can be made to.
        self._by_part: MutableMapping[Any, Sequences] = WeakIdKeyDictionary()
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
        given = {**vars(source), "is_part": past.cache is not None}
        found = kind.of(_PassSource(**given, past=past))
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
        own = past.cache if made is None else made
        for part in _parts(own, output):
            self._by_part[part] = sequences
        sequences.held = _Held(own)

    def drop(self) -> None:
        """Forget the pass, which has failed."""
        self._pending = None

    def _find(self, past: Past) -> Sequences | None:
        """Return the samples that a pass continues; None if it begins new ones."""
        if past.cache is None:
            return None
        known = [self._by_part[part] for part in _parts(past.cache) if part in self._by_part]
        if past.length == 0:
            if known:
                # It was emptied, or never says what it holds.
                raise _of_unknown_length(past.cache)
            return None
        if not known:
            raise CollectError(
                "the network received a cache that no pass of the block has filled, or a copy of "
                "one, so there are no samples to continue: begin the block before the prompt runs "
                f"and pass on the cache itself, or {_WATCH}"
            )
        return known[0]


@dataclass(frozen=True)
class _PassSource(Source):
    """Looks up names for a pass that may have only a part of its samples' positions."""

    past: Past = field(default_factory=Past)

    def find(self, name: str) -> Any:
        """Return an entry of the batch; a mask is cut to the positions of this pass."""
        found = super().find(name)
        if name not in ("attention_mask", "decoder_attention_mask"):
            return found
        stem = name.removesuffix("attention_mask")
        given = (self.arguments.get(f"{stem}{kind}") for kind in ("input_ids", "inputs_embeds"))
        sequence = next((value for value in given if isinstance(value, Tensor)), None)
        if found is None or sequence is None or sequence.ndim < 2:
            return found
        return _of_these(found, sequence.shape[1], self.past.length)


def _parts(cache: Any, output: Any = None) -> list[Any]:
    """Return objects that identify a cache from pass to pass: itself, or tensors in it.

    Weak references to a tuple can't be made, and outputs without names may hold the next one.
    """
    return [cache] if hasattr(cache, "__weakref__") else tensors((cache, output))


def _of_these(mask: Any, number: int, before: int | None) -> Any:
    """Return the columns of a mask for the positions of a pass."""
    if isinstance(mask, Mapping) or getattr(mask, "ndim", 2) > 2:
        raise CollectError(
            "attention_mask says who attends to whom, as for a cache of fixed length, and not "
            "which positions are real: give Tokens(mask=lambda batch: ...) with a bool tensor "
            f"[batch, positions], or {_WATCH}"
        )
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] <= number:
        return mask
    # A mask for a cache of fixed length also has columns for later positions.
    is_long = before is not None and mask.shape[1] >= before + number
    start = before if is_long and before is not None else mask.shape[1] - number
    return mask[:, start : start + number]


def _made_by(output: Any) -> Any:
    """Return the cache that an output holds; None if it holds none."""
    for name in _CACHES:
        # A property is an old name of a field, and warns when it is read.
        if not isinstance(getattr(type(output), name, None), property):
            found = getattr(output, name, None)
            if found is not None:
                return found
    return None


def _past_of(arguments: Mapping[str, Any]) -> Past:
    """Return the results of earlier passes that a pass receives; call this before the pass."""
    for name in _CACHES:
        cache = arguments.get(name)
        if cache is not None:
            return Past(cache, _length_of(cache, name, arguments.get("cache_position")))
    return Past()


def _tensors_in(cache: Any) -> list[Tensor]:
    """Return the tensors of a cache, as far as its parts have names.

    Tuples are not looked into: their tensors identify them.
    """
    own = getattr(cache, "self_attention_cache", cache)
    layers = getattr(own, "layers", None) or [own]
    return tensors([dict(getattr(layer, "__dict__", {})) for layer in layers])


def _length_of(cache: Any, name: str, cache_position: Any) -> int | None:
    if isinstance(cache_position, Tensor) and cache_position.numel():
        return int(cache_position.flatten()[0])
    if isinstance(cache, tuple | list):
        # One pair of keys and values for each layer, [batch, heads, positions, features].
        held = tensors(tuple(cache))
        is_known = name.startswith(("past", "layer_past")) and bool(held) and held[0].ndim == 4
        return held[0].shape[-2] if is_known else None if held else 0
    try:
        # The cache answers for its first layer, which may be one that keeps a state and no keys.
        return int(cache.get_seq_length()) or _length_of_layers(cache)
    except (AttributeError, TypeError, ValueError):
        # Recurrent nets keep a state, which has no length.
        has_state = getattr(cache, "has_previous_state", None)
    if has_state is None:
        raise _of_unknown_length(cache)
    return None if (has_state() if callable(has_state) else has_state) else 0


def _length_of_layers(cache: Any) -> int:
    layers = getattr(cache, "layers", ())
    lengths = (int(getattr(layer, "get_seq_length", int)()) for layer in layers)
    return next(filter(None, lengths), 0)


def _of_unknown_length(cache: Any) -> CollectError:
    return CollectError(
        f"the network received a {type(cache).__name__}, which does not say how many positions it "
        f"holds: {_WATCH}"
    )


def _check_goes_on(sequences: Sequences, past: Past, found: BatchRows) -> None:
    lines, known = found.shape[0], len(sequences.lengths)
    has_same_lines = len(found.dims) == 2 and found.num_samples == lines == known
    if not has_same_lines or past.length not in (None, sequences.num_positions):
        held = "" if past.length is None else f" of {past.length} positions"
        raise CollectError(
            f"the network received a cache{held} for {counted(found.num_samples, 'sample')}, but "
            f"the pass before it had {known} with {sequences.num_positions}: rows of passes "
            "that don't continue where others ended (beams, candidates, segments) can't be told "
            f"apart; {_WATCH}"
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
