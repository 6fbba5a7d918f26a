"""The samples that are compared together, and what a side of a comparison knows of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from scio_recorder.analysis.comparing.findings import SampleId
from scio_recorder.analysis.comparing.measures import dense
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.batch_rows import BatchRows
from scio_recorder.tensors.copies import is_plain
from scio_recorder.tensors.digests import sample_digests


@dataclass
class Block:
    """Samples that are compared together.

    Parameters
    ----------
    ids : sequence of int or str
        The samples' ids.
    batch : any
        The loader's batch of these samples, if networks run.
    rows : BatchRows or None
        Which rows of layers' outputs count, if a row is not a sample and networks run.
    received : BatchRows or None
        Which rows of their inputs count: all but padding.
    positions : sequence of Tensor or None
        The positions of each sample's rows, if a row is not a sample.
    number : int
        The number of the batch, if networks run.
    """

    ids: Sequence[SampleId]
    batch: Any = None
    rows: BatchRows | None = None
    received: BatchRows | None = None
    positions: Sequence[Tensor] | None = None
    number: int = 0

    def place(self, shape: Sequence[int], flat: int) -> tuple[int, tuple[int, ...]]:
        """Return the sample to which an element of a layer belongs, and its index there.

        Parameters
        ----------
        shape : sequence of int
            The shape of the layer's tensor.
        flat : int
            The element's flat index. If dimension 0 does not count samples, it counts as one of the
            first sample.
        """
        # Torch takes twenty times as long.
        index = [int(part) for part in np.unravel_index(flat, tuple(shape))]
        lengths = [1] * len(self.ids) if self.positions is None else list(map(len, self.positions))
        if not index or shape[0] != sum(lengths):
            return 0, tuple(index)
        if self.positions is None:
            return index[0], tuple(index[1:])
        ends = list(accumulate(lengths))
        sample = bisect_right(ends, index[0])
        return sample, (index[0] - ends[sample] + lengths[sample], *index[1:])


class Values(NamedTuple):
    """The data of one side for a block, as functions of a layer.

    Parameters
    ----------
    output : callable
        Returns a layer's output, or digests of it.
    inputs : callable
        Returns a layer's inputs; None if they are not known.
    is_digest : callable
        Whether only digests of a layer's output are known.
    """

    output: Callable[[DepthIdx], Any]
    inputs: Callable[[DepthIdx], Inputs | None] = lambda label: None
    is_digest: Callable[[DepthIdx], bool] = lambda label: False


def digests_of(value: Any) -> Any:
    """Return a digest for each sample; others refuse outputs without samples."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return sample_digests(value if is_plain(value) else dense(value))
