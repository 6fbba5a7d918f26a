"""Handing a sink the attention of layers, as soon as it has been computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from scio_recorder.layer import DepthIdx, Layer, Operation, RowIdx
from scio_recorder.nets.attention_calls import AttentionCalls
from scio_recorder.nets.records import Inputs

if TYPE_CHECKING:
    from scio_recorder.capture.program import Sink


class AttentionSink:
    """Receives what operations receive and return, and hands a sink the attention of layers.

    It is made of what these operations have just received, of which nothing need be copied.

    Parameters
    ----------
    sink : Sink
        It receives the attention of a layer in place of what the layer returns.
    attention : mapping of (int, int) to AttentionCalls
        The operations, by layer.
    """

    def __init__(self, sink: Sink, attention: Mapping[DepthIdx, AttentionCalls]) -> None:
        # What the operations of the layer that runs have received and returned.
        self._received: dict[str, Any] = {}
        self.receivers: dict[RowIdx, Callable[[Any], None]] = {**sink.receivers}
        for layer, calls in attention.items():
            self.receivers[layer] = _ignore
            for row in calls:
                # Without a reference to this object, which may hold an attention.
                given = row, calls, self._received, sink.receivers
                self.receivers[row.label] = partial(_receive, *given)

    def keep_inputs(self, row: Layer, inputs: Inputs) -> Inputs:
        """Return what an operation is about to receive."""
        return inputs

    def receive_inputs(self, label: RowIdx, kept: Inputs) -> None:
        """Take what the operation received that has just returned."""
        self._received["inputs"] = kept


def _receive(
    row: Operation,
    calls: AttentionCalls,
    received: dict[str, Any],
    receivers: Mapping[RowIdx, Callable[[Any], None]],
    output: Any,
) -> None:
    """Take what an operation has returned, and hand on the attention if it is the last."""
    if row is calls.last:
        attention = calls.attention((received.get("softmax"), received["inputs"], output))
        received.clear()
        receivers[row.layer.label](attention)
    else:
        received["softmax"] = output
    receivers.get(row.label, _ignore)(output)


def _ignore(output: Any) -> None:
    """Take nothing."""
