"""The interface of readers of rows from files of any format."""

from __future__ import annotations

import abc
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray
from torch import Tensor

from scio_recorder.errors import LayerNotFoundError
from scio_recorder.layer import TensorSpec
from scio_recorder.stores.disk_format.tensor_file import BLOCK_BYTES, Table, memory
from scio_recorder.tensors.threads import for_each


class RowReader(abc.ABC):
    """Rows that lie in several files, one after the other.

    Attributes
    ----------
    path : str
        The folder.
    table : dict of str to TensorSpec
        Shape and dtype of one row of all that can be read of rows.
    starts : sequence of int
        How many rows precede each file, and how many there are in all.
    """

    path: str
    table: Table
    starts: Sequence[int]
    # How many bytes are best read at a time, and how many files at once.
    span_bytes = BLOCK_BYTES
    num_readers = 1

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.starts[-1]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop``, in memory of their own.

        Raises
        ------
        LayerNotFoundError, IndexError
            If there is nothing of this name or there are no such rows.
        RecordingError
            If the data is not what was written.
        """
        spec = self._spec(name)
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows} in {self.path}")
        data = memory((stop - start) * spec.nbytes)
        self.read_into(data.numpy(), name, start)
        return data.view(spec.dtype).view(stop - start, *spec.shape)

    def read_into(self, out: NDArray[numpy.uint8], name: str, start: int) -> None:
        """Fill memory with the bytes of rows from ``start`` on; see `read`."""
        row_bytes = self._spec(name).nbytes
        stop = start + len(out) // max(1, row_bytes)
        if start == stop:
            return
        numbers = range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))

        def fill(number: int) -> None:
            first, last = max(start, self.starts[number]), min(stop, self.starts[number + 1])
            part = out[(first - start) * row_bytes : (last - start) * row_bytes]
            self._fill(part, number, name, first - self.starts[number])

        for_each(fill, numbers, self.num_readers)

    @abc.abstractmethod
    def _fill(self, out: NDArray[numpy.uint8], number: int, name: str, start: int) -> None:
        """Fill memory with the bytes of rows of one file, counted from its first."""

    @abc.abstractmethod
    def distrust(self) -> None:
        """Verify again what is read next."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Return what tells these rows, as they are now, from all others."""

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.table:
            known = ", ".join(map(repr, self.table)) or "none"
            raise LayerNotFoundError(f"{self.path} has no layer {name!r}; it has {known}")
        return self.table[name]
