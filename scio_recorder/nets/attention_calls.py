"""Which operations of a layer compute its attention, and what they show of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from scio_recorder.errors import LayerNotFoundError
from scio_recorder.layer import DepthIdx, Operation, RowIdx, few
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.attention import Attention, attention_of, eager_attention_of
from scio_recorder.nets.attention_arguments import KERNELS, unpacked
from scio_recorder.nets.records import Entry, Inputs, Recorded, Records
from scio_recorder.nets.selection import selector_for

_PRODUCTS = ("matmul", "bmm", "einsum")


class AttentionCalls(NamedTuple):
    """The operations by which the own code of a layer computes attention.

    Attributes
    ----------
    first : Operation
        The kernel, or the softmax: its inputs decide who attends to whom.
    last : Operation
        The kernel, or the product of weights and values: its inputs and output tell the weights.
    """

    first: Operation
    last: Operation

    def record(self, inputs: Mapping[RowIdx, Entry], outputs: Mapping[RowIdx, Entry]) -> Recorded:
        """Return a record of the attention, which is computed when it is read."""
        last = self.last.label
        return Recorded([outputs[self.first.label], inputs[last], outputs[last]], self.attention)

    def attention(self, parts: Sequence[Any]) -> Attention:
        """Return the attention, given what the first returned, the last received and returned."""
        softmax, inputs, output = parts
        if self.first is not self.last:
            return eager_attention_of(softmax, inputs, output)
        given = unpacked(self.last, inputs)
        if given is not inputs:
            output = output.flatten(1, 2)[:, :, None]
        return attention_of(self.last.function, given, output)


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
        One of them has no attention in its own code, or several.
    """
    found = {}
    for label in layers:
        own = _attention_in(architecture, label)
        if len(own) != 1:
            raise LayerNotFoundError(_explain(architecture, label, own))
        found[label] = own[0]
    return dict(sorted(found.items(), key=lambda item: item[1].last.completion or 0))


def _attention_in(architecture: Architecture, label: DepthIdx) -> list[AttentionCalls]:
    label = architecture[label].label
    operations = [row for row in architecture.operations.values() if row.layer.label == label]
    kernels = [row for row in operations if row.function in KERNELS]
    if kernels:
        return [AttentionCalls(row, row) for row in kernels]
    softmaxes = [at for at, row in enumerate(operations) if row.function == "softmax"]
    found = []
    for start, end in itertools.pairwise([*softmaxes, len(operations)]):
        products = [row for row in operations[start:end] if row.function in _PRODUCTS]
        if products:
            found.append(AttentionCalls(operations[start], products[0]))
    return found


def _explain(architecture: Architecture, label: DepthIdx, own: list[AttentionCalls]) -> str:
    layer = architecture[label]
    if own:
        lines = few([calls.last for calls in own], 4)
        return (
            f"layer {layer} computes attention several times in its own code ({lines}): record "
            "these operations with inputs=True instead"
        )
    around = dict.fromkeys(row.layer.label for row in architecture.operations.values())
    having = [architecture[at] for at in around if _attention_in(architecture, at)]
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
        f"the own code of layer {layer} calls neither {' nor '.join(KERNELS)}, and no softmax "
        f"before a product; {hint}"
    )


class AttentionReader:
    """Reads the attention off the operations of a module's own code, one after the other.

    Examples
    --------
    >>> import torch
    >>> weights, value = torch.full((1, 2, 4, 4), 0.25), torch.ones(1, 2, 4, 8)
    >>> reader = AttentionReader()
    >>> reader.read("softmax", Inputs((weights.log(), -1), {}), weights)
    >>> reader.read("matmul", Inputs((weights, value), {}), weights @ value).weights().shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(self) -> None:
        self._softmax: Any = None

    def read(self, function: str, inputs: Inputs, output: Any) -> Attention | None:
        """Return the attention that an operation completes, None if it completes none.

        Raises
        ------
        AttentionError
            The attention can't be read.
        """
        if function in KERNELS:
            return attention_of(function, inputs, output)
        if function == "softmax":
            self._softmax = output
        elif function in _PRODUCTS and self._softmax is not None:
            softmax, self._softmax = self._softmax, None
            return eager_attention_of(softmax, inputs, output)
        return None


class AttentionRecords(Records):
    """The attention of layers in one pass, computed from what was recorded when it is read."""

    def __init__(
        self,
        architecture: Architecture,
        calls: Mapping[DepthIdx, AttentionCalls] = MappingProxyType({}),
        inputs: Mapping[RowIdx, Entry] = MappingProxyType({}),
        outputs: Mapping[RowIdx, Entry] = MappingProxyType({}),
    ) -> None:
        own = {at: one for at, one in calls.items() if one.last.label in outputs}
        entries: dict[RowIdx, Entry] = {at: one.record(inputs, outputs) for at, one in own.items()}
        super().__init__(architecture, entries, "attention")

    def __repr__(self) -> str:
        lines = [f"{self._architecture[label]}  {self[label]!r}" for label in self]
        return "\n".join(lines) or super().__repr__()
