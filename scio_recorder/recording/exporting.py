"""The methods of a recording that export its samples to other libraries, part by part."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from scio_recorder.errors import ArgumentError, RecordingError, needing
from scio_recorder.layer import DepthIdx
from scio_recorder.recording.columns import (
    ID_BYTES,
    SAMPLE_ID,
    about,
    arrow_type,
    columns_of,
    has_texts,
    ids_of_rows,
    plain,
    record_batches,
    to_array,
)
from scio_recorder.recording.readable import Readable
from scio_recorder.stores.disk_format.medium import accessing

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    import zarr


# Bytes of one layer in one file of a Zarr array, before compression: reading a sample reads a file.
CHUNK_BYTES = 1 << 24
# The key under which Arrow and Zarr keep the result of `about`.
_KEY = "scio_recorder"


class Exporting(Readable):
    """The methods that export samples; see the NOTE in `columns.py`."""

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
