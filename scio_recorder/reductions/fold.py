"""The last batch, digests of samples, and summaries made by the user's own function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.base import By
from scio_recorder.reductions.samples import SampleReduction, cannot_go_on
from scio_recorder.tensors.digests import sample_digests

_CONTAINERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "dict": dict}


class Last(SampleReduction):
    """The activation of the last batch that had samples.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to the samples of that
        label in the last batch that had some.

    Notes
    -----
    Any dtype works. After merging, the other reduction's last batch counts as the last.

    Examples
    --------
    >>> import torch
    >>> last = Last()
    >>> last.update(torch.tensor([[1.0], [2.0]]))
    >>> last.update(torch.tensor([[3.0]]))
    >>> last.compute()
    tensor([[3.]])
    """

    _state_names = ("_value",)
    _takes_complex = True
    _takes_any_shape = True
    _value: Tensor

    def _add(self, samples: Tensor) -> None:
        self._value = samples.clone()

    def _join(self, other: Last) -> None:
        self._value = other._value

    def _result(self) -> Tensor:
        return self._value.clone()


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

    def _add_waiting(self) -> None:
        if self._digests:
            self._digests = [torch.cat(self._digests)]

    def _join(self, other: Digest) -> None:
        self._digests += other._digests

    def _result(self) -> Tensor:
        return self._digests[0].clone()


class Fold(SampleReduction):
    """A summary made by your own function.

    Parameters
    ----------
    fn : callable
        ``fn(accumulator, activation) -> accumulator``; the accumulator is None for the first batch.
        It receives a copy of the activation, which it may keep or change.
    merge : callable, optional
        ``merge(accumulator, other_accumulator) -> accumulator``. Without it two folds can't be
        merged.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to accumulator.

    Notes
    -----
    The state can be stored if the accumulator consists of tensors, numbers, strings, None, and
    lists, tuples and dicts of these.

    Examples
    --------
    >>> import torch
    >>> def count_positive(accumulator, activation):
    ...     return (accumulator or 0) + int((activation > 0).sum())
    >>> positive = Fold(count_positive, merge=lambda one, two: one + two)
    >>> positive.update(torch.tensor([[1.0, -1.0], [2.0, 3.0]]))
    >>> positive.compute()
    3
    """

    _state_names = ("_accumulator",)
    _takes_complex = True
    _takes_any_shape = True
    _accumulator: Any

    def __init__(
        self,
        fn: Callable[[Any, Tensor], Any],
        merge: Callable[[Any, Any], Any] | None = None,
        *,
        by: By | None = None,
    ) -> None:
        self._fn = fn
        self._merge = merge
        self._options = {"fn": fn, "merge": merge}
        super().__init__(by=by)

    def _add(self, samples: Tensor) -> None:
        self._accumulator = self._fn(self._accumulator, samples.clone())

    @property
    def why_not_merged(self) -> str | None:
        """Why folds of different data can't be merged; None if they can."""
        if self._merge is not None:
            return None
        return (
            f"{self!r} can't be merged: construct it as Fold(fn, merge=function), where "
            "function(accumulator, other_accumulator) returns the joined accumulator."
        )

    def _join(self, other: Fold) -> None:
        if self._merge is None:
            raise CollectError(self.why_not_merged)
        self._accumulator = self._merge(self._accumulator, other._accumulator)

    def _result(self) -> Any:
        return copy.deepcopy(self._accumulator)

    @classmethod
    def from_recipe(cls, **options: Any) -> Self:
        """Return a fold that can read a state, but can't add data."""
        return super().from_recipe(fn=cannot_go_on, **options)

    def _state(self) -> dict[str, Any]:
        return {"_accumulator": _encode(self._accumulator)}

    def _set_state(self, state: dict[str, Any]) -> None:
        self._accumulator = _decode(state["_accumulator"])

    def _place(self, device: torch.device) -> None:
        pass  # the function decides the device of an accumulator

    def _device(self) -> torch.device | None:
        return None


def _encode(value: Any) -> Any:
    """Write an accumulator with tensors, numbers, strings, lists and str-keyed dicts only."""
    if isinstance(value, Tensor | bool | int | float | str):
        return value
    kind = type(value).__name__
    if value is None or type(value) in _CONTAINERS.values():
        items = () if value is None else value.items() if isinstance(value, dict) else value
        return {"type": kind, "items": [_encode(item) for item in items]}
    raise CollectError(
        f"The accumulator of a Fold holds {kind}, which can't be stored; build it from tensors, "
        "numbers, strings, None, lists, tuples and dicts."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = [_decode(item) for item in value["items"]]
    return None if value["type"] == "NoneType" else _CONTAINERS[value["type"]](items)
