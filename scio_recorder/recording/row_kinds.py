"""The kinds of rows: tokens of padded batches or packed documents, and nodes of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.recording.rows import BatchRows, Fields, Name, Rows, Source, advice_on_lists
from scio_recorder.tensors.arguments import signature_of

_ENCODER = ("input_ids", "inputs_embeds")
_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_MASKS_OF_PAIRS = ("attention_mask", "decoder_attention_mask")


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
        found = source.find_in_all(str(self.mask or "attention_mask"))
        # Otherwise it may say who attends to whom, as segments do.
        is_mask = self.segments is None or getattr(found, "ndim", 2) == 2
        return source.tensor("mask", found) if found is not None and is_mask else None

    def _sequence(self, source: Source, mask: Tensor | None) -> tuple[str, tuple[int, int]]:
        """Return the argument with the sequence of tokens, and its [batch, positions]."""
        names: tuple[str, ...] = _ENCODER
        if isinstance(self.mask, str):
            names = _DECODER if self.mask.startswith("decoder") else _ENCODER
        elif self.mask is not None:
            names = _ENCODER + _DECODER
        found = _shapes(source, names)
        if not found and names is not _DECODER:
            others = [name for name in source.arguments if "mask" not in name]
            found = dict(list(_shapes(source, others).items())[:1])
            if callable(self.mask) and mask is not None and mask.ndim == 2:
                # A net divides sound into frames: a caller who marks the real ones knows their
                # number.
                found = {n: shape for n, shape in found.items() if shape[1] <= mask.shape[1]}
        if mask is not None and mask.ndim == 2:
            size: tuple[int, int] = (mask.shape[0], mask.shape[1])
            fitting = {name: shape for name, shape in found.items() if shape == size}
            found = fitting or found or {"": size}
        if not found:
            raise CollectError(
                advice_on_lists(source.arguments)
                or f"layer {source.layer} can't be collected by rows=Tokens(): the net's input has "
                "no sequence, that is, no tensor [batch, positions] or [batch, positions, "
                "features]; write Tokens(mask=lambda batch: ...) with a bool tensor [batch, "
                "positions] and, if layers have another shape, transform=; or leave rows= out"
            )
        return next(iter(found.items()))


def _is_cut(source: Source, name: str, mask: Tensor) -> bool:
    """Whether a mask belongs to a batch that is cut, at an unknown place, on its way to the net."""
    own, batch = source.entry(name), source.batch
    if own is None:
        own = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return isinstance(own, Tensor) and own.shape[:2] == mask.shape


def _shapes(source: Source, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return [batch, positions] of each argument that can be a sequence of tokens."""
    given = source.tensors
    found = {name: given[name] for name in names if name in given and given[name].ndim in (2, 3)}
    return {name: (value.shape[0], value.shape[1]) for name, value in found.items()}


def _has_others(source: Source, shape: tuple[int, int]) -> bool:
    """Whether the net also receives something with positions of its own, such as an image."""
    own = shape, (1, shape[1])
    given = [one for name, one in source.tensors.items() if "mask" not in name]
    return any(one.ndim > 2 and one.shape[:2] not in own for one in given)


def _default_fields(source: Source, name: str, shape: tuple[int, int]) -> list[tuple[str, Name]]:
    """Return the name of the tokens' ids, if the batch has them."""
    wanted = "decoder_input_ids" if name in _DECODER else "input_ids"
    found = source.find(wanted)
    is_fitting = isinstance(found, Tensor) and tuple(found.shape) == shape
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
            given = source.find("num_graphs") if self.sample == "batch" else None
            # The last graphs may be without nodes.
            number = max(number, given) if isinstance(given, int) else number
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
                f"sample of rows=Nodes() is negative in batch {source.number}: count the graphs of "
                "a batch from 0"
            )
        if len(owners) and int(owners.max()) >= len(owners):
            raise CollectError(
                f"sample of rows=Nodes() has the graph {int(owners.max())} in batch "
                f"{source.number} of {len(owners)} nodes: count the graphs of a batch from 0, "
                "and leave none out"
            )
        return owners


def _lines(source: Source) -> dict[str, int]:
    """Return the number of lines of each argument of forward, most likely nodes first."""
    given = source.tensors
    values = {"x": given["x"], **given} if "x" in given else given
    return {name: value.shape[0] for name, value in values.items() if value.ndim > 0}


def _num_nodes(source: Source) -> int:
    for number in _lines(source).values():
        return number
    raise CollectError(
        f"the net's input in batch {source.number} has no tensor that shows the number of "
        "nodes: write Nodes(sample=lambda batch: ...) with the graph of each node"
    )
