"""Nested state -> the flat one that is committed with chunks, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.disk_format import JSON

__all__ = ["pack", "unpack"]


def pack(state: Any) -> dict[str, Tensor | JSON]:
    """Return copies of all tensors by number, and the nested rest as one JSON value.

    Examples
    --------
    >>> import torch
    >>> packed = pack({"sum": torch.ones(2), "limits": [1, math.inf]})
    >>> packed["state"]
    {'sum': {'$tensor': '0'}, 'limits': [1, {'$float': 'inf'}]}
    >>> unpack(packed)
    {'sum': tensor([1., 1.]), 'limits': [1, inf]}
    """
    tensors: dict[str, Tensor | JSON] = {}
    values = _pack(state, tensors)
    return {"state": values, **tensors}


def unpack(packed: Mapping[str, Any]) -> Any:
    """Return what `pack` was given; tuples have become lists."""
    try:
        return _unpack(packed["state"], packed)
    except (LookupError, TypeError, ValueError) as error:
        raise RecordingError(f"a recording's state can't be read: {error!r}") from error


def _pack(value: Any, tensors: dict[str, Tensor | JSON]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True)
        return {"$tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, str) or key.startswith("$")]
        if odd:
            raise CollectError(
                f"the state of a reduction has the key {odd[0]!r}: use plain strings"
            )
        return {key: _pack(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CollectError(
        f"the state of a reduction holds {type(value).__name__}, which can't be kept on disk: use "
        "tensors, numbers, strings, lists and dicts"
    )


def _unpack(value: Any, packed: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, packed) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$tensor"}:
        return packed[value["$tensor"]]
    if value.keys() == {"$float"}:
        return float(value["$float"])
    return {key: _unpack(item, packed) for key, item in value.items()}
