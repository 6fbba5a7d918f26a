"""Counting values in bins of equal width.

NOTE [Bins by upper bits]

To find the bin of each value takes most of the time of a histogram. But of floating numbers of 16
bits there are 65,536, and the upper 20 bits of one of 32 say nearly as much: its sign, exponent and
eleven bits more. So a table tells the bin. Where values that share these bits lie on both sides of
an edge, the table says that, and these alone are looked at. Counts are the same.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Table: TypeAlias = NDArray[np.unsignedinteger[Any]]
_KEYED = (torch.float32, torch.float16, torch.bfloat16)
# To make a table takes as long as to go without one for so many values.
_MANY = 1 << 22
_LOWER_BITS = 12


class Bins:
    """Bins of equal width, with NumPy's edges: half-open, the last one closed.

    Parameters
    ----------
    low, high : float
        Where the first begins and the last ends.
    count : int
        How many there are.

    Examples
    --------
    >>> Bins(0.0, 1.0, 2).tally(torch.tensor([-1.0, 0.5, 1.0, 2.0]))
    tensor([1, 0, 2, 1])
    """

    def __init__(self, low: float, high: float, count: int) -> None:
        self._range, self._count = (low, high), count
        self.edges = torch.from_numpy(np.linspace(low, high, count + 1))
        # Bins may be narrower than float64 can tell apart.
        self._are_apart = bool((self.edges.diff() > 0).all())
        self._tables: dict[torch.dtype, _Table] = {}
        self._num_seen = 0

    def tally(self, values: Tensor) -> Tensor:
        """Return how many values [n] lie below, in each bin and above, [bins + 2]; no NaNs."""
        if values.device.type != "cpu":
            return self._compared(values)
        self._num_seen += len(values)
        if values.dtype not in _KEYED or self._num_seen < _MANY:
            return self._searched(values)
        unsure = self._count + 2
        found = self._table(values.dtype).take(_keys(values))
        counts = torch.from_numpy(np.bincount(found, minlength=unsure + 1))
        tally = counts[:unsure]
        if counts[unsure]:
            places = torch.from_numpy(np.flatnonzero(found == unsure))
            tally += self._searched(values[places])
        return tally

    def _table(self, dtype: torch.dtype) -> _Table:
        """Return for each key the bin of its values, or one more than there are if unsure."""
        if dtype not in self._tables:
            if dtype == torch.float32:
                bits = np.arange(1 << (32 - _LOWER_BITS), dtype=np.uint32) << _LOWER_BITS
                rests = (0, (1 << _LOWER_BITS) - 1)
                ends = [torch.from_numpy((bits | rest).view(np.float32)) for rest in rests]
            else:
                keys = np.arange(1 << 16, dtype=np.uint16)
                ends = [torch.from_numpy(keys.view(np.int16)).view(dtype)] * 2
            first, last = (self._places(end.double()).numpy() for end in ends)
            has_nan = ends[1].isnan().numpy()
            found = np.where((first == last) & ~has_nan, first, self._count + 2)
            self._tables[dtype] = found.astype(np.uint8 if self._count < 250 else np.uint32)
        return self._tables[dtype]

    def _searched(self, values: Tensor) -> Tensor:
        kept = values[~values.isnan()].double()
        if not self._are_apart:
            return torch.bincount(self._places(kept), minlength=self._count + 2)
        inside, _ = np.histogram(kept.numpy(), self._count, self._range)
        below = int(np.count_nonzero(kept.numpy() < self._range[0]))
        return torch.tensor([below, *inside, len(kept) - below - int(inside.sum())])

    def _compared(self, values: Tensor) -> Tensor:
        # Nothing waits for the accelerator: NaNs are counted behind the rest, and left out there.
        places = self._places(values.double())
        places = torch.where(values.isnan(), self._count + 2, places)
        return torch.bincount(places, minlength=self._count + 3)[:-1]

    def _places(self, values: Tensor) -> Tensor:
        edges = self.edges.to(values.device)
        return torch.bucketize(values, edges, right=True) - (values == edges[-1]).long()


def _keys(values: Tensor) -> _Table:
    values = values.contiguous()
    if values.dtype == torch.float32:
        upper: _Table = values.numpy().view(np.uint32) >> np.uint32(_LOWER_BITS)
        return upper
    halves: _Table = values.view(torch.int16).numpy().view(np.uint16)
    return halves
