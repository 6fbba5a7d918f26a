"""What must agree when a recording is resumed, as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scio_recorder.disk.chunks import block_checksums, dense
from scio_recorder.recording import recipes_of
from scio_recorder.reductions import Reduction

if TYPE_CHECKING:
    from scio_recorder.architecture import DepthIdx

__all__ = ["settings_of", "weights_digest"]


def settings_of(
    net: nn.Module,
    recording: Sequence[DepthIdx],
    reductions: Mapping[DepthIdx, Reduction | list[Reduction]],
    dtype: torch.dtype | None,
    every: int,
    inputs: bool,
) -> dict[str, Any]:
    """Return what decides the values of a recording, besides the data and the architecture."""
    return {
        "layers": [f"{depth}-{index}" for depth, index in recording],
        "reductions": {
            f"{depth}-{index}": recipes_of(given) for (depth, index), given in reductions.items()
        },
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "every": every,
        "inputs": inputs,
        "weights": weights_digest(net),
    }


def weights_digest(net: nn.Module) -> str:
    """Return a digest of all parameters and buffers of a net, in hexadecimal.

    Examples
    --------
    >>> net = nn.Linear(2, 2)
    >>> before = weights_digest(net)
    >>> _ = net.bias.data.add_(1)
    >>> weights_digest(net) == before
    False
    """
    named = {
        name: value
        for name, value in net.state_dict(keep_vars=False).items()
        if isinstance(value, Tensor)
    }
    plain = {name: _plain(tensor) for name, tensor in named.items()}
    lines = [
        [name, str(tensor.dtype), list(tensor.shape), checksums]
        for (name, tensor), checksums in zip(plain.items(), block_checksums(plain), strict=True)
    ]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return dense(tensor.to_dense() if tensor.layout != torch.strided else tensor)
