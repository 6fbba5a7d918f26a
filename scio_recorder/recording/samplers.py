"""Samplers that split a dataset between processes, and the way in which each deals it out.

See the NOTE in `shares.py`. An unknown sampler is accepted as long as it repeats no samples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from scio_recorder.recording.shares import OWN_WORDS, Share, all_left, noting
from scio_recorder.tensors.processes import Place, this_process

# Attributes that, besides the dataset, decide the indices that a sampler gives.
_SETTINGS = (
    "shuffle", "seed", "initial_seed", "epoch", "drop_last",
    "batch_size", "split_batches", "even_batches",
)  # fmt: skip
# Packages whose samplers deal like their base class, or like the sampler that they wrap.
_FAITHFUL = ("torch.utils.data.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
_MOST_WRAPPERS = 8
_DISPATCHES = (
    "the loader's first process reads for all others, so no other knows its samples: "
    f"prepare it with dispatch_batches=False, or {OWN_WORDS}"
)
_NO_INDICES = (
    "samples of an IterableDataset have no indices that identify them: write "
    "sample_ids=lambda batch: ... with one id for each"
)
_WORKERS = (
    "workers read the stream, so it is unknown where it ends and is filled up with repeats: use "
    f"num_workers=0 or drop_last=True, or {OWN_WORDS}"
)
_SKIPS = (
    "the loader skips its first batches: give the loader that it was made from, and resume=True "
    "to continue after the durable samples"
)


def share_of(loader: Any, *, has_ids: bool) -> Share | None:
    """Return the share that a loader gives this process; None if it does not split a dataset.

    Parameters
    ----------
    loader : any
        The loader that is collected.
    has_ids : bool
        Whether ids are given, which distinguish samples of a stream.
    """
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return None
    source = getattr(loader, "batch_sampler", None)
    source = getattr(loader, "sampler", None) if source is None else source
    found = _of_accelerate(loader, dataset, source, has_ids=has_ids)
    if found is None and isinstance(dataset, IterableDataset):
        # A stream does not show whether it splits itself: given ids say that it does.
        found = Share(this_process(), is_even=False) if has_ids else None
    elif found is None:
        found = _of_sampler(source, dataset)
    if found is None or found.place.world_size == 1:
        return None
    found.problem = found.problem or _problem_of(loader, found.place)
    return found


def _problem_of(loader: Any, place: Place) -> str | None:
    here = this_process()
    if here.world_size > 1 and here != place:
        return (
            f"the sampler gives the samples of rank {place.rank} of {place.world_size}, and this "
            f"process is rank {here.rank} of {here.world_size}: {OWN_WORDS}"
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        return (
            "the loader gives batches in another order than its sampler, so their samples can't be "
            f"known: give it in_order=True, or {OWN_WORDS}"
        )
    return None


def _of_sampler(source: Any, dataset: Any) -> Share | None:
    """Return the share of a sampler like ``DistributedSampler``, which deals samples one by one."""
    chain = [source]
    while not _splits(chain[-1]):
        inner = getattr(chain[-1], "batch_sampler", None) or getattr(chain[-1], "sampler", None)
        if inner is None or len(chain) > _MOST_WRAPPERS:
            return None
        chain.append(inner)
    sampler, unknown = chain[-1], _unknown(chain)
    place = Place(sampler.rank, sampler.num_replicas)
    size = len(getattr(sampler, "dataset", dataset))
    # A sampler that drops nothing may repeat samples, unless it says otherwise.
    is_even = getattr(sampler, "drop_last", False) is True
    total = size - size % place.world_size if is_even else size + 1
    total = getattr(sampler, "total_size", total)
    own = len(range(place.rank, size, place.world_size))
    return Share(
        place,
        source,
        all_left if unknown else lambda number, before: own - before,
        max(0, total - size),
        _settings_of(sampler, size),
        unknown if total > size else None,
        is_even=total % place.world_size == 0,
    )


def _splits(sampler: Any) -> bool:
    return all(isinstance(getattr(sampler, name, None), int) for name in ("num_replicas", "rank"))


@dataclass
class _Dealing:
    """The dealing of Accelerate: whole batches in turn, or a share of each batch."""

    place: Place
    batch_size: int
    splits_batches: bool

    @property
    def round(self) -> int:
        """The number of samples before it is the same process's turn again."""
        return self.batch_size * (1 if self.splits_batches else self.place.world_size)

    def first(self, number: int) -> int:
        """Return the list index of the first sample of a batch."""
        return number * self.round + self.place.rank * (self.round // self.place.world_size)


def _of_accelerate(loader: Any, dataset: Any, source: Any, *, has_ids: bool) -> Share | None:
    """Return the share of a loader that Accelerate has prepared."""
    library = sys.modules.get("accelerate.data_loader")
    if library is None:
        return None
    # Their true class: loaders of Accelerate claim the class of those that they wrap.
    if issubclass(type(loader), library.DataLoaderDispatcher):
        return Share(this_process(), problem=_DISPATCHES)
    if isinstance(dataset, library.IterableDatasetShard):
        return _of_stream(loader, dataset, has_ids=has_ids)
    is_skipping = isinstance(source, library.SkipBatchSampler)
    source = source.batch_sampler if is_skipping else source
    if not isinstance(source, library.BatchSamplerShard):
        return None
    found = _of_batches(loader, source)
    skipped: Any = getattr(loader, "skip_batches", None)
    if is_skipping or skipped:
        found.problem = _SKIPS
    return found


def _of_batches(loader: Any, source: Any) -> Share:
    """Return the share of a ``BatchSamplerShard`` of Accelerate."""
    inner, place = source.batch_sampler, Place(source.process_index, source.num_processes)
    # If batches have different sizes, they are dealt out, and repeated, as a whole.
    order: Any = getattr(inner, "sampler", None)
    is_of_batches = source.batch_size is None
    unknown = None if is_of_batches else _unknown([inner])
    dealing = _Dealing(place, 1 if is_of_batches else source.batch_size, source.split_batches)
    size = len(inner if is_of_batches or unknown else order)
    fills = source.even_batches and not source.drop_last

    def num_left(number: int, before: int) -> int:
        left = size - dealing.first(number)
        return left * sys.maxsize if is_of_batches else left

    ordering = {**_settings_of(order, size), "epoch": getattr(loader, "iteration", 0)}
    return Share(
        place,
        source,
        all_left if unknown else num_left,
        -size % dealing.round if fills else 0,
        {**_settings_of(source, size), "order": ordering},
        unknown if fills else None,
        is_even=source.even_batches or source.drop_last,
    )


class _Length:
    """The length of a stream, known when it has ended."""

    def __init__(self) -> None:
        self.value = sys.maxsize
        self._number = 0

    def note(self, sample: Any) -> None:
        """Count a sample."""
        self._number += 1

    def end(self) -> None:
        """Note that the length is final."""
        self.value = self._number


def _of_stream(loader: Any, dataset: Any, *, has_ids: bool) -> Share:
    """Return the share of an ``IterableDatasetShard`` of Accelerate."""
    place, problem = Place(dataset.process_index, dataset.num_processes), None
    dealing, length = _Dealing(place, dataset.batch_size, dataset.split_batches), _Length()
    if not has_ids:
        problem = _NO_INDICES
    elif loader.num_workers and not dataset.drop_last:
        problem = _WORKERS
    return Share(
        place,
        num_left=lambda number, before: length.value - dealing.first(number),
        num_repeats=0 if dataset.drop_last else 1,
        settings=_settings_of(dataset, 0),
        problem=problem,
        beginning=lambda: noting(dataset.dataset, length.note, length.end),
    )


def _settings_of(sampler: Any, size: int) -> dict[str, Any]:
    given = {name: getattr(sampler, name, None) for name in _SETTINGS}
    kept = {name: value for name, value in given.items() if isinstance(value, bool | int)}
    return {"kind": type(sampler).__name__, "samples": size, **kept}


def _unknown(samplers: Sequence[Any]) -> str | None:
    """Explain which sampler may repeat unknown samples; None if all are known."""
    for one in samplers:
        if not str(type(one).__iter__.__module__).startswith(_FAITHFUL):
            return (
                f"a {type(one).__name__} adds repeats, and it is not known which samples "
                f"they are: give it drop_last=True, or {OWN_WORDS}"
            )
    return None
