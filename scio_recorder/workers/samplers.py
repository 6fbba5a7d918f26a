"""Samplers that split a dataset between processes, and the share that they give to this one.

NOTE [Repeats]

``DistributedSampler`` gives all processes equally many samples, and repeats some if needed. It
deals out one list, the dataset in some order, and continues from its beginning after its end. So
repeats are the last samples of a process, and no process must ask another for their number. Its
order follows from its seed and epoch alone, so it is asked for its samples a second time, beside
the loader. A sampler whose order may draw other random numbers can't be asked twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from scio_recorder.errors import CollectError
from scio_recorder.lowlevel import ChosenSamples, Share
from scio_recorder.tensors import ProcessRank, this_process

# Attributes that, besides the dataset, decide the indices that a sampler gives.
_SETTINGS = ("shuffle", "seed", "epoch", "drop_last")
_MOST_WRAPPERS = 8
_OWN_WORDS = "write sample_ids= and Disk(PATH, rank=, world_size=) to say whose samples they are"


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
    here = this_process()
    source = getattr(loader, "batch_sampler", None)
    source = getattr(loader, "sampler", None) if source is None else source
    if any(type(part).__module__.startswith("accelerate.") for part in (loader, dataset, source)):
        number = max(getattr(part, "num_processes", here.world_size) for part in (dataset, source))
        problem = (
            "Accelerate deals out samples in ways that are not followed here: give the loader that "
            f"it was made from, with a DistributedSampler, or {_OWN_WORDS}"
        )
        return Share(here, problem=problem) if number > 1 else None
    if isinstance(dataset, IterableDataset):
        # A stream does not show whether it splits itself: given ids say that it does.
        return Share(here, is_even=False) if has_ids and here.world_size > 1 else None
    chain = _down_to_splitting(source)
    if chain is None or chain[-1].num_replicas == 1:
        return None
    return _share_of_sampler(loader, dataset, chain, has_ids=has_ids)


def refuse_split(loader: Any, part: int) -> None:
    """Refuse a loader for a part whose sampler splits its dataset between processes."""
    share = share_of(loader, has_ids=False)
    if share is not None:
        raise CollectError(
            f"make_batches({part}) gave a loader whose sampler splits its dataset among processes, "
            "but one process collects a part alone: give it no such sampler"
        )


def _share_of_sampler(loader: Any, dataset: Any, chain: list[Any], *, has_ids: bool) -> Share:
    source, sampler = chain[0], chain[-1]
    place = ProcessRank(sampler.rank, sampler.num_replicas)
    size = len(getattr(sampler, "dataset", dataset))
    # A sampler that drops nothing may repeat samples, unless it says otherwise.
    most = size if getattr(sampler, "drop_last", False) is True else size + 1
    repeats = max(0, getattr(sampler, "total_size", most) - size)
    values = {name: getattr(sampler, name, None) for name in _SETTINGS}
    settings = {name: value for name, value in values.items() if isinstance(value, bool | int)}
    is_known = all(map(_is_repeatable, chain))
    num_own = len(range(place.rank, size, place.world_size))
    return Share(
        place,
        partial(_chosen, source, num_own) if is_known else None,
        repeats,
        {"kind": type(sampler).__name__, "samples": size, **settings},
        _problem_of(loader, place, None if is_known else chain, repeats, has_ids=has_ids),
        is_even=is_known,
    )


def _problem_of(
    loader: Any, place: ProcessRank, unknown: list[Any] | None, repeats: int, *, has_ids: bool
) -> str | None:
    """Return why the share can't be known, and what to write."""
    here = this_process()
    if here.world_size > 1 and here != place:
        return (
            f"the sampler gives the samples of rank {place.rank} of {place.world_size}, and this "
            f"process is rank {here.rank} of {here.world_size}: {_OWN_WORDS}"
        )
    kinds = " in a ".join(type(sampler).__name__ for sampler in reversed(unknown or []))
    if unknown is not None and repeats:
        return (
            f"a {kinds} adds repeats, and it is not known which samples they are: give it "
            f"drop_last=True and write sample_ids=, or {_OWN_WORDS}"
        )
    if unknown is not None and not has_ids:
        return (
            f"it is not known which samples a {kinds} chooses: write sample_ids=lambda batch: ... "
            "with one id for each"
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        return (
            "the loader gives batches in another order than its sampler, so their samples can't be "
            f"known: give it in_order=True, or {_OWN_WORDS}"
        )
    return None


def _down_to_splitting(source: Any) -> list[Any] | None:
    """Return a sampler and those that it wraps, down to one that splits; None if there is none."""
    chain = [source]
    while not all(isinstance(getattr(chain[-1], n, None), int) for n in ("num_replicas", "rank")):
        inner = getattr(chain[-1], "batch_sampler", None) or getattr(chain[-1], "sampler", None)
        if inner is None or len(chain) > _MOST_WRAPPERS:
            return None
        chain.append(inner)
    return chain


def _is_repeatable(sampler: Any) -> bool:
    """Whether a sampler gives the same indices each time in an epoch, as those of torch do."""
    return type(sampler).__iter__ in (DistributedSampler.__iter__, BatchSampler.__iter__)


def _chosen(source: Iterable[Any], num_own: int) -> Iterator[ChosenSamples]:
    """Yield the samples of each batch; those behind the first ``num_own`` of all are repeats."""
    for chosen in source:
        indices = list(chosen) if isinstance(chosen, Iterable) else [chosen]
        yield ChosenSamples(indices, max(0, min(num_own, len(indices))))
        num_own -= len(indices)
