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
        Shape and dtype of one row of everything that can be read.
    starts : sequence of int
        The number of rows before each file, and of all rows.
    """

    path: str
    table: Table
    starts: Sequence[int]
    # The best number of bytes to read at a time, and of files at once.
    span_bytes = BLOCK_BYTES
    num_readers = 1

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self.starts[-1]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop`` in new memory.

        Raises
        ------
        LayerNotFoundError, IndexError
            If there is no such name or there are no such rows.
        RecordingError
            If the data differs from the written data.
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

    def distrust(self) -> None:  # noqa: B027 - without checksums there is nothing to forget
        """Forget which data was verified: it is verified again at its next read."""

    def fingerprint(self) -> str:
        """Return a digest that distinguishes these rows, in their present state, from others.

        It is empty if only the values of rows show that, as without checksums.
        """
        return ""

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.table:
            known = ", ".join(map(repr, self.table)) or "none"
            raise LayerNotFoundError(f"{self.path} has no layer {name!r}; it has {known}")
        return self.table[name]
