"""What a file holds: named tensors, their dtypes and shapes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from scio_recorder.errors import RecordingError
from scio_recorder.layer import TensorSpec
from scio_recorder.stores.disk_format.jsons import JSON, expect
from scio_recorder.tensors.dtypes import DTYPES, dtype_name

MAX_DIMENSIONS = 64
# Products of sizes below this stay exact in every program that reads them as doubles.
MAX_SIZE = 1 << 48

# What safetensors calls each dtype; None for those that it lacks, which are kept as bytes.
_FORMAT_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: None,
    torch.float8_e5m2fnuz: None,
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex32: None,
    torch.complex64: "C64",
    torch.complex128: None,
}


Table: TypeAlias = Mapping[str, TensorSpec]


def to_json(table: Table) -> list[JSON]:
    """Return a table as JSON.

    Raises
    ------
    ValueError
        For a dtype or a name that the format can't hold.

    Examples
    --------
    >>> to_json({"1-3": TensorSpec((64, 7), torch.bfloat16)})
    [['1-3', {'dtype': 'bfloat16', 'shape': [64, 7]}]]
    """
    for name, spec in table.items():
        if spec.dtype not in _FORMAT_NAMES:
            raise ValueError(f"{name}: {spec.dtype} can't be kept on disk; convert the tensor")
        if name == "__metadata__":
            raise ValueError("the name __metadata__ has a meaning of its own in safetensors files")
        if not name.isascii() and name != name.encode(errors="replace").decode():
            raise ValueError(f"the name {name!r} can't be written as UTF-8")
    # Objects have no order for every reader of JSON, and the order places the data.
    return [
        [name, {"dtype": dtype_name(spec.dtype), "shape": list(spec.shape)}]
        for name, spec in table.items()
    ]


def from_json(value: Any) -> dict[str, TensorSpec]:
    """Return the table that `to_json` wrote; `ValueError` for anything else."""
    pairs = expect(value, list)
    table = {expect(name, str): _spec_from_json(entry) for name, entry in pairs}
    if len(table) != len(pairs):
        raise ValueError("a name is listed twice")
    return table


def format_entry(spec: TensorSpec) -> dict[str, JSON]:
    """Return dtype and shape as a safetensors file states them."""
    name = _FORMAT_NAMES[spec.dtype]
    if name is not None:
        return {"dtype": name, "shape": list(spec.shape)}
    return {"dtype": "U8", "shape": [*spec.shape, spec.dtype.itemsize]}


def _spec_from_json(value: Any) -> TensorSpec:
    shape = [expect(size, int) for size in expect(value["shape"], list)]
    if len(shape) >= MAX_DIMENSIONS or not all(0 <= size <= MAX_SIZE for size in shape):
        raise ValueError(f"{shape} is not a shape")
    if math.prod(size for size in shape if size) > MAX_SIZE:
        raise ValueError(f"{shape} is too large")
    dtype = DTYPES[expect(value["dtype"], str)]
    if dtype not in _FORMAT_NAMES:
        raise ValueError(f"no file holds {dtype}")
    return TensorSpec(tuple(shape), dtype)


def require_little_endian() -> None:
    """Refuse a machine whose memory does not hold numbers as the files do."""
    if sys.byteorder != "little":
        raise RecordingError("recordings on disk can only be used on little-endian machines")
