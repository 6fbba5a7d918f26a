"""Passes that continue the samples of an earlier pass, as those of ``generate`` do.

NOTE [Which pass continues which]

A pass that receives a filled cache continues: its positions are the next ones of the same samples.
Whose samples these are, the tensors in the cache tell. If each is one that the latest pass of some
samples left, and nobody has written to it since, then each line is the line of that pass. A cache
whose tensors are all zeros, or that has none yet, begins samples. Anything else (beams, candidates
that are taken back, rows that are reordered or selected, a copy, a cache that other code has
filled) would assign rows to wrong samples, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from scio_recorder.errors import CollectError
from scio_recorder.recording.rows import BatchRows, Rows, Source
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import version_of
from scio_recorder.tensors.digests import digest_of
from scio_recorder.tensors.structures import tensors

# Arguments of forward, and entries of its output, by which libraries hand over the results of
# earlier passes.
_CACHES = (
    *("past_key_values", "cache_params", "past_key_value", "layer_past", "past", "kv_cache"),
    *("state", "mems", "cache"),
)
_WATCH = "record it inside `with rnet.watch() as passes:`, which keeps passes as they come"


@dataclass(eq=False)
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
    """

    first: int
    lengths: Tensor
    is_taken: bool
    num_positions: int = 0
    step: int = 0


class _LeftTensor(NamedTuple):
    """A tensor that a pass left in a cache: the samples of that pass, its step, the contents."""

    sequences: Sequences
    step: int
    contents: int | str


class ContinuedPass(NamedTuple):
    """A pass that may continue samples, or be continued: what it received, and its rows.

    Parameters
    ----------
    caches : list
        The caches that it received.
    sequences : Sequences
        The samples that it belongs to.
    rows : BatchRows
        Its rows, as a pass alone would have them.
    """

    caches: list[Any]
    sequences: Sequences
    rows: BatchRows


class Continuing:
    """Distinguishes passes that continue samples from those that begin them; see the NOTE."""

    def __init__(self) -> None:
        self._left: MutableMapping[Tensor, _LeftTensor] = WeakTensorKeyDictionary()

    def begin(
        self, kind: Rows, source: Source, first: int, *, is_taken: bool
    ) -> tuple[ContinuedPass, BatchRows]:
        """Return a pass that is about to run, and its rows; without samples if it continues some.

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
        caches = _caches_in(source.arguments)
        earlier = self._find(_samples_in(caches))
        if earlier is None:
            _refuse_several()
        rows = _rows(kind, source, earlier, has_cache=bool(caches))
        lengths = torch.zeros(rows.num_samples, dtype=torch.int64, device="cpu")
        now = earlier or Sequences(first, lengths, is_taken)
        columns = dict(rows.columns)
        sample, position = columns.pop("sample"), columns.pop("position")
        places = {
            "sample": sample + (now.first - first),
            "position": position + now.lengths[sample],
            "step": torch.full_like(sample, now.step),
        }
        number = rows.num_samples if earlier is None else 0
        placed = replace(rows, num_samples=number, columns={**places, **columns})
        return ContinuedPass(caches, now, rows), placed

    def count(self, ended: ContinuedPass, output: Any) -> None:
        """Count a pass, which has ended well.

        Parameters
        ----------
        ended : ContinuedPass
            The pass.
        output : any
            The network's output, which may hold a cache that the network made.
        """
        caches, sequences, rows = ended
        sequences.lengths = sequences.lengths + rows.lengths
        sequences.num_positions += rows.shape[-1]
        # Caches that the pass has only read, such as tuples, don't hold what it left.
        held = [one for one in map(_samples_in, caches) if not self._are_left_by(sequences, one)]
        sequences.step += 1
        for tensor in _samples_in([held, _caches_in(output)]):
            self._left[tensor] = _LeftTensor(sequences, sequences.step, _contents(tensor))

    def _find(self, held: list[Tensor]) -> Sequences | None:
        """Return the samples that caches with these tensors continue; None if they are empty."""
        left = self._left.get(held[0]) if held else None
        if left is not None and self._are_left_by(left.sequences, held):
            return left.sequences
        if not any(bool(tensor.ne(0).any()) for tensor in held):
            return None
        raise CollectError(
            "the network received a cache that does not hold what the latest pass of its samples "
            "left there: it was filled outside of the block, or copied, reordered or cut since, so "
            "it is not known which samples go on; begin the block before the prompt runs and pass "
            f"on the cache itself, or {_WATCH}"
        )

    def _are_left_by(self, sequences: Sequences, held: list[Tensor]) -> bool:
        """Whether tensors are all as the latest pass of these samples left them."""
        return all(
            self._left.get(tensor) == (sequences, sequences.step, _contents(tensor))
            for tensor in held
        )


def _rows(kind: Rows, source: Source, earlier: Sequences | None, *, has_cache: bool) -> BatchRows:
    """Return the rows of a pass; refuse those that can't be the next ones of earlier samples."""
    name = getattr(kind, "mask", "")
    name = "attention_mask" if name is None else name
    mask = source.arguments.get(name) if isinstance(name, str) else None
    is_of_pairs = isinstance(mask, Mapping) or getattr(mask, "ndim", 2) > 2
    if not is_of_pairs:
        found = kind.of(replace(source, is_part=has_cache))
        before = 0 if earlier is None else earlier.num_positions
        is_longer = isinstance(mask, Tensor) and mask.shape[-1] > before + found.shape[-1]
    if is_of_pairs or (has_cache and is_longer):
        raise CollectError(
            f"{name} says who attends to whom, or is longer than the cache, as for a cache of "
            "fixed length, and not which positions are real: give Tokens(mask=lambda batch: ...) "
            f"with a bool tensor [batch, positions], or {_WATCH}"
        )
    known = found.shape[0] if earlier is None else len(earlier.lengths)
    if earlier is not None and not (len(found.dims) == 2 and found.num_samples == known):
        raise CollectError(
            f"the network received a cache of {known} samples for {found.num_samples}: rows of "
            f"passes that don't continue where others ended can't be told apart; {_WATCH}"
        )
    return found


def _caches_in(given: Any) -> list[Any]:
    """Return the caches among arguments, or in an output; what has no names may be one."""
    if isinstance(given, tuple | list):
        return list(given)
    # Not by getattr: an old name of a field may be a property that warns when it is read.
    named = given if isinstance(given, Mapping) else getattr(given, "__dict__", {})
    return [named[name] for name in _CACHES if named.get(name) is not None]


def _samples_in(caches: list[Any]) -> list[Tensor]:
    """Return the tensors in caches that can hold samples: a number, such as a length, can't."""
    return [tensor for tensor in tensors(caches) if tensor.ndim]


def _contents(tensor: Tensor) -> int | str:
    """Return what tells whether somebody has written to a tensor."""
    return digest_of(tensor) if tensor.is_inference() else version_of(tensor)


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
