"""What is kept of whole batches, besides samples: JSON values, and tensors that these refer to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from scio_recorder.stores.disk_format.faults import parsing
from scio_recorder.stores.disk_format.jsons import JSON, MAX_FILE_BYTES, dump, expect, parse
from scio_recorder.stores.disk_format.run import Chunk, batch_name, tensor_name

if TYPE_CHECKING:
    from torch import Tensor

    from scio_recorder.stores.disk_format.tensor_file import TensorFile


class KeptBatches(NamedTuple):
    """What is kept of the batches of one chunk.

    Parameters
    ----------
    rows : sequence of int
        How many samples each batch has.
    values : sequence of JSON
        One for each batch.
    tensors : sequence of Tensor
        Those that the values refer to, by position.
    """

    rows: Sequence[int]
    values: Sequence[JSON]
    tensors: Sequence[Tensor]


def kept_tensors(kept: KeptBatches, rows: int) -> dict[str, Tensor]:
    """Return what the file of a chunk of so many samples holds; `ValueError` if it can't."""
    if len(kept.values) != len(kept.rows) or sum(kept.rows) != rows:
        raise ValueError(f"batches of {list(kept.rows)} samples are kept with {rows} samples")
    tensors = {tensor_name(number): tensor for number, tensor in enumerate(kept.tensors)}
    for number, value in enumerate(kept.values):
        text = dump(value)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"what is kept of a batch takes {len(text)} bytes besides tensors")
        # Read at once as it will be read: what is nested too deeply is refused.
        parse(text)
        tensors[batch_name(number)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


class KeptReader:
    """Reads what is kept of each batch of a recording, one at a time.

    Parameters
    ----------
    chunks : sequence of Chunk
        The commits of the recording, in order.
    open_file : callable
        Opens the file of a chunk.

    Raises
    ------
    ValueError
        If something is kept of some samples only.
    """

    def __init__(self, chunks: Sequence[Chunk], open_file: Callable[[Chunk], TensorFile]) -> None:
        self._open_file = open_file
        self._chunks = [chunk for chunk in chunks if chunk.batches is not None]
        # The number of batches before each chunk.
        self._starts: list[int] = []
        self.rows: list[int] = []
        for chunk in self._chunks:
            self._starts.append(len(self.rows))
            self.rows += chunk.batches or ()
        if self._chunks and sum(self.rows) != sum(len(chunk.ids) for chunk in chunks):
            raise ValueError("something is kept of some batches and not of others")
        self.num_bytes = sum(chunk.kept_bytes for chunk in self._chunks)
        # Cache: the layers of one batch are read together.
        self._last: tuple[int, JSON] | None = None

    def read(self, number: int) -> tuple[JSON, Callable[[int], Tensor]]:
        """Return the value of a batch, not to be changed, and what reads tensors it refers to.

        Raises
        ------
        IndexError
            There is no such batch.
        RecordingError
            The file is damaged.
        """
        number = range(len(self.rows))[number]
        at = bisect_right(self._starts, number) - 1
        file = self._open_file(self._chunks[at])

        def tensor(position: int) -> Tensor:
            with parsing(file.path):
                return file.read(tensor_name(expect(position, int)))

        # Other threads may replace it meanwhile.
        last = self._last
        if last is None or last[0] != number:
            with parsing(file.path):
                text = file.read(batch_name(number - self._starts[at]))
                last = self._last = number, parse(text.numpy().tobytes())
        return last[1], tensor
