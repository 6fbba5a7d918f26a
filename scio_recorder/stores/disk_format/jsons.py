"""Checksums, bounded and strict JSON, and structures of plain values and tensors as JSON.

Files name no class, and reading gives only values of Python's and torch's own types, so reading
runs no foreign code. ``docs/disk-format.md`` specifies the form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import xxhash
from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.tensors.copies import DTYPES, dtype_name

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

DIGITS = 16
MAX_FILE_BYTES = 64 << 20
MAX_DEPTH = 64
# Sizes below this stay exact in every program that reads them as doubles.
MAX_SIZE = 1 << 48

_T = TypeVar("_T")


def checksum(data: bytes | memoryview) -> str:
    """Return XXH3 of 64 bits, which runs at the speed of memory, in hexadecimal digits.

    Examples
    --------
    >>> checksum(b"")
    '2d06800538d394c2'
    """
    return xxhash.xxh3_64_hexdigest(data)


def dump(value: object) -> bytes:
    """Return the canonical form: ASCII, no spaces, keys in the given order.

    Raises
    ------
    ValueError, TypeError
        If ``value`` is not JSON; infinities and NaN are not.
    """
    return _ENCODER.encode(value).encode("ascii")


def parse(data: bytes) -> Any:
    """Return the value of a JSON text; `ValueError` for any text that `dump` would not write.

    So it has no constants outside of the standard and no repeated keys, which programs read
    differently, and no deep nesting, which exhausts the stack.
    """
    try:
        value = json.loads(data.decode("ascii"))
        is_deep = data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if dump(value) != data:
        raise ValueError("it has a repeated key, or is not in canonical form")
    return value


def expect(value: Any, kind: type[_T]) -> _T:
    """Return ``value`` if it is of exactly this type (a bool is not an int); else `ValueError`."""
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def differences(stored: Any, given: Any, path: str = "") -> list[str]:
    """Return the places where two JSON values differ, one line for each."""
    if isinstance(stored, dict) and isinstance(given, dict):
        lines = []
        for key in stored | given:
            where = f"{path}.{key}" if path else key
            if key not in stored:
                lines.append(f"{where} is not stored")
            elif key not in given:
                lines.append(f"{where} is stored and was not given")
            else:
                lines += differences(stored[key], given[key], where)
        return lines
    if type(stored) is type(given) and stored == given:
        return []
    return [f"{path} is {_short(stored)} there and {_short(given)} here"]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class UnkeepableError(TypeError):
    """A value of a type that can't be kept on disk."""


def encode(value: Any, tensor: Callable[[Tensor], int]) -> JSON:
    """Return a node.

    Parameters
    ----------
    value : Any
        Tuples, lists, dicts, numbers, strings, None, dtypes, devices, tensors.
    tensor : callable
        Returns the number that refers to a tensor.

    Raises
    ------
    UnkeepableError
        It holds something else; the message is the name of its type.

    Examples
    --------
    >>> encode((1, [None, math.inf], {"x": torch.float32}, torch.ones(2)), len)
    {'tuple': [1, [None, {'float': 'inf'}], {'dict': [['x', {'dtype': 'float32'}]]}, {'tensor': 2}]}
    """
    if isinstance(value, Tensor):
        return {"tensor": tensor(value)}
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value  # type: ignore[no-any-return]  # its kind was just compared
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
    """Return the value of a node.

    Parameters
    ----------
    node : JSON
        The result of `encode`.
    tensor : callable
        Returns the tensor of a number.

    Raises
    ------
    ValueError, TypeError, LookupError, RuntimeError
        If it is not a node.
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


class Packed(NamedTuple):
    """A value as JSON, and the tensors that it refers to by their numbers."""

    value: JSON
    tensors: Sequence[Tensor]


def pack(state: Any) -> Packed:
    """Return the state of a collection for a commit, with copies of its tensors.

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
    """Return the value that was packed."""
    numbers = range(len(packed.tensors))
    try:
        return decode(packed.value, lambda number: packed.tensors[numbers[number]])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise RecordingError(f"a recording's state can't be read: {error!r}") from error


def _float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError(f"{text!r} is not such a number")
    return float(text)


_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "float": _float,
    "dtype": lambda name: DTYPES[name],
    "device": torch.device,
    "size": lambda sizes: torch.Size([expect(size, int) for size in sizes]),
}
