"""The sides of a comparison: a network that runs or a recording that is read."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from scio_recorder.analysis.comparing.findings import SampleId
from scio_recorder.analysis.comparing.measures import dense
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.collect.batch_rows import BatchRows
from scio_recorder.tensors.copies import is_plain
from scio_recorder.tensors.digests import sample_digests


@dataclass
class Block:
    """Samples that are compared together.

    Parameters
    ----------
    ids : sequence of int or str
        Those of the samples.
    batch : any
        What the loader gave for them, where networks run.
    rows : BatchRows or None
        Which lines of what layers return count, where a row is no sample and networks run.
    lengths : list of int or None
        How many rows each sample has, where a row is no sample.
    number : int
        Which batch it is, where networks run.
    """

    ids: Sequence[SampleId]
    batch: Any = None
    rows: BatchRows | None = None
    lengths: list[int] | None = None
    number: int = 0

    def place(self, shape: Sequence[int], flat: int) -> tuple[int, tuple[int, ...]]:
        """Return which sample an element of a layer belongs to, and where it is there.

        Parameters
        ----------
        shape : sequence of int
            That of the layer's tensor.
        flat : int
            The element, counted through the tensor. Where dimension 0 does not count samples it is
            taken for one of the first sample.
        """
        # Torch takes twenty times as long.
        index = [int(part) for part in np.unravel_index(flat, tuple(shape))]
        lengths = self.lengths
        if not index or shape[0] != (len(self.ids) if lengths is None else sum(lengths)):
            return 0, tuple(index)
        if lengths is None:
            return index[0], tuple(index[1:])
        ends = list(accumulate(lengths))
        sample = bisect_right(ends, index[0])
        return sample, (index[0] - ends[sample] + lengths[sample], *index[1:])


class Values(Protocol):
    """The data of one side for a block."""

    def output(self, label: DepthIdx) -> Any:
        """Return what a layer returned, or digests of that."""

    def inputs(self, label: DepthIdx) -> Inputs | None:
        """Return what a layer received; None where that is not known."""

    def is_digest(self, label: DepthIdx) -> bool:
        """Whether there are digests only of what a layer returned."""


class Side(Protocol):
    """One side of a comparison."""

    architecture: Architecture

    @property
    def labels(self) -> tuple[DepthIdx, ...]:
        """The layers that can be compared."""

    @property
    def digests(self) -> frozenset[DepthIdx]:
        """Those of which there are digests only."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of layers that are there and can't be compared."""

    def knows_inputs(self, label: DepthIdx) -> bool:
        """Whether it is known what a layer received."""

    def opened(
        self, labels: Sequence[DepthIdx], *, inputs: bool, calls: Any, digests: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Get ready to give values of some layers for the length of a block of code."""

    def at(self, block: Block) -> Values:
        """Return what it has of some samples."""


def digests_of(value: Any) -> Any:
    """Return a digest for each sample; what has no samples is left for others to refuse."""
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    return sample_digests(value if is_plain(value) else dense(value))
