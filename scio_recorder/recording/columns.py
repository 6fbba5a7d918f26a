"""The columns of all exports of a recording, and their Arrow arrays.

NOTE [Exported columns]

Each export has a column ``sample_id``, one for each layer with stored samples, and, if rows are not
samples, one for each fact about a row. All exports describe columns in the same way (`about`), so
that widening can be undone.

Samples become NumPy arrays first (`to_array`). dtypes that NumPy lacks are widened to float32 or
complex64, which represent all their numbers exactly. Raw bits under another dtype would be read as
wrong numbers. Arrow has no tensors of truth values and no complex numbers, so these become bytes 0
and 1, and pairs of real and imaginary part (`plain`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import ArgumentError
from scio_recorder.layer import Layer
from scio_recorder.recording.readable import Readable
from scio_recorder.tensors.dtypes import dtype_name

if TYPE_CHECKING:
    import pyarrow as pa


# Bytes of all layers together that are read and handed over at once.
PART_BYTES = 1 << 26
# The approximate bytes of an id as a Python object.
ID_BYTES = 64
SAMPLE_ID = "sample_id"


@dataclass(frozen=True)
class Column:
    """One exported column: a layer's values in all rows, or a column of rows."""

    name: str
    samples: Tensor
    layer: Layer | None = None

    @classmethod
    def of(cls, layer: Layer, samples: Tensor) -> Self:
        """Name a layer by its label, and a qualified name if it has one: ``1-3_layer4.relu``."""
        return cls("_".join(filter(None, [str(layer.label), layer.name])), samples, layer)

    @property
    def about(self) -> dict[str, Any]:
        """The description of a column, as JSON, for readers without this library."""
        kind = {"dtype": dtype_name(self.samples.dtype), "shape": list(self.samples.shape[1:])}
        if self.layer is None:
            return kind
        layer = self.layer
        return {"label": str(layer.label), "name": layer.name, "type": layer.type_name, **kind}

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return some samples, in rows without gaps."""
        return np.ascontiguousarray(to_array(self.samples[start:stop]))


def columns_of(recording: Readable) -> list[Column]:
    """Return the columns that can be exported.

    Raises
    ------
    ArgumentError
        There is nothing to export, or values that no array can hold.
    """
    columns = [Column.of(recording.architecture[one], recording[one]) for one in recording.stored]
    if not columns:
        raise ArgumentError(
            "there are no samples to export: every layer was reduced. Collect some layers without "
            'reduce=, as in reduce={"features.*": Mean()}; results of reductions are recording[key]'
        )
    columns += [Column(name, samples) for name, samples in recording.rows.items()]
    names = [SAMPLE_ID, *(column.name for column in columns)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(
            f"a column of rows has the name {twice!r}, which another column of the export has too: "
            "collect it under another name"
        )
    for column in columns:
        try:
            empty = torch.zeros(16, dtype=torch.uint8, device="cpu")
            to_array(empty.view(column.samples.dtype))
        except (TypeError, RuntimeError) as error:
            name = dtype_name(column.samples.dtype)
            raise ArgumentError(
                f"{'layer ' if column.layer else ''}{column.layer or column.name} has dtype "
                f"{name}, which no array can hold: convert it in collect(...), layers with "
                "transform="
            ) from error
    return columns


def about(recording: Readable, columns: dict[str, Column]) -> dict[str, Any]:
    """Return the descriptions of columns by name, as JSON, for readers without this library."""
    items = columns.items()
    said: dict[str, Any] = {
        "complete": recording.complete,
        "fingerprint": recording.architecture.fingerprint,
        "layers": {name: column.about for name, column in items if column.layer is not None},
    }
    if recording.has_rows:
        said["rows"] = {name: column.about for name, column in items if column.layer is None}
    return said


def ids_of_rows(recording: Readable, start: int, stop: int) -> Sequence[int | str]:
    """Return the id of the sample of each of some rows."""
    ids = recording.sample_ids
    if not recording.has_rows:
        return ids[start:stop]
    return [ids[sample] for sample in recording.rows["sample"][start:stop].tolist()]


def has_texts(recording: Readable) -> bool:
    """Whether samples are named by strings."""
    return bool(recording.num_samples) and isinstance(recording.sample_ids[0], str)


def to_array(samples: Tensor) -> NDArray[Any]:
    """Return samples as an array; dtypes that NumPy lacks are widened."""
    tensor = samples[:].detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        return tensor.to(wide).numpy()


def plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return truth values as bytes, and complex numbers as pairs in a last dimension."""
    if array.dtype == np.bool_:
        return array.view(np.uint8)
    if np.iscomplexobj(array):
        return np.stack([array.real, array.imag], axis=-1)
    return array


def arrow_type(pa: Any, array: NDArray[Any]) -> pa.DataType:
    """Return the type of rows like those of an array: tensors, or plain numbers."""
    value = pa.from_numpy_dtype(array.dtype)
    return pa.fixed_shape_tensor(value, array.shape[1:]) if array.ndim > 1 else value


def record_batches(
    pa: Any, schema: pa.Schema, recording: Readable, columns: Sequence[Column]
) -> Iterator[pa.RecordBatch]:
    """Yield all rows in parts, without keeping any of them."""
    num_rows = recording.num_rows
    row_bytes = ID_BYTES + sum(
        column.read(0, 0).itemsize * column.samples.shape[1:].numel() for column in columns
    )
    step = max(1, PART_BYTES // row_bytes)
    id_type, *types = schema.types
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(ids_of_rows(recording, start, stop), id_type),
                *(
                    _arrow_array(pa, kind, plain(column.read(start, stop)))
                    for kind, column in zip(types, columns, strict=True)
                ),
            ],
            schema=schema,
        )


def _arrow_array(pa: Any, kind: pa.DataType, array: NDArray[Any]) -> pa.Array:
    """Return rows as an Arrow array of a type that has their shape."""
    if isinstance(kind, pa.FixedShapeTensorType):
        array = array.reshape(len(array), math.prod(array.shape[1:]))
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _arrow_array(pa, kind.storage_type, array))
    if not pa.types.is_nested(kind):
        return pa.array(array, kind)
    rows, length = array.shape[:2]
    values = _arrow_array(pa, kind.value_type, array.reshape(rows * length, *array.shape[2:]))
    if pa.types.is_fixed_size_list(kind):
        # FixedSizeListArray.from_arrays refuses empty rows.
        return pa.Array.from_buffers(kind, rows, [None], children=[values])
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * length, pa.int32()), values)
