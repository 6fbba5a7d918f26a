"""The share of one process in a dataset: its samples, their ids and the repeats.

NOTE [Repeats]

A sampler that splits a dataset gives all processes equally many samples, and repeats some for that.
It deals out one list, the dataset in some order, and goes on from its beginning where it ends. Each
kind of sampler has its way of dealing, which tells at which place of the list a batch begins. What
lies behind the end of the dataset is a repeat, so repeats are the last samples of a process.
No process has to ask another for that, and no order is computed twice, which would take random
numbers.

Which samples a batch has is noted where the loader asks for indices. It may ask ahead of what it
gives, and it gives batches in the order in which it asked for them.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scio_recorder.errors import CollectError
from scio_recorder.tensors.processes import Place

_END = object()
OWN_WORDS = "write sample_ids= and Disk(PATH, rank=, world_size=) to say yourself whose they are"


def all_left(number: int, before: int) -> int:
    """Say that no repeats are coming."""
    return sys.maxsize


@dataclass
class Share:
    """The share of one of several processes.

    Parameters
    ----------
    place : Place
        Which process of how many.
    source : any, optional
        What the loader asks for the indices of batches; None where samples have none.
    num_left : callable, optional
        ``number of a batch, samples before it ->`` how many samples there are from its beginning to
        the first repeat, if no other process had any in between.
    num_repeats : int, default 0
        How many repeats all processes have together.
    settings : dict, optional
        What decides who is given what, in which all processes must agree.
    problem : str, optional
        Why it can't be known who is given what.
    is_even : bool, default True
        Whether all processes are given equally many batches.
    beginning : callable, optional
        Makes a context in which the loader begins.
    """

    place: Place
    source: Any = None
    num_left: Callable[[int, int], int] = all_left
    num_repeats: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    is_even: bool = True
    beginning: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    # Of the batch that is under way.
    _indices: list[Any] | None = None
    _number: int = 0
    _left: int = 0

    @property
    def has_ids(self) -> bool:
        """Whether samples have indices in the dataset."""
        return self.source is not None

    def through(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and know of each which samples it has."""
        drawn: deque[Any] = deque()
        before = 0
        with noting(self.source, drawn.append), self.beginning():
            # The loader holds the iterator that notes, from its first batch on.
            iterator = iter(batches)
            batch = next(iterator, _END)
        while batch is not _END:
            if self.has_ids:
                if not drawn:
                    raise CollectError(
                        f"the loader gave batch {self._number} without asking its sampler for "
                        f"samples: {OWN_WORDS}"
                    )
                indices = drawn.popleft()
                self._indices = list(indices) if isinstance(indices, Iterable) else [indices]
            self._left = self.num_left(self._number, before)
            yield batch
            self._number, before = self._number + 1, before + len(self._indices or ())
            batch = next(iterator, _END)

    def ids(self, number: int) -> list[Any]:
        """Return the indices of the batch that is under way, which has so many samples."""
        indices = self._indices or []
        if len(indices) != number:
            raise CollectError(
                f"the sampler chose {len(indices)} samples for batch {self._number}, but the "
                f"batch has {number}: write sample_ids=lambda batch: ... with one id for each"
            )
        return indices

    def num_own(self, number: int) -> int:
        """Return how many of so many samples of the batch, the first ones, are no repeats."""
        chosen = number if self._indices is None else len(self._indices)
        own = max(0, min(self._left, chosen))
        if own in (0, chosen):
            return number if own else 0
        if number != chosen:
            raise CollectError(
                f"{chosen - own} of {chosen} samples of batch {self._number} are repeats with "
                f"which the sampler fills up, and nothing tells which of the {number} ids belong "
                "to them: give the sampler drop_last=True"
            )
        return own


@contextlib.contextmanager
def noting(
    source: Any, note: Callable[[Any], object], end: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Tell what comes out of iterators over an object that are made inside the block.

    The object itself becomes one of a subclass: loaders are wrapped in other loaders, which all
    hold it, and none lets it be replaced.

    Parameters
    ----------
    source : any
        The object; None for nothing.
    note : callable
        Is given what comes out, before whoever iterates.
    end : callable, optional
        Is called when nothing is left.
    """
    if source is None:
        yield
        return
    kind = type(source)

    def noted(iterator: Any) -> Iterator[Any]:
        # Not by `for`: what is its own iterator would be asked for another.
        while (value := next(iterator, _END)) is not _END:
            note(value)
            yield value
        end()

    def iterate(self: Any) -> Iterator[Any]:
        return noted(kind.__iter__(self))

    source.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate, "__slots__": ()})
    try:
        yield
    finally:
        source.__class__ = kind
