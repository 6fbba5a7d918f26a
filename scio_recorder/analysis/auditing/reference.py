"""The net of an audit: what its layers return and receive, exactly and narrow, and their names."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scio_recorder import Architecture, Recorder
from scio_recorder.analysis.auditing.finding import Kind
from scio_recorder.analysis.comparing.matching import translated
from scio_recorder.analysis.comparing.sides import NetworkSide, SampleBlock
from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx, RowIdx, TensorSpec
from scio_recorder.lowlevel import BatchRows, Feed, Inputs, RecordOptions, digest_of, untouched
from scio_recorder.tensors import is_dense, taken_apart

# What adds a branch to the residual stream.
_ADDITIONS = {"add", "add_", "iadd", "radd"}
# What a net can compute in, and what can only be stored.
NARROW = (torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e5m2, torch.float8_e4m3fn)


class Value(NamedTuple):
    """A tensor that a layer or an operation returns, or receives."""

    label: RowIdx
    is_received: bool
    part: tuple[Any, ...]


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
        self.architecture = rnet.architecture
        self.operations = rnet.operations().architecture
        self.is_training: bool = rnet.net.training
        ran: list[RowIdx] = [row.label for row in self.architecture.values() if row.executed]
        named = [at for at, row in self.operations.operations.items() if row.name in names]
        # In the order in which they return.
        self.labels = self.operations.in_order({*ran, *_additions(self.operations), *named})
        self._rnet, self._feed = rnet, feed
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

    def run(self, block: SampleBlock, dtype: torch.dtype | None = None) -> dict[Value, Tensor]:
        """Return what layers and operations return and receive in a batch.

        Parameters
        ----------
        block : SampleBlock
            The batch.
        dtype : torch.dtype, optional
            A narrow precision, in which a copy of the net runs, or to which values are cast.
        """
        if dtype in NARROW:
            # Not every net can be copied, nor run in every precision.
            with contextlib.suppress(Exception), contextlib.ExitStack() as stack:
                side = self._opened(copy.deepcopy(self._rnet).to(dtype), stack)
                return self._values(side, _cast(block, dtype))
        block = _cast(block, torch.float32) if self._is_copy else block
        values = self._values(self._exact, block)
        if dtype is None:
            return values
        real = {at: x for at, x in values.items() if x.is_floating_point()}
        return {at: x.to(dtype).to(x.dtype) for at, x in real.items()}

    def _values(self, side: NetworkSide, block: SampleBlock) -> dict[Value, Tensor]:
        side.load(block)
        if not side.copies_are_right:
            # Something writes to tensors in ways that are not counted.
            side.shares_copies = False
            side.load(block)
        values = dict[Value, Tensor]()
        for label in self.labels:
            inputs = side.inputs(label) or Inputs((), {})
            arguments = [*enumerate(inputs.args), *inputs.kwargs.items()]
            received = [((key, *at), x) for key, parts in arguments for at, x in parts.items()]
            # Of an addition both terms; of other layers what they work on, and no masks.
            most = 2 if isinstance(label, OperationIdx) else 1
            kept = [(Value(label, True, at), x) for at, x in received if _is_array(x)][:most]
            returned = side.output(label).items()
            kept += [(Value(label, False, at), x) for at, x in returned if _is_array(x)]
            values |= dict(kept)
        return values


def _is_array(part: Any) -> bool:
    return isinstance(part, Tensor) and is_dense(part) and part.numel() > 0


def _additions(architecture: Architecture) -> list[OperationIdx]:
    """Return the additions that may make the residual stream: of the size that a layer returns.

    Of layers that also add other things, such as masks, the number of additions may vary from batch
    to batch.
    """
    sizes: dict[OperationIdx, bool] = {}
    for at, row in architecture.operations.items():
        if at.function in _ADDITIONS:
            sizes[at] = _size(row.output_spec) == _size(row.layer.output_spec)
    others = {at[:3] for at, is_stream in sizes.items() if not is_stream}
    return [at for at in sizes if at[:3] not in others]


def _size(spec: Any) -> Any:
    """Return how many numbers, and how many features, the first part of a structure has."""
    while isinstance(spec, tuple | list) and spec:
        spec = spec[0]
    return (math.prod(spec.shape), spec.shape[-1:]) if isinstance(spec, TensorSpec) else spec


def _with(block: SampleBlock, leaves: Iterable[Tensor]) -> SampleBlock:
    """Return a batch with other tensors in its inputs."""
    assert block.inputs is not None
    return replace(block, inputs=taken_apart(block.inputs.rebuild(list(leaves))))


def _cast(block: SampleBlock, dtype: torch.dtype) -> SampleBlock:
    assert block.inputs is not None
    return _with(block, (x.to(dtype) if x.is_floating_point() else x for x in block.inputs.leaves))


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
    real = torch.zeros(math.prod(rows.shape), dtype=torch.bool)
    real[rows.index.cpu()] = True
    real = real.view(rows.shape)
    is_right = bool(real[:, 0].all())
    stay = torch.arange(rows.shape[1]).expand_as(real)
    roll = (real if is_right else ~real).long().argsort(dim=1, stable=True)
    side = f"the padding is on the {'left' if is_right else 'right'}"
    variants: list[tuple[Kind, str, Tensor, bool]] = [
        ("other padding side", side, roll, True),
        ("padding counted", "padding is not masked", stay, False),
        ("other padding side", f"{side}, and not masked", roll, False),
    ]
    for kind, words, order, has_mask in variants:
        leaves = [
            _moved(leaf, order, fills=not has_mask and torch.equal(leaf.cpu(), real.to(leaf.dtype)))
            if leaf.shape[:2] == real.shape
            else leaf
            for leaf in block.inputs.leaves
        ]
        index = real.take_along_dim(order, 1).flatten().nonzero().squeeze(1)
        words = f"as the net is if {words}"
        yield kind, words, _with(block, leaves), replace(rows, index=index)


def _moved(leaf: Tensor, order: Tensor, *, fills: bool) -> Tensor:
    """Return an input with its positions in another order, or with ones everywhere."""
    index = order.to(leaf.device).view(*order.shape, *[1] * (leaf.ndim - 2))
    return torch.ones_like(leaf) if fills else leaf.take_along_dim(index, 1)


# -- what names mean -------------------------------------------------------------------------------

_NUMBERED = re.compile(r"(.*?)(\d+)")
_HIDDEN_STATES = re.compile(r"(?:.*\.)?hidden_states\.(\d+)")


class Relations:
    """The values of a net in a batch, those that are equal bit for bit, and their names.

    Values are equal if their digests are, which stand for all values that are.

    Parameters
    ----------
    reference : Reference
        The net.
    values : mapping
        Its values in a batch.
    """

    def __init__(self, reference: Reference, values: Mapping[Value, Tensor]) -> None:
        self._rows = reference.operations
        self._layers = [row for row in reference.architecture.values() if row.executed]
        # Layers may work on the tokens of all samples in a row, or on heads.
        flat = {id(x): x.flatten() for x in values.values()}
        digests = {key: digest_of(x) for key, x in flat.items()}
        self._digests = {value: digests[id(x)] for value, x in values.items()}
        self._first = {value[:2]: value for value in reversed(self._digests)}
        self._equal: dict[str | None, list[Value]] = {}
        for value, digest in self._digests.items():
            self._equal.setdefault(digest, []).append(value)
        self._blocks = self._listed()
        # What each norm receives and returns, and by its sum the terms of each addition.
        self._norms = {
            row.label: (self._digest(row.label, is_received=True), self._digest(row.label))
            for row in self._layers
            if "norm" in row.type_name.lower()
        }
        self._sums: dict[str | None, list[list[str]]] = {}
        for at in reference.labels:
            terms = [x for value, x in self._digests.items() if value[:2] == (at, True)]
            if isinstance(at, OperationIdx) and len(terms) == 2:
                self._sums.setdefault(self._digest(at), []).append(self._in_order(terms))

    def _in_order(self, digests: Iterable[str]) -> list[str]:
        """Sort values as they are made: a branch is computed from the residual stream."""
        return sorted(digests, key=[*self._equal].index)

    def _listed(self) -> list[DepthIdx]:
        """Return the blocks: the outermost list of several modules of one type, not experts."""
        lists: dict[tuple[str, str], list[DepthIdx]] = {}
        for row in self._layers:
            if match := _NUMBERED.fullmatch(row.name):
                lists.setdefault((match[1], row.type_name), []).append(row.label)
        return max(lists.values(), key=lambda x: (len(x) > 1, -x[0][0], len(x)), default=[])

    def _digest(self, label: RowIdx, *, is_received: bool = False) -> str | None:
        """Return that of the first tensor that a layer returns or receives."""
        value = self._first.get((label, is_received))
        return None if value is None else self._digests[value]

    def are_equal(self, value: Value, other: Value) -> bool:
        """Whether two values are equal bit for bit."""
        return self._digests[value] == self._digests[other]

    def target(self, column: Layer, match: Mapping[str, str], *, are_numbers: bool) -> Value | None:
        """Return the value that the name of a column means; None if it is not known.

        Parameters
        ----------
        column : Layer
            Its name is that of a layer or an operation, an ending, or ``"hidden_states.4"``.
        match : mapping
            Globs -> the net's. What a name may mean by these comes first.
        are_numbers : bool
            Whether a number alone is what that block receives, as vLLM counts.
        """
        names = [translated(column.name, glob, partner) for glob, partner in match.items()]
        operations = {row.name: at for at, row in self._rows.operations.items()}
        for known in [*filter(None, names), column.name]:
            if are_numbers and known.isdecimal():
                return self._received(int(known), is_normed=False)
            if known in operations:
                return self._first.get((operations[known], False))
            labels = self._rows.labels_of(known)
            if not labels and (states := _HIDDEN_STATES.fullmatch(known)):
                return self._received(int(states[1]), is_normed=True)
            endings = [full for full in self._rows.names if full.endswith(f".{known}")]
            if not labels and len(endings) == 1:
                labels = self._rows.labels_of(endings[0])
            if labels:
                return self._first.get((labels[min(column.call, len(labels) - 1)], False))
        return None

    def _received(self, number: int, *, is_normed: bool) -> Value | None:
        if number < len(self._blocks):
            return self._first.get((self._blocks[number], True))
        if number > len(self._blocks) or not self._blocks:
            return None
        last = self._blocks[-1]
        # Transformers' last hidden states are behind the last norm, vLLM's before it.
        norms = [at for at, (before, _) in self._norms.items() if before == self._digest(last)]
        return self._first.get((norms[0] if norms and is_normed else last, False))

    def layer(self, value: Value, beside: Value | None = None) -> Layer:
        """Return the layer that best names a value: of about the depth of another one."""
        depth = 0 if beside is None else beside.label[0]

        def rank(other: Value) -> tuple[bool, bool, bool, bool, int]:
            layer = self._rows[other.label]
            is_operation, is_root = isinstance(layer, Operation), not layer.name
            off = abs(layer.depth - depth)
            return other.is_received, other != beside, is_operation, is_root, off

        return self._rows[min(self._equal[self._digests[value]], key=rank).label]

    def absent(self, held: Iterable[Layer]) -> list[Layer]:
        """Return the layers that none of some equals, although one of their type is among these.

        Those of types of which most are there come first: they are the least expected to lack.
        """
        layers = [*held]
        digests = {self._digest(layer.label) for layer in layers}
        types = {layer.type_name for layer in layers}
        rows = [row for row in self._layers if row.type_name in types]
        lacking = [row for row in rows if self._digest(row.label) not in digests]
        total, missing = (Counter(row.type_name for row in some) for some in (rows, lacking))
        return sorted(lacking, key=lambda row: missing[row.type_name] / total[row.type_name])

    def kind(self, value: Value, target: Value) -> Kind:
        """Return the kind of a column that is named as one value and holds another."""
        held, named = self._digests[value], self._digests[target]
        if (named, held) in self._norms.values():
            return "after the norm"
        if (held, named) in self._norms.values():
            return "before the norm"
        totals = [named, *(before for before, after in self._norms.values() if after == named)]
        for early, late in chain(*(self._sums.get(total, []) for total in totals)):
            # Of branches side by side, one may have been added to the other or to the stream.
            terms = self._in_order({early, late, *chain(*self._sums.get(late, []))})
            streams = terms[0], early if early == terms[0] else late
            if held in terms and held not in streams:
                return "branch without residual"
            if held in streams and not self._is_elsewhere(held, named):
                return "residual without branch"
        return "other layer"

    def _is_elsewhere(self, held: str, named: str) -> bool:
        """Whether a module outside of those that return what is named returns what is held."""
        inside, names = (
            [
                self._rows[v.label].name
                for v in self._equal[digest]
                if not v.is_received and not isinstance(v.label, OperationIdx)
            ]
            for digest in (named, held)
        )
        return not all(name.startswith(tuple(f"{around}." for around in inside)) for name in names)
