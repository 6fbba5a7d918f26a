"""The share of one process in a dataset: its samples, their ids and the repeats.

NOTE [Repeats]

A sampler that splits a dataset gives all processes equally many samples, and repeats some if
needed. It deals out one list, the dataset in some order, and continues from its beginning after its
end. Each kind of sampler has its way of dealing, which determines the place in the list where a
batch begins. Places behind the end of the dataset are repeats, so repeats are the last samples of a
process. No process must ask another for that, and no order is computed twice, which would draw
random numbers.

The samples of a batch are noted when the loader asks for indices. It may ask ahead, and it gives
batches in the order in which it asked for them.
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
OWN_WORDS = "write sample_ids= and Disk(PATH, rank=, world_size=) to say whose samples they are"


def all_left(number: int, before: int) -> int:
    """Return that no repeat is coming: a number that no dataset exceeds."""
    return sys.maxsize


@dataclass
class Share:
    """The share of one of several processes.

    Parameters
    ----------
    place : Place
        The rank of this process, and the number of processes.
    source : any, optional
        The object that gives the loader the indices of batches; None if samples have none.
    num_left : callable, optional
        ``number of a batch, samples before it ->`` the number of samples from its beginning to the
        first repeat, if other processes had none in between.
    num_repeats : int, default 0
        The number of repeats of all processes together.
    settings : dict, optional
        The settings that decide the shares, in which all processes must agree.
    problem : str, optional
        Why the shares can't be known.
    is_even : bool, default True
        Whether all processes have equally many batches.
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

    # The current batch's.
    _indices: list[Any] | None = None
    _number: int = 0
    _left: int = 0

    @property
    def has_ids(self) -> bool:
        """Whether samples have indices in the dataset."""
        return self.source is not None

    def through(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and note the samples of each."""
        drawn: deque[Any] = deque()
        before = 0
        with noting(self.source, drawn.append), self.beginning():
            # From its first batch on, the loader holds the iterator that takes the notes.
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
        """Return the indices of the current batch, which has this many samples."""
        indices = self._indices or []
        if len(indices) != number:
            raise CollectError(
                f"the sampler chose {len(indices)} samples for batch {self._number}, but the "
                f"batch has {number}: write sample_ids=lambda batch: ... with one id for each"
            )
        return indices

    def num_own(self, number: int) -> int:
        """Return the number of samples of the batch, from the first on, that are not repeats."""
        chosen = number if self._indices is None else len(self._indices)
        own = max(0, min(self._left, chosen))
        if own in (0, chosen):
            return number if own else 0
        if number != chosen:
            raise CollectError(
                f"{chosen - own} of {chosen} samples of batch {self._number} are repeats that the "
                f"sampler added, and it is unknown which of the {number} ids belong to them: give "
                "the sampler drop_last=True"
            )
        return own


@contextlib.contextmanager
def noting(
    source: Any, note: Callable[[Any], object], end: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Observe the items of iterators over an object that are made inside the block.

    The object's class becomes a subclass: loaders are wrapped in other loaders, which all hold the
    object, and none allows replacing it.

    Parameters
    ----------
    source : any
        The object; None for nothing.
    note : callable
        Called with each item before the caller of the iterator gets it.
    end : callable, optional
        Called when no item is left.
    """
    if source is None:
        yield
        return
    kind = type(source)

    def noted(iterator: Any) -> Iterator[Any]:
        # Not by `for`, which would ask an object that is its own iterator for another one.
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
