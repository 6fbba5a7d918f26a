"""The kinds of rows, tokens and nodes; and passes that continue samples, as in ``generate``.

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
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from scio_recorder.errors import CollectError
from scio_recorder.recording.rows import BatchRows, Fields, Name, Rows, Source, advice_on_lists
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import names_arguments, signature_of
from scio_recorder.tensors.digests import digest_of
from scio_recorder.tensors.properties import version_of
from scio_recorder.tensors.structures import tensors

# Arguments of forward, and entries of its output, by which libraries hand over the results of
# earlier passes.
_CACHES = (
    *("past_key_values", "cache_params", "past_key_value", "layer_past", "past", "kv_cache"),
    *("state", "mems", "cache"),
)
_WATCH = "record it inside `with rnet.watch() as passes:`, which keeps passes as they come"
_ENCODER = ("input_ids", "inputs_embeds")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_MASKS_OF_PAIRS = ("attention_mask", "decoder_attention_mask")


@names_arguments
@dataclass(eq=False, repr=False)
class Tokens(Rows):
    """Makes each row of a recording a token. Padding is not kept, not reduced and not counted.

    Layers must be ``[batch, positions, ...]``. Rows are in the order of samples, and positions rise
    within each.

    Parameters
    ----------
    mask : str or callable, optional
        The positions that are real tokens, ``[batch, positions]``: True, or a number other than
        zero. By default ``attention_mask``; without one, all positions are real. If a mask is
        longer, its last columns count.
    segments : str or callable, optional
        For packed documents: integers ``[batch, positions]``. Each segment of a row of the batch
        is a sample, in the order in which they begin; negative numbers are padding.
    fields : sequence of str, or mapping from str to str or callable, optional
        The facts to keep about each row, ``[batch, positions]``. By default ``input_ids``, if the
        batch has them.
    where : str or callable, optional
        The real tokens to keep, ``[batch, positions]``. The others still count in ``position``.

    Notes
    -----
    A name is a key or an attribute of the batch, or an argument of the network's forward. A
    function receives the batch.

    Raises
    ------
    CollectError
        An argument is neither a name nor a function.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder, Tokens
    >>> rnet = Recorder(torch.nn.Embedding(9, 2), input_data=torch.zeros(2, 3, dtype=torch.long))
    >>> rnet.record("0-1")
    >>> ids = torch.tensor([[5, 6, 7], [0, 0, 8]])
    >>> rows = Tokens(mask=lambda batch: batch > 0, fields={"token": lambda batch: batch})
    >>> recording = rnet.collect([ids], rows=rows)
    >>> recording["0-1"].shape
    torch.Size([4, 2])
    """

    mask: Name | None = None
    segments: Name | None = None
    fields: Fields | None = None
    where: Name | None = None

    def of(self, source: Source) -> BatchRows:
        """Return the rows of a batch.

        Parameters
        ----------
        source : Source
            The batch and the network's inputs.

        Returns
        -------
        BatchRows
            The kept tokens, and the facts about them.
        """
        dims = "batch", "positions"
        mask = self._mask(source)
        name, shape = self._sequence(source, mask)
        if mask is not None:
            if mask.ndim == 2 and mask.shape[1] > shape[1] and not _is_cut(source, name, mask):
                mask = mask[:, mask.shape[1] - shape[1] :]
            mask = source.truth("mask", mask, dims, shape).flatten()
        if self.segments is None:
            owners = torch.arange(shape[0], device="cpu").repeat_interleave(shape[1])
            number = shape[0]
        else:
            owners, number = _owners(source, source.numbers("segments", self.segments), shape)
        if mask is not None:
            owners = owners.where(mask, -1)
        fields = self._pairs() if self.fields is not None else _default_fields(source, name, shape)
        rows = self._rows(source, dims, shape, owners, number, fields)
        return replace(
            rows,
            labelled=source.labelled_as(name, 2),
            other_half=self._other_half(source, shape),
            has_others=_has_others(source, shape),
        )

    def _other_half(self, source: Source, shape: tuple[int, int]) -> str | None:
        """Return the half of a net with a sequence of its own, if the lengths are equal."""
        if not isinstance(self.mask, str) or not _is_pair(source):
            return None
        is_decoder = self.mask.startswith("decoder")
        others = _shapes(source, _ENCODER if is_decoder else _DECODER).values()
        if others and shape not in others:
            return None
        return "encoder" if is_decoder else "decoder"

    def _mask(self, source: Source) -> Tensor | None:
        is_pair = _is_pair(source)
        if is_pair and self.mask is None:
            raise CollectError(
                "the net has an encoder and a decoder with different positions, and layer "
                f'{source.layer} belongs to one of them: write Tokens(mask="attention_mask") and '
                'record layers of the encoder only, or Tokens(mask="decoder_attention_mask") and '
                "record layers of the decoder only"
            )
        if self.mask is not None and not (is_pair and self.mask in _MASKS_OF_PAIRS):
            return source.read("mask", self.mask)
        # Without it, as in generate, the net treats all positions as real.
        mask = source.find_in_all(str(self.mask or "attention_mask"))
        # Otherwise it may say who attends to whom, as segments do.
        is_mask = self.segments is None or getattr(mask, "ndim", 2) == 2
        return source.tensor("mask", mask) if mask is not None and is_mask else None

    def _sequence(self, source: Source, mask: Tensor | None) -> tuple[str, tuple[int, int]]:
        """Return the argument with the sequence of tokens, and its [batch, positions]."""
        names: tuple[str, ...] = _ENCODER
        if isinstance(self.mask, str):
            names = _DECODER if self.mask.startswith("decoder") else _ENCODER
        elif self.mask is not None:
            names = _ENCODER + _DECODER
        sequences = _shapes(source, names)
        if not sequences and names is not _DECODER:
            others = [name for name in source.arguments if "mask" not in name]
            sequences = dict(list(_shapes(source, others).items())[:1])
            if callable(self.mask) and mask is not None and mask.ndim == 2:
                # A net divides sound into frames: a caller who marks the real ones knows their
                # number.
                most = mask.shape[1]
                sequences = {n: shape for n, shape in sequences.items() if shape[1] <= most}
        if mask is not None and mask.ndim == 2:
            size: tuple[int, int] = (mask.shape[0], mask.shape[1])
            fitting = {name: shape for name, shape in sequences.items() if shape == size}
            sequences = fitting or sequences or {"": size}
        if not sequences:
            raise CollectError(
                advice_on_lists(source.arguments)
                or f"layer {source.layer} can't be collected by rows=Tokens(): the net's input has "
                "no sequence, that is, no tensor [batch, positions] or [batch, positions, "
                "features]; write Tokens(mask=lambda batch: ...) with a bool tensor [batch, "
                "positions] and, if layers have another shape, transform=; or leave rows= out"
            )
        return next(iter(sequences.items()))


def _is_cut(source: Source, name: str, mask: Tensor) -> bool:
    """Whether a mask belongs to a batch that is cut, at an unknown place, on its way to the net."""
    whole, batch = source.entry(name), source.batch
    if whole is None:
        whole = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return isinstance(whole, Tensor) and whole.shape[:2] == mask.shape


def _shapes(source: Source, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return [batch, positions] of each argument that can be a sequence of tokens."""
    values = {name: source.tensors[name] for name in names if name in source.tensors}
    return {name: (x.shape[0], x.shape[1]) for name, x in values.items() if x.ndim in (2, 3)}


