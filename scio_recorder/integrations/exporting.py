"""Exporting the samples of a recording to Arrow, Hugging Face datasets and Zarr, part by part.

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

import importlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.display.outline import visible
from scio_recorder.errors import ArgumentError, RecordingError
from scio_recorder.layer import Layer
from scio_recorder.lowlevel import Readable, needing
from scio_recorder.stores.files import accessing
from scio_recorder.tensors import dtype_name, to_array

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    import zarr


# Bytes of one layer in one file of a Zarr array, before compression: reading a sample reads a file.
CHUNK_BYTES = 1 << 24
# The key under which Arrow and Zarr keep the result of `about`.
_KEY = "scio_recorder"
# Bytes of all layers together that are read and handed over at once.
PART_BYTES = 1 << 26
# The approximate bytes of an id as a Python object.
ID_BYTES = 64
SAMPLE_ID = "sample_id"


@dataclass(frozen=True)
class ExportedColumn:
    """One exported column: a layer's values in all rows, or a column of rows."""

    name: str
    samples: Tensor
    layer: Layer | None = None

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
        try:
            return np.ascontiguousarray(to_array(self.samples[start:stop]))
        except (TypeError, NotImplementedError) as error:
            raise ArgumentError(
                f"{self} has dtype {dtype_name(self.samples.dtype)}, which no array can hold: "
                "convert it in collect(...), layers with transform="
            ) from error

    def __str__(self) -> str:
        return f"layer {self.layer}" if self.layer else f"column {self.name}"


