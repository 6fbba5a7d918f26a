"""Structures of plain values and tensors as JSON and back; ``docs/disk-format.md`` specifies it.

No class is named in what is written, and nothing but values of Python's and torch's own comes back,
so that reading runs nobody's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.stores.disk_format.jsons import JSON, expect
from scio_recorder.stores.disk_format.run import Packed
from scio_recorder.tensors.dtypes import DTYPES, dtype_name


class UnkeepableError(TypeError):
    """A value of a type that can't be kept on disk."""


def encode(value: Any, tensor: Callable[[Tensor], int]) -> JSON:
    """Return a node.

    Parameters
    ----------
    value : Any
        Tuples, lists, dicts, numbers, strings, None, dtypes, devices, tensors.
    tensor : callable
        Gives the number by which a tensor is referred to.

    Raises
    ------
    UnkeepableError
        There is something else in it; the message is the name of its type.

    Examples
    --------
    >>> encode((1, [None, math.inf], {"x": torch.float32}, torch.ones(2)), len)
    {'tuple': [1, [None, {'float': 'inf'}], {'dict': [['x', {'dtype': 'float32'}]]}, {'tensor': 2}]}
    """
    if isinstance(value, Tensor):
        return {"tensor": tensor(value)}
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value  # type: ignore[no-any-return]
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is dict:
        return {"dict": [[encode(k, tensor), encode(v, tensor)] for k, v in value.items()]}
    if kind in (list, tuple, torch.Size):
        items = [encode(item, tensor) for item in value]
        return items if kind is list else {"tuple" if kind is tuple else "size": items}
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is torch.device:
        return {"device": str(value)}
    raise UnkeepableError(f"{kind.__module__}.{kind.__qualname__}")


def decode(node: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Return what `encode` was given.

    Parameters
    ----------
    node : JSON
        What it returned.
    tensor : callable
        Gives the tensor of a number.

    Raises
    ------
    ValueError, TypeError, LookupError, RuntimeError
        If it is no node.
    """
    if isinstance(node, list):
        return [decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        pairs = [(decode(k, tensor), decode(v, tensor)) for k, v in value]
        return dict(pairs)
    if kind == "tuple":
        return tuple([decode(item, tensor) for item in expect(value, list)])
    if kind == "tensor":
        return tensor(expect(value, int))
    return _PLAIN[kind](value)


def pack(state: Any) -> Packed:
    """Return the state of a collection as it is committed, with copies of its tensors.

    Examples
    --------
    >>> packed = pack({"sum": torch.ones(2), "limits": [1, math.inf]})
    >>> packed.value
    {'dict': [['sum', {'tensor': 0}], ['limits', [1, {'float': 'inf'}]]]}
    >>> unpack(packed)
    {'sum': tensor([1., 1.]), 'limits': [1, inf]}
    """
    tensors: list[Tensor] = []

    def number(tensor: Tensor) -> int:
        tensors.append(tensor.detach().to("cpu", copy=True))
        return len(tensors) - 1

    try:
        return Packed(encode(state, number), tensors)
    except UnkeepableError as error:
        raise CollectError(
            f"the state of a reduction holds {error}, which can't be kept on disk: use tensors, "
            "numbers, strings, tuples, lists and dicts"
        ) from None


def unpack(packed: Packed) -> Any:
    """Return what `pack` was given."""
    numbers = range(len(packed.tensors))
    try:
        return decode(packed.value, lambda number: packed.tensors[numbers[number]])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise RecordingError(f"a recording's state can't be read: {error!r}") from error


def _float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError(f"{text!r} is no such number")
    return float(text)


_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "float": _float,
    "dtype": lambda name: DTYPES[name],
    "device": torch.device,
    "size": lambda sizes: torch.Size([expect(size, int) for size in sizes]),
}
