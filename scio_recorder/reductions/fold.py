"""The last batch, and summaries made by a function of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.reductions.labels import By, Label
from scio_recorder.reductions.samples import SampleReduction, cannot_go_on


class Last(SampleReduction):
    """The activation of the last batch that had samples.

    Parameters
    ----------
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to the samples of that
        label in the last batch that had some.

    Notes
    -----
    Takes any dtype. Merging takes what the other saw last for the last.

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
    _value: Tensor

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        return ()  # nothing is combined, so any shape may follow any other

    def _add(self, samples: Tensor) -> None:
        self._value = samples.clone()

    def _join(self, other: Last) -> None:
        self._value = other._value.clone()

    def _result(self) -> Tensor:
        return self._value.clone()


class Fold(SampleReduction):
    """A summary made by a function of your own.

    Parameters
    ----------
    fn : callable
        ``fn(accumulator, activation) -> accumulator``; the accumulator is None for the first batch.
        It is given a copy of the activation, which it may keep or change.
    merge : callable, optional
        ``merge(accumulator, other_accumulator) -> accumulator``. Without it two folds can't be
        merged.
    by : callable, optional
        ``batch -> labels [batch]``; the result is then a dict from label to accumulator.

    Notes
    -----
    The state can be stored where the accumulator consists of tensors, numbers, strings, None, and
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
        super().__init__(by=by)

    def __repr__(self) -> str:
        name = getattr(self._fn, "__qualname__", repr(self._fn))
        by = "" if self._by is None else f", by={self._by!r}"
        return f"Fold({name}{by})"

    def _sample_shape(self, samples: Tensor) -> tuple[int, ...]:
        return ()  # what fits together is for the function to say

    def _add(self, samples: Tensor) -> None:
        self._accumulator = self._fn(self._accumulator, samples.clone())

    def _join(self, other: Fold) -> None:
        if self._merge is None:
            raise CollectError(
                f"{self!r} can't be merged: construct it as Fold(fn, merge=function), where "
                "function(accumulator, other_accumulator) returns the joined accumulator."
            )
        # The function may work in place or return the other accumulator itself.
        theirs = copy.deepcopy(other._accumulator)
        self._accumulator = self._merge(self._accumulator, theirs)

    def _adopt(self, other: Fold) -> None:
        # Unlike other states an accumulator need not be storable, but it can be copied.
        self._count, self._dtype, self._shape = other._count, other._dtype, other._shape
        self._accumulator = copy.deepcopy(other._accumulator)
        self._join_members(other)

    def _result(self) -> Any:
        return copy.deepcopy(self._accumulator)

    @classmethod
    def _functions(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {"fn": cannot_go_on, **super()._functions(options)}

    def _state(self) -> dict[str, Any]:
        return {"_accumulator": _encode(self._accumulator)}

    def _set_state(self, state: dict[str, Any]) -> None:
        self._accumulator = _decode(state.get("_accumulator"))

    def _place(self, device: torch.device) -> None:
        pass  # on which device an accumulator lies is for the function to say

    def _device(self) -> torch.device | None:
        return None


def _encode(value: Any) -> Any:
    """Write an accumulator with tensors, numbers, strings, lists and str-keyed dicts only."""
    if isinstance(value, Tensor | bool | int | float | str):
        return value
    if type(value) in (list, tuple):
        return {"type": type(value).__name__, "items": [_encode(item) for item in value]}
    if type(value) is dict:
        keys = [_encode_key(key) for key in value]
        return {"type": "dict", "keys": keys, "items": [_encode(item) for item in value.values()]}
    if value is None:
        return {"type": "none"}
    raise CollectError(
        f"The accumulator of a Fold holds {type(value).__name__}, which can't be stored; build it "
        "of tensors, numbers, strings, lists, tuples and dicts."
    )


def _encode_key(key: Any) -> Label:
    if isinstance(key, bool | int | float | str):
        return key
    raise CollectError(
        f"The accumulator of a Fold has the dict key {key!r}, which can't be stored; use numbers "
        "or strings as keys."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = [_decode(item) for item in value.get("items", [])]
    kinds: dict[str, Callable[[], Any]] = {
        "list": lambda: items,
        "tuple": lambda: tuple(items),
        "dict": lambda: dict(zip(value["keys"], items, strict=True)),
        "none": lambda: None,
    }
    return kinds[value["type"]]()
