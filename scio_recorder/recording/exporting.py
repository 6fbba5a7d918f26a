"""The methods of a recording that export its samples to other libraries, part by part.

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
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import ArgumentError, RecordingError, needing
from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.recording.readable import Readable
from scio_recorder.stores.disk_format.medium import accessing
from scio_recorder.tensors.copies import dtype_name

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


def columns_of(recording: Readable) -> list[ExportedColumn]:
    """Return the columns that can be exported.

    Raises
    ------
    ArgumentError
        There is nothing to export, or values that no array can hold.
    """
    columns = [
        ExportedColumn.of(recording.architecture[one], recording[one]) for one in recording.stored
    ]
    if not columns:
        raise ArgumentError(
            "there are no samples to export: every layer was reduced. Collect some layers without "
            'reduce=, as in reduce={"features.*": Mean()}; results of reductions are recording[key]'
        )
    columns += [ExportedColumn(name, samples) for name, samples in recording.rows.items()]
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


def about(recording: Readable, columns: dict[str, ExportedColumn]) -> dict[str, Any]:
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
    pa: Any, schema: pa.Schema, recording: Readable, columns: Sequence[ExportedColumn]
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


class Exporting(Readable):
    """The methods that export samples; see the NOTE."""

    def to_numpy(self) -> dict[DepthIdx, NDArray[Any]]:
        """Return the samples of every layer that was not reduced, as NumPy arrays.

        Returns
        -------
        dict
            Label -> array [samples, ...]. Arrays share the memory of tensors in host memory;
            dtypes that NumPy lacks, such as bfloat16, are widened to float32.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
        >>> rnet.record("0-1")
        >>> rnet.collect([torch.ones(1, 2)], dtype=torch.bfloat16).to_numpy()
        {(0, 1): array([[1., 1.]], dtype=float32)}
        """
        return {label: to_array(self[label]) for label in self.stored}

    def to_arrow(self) -> pa.RecordBatchReader:
        """Return the samples of every layer that was not reduced, as Arrow record batches.

        This needs the extra ``arrow``. Each batch has at most about 64 MiB, and is read on demand;
        ``read_all()`` gives a table. A reader is for one pass over the data.

        Returns
        -------
        pyarrow.RecordBatchReader
            A column ``sample_id`` and one for each layer, ``"1-3_layer4.relu"``: fixed-shape
            tensors, or plain numbers if each sample is one. If rows are not samples, their columns
            are exported under their names. bfloat16 and float8 are widened to float32, bool is
            uint8, and complex numbers are pairs in a last dimension of 2. The metadata of the
            schema describe each column under ``scio_recorder``.

        Raises
        ------
        ArgumentError
            Every layer was reduced, or a dtype can't be widened.
        MissingPackageError
            The extra is missing.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> table = rnet.collect([torch.ones(3, 2)]).to_arrow().read_all()
        >>> table.column_names, table["sample_id"].to_pylist()
        (['sample_id', '1-1_0'], [0, 1, 2])
        >>> table["1-1_0"].combine_chunks().to_numpy_ndarray().shape
        (3, 2)
        """
        pa = _imported("pyarrow", "arrow")
        columns = columns_of(self)
        schema = pa.schema(
            [
                (SAMPLE_ID, pa.string() if has_texts(self) else pa.int64()),
                *((column.name, arrow_type(pa, plain(column.read(0, 0)))) for column in columns),
            ],
            {_KEY: json.dumps(about(self, {column.name: column for column in columns}))},
        )
        return pa.RecordBatchReader.from_batches(schema, record_batches(pa, schema, self, columns))

    def to_datasets(self, path: str | os.PathLike[str]) -> datasets.Dataset:
        """Write the samples to a folder that ``datasets.load_from_disk`` of Hugging Face reads.

        This needs the extra ``datasets``. Columns and dtypes are those of :meth:`to_arrow`; its
        metadata are the ``info.description`` of the dataset.

        Parameters
        ----------
        path : str or path-like
            The folder, which must not exist yet; its parent folder must exist.

        Returns
        -------
        datasets.Dataset
            The dataset, on disk. Samples of one dimension and of more than five are lists of fixed
            length; the others are ``Array2D`` to ``Array5D``.

        Raises
        ------
        RecordingError
            The folder exists already, or the disk fails; no partial export is left.
        ArgumentError
            Every layer was reduced, a dtype can't be widened, or ``path`` names no folder.
        MissingPackageError
            The extra is missing.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> folder = tempfile.TemporaryDirectory()
        >>> rnet.collect([torch.ones(3, 2)]).to_datasets(folder.name + "/dataset")[0]
        {'sample_id': 0, '1-1_0': [1.0, 1.0]}
        >>> folder.cleanup()
        """
        library = _imported("datasets", "datasets")
        pa = _imported("pyarrow", "datasets")
        columns = {column.name: column for column in columns_of(self)}
        features = {SAMPLE_ID: library.Value("string" if has_texts(self) else "int64")}
        for name, column in columns.items():
            features[name] = _feature(library, plain(column.read(0, 0)))
        info = library.DatasetInfo(
            description=json.dumps(about(self, columns)), features=library.Features(features)
        )
        schema = info.features.arrow_schema
        with _new_folder(path) as folder:
            data = folder / "data-00000-of-00001.arrow"
            with pa.OSFile(str(data), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
                for batch in record_batches(pa, schema, self, list(columns.values())):
                    writer.write_batch(batch)
                    del batch  # otherwise two of them would be in memory while the next one is read
            info.write_to_directory(str(folder))
            (folder / "state.json").write_text(json.dumps(_state(data.name)), encoding="utf-8")
            # The library's `save_to_disk` would write everything a second time, in larger parts.
            # This shows whether it can read the folder, before anybody else does.
            if len(library.load_from_disk(str(folder))) != self.num_rows:
                raise RecordingError("this version of datasets reads another number of rows")
        return library.load_from_disk(os.fspath(path))

    def to_zarr(self, path: str | os.PathLike[str]) -> zarr.Group:
        """Write the samples to a folder with a Zarr array for each layer, and one of sample ids.

        This needs the extra ``zarr``. Arrays are the columns of :meth:`to_arrow`, under their
        names, with characters other than letters, digits and ``_.-~`` percent-encoded. bfloat16
        and float8 are widened to float32; bool and complex numbers keep their dtype.

        Parameters
        ----------
        path : str or path-like
            The folder, which must not exist yet; its parent folder must exist.

        Returns
        -------
        zarr.Group
            The group, open for reading. Its attribute ``scio_recorder`` describes each array.

        Raises
        ------
        RecordingError
            The folder exists already, or the disk fails; no partial export is left.
        ArgumentError
            Every layer was reduced, a dtype can't be widened, or ``path`` names no folder.
        MissingPackageError
            The extra is missing.

        Examples
        --------
        >>> import tempfile, torch
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.ReLU()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> folder = tempfile.TemporaryDirectory()
        >>> group = rnet.collect([torch.ones(3, 2)]).to_zarr(folder.name + "/arrays")
        >>> sorted(group.array_keys()), group["1-1_0"].shape
        (['1-1_0', 'sample_id'], (3, 2))
        >>> folder.cleanup()
        """
        library = _imported("zarr", "zarr")
        columns = {quote(column.name, safe=""): column for column in columns_of(self)}
        id_type = "object" if has_texts(self) else "int64"
        line = "row" if self.has_rows else "sample"
        with _new_folder(path) as folder:
            group = library.create_group(str(folder), attributes={_KEY: about(self, columns)})
            layout = _layout(SAMPLE_ID, (self.num_rows,), id_type, line)
            _fill(
                group.create_array(SAMPLE_ID, **layout),
                lambda start, stop: np.array(ids_of_rows(self, start, stop), dtype=id_type),
            )
            for name, column in columns.items():
                layout = _layout(name, column.samples.shape, column.read(0, 0).dtype, line)
                _fill(group.create_array(name, **layout), column.read)
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


def _state(name: str) -> dict[str, Any]:
    """Return the ``state.json`` that ``datasets.load_from_disk`` reads."""
    return {
        "_data_files": [{"filename": name}],
        # The library's `map` finds cached results by it, so each export has its own.
        "_fingerprint": uuid.uuid4().hex[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


def _layout(name: str, shape: Sequence[int], dtype: Any, line: str) -> dict[str, Any]:
    """Return the layout of a Zarr array: files of whole rows."""
    is_text = dtype == "object"
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
    if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path) or not os.fspath(path):
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
