"""Which operations of a layer compute its attention, by the kinds of attention that there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.errors import AttentionError, LabellingError, LayerNotFoundError
from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx, RowIdx, few
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.attention.eager import Eager
from scio_recorder.nets.attention.kernel import Kernel, MultiHead
from scio_recorder.nets.attention.kind import Attention as Attention
from scio_recorder.nets.attention.kind import AttentionKind, SeenAttention, SeenOperation, TakeOut
from scio_recorder.nets.records import Entries, Inputs, Recorded, Records
from scio_recorder.nets.selection import selector_for
from scio_recorder.tensors.properties import is_dense
from scio_recorder.tensors.structures import map_tensors, tensors

KINDS: list[AttentionKind] = [Kernel(), MultiHead(), Eager()]
# The way on where attention can't be read.
_PARTS = (
    'record its parts as operations, such as "*/softmax", whose output are the weights of eager '
    "code, or the kernel with inputs=True"
)


def checked_order(
    attention: Mapping[OperationIdx, SeenAttention],
    inputs: Inputs,
    run: Callable[[Inputs], Mapping[OperationIdx, SeenAttention]],
) -> dict[OperationIdx, SeenAttention]:
    """Refuse attention of which nothing shows that samples come first, and then heads.

    Sizes show it, unless there are as many heads as samples, or the samples are taken apart, as
    into windows. Then it shows when the network runs on twice as many samples.

    Parameters
    ----------
    attention : mapping
        What operations complete, at labelling.
    inputs : Inputs
        What the network was labelled with.
    run : callable
        Runs it on others, and returns what operations complete then.
    """
    dense = [tensor for tensor in tensors(inputs) if is_dense(tensor) and tensor.dim()]
    num_samples = len(dense[0]) if dense else 0
    doubted = {
        label: seen.sizes
        for label, seen in attention.items()
        if seen.sizes and not seen.sizes[0] == num_samples != seen.sizes[-3]
    }
    others: set[OperationIdx] = set()  # those in which samples are where heads should be
    # Some networks have positions first.
    for dim in range(min(2, dense[0].dim()) if dense else 0):
        if not doubted:
            break
        with contextlib.suppress(LabellingError):
            again = run(_twice(inputs, dim, dense[0].shape[dim]))
            more = {at: (again[at].sizes, sizes) for at, sizes in doubted.items() if at in again}
            others |= {at for at, (after, before) in more.items() if _is_twice(after, before, -3)}
            shown = {at for at, (after, before) in more.items() if _is_twice(after, before, 0)}
            doubted = {at: doubted[at] for at in doubted if at in others or at not in shown}
    refusal = (
        "the weights are {}, and nothing shows that these are [batch, ..., heads, queries, keys]"
    )
    return dict(attention) | {
        label: attention[label]._replace(refusal=refusal.format([*sizes]))
        for label, sizes in doubted.items()
    }


def _is_twice(sizes: tuple[int, ...], before: tuple[int, ...], at: int) -> bool:
    """Whether of a batch and heads one is twice as many as before, and the other as many."""
    expected = [*before]
    expected[at] *= 2
    return len(sizes) == len(before) and (sizes[0], sizes[-3]) == (expected[0], expected[-3])


def _twice(inputs: Inputs, dim: int, length: int) -> Inputs:
    """Return inputs that are twice as long in a dimension, if they have a length there."""

    def longer(tensor: Tensor) -> Tensor:
        is_long = is_dense(tensor) and tensor.shape[dim : dim + 1] == (length,)
        return torch.cat([tensor, tensor], dim) if is_long else tensor

    doubled: Inputs = map_tensors(longer, inputs)
    return doubled


class AttentionCalls(NamedTuple):
    """The operations by which the own code of a layer computes attention.

    Attributes
    ----------
    first, last : Operation
        The kernel is both; or the softmax, and the product of weights and values.
    """

    first: Operation
    last: Operation

    def record(self, inputs: Entries, outputs: Entries) -> Recorded:
        """Return a record of the attention, which is computed when it is read."""
        last = self.last.label
        return Recorded([outputs[self.first.label], inputs[last], outputs[last]], self.attention)

    def attention(self, parts: Sequence[Any]) -> Attention:
        """Return the attention, given what the first returned, the last received and returned."""
        seen: SeenAttention = self.last.attention
        attention = seen.kind.attention(seen.layout, parts)
        self._check_heads(attention.sizes[:-2])
        return attention

    def changed(self, inputs: Inputs, take_out: TakeOut) -> Inputs:
        """Return inputs of the first operation with which some entries are taken out."""
        seen: SeenAttention = self.last.attention

        def checked(bias: Tensor, leading: Sequence[int]) -> Tensor:
            self._check_heads(leading)
            return take_out(bias, leading)

        return seen.kind.changed(seen.layout, inputs, checked)

    def _check_heads(self, leading: Sequence[int]) -> None:
        """Refuse other heads than at labelling, where nothing else shows what is heads."""
        sizes = self.last.attention.sizes
        if sizes and leading[-1] != sizes[-3]:
            raise AttentionError(
                f"layer {self.last.layer} had {sizes[-3]} heads at labelling and has {leading[-1]} "
                f"now, so these are no heads: {_PARTS}"
            )


def find_attention(
    architecture: Architecture, layers: Iterable[DepthIdx]
) -> dict[DepthIdx, AttentionCalls]:
    """Return where the own code of layers computes attention.

    Parameters
    ----------
    architecture : Architecture
        The layers, with their operations.
    layers : iterable of (int, int)
        Those that are asked for.

    Raises
    ------
    LayerNotFoundError
        One of them has no attention in its own code, several, or one that can't be read.
    """
    calls = {}
    for label in layers:
        rows = _completing(architecture, architecture[label].label)
        if len(rows) != 1 or rows[0].attention.refusal:
            raise LayerNotFoundError(_explain(architecture, label, rows))
        first = architecture.operations[rows[0].attention.first]
        calls[label] = AttentionCalls(first, rows[0])
    return dict(sorted(calls.items(), key=lambda item: item[1].last.completion or 0))


def _completing(architecture: Architecture, label: DepthIdx) -> list[Operation]:
    """Return the operations in the own code of a layer that complete an attention each."""
    rows = [row for row in architecture.operations.values() if row.layer.label == label]
    completing = [row for row in rows if row.attention is not None]
    # What one softmax returned may be multiplied with several things: the first are the values.
    by_first: dict[OperationIdx, Operation] = {}
    for row in sorted(completing, key=_rank):
        by_first.setdefault(row.attention.first, row)
    kernels = [row for row in completing if row.attention.first == row.label]
    return kernels or [*by_first.values()]


def _rank(row: Operation) -> tuple[bool, bool]:
    return not row.attention.refuses_all, bool(row.attention.refusal)


def _explain(architecture: Architecture, label: DepthIdx, rows: Sequence[Operation]) -> str:
    layer = architecture[label]
    if len(rows) > 1:
        return (
            f"layer {layer} computes attention several times in its own code ({few(rows, 4)}): "
            f"{_PARTS}"
        )
    if rows:
        return (
            f"the attention of layer {layer} can be neither read nor changed, since at {rows[0]} "
            f"{rows[0].attention.refusal}: {_PARTS}"
        )
    around = dict.fromkeys(row.layer.label for row in architecture.operations.values())
    having = [architecture[at] for at in around if _completing(architecture, at)]
    labels = [row.label for row in having]
    globs = dict.fromkeys(selector_for(architecture, at, labels) for at in labels)
    hint = (
        f"layers that do: {few(having, 4)}: write "
        f"record({', '.join(map(repr, globs))}, attention=True)"
        if having
        else "no layer of this network does"
    )
    inside = f"{layer.name}.".removeprefix(".")
    modules = [row for row in architecture.values() if isinstance(row.module, nn.Softmax)]
    softmaxes = [row.label for row in modules]
    if own_softmax := [row for row in modules if row.name.startswith(inside)]:
        hint = (
            f"what it calls softmax is a layer, {own_softmax[0]}, whose output is the weights: "
            f"write record({selector_for(architecture, own_softmax[0].label, softmaxes)!r})"
        )
    return (
        f"the own code of layer {layer} calls neither {Kernel.function} nor {MultiHead.function}, "
        f"and no softmax before a product; {hint}"
    )


class AttentionSink:
    """Receives what operations receive and return, and hands on the attention that they complete.

    It is made of what these operations have just received, of which nothing need be copied.

    Parameters
    ----------
    receivers : mapping
        The functions that receive what layers return. That of a layer with attention receives the
        attention in place of it.
    attention : mapping of (int, int) to AttentionCalls
        The operations, by layer.
    """

    def __init__(
        self,
        receivers: Mapping[RowIdx, Callable[[Any], None]],
        attention: Mapping[DepthIdx, AttentionCalls],
    ) -> None:
        # By operation: what it has returned, and received, until the attention is complete.
        self._returned: dict[RowIdx, Any] = {}
        self._received: dict[RowIdx, Inputs] = {}
        self.receivers: dict[RowIdx, Callable[[Any], None]] = {**receivers}
        for layer, calls in attention.items():
            self.receivers[layer] = _ignore
            for row in calls:
                # Without a reference to this object, which may hold an attention.
                parts = self._returned, self._received, receivers
                self.receivers[row.label] = partial(_receive, row, calls, *parts)

    def keep_inputs(self, row: Layer, inputs: Inputs) -> Inputs:
        """Return what an operation is about to receive."""
        return inputs

    def receive_inputs(self, label: RowIdx, kept: Inputs) -> None:
        """Take what the operation received that has just returned."""
        self._received[label] = kept


def _receive(
    row: Operation,
    calls: AttentionCalls,
    returned: dict[RowIdx, Any],
    received: dict[RowIdx, Inputs],
    receivers: Mapping[RowIdx, Callable[[Any], None]],
    output: Any,
) -> None:
    """Take what an operation has returned, and hand on the attention if it is the last."""
    returned[row.label] = output
    if row is calls.last:
        parts = returned.pop(calls.first.label), received.pop(row.label), output
        returned.pop(row.label, None)
        receivers[row.layer.label](calls.attention(parts))
    receivers.get(row.label, _ignore)(output)


def _ignore(output: Any) -> None:
    """Take nothing."""


class AttentionReader:
    """Finds attention among operations that it is shown one after the other.

    Examples
    --------
    >>> import torch
    >>> scores, value = torch.zeros(1, 2, 4, 4), torch.ones(1, 2, 4, 8)
    >>> weights, reader = scores.softmax(-1), AttentionReader()
    >>> reader.read("softmax", Inputs((scores, -1), {}), weights)
    >>> reader.read("matmul", Inputs((weights, value), {}), weights @ value).weights().shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(self) -> None:
        self._recognisers = [kind.recogniser() for kind in KINDS]

    def see(self, operation: SeenOperation) -> SeenAttention | None:
        """Return the attention that an operation completes, None if it completes none."""
        completed = [recognise(operation) for recognise in self._recognisers]
        return next((seen for seen in completed if seen is not None), None)

    def read(self, function: str, inputs: Inputs, output: Any) -> Attention | None:
        """Return the attention that an operation of a single module completes.

        Raises
        ------
        AttentionError
            The attention can't be read.
        """
        seen = self.see(SeenOperation(None, None, function, 0, inputs, output))
        if seen is None:
            return None
        if seen.refusal:
            raise AttentionError(seen.refusal)
        parts = seen.first.output, seen.last.inputs, seen.last.output
        return seen.kind.attention(seen.layout, parts)


class AttentionRecords(Records):
    """The attention of layers in one pass, computed from what was recorded when it is read."""

    def __repr__(self) -> str:
        lines = [f"{self._architecture[label]}  {self[label]!r}" for label in self]
        return "\n".join(lines) or super().__repr__()