def _has_others(source: Source, shape: tuple[int, int]) -> bool:
    """Whether the net also receives something with positions of its own, such as an image."""
    leading = shape, (1, shape[1])
    others = [tensor for name, tensor in source.tensors.items() if "mask" not in name]
    return any(tensor.ndim > 2 and tensor.shape[:2] not in leading for tensor in others)


def _default_fields(source: Source, name: str, shape: tuple[int, int]) -> list[tuple[str, Name]]:
    """Return the name of the tokens' ids, if the batch has them."""
    wanted = "decoder_input_ids" if name in _DECODER else "input_ids"
    ids = source.find(wanted)
    is_fitting = isinstance(ids, Tensor) and tuple(ids.shape) == shape
    return [(wanted, wanted)] if is_fitting else []


def _is_pair(source: Source) -> bool:
    """Whether a net has an encoder and a decoder, each with positions of its own."""
    is_given = any(source.arguments.get(name) is not None for name in _DECODER)
    is_pair = getattr(getattr(source.net, "config", None), "is_encoder_decoder", False) is True
    return is_given or (is_pair and _DECODER[0] in signature_of(source.net.forward).parameters)


def _owners(source: Source, segments: Tensor, shape: tuple[int, int]) -> tuple[Tensor, int]:
    """Return the sample of each line, -1 for padding, and the number of samples."""
    numbers = source.check_shape("segments", segments, ("batch", "positions"), shape).flatten()
    is_real = numbers >= 0
    lines = torch.arange(shape[0], device="cpu").repeat_interleave(shape[1])[is_real]
    _, codes = torch.unique(numbers[is_real], return_inverse=True)
    keys = (lines * max(1, len(codes)) + codes).numpy()
    _, first, places = numpy.unique(keys, return_index=True, return_inverse=True)
    # Samples are numbered in the order in which they begin.
    numbered = torch.from_numpy(first.argsort().argsort()[places])
    owners = torch.full_like(numbers, -1)
    owners[is_real] = numbered
    return owners, len(first)


