"""The net of an audit: what its layers return and receive, exactly and in narrow precisions."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scio_recorder import Architecture, Recorder
from scio_recorder.analysis.auditing.finding import Kind
from scio_recorder.analysis.comparing.sides import NetworkSide, SampleBlock, chosen
from scio_recorder.layer import Layer, OperationIdx, RowIdx, TensorSpec
from scio_recorder.lowlevel import BatchRows, Feed, RecordOptions, digest_of, untouched
from scio_recorder.tensors import is_dense, taken_apart

# What adds a branch to the residual stream.
_ADDITIONS = {"add", "add_", "iadd", "radd"}
# What a net can compute in, and what can only be stored.
NARROW = (torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn)
_PROBES_OF_A_SAMPLE, _MOST_PROBES = 4, 256


class Value(NamedTuple):
    """A tensor that a layer or an operation returns, or receives."""

    label: RowIdx
    is_received: bool
    part: tuple[Any, ...]


def numbers(lines: Tensor) -> Tensor:
    """Return real numbers in host memory, [rows, features], in float32 or float64."""
    real = torch.view_as_real(lines) if lines.is_complex() else lines
    flat = real.cpu().flatten(1)
    return flat if flat.dtype == torch.float64 else flat.float()


def row_errors(values: Tensor, reference: Tensor) -> Tensor:
    """Return the distance of each row to its reference, relative to the norm of that.

    Rows that are short beside the others, below 0.3 of the median norm, count as that long.

    Examples
    --------
    >>> row_errors(torch.tensor([[3.0, 5.0], [0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([0.2000, 0.0000])
    """
    norms = torch.linalg.vector_norm(reference, dim=-1)
    least = 0.3 * norms.median(dim=-1, keepdim=True).values
    distances = torch.linalg.vector_norm(values - reference, dim=-1)
    errors: Tensor = (distances / torch.maximum(norms, least)).nan_to_num(math.inf, math.inf)
    return errors.where(distances != 0, 0.0)


@dataclass
class View:
    """A batch as a column sees it: which rows the net has, which the column, and their pairs.

    Parameters
    ----------
    values : mapping
        What the net's layers return and receive.
    shape : tuple of int
        The leading dimensions of these values that count rows.
    index : Tensor or None
        The real rows, as flat indices into these dimensions.
    keys, others : Tensor
        The sample and the position of each row, [rows, 2], of the net and of the column.
    """

    values: Mapping[Value, Tensor]
    shape: tuple[int, ...]
    index: Tensor | None
    keys: Tensor
    others: Tensor

    def __post_init__(self) -> None:
        mine, theirs = (map(tuple, keys.tolist()) for keys in (self.keys, self.others))
        places = {key: at for at, key in enumerate(theirs)}
        pairs = [(at, places[key]) for at, key in enumerate(mine) if key in places]
        # Of rows that both have: their places in the net's and in the column's.
        self.here, self.there = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
        samples = len({*self.keys[:, 0].tolist()})
        step = max(1, len(pairs) // (_PROBES_OF_A_SAMPLE * samples))
        self.probes = torch.arange(step // 2, len(pairs), step)[:_MOST_PROBES]
        self._stacks: dict[int, tuple[list[Value], Tensor]] = {}

    def lines(self, value: Value, rows: Tensor | None = None) -> Tensor:
        """Return rows of a value in host memory, [rows, features]: all of them, or some."""
        lines = self.values[value].reshape(math.prod(self.shape), -1)
        index = torch.arange(len(lines)) if self.index is None else self.index.cpu()
        return numbers(lines[(index if rows is None else index[rows]).to(lines.device)])

    def stack(self, features: int) -> tuple[list[Value], Tensor]:
        """Return the values with this many features, and their probe rows [values, rows, ...]."""
        if features not in self._stacks:
            number, size = len(self.shape), math.prod(self.shape) * features
            values = [
                value
                for value, x in self.values.items()
                if x.shape[:number] == self.shape and x.numel() * (1 + x.is_complex()) == size
            ]
            probes = self.here[self.probes]
            lines = [self.lines(value, probes).double() for value in values]
            empty = torch.empty(0, len(probes), features)
            self._stacks[features] = values, torch.stack(lines) if lines else empty
        return self._stacks[features]

    def errors(self, recorded: Tensor) -> dict[Value, float]:
        """Return the median error of the probe rows of a column, as each of the net's values."""
        values, stacked = self.stack(recorded.shape[1])
        if not values or not len(self.probes):
            return {}
        errors = row_errors(recorded[self.there[self.probes]].double(), stacked)
        return dict(zip(values, errors.median(1).values.tolist(), strict=True))


class Reference:
    """A net that runs on the batches of an audit, in float32 or wider.

    Parameters
    ----------
    rnet : Recorder
        The net. If its weights are narrower than float32, a copy in float32 runs instead.
    feed : Feed
        The batches.
    stack : ExitStack
        When it ends, the net is as it was before.
    names : collection of str
        Names of operations that must be seen as well.
    """

    def __init__(
        self, rnet: Recorder, feed: Feed, stack: contextlib.ExitStack, names: Collection[str]
    ) -> None:
        self.operations = rnet.operations().architecture
        self.architecture = rnet.architecture
        rows = self.architecture.values()
        ran: list[RowIdx] = [layer.label for layer in rows if layer.executed]
        # In the order in which they return.
        named = [at for at, row in self.operations.operations.items() if row.name in names]
        labels = dict.fromkeys([*ran, *_additions(self.operations), *named])
        self.labels = self.operations.in_order(labels)
        self._rnet, self._feed = rnet, feed
        self.is_training: bool = rnet.net.training
        stack.enter_context(untouched(rnet.net))
        exact, dtypes = rnet, {parameter.dtype for parameter in rnet.net.parameters()}
        self.dtype = next((dtype for dtype in NARROW if dtype in dtypes), torch.float32)
        with contextlib.suppress(Exception):
            # Nets that can't be copied, or are quantised, are taken as they are.
            exact = rnet if self.dtype == torch.float32 else copy.deepcopy(rnet).float()
        self._is_copy = exact is not rnet
        self._exact = self._opened(exact, stack)

    def _opened(self, rnet: Recorder, stack: contextlib.ExitStack) -> NetworkSide:
        side = NetworkSide(rnet.capture, None, self._feed, "net")
        side.architecture = rnet.operations().architecture
        options = RecordOptions(inputs=side.calls == "labelled", calls=side.calls)
        side.open(stack, self.labels, options)
        return side

    def layer(self, value: Value) -> Layer:
        """Return the layer or the operation that returns or receives a value."""
        return self.operations[value.label]

    def run(self, block: SampleBlock) -> dict[Value, Tensor]:
        """Return what layers and operations return and receive in a batch."""
        return self._values(self._exact, _cast(block, torch.float32) if self._is_copy else block)

    def rounded(self, block: SampleBlock, dtype: torch.dtype) -> dict[Value, Tensor]:
        """Return the same of a copy of the net in a narrow precision, or at least cast to it."""
        if dtype in NARROW:
            # Not every net can be copied, nor run in every precision.
            with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
                side = self._opened(copy.deepcopy(self._rnet).to(dtype), stack)
                return self._values(side, _cast(block, dtype))
        values = self.run(block).items()
        return {at: x.to(dtype).to(x.dtype) for at, x in values if x.is_floating_point()}

    def _values(self, side: NetworkSide, block: SampleBlock) -> dict[Value, Tensor]:
        side.load(block)
        if not side.copies_are_right:
            # Something writes to tensors in ways that are not counted.
            side.shares_copies = False
            side.load(block)
        values = dict[Value, Tensor]()
        for label in self.labels:
            returned = _dense(side.output(label), block)
            values |= {Value(label, False, at): x for at, x in returned.items()}
            inputs = side.inputs(label)
            arguments = [] if inputs is None else [*enumerate(inputs.args), *inputs.kwargs.items()]
            received = [
                ((key, *at), x)
                for key, parts in arguments
                for at, x in _dense(parts, block).items()
            ]
            # Of an addition both terms; of other layers what they work on, and no masks.
            most = 2 if isinstance(label, OperationIdx) else 1
            values |= {Value(label, True, at): x for at, x in received[:most]}
        return values


def _dense(parts: Mapping[Any, Any], block: SampleBlock) -> dict[Any, Tensor]:
    """Return the parts of a structure that are plain arrays of numbers, by sample and position.

    Some layers work on all tokens of a batch in a row.
    """
    plain = {at: x for at, x in parts.items() if isinstance(x, Tensor) and is_dense(x)}
    leaves = () if block.inputs is None else block.inputs.leaves
    texts = next((x.shape for x in leaves if x.ndim == 2), None)
    if texts is None:
        return plain
    in_a_row = {at: x for at, x in plain.items() if x.ndim == 2 and len(x) == texts.numel()}
    apart = {at: chosen(x.reshape(*texts, -1), block.rows) for at, x in in_a_row.items()}
    return plain | apart


def _additions(architecture: Architecture) -> list[OperationIdx]:
    """Return the additions that may make the residual stream: of the size that a layer returns.

    Of layers that also add other things, such as masks, the number of additions may vary from batch
    to batch.
    """
    by_layer: dict[tuple[object, ...], list[OperationIdx]] = {}
    for at in architecture.operations:
        if at.function in _ADDITIONS:
            by_layer.setdefault(at[:3], []).append(at)
    chosen = list[OperationIdx]()
    for additions in by_layer.values():
        rows = [architecture.operations[at] for at in additions]
        if all(_size(row.output_spec) == _size(row.layer.output_spec) for row in rows):
            chosen += additions
    return chosen


def _size(spec: Any) -> Any:
    """Return how many numbers, and how many features, the first part of a structure has."""
    while isinstance(spec, tuple | list) and spec:
        spec = spec[0]
    return (math.prod(spec.shape), spec.shape[-1:]) if isinstance(spec, TensorSpec) else spec


def digests_of(values: dict[Value, Tensor]) -> dict[Value, str]:
    """Return a digest of each value, equal for those that are equal bit for bit."""
    known: dict[int, str] = {}
    for tensor in values.values():
        if id(tensor) not in known:
            known[id(tensor)] = digest_of(tensor)
    return {value: known[id(tensor)] for value, tensor in values.items()}


def _cast(block: SampleBlock, dtype: torch.dtype) -> SampleBlock:
    assert block.inputs is not None
    leaves = [x.to(dtype) if x.is_floating_point() else x for x in block.inputs.leaves]
    return replace(block, inputs=taken_apart(block.inputs.rebuild(leaves)))


def otherwise_padded(
    block: SampleBlock, rows: BatchRows | None
) -> Iterator[tuple[Kind, str, SampleBlock, BatchRows]]:
    """Yield a batch with the padding on the other side, without its mask, and with both changed.

    Each comes with its real rows, and with the kind and the words of a column that fits.

    Parameters
    ----------
    block : SampleBlock
        The batch.
    rows : BatchRows
        Its real rows, ``[batch, positions]``.
    """
    if rows is None or rows.index is None or len(rows.shape) != 2 or block.inputs is None:
        return
    real = torch.zeros(rows.shape, dtype=torch.bool).view(-1)
    real[rows.index.cpu()] = True
    real = real.view(rows.shape)
    is_right = bool(real[:, 0].all())
    order = (real if is_right else ~real).long().argsort(dim=1, stable=True)
    places = torch.arange(rows.shape[0])[:, None] * rows.shape[1] + order.argsort(1)
    rolled = replace(rows, index=places.view(-1)[rows.index.cpu()])
    stay = torch.arange(rows.shape[1]).expand_as(order)
    side = f"the padding is on the {'left' if is_right else 'right'}"
    variants: list[tuple[Kind, str, Tensor, bool, BatchRows]] = [
        ("other padding side", side, order, True, rolled),
        ("padding counted", "padding is not masked", stay, False, rows),
        ("other padding side", f"{side}, and not masked", order, False, rolled),
    ]
    for kind, words, to, has_mask, now in variants:
        leaves = _moved(block.inputs.leaves, real, to, has_mask=has_mask)
        inputs = taken_apart(block.inputs.rebuild(leaves))
        chosen = None if block.rows is None else now
        other = replace(block, inputs=inputs, rows=chosen, received=chosen)
        yield kind, f"as the net is if {words}", other, now


def _moved(
    leaves: Iterable[Tensor], real: Tensor, order: Tensor, *, has_mask: bool
) -> Sequence[Tensor]:
    """Return inputs with their positions in another order, and perhaps a mask of ones."""
    moved = []
    for leaf in leaves:
        if leaf.shape[:2] == real.shape:
            is_mask = torch.equal(leaf.cpu(), real.to(leaf.dtype))
            index = order.to(leaf.device).view(*order.shape, *[1] * (leaf.ndim - 2))
            is_left_out = is_mask and not has_mask
            leaf = torch.ones_like(leaf) if is_left_out else leaf.take_along_dim(index, 1)
        moved.append(leaf)
    return moved
