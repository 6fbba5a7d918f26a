"""The loader's side: which batches are taken, their inputs, and their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from scio_recorder.errors import CollectError, RecorderError, raised_by
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.given_ids import SeenIds
from scio_recorder.recording.samplers import share_of
from scio_recorder.recording.shares import Share
from scio_recorder.stores import Store
from scio_recorder.stores.disk_format.ids import Ids, to_ids
from scio_recorder.tensors.arguments import whole
from scio_recorder.tensors.processes import this_process
from scio_recorder.tensors.structures import tensors

_WRITE = (
    "a batch must be a tensor, a tuple or list that begins with one, or a mapping of keywords: "
    "write to_inputs=lambda batch: ... to say what the net is given"
)

# By default sample 5 of part 17 has the id 17_000_000_000_005, whichever process counts, and
# however many samples other parts have.
IDS_OF_A_PART = 10**12


@dataclass
class Feed:
    """The batches of one ``collect``.

    Parameters
    ----------
    batches : iterable
        The loader.
    every : int, default 1
        Take every n-th batch, the first included.
    max_batches : int, optional
        Stop after this number of taken ones.
    to_inputs, sample_ids : callable, optional
        As given to ``collect``.
    part : int, optional
        The part of a dataset that these are. It may be empty.
    """

    batches: Iterable[Any]
    every: int = 1
    max_batches: int | None = None
    to_inputs: Callable[[Any], Any] | None = None
    sample_ids: Callable[[Any], Any] | None = None
    part: int | None = None

    def __post_init__(self) -> None:
        # The number of the current batch.
        self._seen, self.number = SeenIds(), 0
        self.every = whole("every", self.every, 1)
        if self.max_batches is not None:
            self.max_batches = whole("max_batches", self.max_batches, 1)
        for name in ("to_inputs", "sample_ids"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise CollectError(
                    f"{name} is a {type(given).__name__}, and not a function: write "
                    f"{name}=lambda batch: ..."
                )
        self._check_batches()
        # This process's share, if a sampler splits the data between several.
        self.share: Share | None = None

    def _check_batches(self) -> None:
        """Refuse what gives no batches, and what would give other ones than were meant."""
        batches = self.batches
        if isinstance(batches, Tensor | np.ndarray):
            kind, x = "tensor", "x"
            if isinstance(batches, np.ndarray):
                kind, x = "array", "torch.from_numpy(x)"
            raise CollectError(
                f"batches is a single {kind}, so its rows would count as batches: write "
                f"batches=[{x}] for one batch, or batches={x}.split(32) for several"
            )
        if isinstance(batches, Mapping) and any(
            self.to_inputs is None or isinstance(one, Tensor) for one in batches.values()
        ):
            raise CollectError(
                "batches is a mapping, so its keys would count as batches: write batches=[x] if "
                "it is one batch, or batches=x.values() if its values are batches"
            )
        if self.to_inputs is None and _is_of_samples(batches):
            raise CollectError(
                f"batches is a {type(batches).__name__}, whose items are samples and not batches: "
                "write DataLoader(dataset, batch_size=32), or batch_size=None if its items are "
                "batches"
            )
        if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
            raise CollectError(
                f"batches is a {type(batches).__name__}, which can't be iterated over: give a "
                "DataLoader, a list of batches or a generator"
            )

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yield every batch and whether it is taken, and request no more batches than needed."""
        stop = None if self.max_batches is None else (self.max_batches - 1) * self.every + 1
        given = self.batches if self.share is None else self.share.through(self.batches)
        batches = iter(islice(given, stop))
        for number in count():
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RecorderError:
                raise
            except Exception as error:
                raise raised_by(f"batch {number}: the loader", error) from error
            yield batch, self.is_taken(number)

    def is_taken(self, number: int) -> bool:
        """Go on to the batch of this number, and return whether it is taken."""
        self.number = number
        nth, remainder = divmod(number, self.every)
        return remainder == 0 and (self.max_batches is None or nth < self.max_batches)

    @property
    def num_batches(self) -> int | None:
        """The number of batches that will be taken, if the loader knows its length."""
        length = _length(self.batches)
        if length is None:
            return None
        taken = -(-length // self.every)
        return taken if self.max_batches is None else min(taken, self.max_batches)

    @property
    def length(self) -> list[int | None]:
        """The expected numbers of batches to take, and of samples to choose from.

        If these are the same in a later run, the number of samples most likely is too.
        """
        taken, batches = self.num_batches, self.batches
        if isinstance(batches, list | tuple):
            firsts = (one[0] if isinstance(one, list | tuple) and one else one for one in batches)
            samples: int | None = sum(map(len, filter(_has_rows, firsts)))
        else:
            samples = _length(getattr(batches, "sampler", None))
        return [self.max_batches if taken is None else taken, samples]

    def inputs(self, batch: Any) -> Inputs:
        """Return the net's inputs for a batch."""
        given = _first(batch) if self.to_inputs is None else self._said("to_inputs", batch)
        if self.to_inputs is None and not isinstance(given, Tensor | Mapping):
            begins = "" if given is batch else f" that begins with a {type(given).__name__}"
            what = f"batch {self.number} is a {type(batch).__name__}{begins}"
            x = "batch" if given is batch else "batch[0]"
            is_array = isinstance(given, np.ndarray)
            array = f": write to_inputs=lambda batch: torch.from_numpy({x})"
            raise CollectError(f"{what}{array if is_array else f'; {_WRITE}'}")
        inputs = Inputs.of(tuple(given) if isinstance(given, list) else given)
        if inputs is not None:
            odd = [key for key in inputs.kwargs if not isinstance(key, str)]
            if odd:
                raise CollectError(f"the key {odd[0]!r} of a batch can't be a keyword; {_WRITE}")
            return inputs
        raise CollectError(
            f"to_inputs returned a {type(given).__name__} for batch {self.number}: return a "
            "tensor, a tuple of positional inputs, a dict of keyword inputs, or both as a pair "
            "(tuple, dict)"
        )

    def _said(self, name: str, batch: Any) -> Any:
        """Return the result of the caller's function for a batch."""
        try:
            return getattr(self, name)(batch)
        except Exception as error:
            raise raised_by(f"batch {self.number}: {name}", error) from error

    def place_settings(self, *, is_shared: bool) -> dict[str, Any]:
        """Return the settings of this process's share, which must agree on resuming.

        If it is unknown whether a loader splits its dataset, a process must not mistake another
        one's recording for its own, nor the samples that it lacks for collected ones.
        """
        if self.share is not None:
            return {"sampler": self.share.settings}
        here = this_process()
        if here.world_size == 1 or is_shared or self.part is not None:
            return {}
        return {"process": f"rank {here.rank} of {here.world_size}"}

    def placed(self, store: Store, *, by_batches: bool) -> Store:
        """Return the store for these batches: this process's own if a sampler splits them.

        Parameters
        ----------
        store : Store
            The requested store.
        by_batches : bool
            Whether something is kept for whole batches.
        """
        share = share_of(self.batches, has_ids=self.sample_ids is not None)
        if share is None or self.part is not None:
            if share is not None and (share.has_ids or share.problem is not None):
                raise CollectError(
                    f"make_batches({self.part}) gave a loader whose sampler splits its dataset "
                    "among processes, but one process collects a part alone: give it no such "
                    "sampler"
                )
            return store
        placed = store.placed(share.place, share.problem)
        if placed is None:
            # Each process has a store of its own, and need not know the shares of others.
            return store
        if by_batches and share.num_repeats:
            raise CollectError(
                "the sampler repeats samples, but inputs are kept by whole batches: "
                "give it drop_last=True, or record without inputs=True"
            )
        self.share = share
        return placed

    @property
    def may_be_empty(self) -> bool:
        """Whether other processes may have batches if this one has none."""
        return self.part is not None or (self.share is not None and not self.share.is_even)

    @property
    def is_numbering(self) -> bool:
        """Whether ids are running numbers, for which all batches must be counted."""
        return self.sample_ids is None and (self.share is None or not self.share.has_ids)

    @property
    def has_ids(self) -> bool:
        """Whether ids distinguish samples of several processes."""
        return not self.is_numbering or self.part is not None

    def ids(
        self, batch: Any, inputs: Inputs, first: int, number: int | None = None
    ) -> tuple[Ids, int]:
        """Return the ids of a batch's samples, and their number including repeats at the end.

        Parameters
        ----------
        batch : any
            The loader's batch.
        inputs : Inputs
            The net's inputs for it.
        first : int
            The running index of its first sample.
        number : int, optional
            The number of its samples, if known.
        """
        share = self.share
        if self.sample_ids is not None:
            given = self._given_ids(batch, number)
        else:
            number = len(counting_tensor(inputs)) if number is None else number
            if share is None or not share.has_ids:
                first += (self.part or 0) * IDS_OF_A_PART
                return range(first, first + number), number
            given = share.ids(number)
        own = len(given) if share is None else share.num_own(len(given))
        try:
            ids = to_ids(given[:own])
        except ValueError as error:
            raise CollectError(f"sample_ids of batch {self.number}: {error}") from None
        self._seen.add(ids, self.number)
        return ids, len(given)

    def _given_ids(self, batch: Any, number: int | None) -> list[Any]:
        given = self._said("sample_ids", batch)
        values = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise CollectError(
                f"sample_ids returned {given!r} for batch {self.number}: return one integer or "
                "string for each sample"
            )
        ids = list(values)
        if number is not None and len(ids) != number:
            raise CollectError(
                f"sample_ids returned {len(ids)} ids for batch {self.number}, which has {number} "
                "samples by rows=: return one for each"
            )
        return ids

    def forget(self, ids: Ids) -> None:
        """Let the ids of the latest batch come again, since it has failed."""
        if not self.is_numbering:
            self._seen.remove(ids)


def _length(given: Any) -> int | None:
    try:
        return len(given)
    except Exception:
        # Other libraries' samplers may raise anything, and need no length to be iterated over.
        return None


def _has_rows(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim > 0


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def counting_tensor(inputs: Inputs) -> Tensor:
    """Return the input whose first dimension tells how many samples a batch has."""
    first = inputs.args[0] if inputs.args else None
    if _has_rows(first):
        # Usually the first input decides, and the others need not be examined.
        return first
    for tensor in tensors(tuple(inputs)):
        if tensor.ndim > 0:
            return tensor
    named = {**{f"input {place}": one for place, one in enumerate(inputs.args)}, **inputs.kwargs}
    raise CollectError(
        advice_on_lists(named)
        or "the net's input has no tensor that shows the number of samples: write "
        "sample_ids=lambda batch: ... with one id for each sample"
    )


def advice_on_lists(named: Mapping[str, Any]) -> str:
    """Return a sentence on the first input that is a list of numbers; empty if there is none.

    Parameters
    ----------
    named : mapping
        The inputs by name.

    Examples
    --------
    >>> advice_on_lists({"scale": 2})
    ''
    >>> advice_on_lists({"input_ids": [[1, 2]]}).partition(":")[0]
    'input_ids is a list, not a tensor'
    """
    for name, given in named.items():
        if isinstance(given, list) and _is_of_numbers(given):
            return (
                f'{name} is a list, not a tensor: tokenize with return_tensors="pt" (and '
                "padding=True), or make it a tensor with torch.tensor"
            )
    return ""


def _is_of_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _is_of_samples(batches: Any) -> bool:
    # The first dimension of a single sample would count as the number of samples.
    return isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)
