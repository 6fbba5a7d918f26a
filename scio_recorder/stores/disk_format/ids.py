"""Sample ids: integers or strings, kept compactly."""

from __future__ import annotations

import abc
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import index as as_integer
from typing import Any, Self, TypeAlias, TypeVar, overload

import numpy

from scio_recorder.stores.disk_format.tensor_file import JSON, MAX_SIZE, entries, expect

T = TypeVar("T")
Ids: TypeAlias = "range | array[int] | tuple[str, ...]"


class OnDemand(Sequence[T]):
    """Entries that are found by their numbers, each when it is asked for."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self._read(number) for number in numbers]
        return self._read(numbers)

    @abc.abstractmethod
    def _read(self, number: int) -> T:
        """Return the entry of a valid number."""


class SampleIds(OnDemand[int | str]):
    """The ids of many chunks as one sequence; consecutive numbers take no memory.

    Examples
    --------
    >>> ids = SampleIds()
    >>> ids.add(range(1000))
    >>> ids.add(to_ids([7, 5]))
    >>> ids[-2:], len(ids), list(ids)[999]
    ([7, 5], 1002, 999)
    >>> ids
    SampleIds([0, 1, 2, 3, 4, 5, ...], 1002 in all)
    """

    def __init__(self) -> None:
        self._parts: list[Ids] = []
        self._ends = [0]

    def add(self, part: Ids) -> None:
        """Append the ids of one chunk; `ValueError` if `check` refuses them.

        Parameters
        ----------
        part : range, array.array or tuple
            The ids.
        """
        self.check(part)
        self._append(part)

    @classmethod
    def joined(cls, writers: Iterable[Iterable[Ids]]) -> Self:
        """Return the ids of several writers; those of each are of one type, or `ValueError`."""
        whole = cls()
        for parts in writers:
            ids_of_writer = cls()
            for part in parts:
                ids_of_writer.add(part)
            for part in ids_of_writer._parts:
                whole._append(part)
        return whole

    def check(self, part: Ids) -> None:
        """Raise `ValueError` for ids of another type than the earlier ones, or for too many.

        Parameters
        ----------
        part : range, array.array or tuple
            The ids that are about to follow.
        """
        kinds = {isinstance(ids, tuple) for ids in (*self._parts[:1], part) if len(ids)}
        if len(kinds) > 1:
            raise ValueError("integers and strings are mixed as sample ids")
        if len(self) + len(part) > MAX_SIZE:
            raise ValueError(f"more than {MAX_SIZE} samples")

    def _append(self, part: Ids) -> None:
        if len(part):
            self._parts.append(part)
            self._ends.append(self._ends[-1] + len(part))

    def __len__(self) -> int:
        return self._ends[-1]

    def _read(self, number: int) -> int | str:
        part = bisect_right(self._ends, number) - 1
        return self._parts[part][number - self._ends[part]]

    def __iter__(self) -> Iterator[int | str]:
        return chain.from_iterable(self._parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # ids can still be added

    def __repr__(self) -> str:
        few = ", ".join(map(repr, self[:6]))
        return f"SampleIds([{few}{', ...' if len(self) > 6 else ''}], {len(self)} in all)"

    def repeated(self) -> int | str | None:
        """Return an id that occurs twice; None if there is none.

        Examples
        --------
        >>> ids = SampleIds()
        >>> ids.add(range(10, 20))
        >>> ids.add(to_ids([3, 7, 30]))
        >>> ids.repeated()
        >>> ids.add(range(7, 9))
        >>> ids.repeated()
        7
        """
        seen: set[str] = set()
        for name in chain.from_iterable(part for part in self._parts if isinstance(part, tuple)):
            if name in seen:
                return name
            seen.add(name)
        ranges = [(part[0], part[-1]) for part in self._parts if isinstance(part, range)]
        others = [numpy.array(part) for part in self._parts if isinstance(part, array)]
        first = numpy.concatenate([numpy.array([low for low, _ in ranges], numpy.int64), *others])
        last = numpy.concatenate([numpy.array([high for _, high in ranges], numpy.int64), *others])
        order = first.argsort()
        first, last = first[order], last[order]
        again = numpy.flatnonzero(last[:-1] >= first[1:])
        return int(first[again[0] + 1]) if len(again) else None

    def tolist(self) -> list[int | str]:
        """Return the ids as a list."""
        return list(self)


def to_ids(ids: Sequence[Any]) -> Ids:
    """Return ids in their compact form.

    Parameters
    ----------
    ids : sequence
        Integers or strings.

    Raises
    ------
    ValueError
        If they are neither all integers of 64 bits nor all strings.
    """
    if isinstance(ids, range) and ids.step == 1:
        return ids
    if not len(ids):
        return range(0)
    if all(isinstance(value, str) for value in ids):
        return tuple(ids)
    try:
        numbers = array("q", [as_integer(value) for value in ids])
    except (TypeError, OverflowError):
        raise ValueError("sample ids must be integers of 64 bits, or strings") from None
    consecutive = range(numbers[0], numbers[0] + len(numbers))
    return consecutive if numbers.tolist() == list(consecutive) else numbers


def ids_to_json(ids: Ids) -> JSON:
    """Return ids as JSON, consecutive numbers as their range."""
    if isinstance(ids, range):
        return {"start": ids.start, "count": len(ids)}
    return list(ids)


def ids_from_json(value: Any) -> Ids:
    """Return the ids from the result of `ids_to_json`; `ValueError` for anything else."""
    if isinstance(value, dict):
        start, count = entries(value, start=int, count=int)
        if not (0 <= count <= MAX_SIZE and -(1 << 63) <= start <= (1 << 63) - count):
            raise ValueError("sample ids out of bounds")
        return range(start, start + count)
    kinds = {type(entry) for entry in expect(value, list)}
    if kinds <= {str}:
        return tuple(value)
    if kinds != {int}:
        raise ValueError("sample ids that are neither all integers nor all strings")
    return array("q", value)