@names_arguments
@dataclass(eq=False, repr=False)
class Nodes(Rows):
    """Makes each row of a recording a node of a graph; each graph of a batch is a sample.

    Layers must be ``[nodes, ...]``. Rows are in the order of samples, and keep the order of nodes
    within each.

    Parameters
    ----------
    sample : str, callable or None, default "batch"
        The graph of each node, counted from 0 within the batch: integers ``[nodes]``. None: each
        batch is one graph, as is a batch without an entry ``batch``.
    fields : sequence of str, or mapping from str to str or callable, optional
        The facts to keep about each row, ``[nodes]``.
    where : str or callable, optional
        The nodes to keep, ``[nodes]``. The others still count in ``position``.

    Notes
    -----
    A name is a key or an attribute of the batch, or an argument of the network's forward. A
    function receives the batch.

    Raises
    ------
    CollectError
        An argument is neither a name nor a function.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Nodes, Recorder
    >>> rnet = Recorder(torch.nn.Linear(4, 2), input_size=(3, 4))
    >>> rnet.record("0-1")
    >>> graphs = [{"input": torch.ones(5, 4), "batch": torch.tensor([0, 0, 0, 1, 1])}]
    >>> recording = rnet.collect(graphs, rows=Nodes(), to_inputs=lambda batch: batch["input"])
    >>> recording["0-1"].shape, recording.num_samples
    (torch.Size([5, 2]), 2)
    """

    sample: Name | None = "batch"
    fields: Fields | None = None
    where: Name | None = None

    def of(self, source: Source) -> BatchRows:
        """Return the rows of a batch.

        Parameters
        ----------
        source : Source
            The batch and the network's inputs.

        Returns
        -------
        BatchRows
            The kept nodes, and the facts about them.
        """
        if self.sample is None or (self.sample == "batch" and source.find("batch") is None):
            owners, number = torch.zeros(_num_nodes(source), dtype=torch.int64, device="cpu"), 1
        else:
            owners = self._owners(source)
            number = int(owners.max()) + 1 if len(owners) else 0
            num_graphs = source.find("num_graphs") if self.sample == "batch" else None
            # The last graphs may be without nodes.
            number = max(number, num_graphs) if isinstance(num_graphs, int) else number
        rows = self._rows(source, ("nodes",), (len(owners),), owners, number, self._pairs())
        nodes = next((name for name, size in _lines(source).items() if size == len(owners)), "")
        return replace(rows, labelled=source.labelled_as(nodes, 1))

    def _owners(self, source: Source) -> Tensor:
        """Return the graph of each node."""
        assert self.sample is not None
        owners = source.numbers("sample", self.sample)
        source.check_shape("sample", owners, ("nodes",), (owners.numel(),))
        if bool((owners < 0).any()):
            raise CollectError(
                f"sample of rows=Nodes() is negative in batch {source.number}: count from 0"
            )
        if len(owners) and int(owners.max()) >= len(owners):
            raise CollectError(
                f"sample of rows=Nodes() has the graph {int(owners.max())} in batch "
                f"{source.number} of {len(owners)} nodes: count from 0, and leave none out"
            )
        return owners


def _lines(source: Source) -> dict[str, int]:
    """Return the number of lines of each argument of forward, most likely nodes first."""
    values = source.tensors
    if "x" in values:
        values = {"x": values["x"], **values}
    return {name: value.shape[0] for name, value in values.items() if value.ndim > 0}


def _num_nodes(source: Source) -> int:
    for number in _lines(source).values():
        return number
    raise CollectError(
        f"the net's input in batch {source.number} has no tensor that shows the number of "
        "nodes: write Nodes(sample=lambda batch: ...) with the graph of each node"
    )


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
        rows = _pass_rows(kind, source, earlier, has_cache=bool(caches))
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
        held = [
            cache for cache in map(_samples_in, caches) if not self._are_left_by(sequences, cache)
        ]
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


def _pass_rows(
    kind: Rows, source: Source, earlier: Sequences | None, *, has_cache: bool
) -> BatchRows:
    """Return the rows of a pass; refuse those that can't be the next ones of earlier samples."""
    name = getattr(kind, "mask", "")
    name = "attention_mask" if name is None else name
    mask = source.arguments.get(name) if isinstance(name, str) else None
    is_of_pairs = isinstance(mask, Mapping) or getattr(mask, "ndim", 2) > 2
    if not is_of_pairs:
        rows = kind.of(replace(source, is_part=has_cache))
        before = 0 if earlier is None else earlier.num_positions
        is_longer = isinstance(mask, Tensor) and mask.shape[-1] > before + rows.shape[-1]
    if is_of_pairs or (has_cache and is_longer):
        raise CollectError(
            f"{name} says who attends to whom, or is longer than the cache, as for a cache of "
            "fixed length, and not which positions are real: give Tokens(mask=lambda batch: ...) "
            f"with a bool tensor [batch, positions], or {_WATCH}"
        )
    known = rows.shape[0] if earlier is None else len(earlier.lengths)
    if earlier is not None and not (len(rows.dims) == 2 and rows.num_samples == known):
        raise CollectError(
            f"the network received a cache of {known} samples for {rows.num_samples}: rows of "
            f"passes that don't continue where others ended can't be told apart; {_WATCH}"
        )
    return rows


def _caches_in(holder: Any) -> list[Any]:
    """Return the caches among arguments, or in an output; what has no names may be one."""
    if isinstance(holder, tuple | list):
        return list(holder)
    # Not by getattr: an old name of a field may be a property that warns when it is read.
    named = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
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
            f"told apart: generate one for each, greedily or by sampling, or {_WATCH}"
        )
