"""What must agree when a recording is resumed, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scio_recorder.layer import text_of
from scio_recorder.recording import recipes_of
from scio_recorder.reductions import Reduction
from scio_recorder.tensors.dtypes import dtype_name

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


def settings_of(
    net: nn.Module,
    recording: Sequence[DepthIdx],
    reductions: Mapping[DepthIdx, Reduction | list[Reduction]],
    dtype: torch.dtype | None,
    every: int,
    inputs: bool,
    *,
    transforms: Iterable[DepthIdx],
    postprocessors: Iterable[DepthIdx],
    has_to_inputs: bool,
    has_sample_ids: bool,
) -> dict[str, Any]:
    """Return what decides the values of a recording, besides the data and the architecture.

    Of functions only whether there are any: what they do can't be compared. The weights of the net
    are missing, since looking at all of them takes its time: see `weights_digest`.
    """
    return {
        "layers": _labels(recording),
        "reductions": {text_of(label): recipes_of(given) for label, given in reductions.items()},
        "dtype": None if dtype is None else dtype_name(dtype),
        "every": every,
        "inputs": inputs,
        "transforms": _labels(sorted(transforms)),
        "postprocessors": _labels(sorted(postprocessors)),
        "to_inputs": has_to_inputs,
        "sample_ids": has_sample_ids,
        "mode": mode_of(net),
        "autocast": _autocast(),
    }


def mode_of(net: nn.Module) -> str:
    """Return in words which modules are in training mode.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    >>> mode_of(net)
    'eval mode'
    >>> net[1].train()
    Dropout(p=0.5, inplace=False)
    >>> mode_of(net)
    "eval mode, but for '1'"
    """
    base = "train mode" if net.training else "eval mode"
    others = list(_others(net, ""))
    return f"{base}, but for {', '.join(map(repr, others))}" if others else base


def _others(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of modules whose mode is another one than that of the module around them."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if child.training != module.training:
            yield path
        yield from _others(child, path)


def _labels(labels: Iterable[DepthIdx]) -> list[str]:
    return list(map(text_of, labels))


def _autocast() -> dict[str, str]:
    """Return the dtype by device type, where autocast is on."""
    return {
        kind: dtype_name(torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    }
