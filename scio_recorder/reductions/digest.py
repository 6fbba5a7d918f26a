"""A few bytes for each sample that show whether it is the same, bit for bit, in another run."""

from __future__ import annotations

import torch
from torch import Tensor

from scio_recorder.reductions.samples import SampleReduction
from scio_recorder.tensors.digests import sample_digests


class Digest(SampleReduction):
    """Eight bytes for each sample, XXH3 of its bytes: a whole run to compare with, bit for bit.

    :func:`scio_recorder.compare` takes a recording of digests for either side, even one that was
    made on another machine or with another version of torch.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to the digests of the
        samples of that label. `compare` does not take such digests.

    Notes
    -----
    The dtype and shape of a sample are digested with its bytes, which are those of a contiguous
    array. All NaNs count as the same, and -0.0 differs from 0.0. With ``rows=`` each row
    has its digest.

    Any dtype and shape works. The result is in the order of the samples: merging appends the
    digests of the other reduction.

    Examples
    --------
    >>> digest = Digest()
    >>> digest.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> digest.update(torch.tensor([[1.0, 2.0]]))
    >>> first, second, third = digest.compute()
    >>> bool(first == third), bool(first == second)
    (True, False)
    """

    _state_names = ("_digests",)
    _takes_complex = True
    _takes_any_shape = True
    _digests: list[Tensor]

    @property
    def keeps_rows(self) -> bool:
        """Whether each row has its digest in order: not if they are kept by label."""
        return self._by is None

    def _device(self) -> None:
        # Digests stay in host memory, wherever the samples are.
        return None

    def _add(self, samples: Tensor) -> None:
        # Before the first samples there is no state.
        self._digests = self._digests or []
        self._digests.append(sample_digests(samples))

    def _settle(self) -> None:
        if self._digests:
            self._digests = [torch.cat(self._digests)]

    def _join(self, other: Digest) -> None:
        self._digests += other._digests

    def _result(self) -> Tensor:
        return self._digests[0].clone()
