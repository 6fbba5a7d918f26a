"""The loader's side: which batches are taken, their inputs, and their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from scio_recorder.errors import CollectError, RecorderError, raised_by
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.options import CollectOptions
from scio_recorder.recording.rows import advice_on_lists
from scio_recorder.stores import Store
from scio_recorder.stores.disk_format.ids import Ids, to_ids
from scio_recorder.tensors.arguments import ProcessRank, this_process
from scio_recorder.tensors.structures import tensors

_WRITE = (
    "a batch must be a tensor, a tuple or list that begins with one, or a mapping of keywords: "
    "write to_inputs=lambda batch: ... to say what the net is given"
)

# By default sample 5 of part 17 has the id 17_000_000_000_005, whichever process counts, and
# however many samples other parts have.
IDS_OF_A_PART = 10**12


class ChosenSamples(NamedTuple):
    """The samples of a batch that a sampler has chosen; repeats of others' samples come last.

    Parameters
    ----------
    indices : list
        Their indices in the dataset.
    num_own : int
        The number of those that are no repeats.
    """

    indices: list[Any]
    num_own: int


@dataclass
class Share:
    """The share of this process in a dataset that a sampler splits; its repeats come last.

    Parameters
    ----------
    place : ProcessRank
        The rank of this process, and the number of processes.
    batches : callable, optional
        Makes an iterator over the samples of each batch; None if samples have no indices.
    num_repeats : int, default 0
        The number of repeats of all processes together.
    settings : dict, optional
        The settings that decide the shares, in which all processes must agree.
    problem : str, optional
        Why the shares can't be known.
    is_even : bool, default True
        Whether all processes have equally many batches.
    """

    place: ProcessRank
    batches: Callable[[], Iterator[ChosenSamples]] | None = None
    num_repeats: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    is_even: bool = True


@dataclass
class Feed:
    """The batches of one ``collect``, and the numbers and ids of their samples.

    Parameters
    ----------
    batches : iterable
        The loader.
    asked : CollectOptions, optional
        Which batches are taken, and how they are read.
    part : int, optional
        The part of a dataset that these are. It may be empty.
    share : Share, optional
        This process's share, if a sampler splits the data between several.
    """

    batches: Iterable[Any]
    asked: CollectOptions = field(default_factory=CollectOptions)
    part: int | None = None
    share: Share | None = None

    def __post_init__(self) -> None:
        # The number of the current batch, and that of samples before it.
        self.number, self.num_samples = 0, 0
        # The samples of the current batch, if a sampler chooses them.
        self._chosen: ChosenSamples | None = None
        self._seen: set[int | str] = set()
        self._check_batches()

    def _check_batches(self) -> None:
        """Refuse what gives no batches, and what would give other ones than were meant."""
        batches, to_inputs = self.batches, self.asked.to_inputs
        if isinstance(batches, Tensor | np.ndarray):
            is_array = isinstance(batches, np.ndarray)
            kind, x = ("array", "torch.from_numpy(x)") if is_array else ("tensor", "x")
            raise CollectError(
                f"batches is a single {kind}, so its rows would count as batches: write "
                f"batches=[{x}] for one batch, or batches={x}.split(32) for several"
            )
        if isinstance(batches, Mapping) and any(
            to_inputs is None or isinstance(value, Tensor) for value in batches.values()
        ):
            raise CollectError(
                "batches is a mapping, so its keys would count as batches: write batches=[x] if "
                "it is one batch, or batches=x.values() if its values are batches"
            )
        # The first dimension of a single sample would count as the number of samples.
        has_samples = isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)
        if to_inputs is None and has_samples:
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
        """Yield each batch that counts and whether it is taken; request no more than needed."""
        every, most = self.asked.every, self.asked.max_batches
        batches = iter(islice(self.batches, None if most is None else (most - 1) * every + 1))
        chosen = None
        if self.share is not None and self.share.batches is not None:
            chosen = self.share.batches()
        for self.number in count():
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RecorderError:
                raise
            except Exception as error:
                raise raised_by(f"batch {self.number}: the loader", error) from error
            self._chosen = None if chosen is None else next(chosen, ChosenSamples([], 0))
            is_taken = self.is_taken
            # Only running numbers count the others.
            if is_taken or self.is_numbering:
                yield batch, is_taken

    @property
    def is_taken(self) -> bool:
        """Whether the current batch is one of those to take."""
        nth, remainder = divmod(self.number, self.asked.every)
        return remainder == 0 and (self.asked.max_batches is None or nth < self.asked.max_batches)

    @cached_property
    def num_batches(self) -> int | None:
        """The number of batches that will be taken, if the loader knows its length."""
        length = _length(self.batches)
        if length is None:
            return None
        taken, most = -(-length // self.asked.every), self.asked.max_batches
        return taken if most is None else min(taken, most)

    @cached_property
    def length(self) -> list[int | None]:
        """The expected numbers of batches to take, and of samples to choose from.

        If these are the same in a later run, the number of samples most likely is too.
        """
        taken, batches = self.num_batches, self.batches
        if isinstance(batches, list | tuple):
            firsts = map(_first, batches)
            sizes = [len(x) for x in firsts if isinstance(x, Tensor) and x.ndim]
            samples: int | None = sum(sizes)
        else:
            samples = _length(getattr(batches, "sampler", None))
        return [self.asked.max_batches if taken is None else taken, samples]

    def inputs(self, batch: Any) -> Inputs:
        """Return the net's inputs for a batch."""
        is_ours = self.asked.to_inputs is None
        fed = _first(batch) if is_ours else self._result_of("to_inputs", batch)
        if is_ours and not isinstance(fed, Tensor | Mapping):
            begins = "" if fed is batch else f" that begins with a {type(fed).__name__}"
            what = f"batch {self.number} is a {type(batch).__name__}{begins}"
            raise CollectError(f"{what}{_converted(fed, batch)}")
        inputs = Inputs.of(tuple(fed) if isinstance(fed, list) else fed)
        if inputs is not None:
            for key in inputs.kwargs:
                if not isinstance(key, str):
                    raise CollectError(f"the key {key!r} of a batch can't be a keyword; {_WRITE}")
            return inputs
        raise CollectError(
            f"to_inputs returned a {type(fed).__name__} for batch {self.number}: return a "
            "tensor, a tuple of positional inputs, a dict of keyword inputs, or both as a pair "
            "(tuple, dict)"
        )

    def _result_of(self, name: str, batch: Any) -> Any:
        """Return the result of the caller's function for a batch."""
        try:
            return getattr(self.asked, name)(batch)
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
        if self.share is None:
            return store
        placed = store.placed(self.share.place, self.share.problem)
        if placed is None:
            # Each process has a store of its own, and need not know the shares of others.
            self.share = None
            return store
        if by_batches and self.share.num_repeats:
            raise CollectError(
                "the sampler repeats samples, but inputs are kept by whole batches: "
                "give it drop_last=True, or record without inputs=True"
            )
        return placed

    @property
    def may_be_empty(self) -> bool:
        """Whether other processes may have batches if this one has none."""
        return self.part is not None or (self.share is not None and not self.share.is_even)

    @property
    def has_indices(self) -> bool:
        """Whether samples are known by their indices in a dataset."""
        return self.share is not None and self.share.batches is not None

    @property
    def is_numbering(self) -> bool:
        """Whether ids are running numbers, for which all batches must be counted."""
        return self.asked.sample_ids is None and not self.has_indices

    @property
    def has_ids(self) -> bool:
        """Whether ids distinguish samples of several processes."""
        return not self.is_numbering or self.part is not None

    def ids(self, batch: Any, inputs: Inputs, number: int | None = None) -> tuple[Ids, int]:
        """Return the ids of a batch's samples, and their number including repeats at the end.

        Parameters
        ----------
        batch : any
            The loader's batch.
        inputs : Inputs
            The net's inputs for it.
        number : int, optional
            The number of its samples, if known.
        """
        if self.asked.sample_ids is not None:
            all_ids = self._given_ids(batch, number)
        else:
            number = len(counting_tensor(inputs)) if number is None else number
            first = self.num_samples + (self.part or 0) * IDS_OF_A_PART
            if not self.has_indices:
                return range(first, first + number), number
            all_ids = [] if self._chosen is None else self._chosen.indices
        num_own = self._num_own(len(all_ids) if number is None else number)
        try:
            ids = to_ids(all_ids[:num_own])
        except ValueError as error:
            raise CollectError(f"sample_ids of batch {self.number}: {error}") from None
        each: Iterable[Any] = ids
        for place, value in enumerate(each):
            if value in self._seen:
                self._seen.difference_update(ids[:place])
                raise CollectError(
                    f"sample_ids: batch {self.number} has the id {value!r}, which an earlier "
                    "sample has already: give every sample an id of its own"
                )
            self._seen.add(value)
        return ids, len(all_ids)

    def _num_own(self, number: int) -> int:
        """Return how many of a batch's samples, from the first on, are no repeats of a sampler."""
        if self._chosen is None:
            return number
        chosen, num_own = len(self._chosen.indices), self._chosen.num_own
        if number != chosen and (self.asked.sample_ids is None or 0 < num_own < chosen):
            raise CollectError(
                f"the sampler chose {chosen} samples for batch {self.number}, of which it repeats "
                f"{chosen - num_own}, but the batch has {number}, and it is unknown which they "
                "are: write sample_ids=lambda batch: ... with one id for each, or give the sampler "
                "drop_last=True"
            )
        return number if num_own == chosen else num_own

    def _given_ids(self, batch: Any, number: int | None) -> list[Any]:
        result = self._result_of("sample_ids", batch)
        values = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise CollectError(
                f"sample_ids returned {result!r} for batch {self.number}: return one integer or "
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
        self._seen.difference_update(ids)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except Exception:
        # Other libraries' samplers may raise anything, and need no length to be iterated over.
        return None


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def _converted(begin: Any, batch: Any) -> str:
    """Return how to make inputs of what a batch begins with."""
    x = "batch" if begin is batch else "batch[0]"
    if isinstance(begin, np.ndarray):
        return f": write to_inputs=lambda batch: torch.from_numpy({x})"
    texts = begin if isinstance(begin, list | tuple) else [begin]
    if not texts or not all(isinstance(text, str) for text in texts):
        return f"; {_WRITE}"
    # A list of texts begins with one.
    x = "batch" if isinstance(begin, str) else x
    return (
        ": texts must be tokenized, so write to_inputs=lambda batch: "
        f'tokenizer({x}, padding=True, return_tensors="pt")'
    )


def counting_tensor(inputs: Inputs) -> Tensor:
    """Return the input whose first dimension tells how many samples a batch has."""
    first = inputs.args[0] if inputs.args else None
    if isinstance(first, Tensor) and first.ndim:
        # Usually the first input decides, and the others need not be examined.
        return first
    for tensor in tensors(tuple(inputs)):
        if tensor.ndim:
            return tensor
    named = {f"input {place}": value for place, value in enumerate(inputs.args)} | inputs.kwargs
    raise CollectError(
        advice_on_lists(named)
        or "the net's input has no tensor that shows the number of samples: write "
        "sample_ids=lambda batch: ... with one id for each sample"
    )
