"""Distinguishing dimensions of equal length, by a run on inputs of another length.

NOTE [Lengths that tell nothing]

A layer may return ``[positions, batch, ...]``, ``[batch, heads, positions, ...]`` or ``[batch,
queries, ...]``, with the lengths of ``[batch, positions, ...]`` by chance, at labelling as well. An
image may have as many patches as a text has tokens, and an encoder as many positions as a decoder,
which computes keys from them. So the network is labelled once more, on fewer
positions: the dimension that follows their number is that of positions. This is done only for
layers whose lengths leave a doubt, and only once. A network that fails then, or has inputs other
than tensors and an empty cache, gives no answer.

An embedding of positions may return ``[1, positions, ...]`` for all samples at labelling, and
``[batch, positions, ...]`` where positions depend on the mask, as in ``generate``. It is kept only
if it follows the number of samples too, in a run on twice as many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.nets.labelling.label import label_net
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.batch_rows import BatchRows
from scio_recorder.recording.continuing import without_empty_cache

_PLAIN = (type(None), bool, int, float, str, Tensor)


class Doubts:
    """Layers whose lengths may leave a doubt, and the answers for them.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    layers : iterable of Layer
        The layers whose own output is kept or reduced.

    Examples
    --------
    >>> import torch
    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Unflatten(2, (4, 1)), nn.Flatten(1))
    >>> ids = torch.ones(4, 4, dtype=torch.long)
    >>> _, architecture = label_net(net, input_data=ids)
    >>> doubts = Doubts(net, [architecture[1, 1], architecture[1, 3]])
    >>> rows = BatchRows(("batch", "positions"), (4, 4), 4)
    >>> doubts.settled(rows, Inputs((ids,), {})).told
    {(1, 1): True}
    """

    def __init__(self, net: nn.Module, layers: Iterable[Layer]) -> None:
        self._net = net
        self._layers = list(layers)
        self._answers: dict[DepthIdx, bool] = {}

    def settled(self, rows: BatchRows, inputs: Inputs) -> BatchRows:
        """Return the rows of a batch with the answers for doubtful layers.

        Parameters
        ----------
        rows : BatchRows
            The rows.
        inputs : Inputs
            The network's inputs for the batch.
        """
        sequence = rows.shape, (1, *rows.shape[1:])
        has_others = rows.other_half is not None or any(
            isinstance(value, Tensor) and value.ndim > 2 and value.shape[:2] not in sequence
            for value in (*inputs.args, *inputs.kwargs.values())
        )
        doubtful = [one for one in self._layers if rows.is_doubtful(one, has_others=has_others)]
        shared = [one for one in self._layers if rows.may_be_shared(one)]
        for layers, times in ((doubtful, 1), (shared, 2)):
            if layers:
                self._answers |= _tell_positions(self._net, layers, inputs, rows, times)
        # Each layer is examined once.
        examined = {*doubtful, *shared}
        self._layers = [layer for layer in self._layers if layer not in examined]
        return replace(rows, told=self._answers) if self._answers else rows


def _tell_positions(
    net: nn.Module, layers: Iterable[Layer], inputs: Inputs, rows: BatchRows, times: int
) -> dict[DepthIdx, bool]:
    """Return whether dimension 1 counts the positions, for the layers that show it.

    They are run on fewer positions, and on the samples ``times`` over.
    """
    batch, positions = rows.shape
    fewer = next((n for n in (positions - 1, positions - 2) if n > 0 and n != batch), None)
    given = without_empty_cache(inputs.named(net))
    if fewer is None or not all(isinstance(value, _PLAIN) for value in given.values()):
        return {}
    narrowed = {
        name: _narrowed(
            value, rows.shape, positions if _half_of(name) == rows.other_half else fewer, times
        )
        for name, value in given.items()
    }
    try:
        _, probed = label_net(net, input_data=narrowed, force_static_flow=False, verbose=0)
    except Exception:  # no answer is needed
        return {}
    found: dict[DepthIdx, bool] = {}
    for layer in layers:
        other = probed.get(layer.label)
        if other is not None and other.name == layer.name and isinstance(other.output_shape, tuple):
            found[layer.label] = other.output_shape[:2] == (batch * times, fewer)
    return found


def _half_of(name: str) -> str:
    """Return the half of a net with two sequences that receives an argument."""
    return "decoder" if name.startswith("decoder") or name == "labels" else "encoder"


def _narrowed(value: Any, shape: tuple[int, ...], fewer: int, times: int) -> Any:
    """Return an input with fewer positions, or as many; a copy: networks write into inputs."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if tuple(value.shape[:2]) in (shape, (1, shape[1])):
        value = value[:, :fewer]
    if times > 1 and value.ndim and value.shape[0] == shape[0]:
        return torch.cat([value] * times)
    return value.clone()