def columns_of(recording: Readable) -> list[ExportedColumn]:
    """Return the columns that can be exported.

    Raises
    ------
    ArgumentError
        There is nothing to export, or values that no array can hold.
    """
    layers = [recording.architecture[label] for label in recording.stored]
    # A layer's label, and its qualified name if it has one: ``1-3_layer4.relu``.
    names = ["_".join(filter(None, [str(layer.label), layer.name])) for layer in layers]
    columns = [
        ExportedColumn(visible(name), recording[layer.label], layer)
        for name, layer in zip(names, layers, strict=True)
    ]
    if not columns:
        raise ArgumentError(
            "there are no samples to export: every layer was reduced. Collect some layers without "
            'reduce=, as in reduce={"features.*": Mean()}; results of reductions are recording[key]'
        )
    rows = recording.rows.items()
    columns += [ExportedColumn(visible(name), samples) for name, samples in rows]
    names = [SAMPLE_ID, *(column.name for column in columns)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ArgumentError(
            f"a column of rows has the name {twice!r}, which another column of the export has too: "
            "collect it under another name"
        )
    for column in columns:
        if not column.samples.shape[1:].numel():
            raise ArgumentError(f"{column} has no values, so it can't be exported: leave it out")
    return columns


def about(recording: Readable, columns: Sequence[ExportedColumn]) -> dict[str, Any]:
    """Return the descriptions of columns by name, as JSON, for readers without this library."""
    said: dict[str, Any] = {
        "complete": recording.complete,
        "fingerprint": recording.architecture.fingerprint,
        "layers": {column.name: column.about for column in columns if column.layer is not None},
    }
    if recording.has_rows:
        said["rows"] = {column.name: column.about for column in columns if column.layer is None}
    return said


def ids_of_rows(recording: Readable, start: int, stop: int) -> Sequence[int | str]:
    """Return the id of the sample of each of some rows."""
    ids = recording.sample_ids
    if not recording.has_rows:
        return ids[start:stop]
    return [ids[sample] for sample in recording.rows["sample"][start:stop].tolist()]


def type_of_ids(recording: Readable) -> str:
    """Return the name of the type of sample ids."""
    is_text = recording.num_samples and isinstance(recording.sample_ids[0], str)
    return "string" if is_text else "int64"


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


def parts_of(recording: Readable, columns: Sequence[ExportedColumn]) -> Iterator[tuple[int, int]]:
    """Yield where parts of a bounded size begin and end."""
    row_bytes = ID_BYTES + sum(
        column.read(0, 0).itemsize * column.samples.shape[1:].numel() for column in columns
    )
    step = max(1, PART_BYTES // row_bytes)
    for start in range(0, recording.num_rows, step):
        yield start, min(start + step, recording.num_rows)


def values_of(
    recording: Readable, columns: Sequence[ExportedColumn], part: tuple[int, int]
) -> dict[str, Any]:
    """Return the ids and values of a part by the names of columns."""
    ids = ids_of_rows(recording, *part)
    return {SAMPLE_ID: ids} | {column.name: plain(column.read(*part)) for column in columns}


def _record_batch(pa: Any, schema: pa.Schema, values: dict[str, Any]) -> pa.RecordBatch:
    arrays = [
        pa.FixedShapeTensorArray.from_numpy_ndarray(rows)
        if isinstance(rows, np.ndarray) and rows.ndim > 1
        else pa.array(rows, kind)
        for rows, kind in zip(values.values(), schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def to_arrow(recording: Readable) -> pa.RecordBatchReader:
    """Do what ``Recording.to_arrow`` says."""
    pa = _imported("pyarrow", "arrow")
    columns = columns_of(recording)
    schema = pa.schema(
        [
            (SAMPLE_ID, type_of_ids(recording)),
            *((column.name, arrow_type(pa, plain(column.read(0, 0)))) for column in columns),
        ],
        {_KEY: json.dumps(about(recording, columns))},
    )
    batches = (
        _record_batch(pa, schema, values_of(recording, columns, part))
        for part in parts_of(recording, columns)
    )
    return pa.RecordBatchReader.from_batches(schema, batches)


def to_datasets(recording: Readable, path: str | os.PathLike[str]) -> datasets.Dataset:
    """Do what ``Recording.to_datasets`` says."""
    library = _imported("datasets", "datasets")
    columns = columns_of(recording)
    features = library.Features({SAMPLE_ID: library.Value(type_of_ids(recording))})
    for column in columns:
        features[column.name] = _feature(library, plain(column.read(0, 0)))
    info = library.DatasetInfo(description=json.dumps(about(recording, columns)), features=features)
    with _new_folder(path) as folder:
        # The library writes it once more, in its own layout.
        data = str(folder.with_name("parts.arrow"))
        with library.arrow_writer.ArrowWriter(features=features, path=data) as writer:
            for part in parts_of(recording, columns):
                writer.write_batch(values_of(recording, columns, part))
            writer.finalize()
        library.Dataset.from_file(data, info=info).save_to_disk(folder, num_shards=1)
    return library.load_from_disk(os.fspath(path))


def to_zarr(recording: Readable, path: str | os.PathLike[str]) -> zarr.Group:
    """Do what ``Recording.to_zarr`` says."""
    library = _imported("zarr", "zarr")
    columns = columns_of(recording)
    columns = [replace(column, name=quote(column.name, safe="")) for column in columns]
    id_type = type_of_ids(recording)
    line = "row" if recording.has_rows else "sample"
    with _new_folder(path) as folder:
        group = library.create_group(str(folder), attributes={_KEY: about(recording, columns)})
        layout = _layout(SAMPLE_ID, (recording.num_rows,), id_type, line)
        _fill(
            group.create_array(SAMPLE_ID, **layout),
            lambda start, stop: np.array(ids_of_rows(recording, start, stop)),
        )
        for column in columns:
            layout = _layout(column.name, column.samples.shape, column.read(0, 0).dtype, line)
            _fill(group.create_array(column.name, **layout), column.read)
    written: zarr.Group = library.open_group(os.fspath(path), mode="r")
    return written


def _feature(library: Any, array: NDArray[Any]) -> Any:
    """Return the feature of `datasets` for rows like those of an array."""
    shape, dtype = array.shape[1:], str(array.dtype)
    if 2 <= len(shape) <= 5:
        return getattr(library, f"Array{len(shape)}D")(shape=shape, dtype=dtype)
    feature = library.Value(dtype)
    for length in reversed(shape):
        feature = library.List(feature, length=length)
    return feature


def _layout(name: str, shape: Sequence[int], dtype: Any, line: str) -> dict[str, Any]:
    """Return the layout of a Zarr array: files of whole rows."""
    is_text = dtype == "string"
    item_bytes = ID_BYTES if is_text else np.dtype(dtype).itemsize
    rows = min(shape[0], CHUNK_BYTES // max(1, math.prod(shape[1:]) * item_bytes))
    return {
        "shape": tuple(shape),
        "chunks": tuple(max(1, length) for length in (rows, *shape[1:])),
        "dtype": str if is_text else dtype,
        # A missing file reads as zeros, and some versions mistake negative zeros for zeros.
        "config": {"write_empty_chunks": True},
        "dimension_names": [line, *(f"{name}_{axis}" for axis in range(1, len(shape)))],
    }


def _fill(array: zarr.Array[Any], read: Callable[[int, int], NDArray[Any]]) -> None:
    """Write an array file by file."""
    for start in range(0, array.shape[0], array.chunks[0]):
        stop = min(start + array.chunks[0], array.shape[0])
        array[start:stop] = read(start, stop)


def _imported(package: str, extra: str) -> Any:
    with needing(extra, "this export"):
        return importlib.import_module(package)


@contextmanager
def _new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder that gets its name at the end of the block; a failure removes it."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not name or "://" in name or "\0" in name:
        raise ArgumentError(f"{path!r}: name a folder on this machine that does not exist yet")
    target = Path(path)
    with accessing(os.fspath(path)):
        if os.path.lexists(target):
            raise RecordingError(f"{path} exists already: name a folder that does not exist yet")
        hidden = Path(tempfile.mkdtemp(prefix=f".{target.name[:40]}.", dir=target.parent))
        try:
            # Unlike the temporary folder around it, it has the usual permissions.
            folder = hidden / "export"
            folder.mkdir()
            yield folder
            folder.rename(target)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
