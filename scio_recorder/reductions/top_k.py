"""The largest values of each unit, and the samples that they come from."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import By, Labels, Read, RowReduction, cannot_go_on, portions
from scio_recorder.tensors.arguments import whole


class TopKResult(NamedTuple):
    """The largest values of each unit, largest first.

    Attributes
    ----------
    values : Tensor
        The values, [units, k], float32 or float64; fewer than k if there were fewer.
    ids : Tensor
        The id of the sample of each, [units, k], int64.
    positions : Tensor
        The position of each in its sample, [units, k], int64: an index into all dimensions but the
        first and ``feature_dim``, flattened; zeros without ``feature_dim``.
    """

    values: Tensor
    ids: Tensor
    positions: Tensor


class TopK(RowReduction):
    """The k largest values of each unit, and the samples that they come from.

    Parameters
    ----------
    k : int
        How many are kept.
    ids : callable
        ``batch -> ids [batch]``: a whole number for each sample, such as its place in the dataset.
        No two samples should have the same.
    feature_dim : int, optional
        The dimension that holds the units: 1 for the channels of images, -1 for the features of
        tokens. Every other position is a value of a unit, so that a sample may be there several
        times. None: all but dimension 0 are units.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to result.

    Notes
    -----
    Of equal values that with the lower id comes first, then that with the lower position: the
    result is the same for every split of the data. A NaN has no rank: after one, reading the result
    is a `CollectError`. Memory is that of 3 k numbers a unit.

    Examples
    --------
    >>> import torch
    >>> top = TopK(2, ids=lambda batch: batch["id"])
    >>> top.update(torch.tensor([[0.1, 5.0], [0.9, 2.0]]), {"id": [0, 1]})
    >>> top.update(torch.tensor([[0.3, 5.0]]), {"id": [2]})
    >>> top.compute().ids
    tensor([[1, 2],
            [0, 2]])
    """

    _state_names = ("_values", "_ids", "_positions")
    _state_kinds = (
        r"tensor float.. {units} \d+",
        r"tensor -?int64 {units} \d+",
        r"tensor int64 {units} \d+",
    )
    _values: Tensor
    _ids: Tensor
    _positions: Tensor

    def __init__(
        self, k: int, ids: By, feature_dim: int | None = None, *, by: By | None = None
    ) -> None:
        self._k = whole("k", k, 1)
        if not callable(ids):
            raise CollectError(
                f"TopK(ids={ids!r}): give a function of the batch that returns a whole number for "
                'each sample, such as ids=lambda batch: batch["id"].'
            )
        self._ids_of = ids
        super().__init__(feature_dim, by=by, k=self._k, ids=ids)

    def _read(self, read: Read, device: torch.device) -> None:
        self._ids_now = read(self._ids_of, "ids=").numbers(device)

    def _add_labelled(self, samples: Tensor, labels: Labels) -> None:
        for label, places in labels.places(samples.device).items():
            member = self._member(label)
            member._ids_now = self._ids_now[places]
            member._add_samples(samples[places])

    def _add(self, samples: Tensor) -> None:
        start = 0
        for portion in portions(samples):
            ids = self._ids_now[start : start + len(portion)]
            order = ids.argsort(stable=True)
            units = self._units_of(portion[order])
            values, places = _largest(units, min(self._k, units.shape[1]))
            # Rows of a sample, its positions, follow each other.
            num_positions = units.shape[1] // len(ids)
            self._take(values, ids[order][places // num_positions], places % num_positions)
            start += len(portion)

    def _units_of(self, samples: Tensor) -> Tensor:
        """Return samples as [units, rows]."""
        if self._feature_dim is None:
            units = samples.reshape(len(samples), -1).T
        else:
            units = samples.movedim(self._feature_dim, 0).flatten(1)
        return units.to(self._dtype).contiguous()

    def _join(self, values: Tensor, ids: Tensor, positions: Tensor) -> None:
        pairs = zip(self._state().values(), (values, ids, positions), strict=True)
        parts = [torch.cat(pair, -1) for pair in pairs]
        # Both are in the order of positions where ids are equal.
        order = parts[1].argsort(dim=-1, stable=True)
        order = order.gather(-1, _falling(parts[0].gather(-1, order)))[:, : self._k]
        self._values, self._ids, self._positions = (part.gather(-1, order) for part in parts)

    def _result(self) -> TopKResult:
        # A NaN counts as the largest value.
        if bool(self._values[:, 0].isnan().any()):
            self._refuse_nan("nan, which has no rank")
        return TopKResult(self._values.clone(), self._ids.clone(), self._positions.clone())

    def _is_consistent(self) -> bool:
        shapes = {part.shape for part in self._state().values()}
        return len(shapes) == 1 and 1 <= self._values.shape[1] <= self._k

    @classmethod
    def from_recipe(cls, **options: Any) -> Self:
        """Return a reduction that can read a state, but can't add data."""
        return super().from_recipe(ids=cannot_go_on, **options)


def _largest(units: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of [units, rows], and where they are; of equals the first.

    Which of equal values `torch.topk` takes is not defined, and a stable sort of all takes three
    times as long as a second `topk`, of numbers that all differ.
    """
    values, num_rows = units.topk(k).values, units.shape[1]
    least = values[:, -1:]
    above = (units >= least).int() + (units > least).int()
    later = torch.arange(num_rows, dtype=torch.int32, device=units.device)
    places = (above * num_rows - later).topk(k).indices
    return values, places.gather(-1, _falling(units.gather(-1, places)))


def _falling(values: Tensor) -> Tensor:
    return values.argsort(dim=-1, descending=True, stable=True)
