"""Collect the parts of a recording with the actors of a `Ray <https://docs.ray.io>`_ cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

from torch import nn

from scio_recorder import Recording, open_recording
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.lowlevel import CollectOptions, PartKeywords, needing, shows
from scio_recorder.stores import Disk, Store, as_store
from scio_recorder.stores.files import complete_ranks, for_others, medium_at
from scio_recorder.tensors import whole
from scio_recorder.workers.parts import check_make_batches, seen_by_others

with needing("ray", "a collection by actors"):
    import ray

__all__ = ["collect_parts"]

_SECONDS_BETWEEN_LOOKS = 5.0


@shows(PartKeywords)
def collect_parts(
    make_recorder: Callable[[], Any],
    make_batches: Callable[[int], Iterable[Any]],
    num_parts: int,
    *,
    store: str | Store,
    num_workers: int,
    resources: Mapping[str, float] | None = None,
    max_restarts: int = 3,
    **options: Unpack[PartKeywords],
) -> Recording:
    """Collect a dataset in parts, with actors on the machines of a Ray cluster.

    Each actor makes a recorder and calls its ``collect_parts``. Ray restarts actors that die. The
    actor that takes a part next continues it from what was durable.

    Parameters
    ----------
    make_recorder : callable
        Returns a ``Recorder`` with its layers recorded, on the device of the actor.
    make_batches : callable
        ``part -> batches``, as for :meth:`scio_recorder.Recorder.collect_parts`.
    num_parts : int
        The number of parts.
    store : str or Store
        A place to which all machines of the cluster can write: "disk:PATH" on a shared file
        system, or a URL such as "s3://bucket/run".
    num_workers : int
        The number of actors. If the cluster has no room for all of them, those that it has room
        for do the work.
    resources : mapping, optional
        What each actor needs, such as ``{"CPU": 2, "GPU": 1}``; one CPU by default.
    max_restarts : int, default 3
        How often Ray restarts each actor that dies.
    **options
        Those of `CollectOptions`.

    Returns
    -------
    Recording
        All parts.

    Raises
    ------
    CollectError
        As ``collect_parts`` raises it; what an actor raises is raised here, and ends the others. Or
        ``make_recorder`` doesn't return a recorder.
    RecordingError
        As ``collect_parts`` raises it; or all actors have died more often than ``max_restarts``.
        Durable data stays, and the same call continues.

    Notes
    -----
    If no machine of the cluster has ``resources``, Ray says so, and actors wait for one that has.

    Examples
    --------
    >>> import tempfile
    >>> import ray
    >>> import torch
    >>> from scio_recorder import Recorder
    >>> def make_recorder():
    ...     rnet = Recorder(torch.nn.ReLU(), input_size=(1, 2))
    ...     rnet.record("0-1")
    ...     return rnet
    >>> def make_batches(part):
    ...     return [torch.full((3, 2), float(part))]
    >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
    ...     recording = collect_parts(
    ...         make_recorder, make_batches, 4, store=f"disk:{folder}/run", num_workers=2
    ...     )
    """
    number = whole("num_parts", num_parts, 1)
    if _is_recorder(make_recorder) or not callable(make_recorder):
        raise CollectError(
            f"make_recorder is a {type(make_recorder).__name__}: give a function without "
            "arguments that makes a Recorder and chooses its layers, which each actor calls"
        )
    check_make_batches(make_batches)
    seen = seen_by_others(as_store(store))
    # With a path that means the same to all processes.
    where = Disk(for_others(seen.path), seen.chunk_bytes)
    asked = CollectOptions(store=where, **options)
    needs = dict(resources or {"CPU": 1})
    # Resources with keywords of their own in Ray; all others are the user's.
    named = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    kind: Any = ray.remote(_Worker).options(
        **{keyword: needs.pop(name, None) for keyword, name in named.items()},
        resources=needs,
        max_restarts=whole("max_restarts", max_restarts, 0),
        max_task_retries=max_restarts,
    )
    functions = ray.put((make_recorder, make_batches))
    workers = [kind.remote() for _ in range(whole("num_workers", num_workers, 1))]
    try:
        tasks = [worker.collect.remote(functions, number, asked) for worker in workers]
        _wait(tasks, where.path, number, progress=asked.progress)
    finally:
        for worker in workers:
            ray.kill(worker)
    return open_recording(where.path)


class _Worker:
    """The work of an actor."""

    def collect(
        self, functions: tuple[Callable[[], Any], Any], num_parts: int, asked: CollectOptions
    ) -> None:
        make_recorder, make_batches = functions
        rnet = make_recorder()
        if not _is_recorder(rnet):
            raise CollectError(f"make_recorder returned a {type(rnet).__name__}: return a Recorder")
        options = {**vars(asked), "progress": False}
        del options["resume"]
        rnet.collect_parts(make_batches, num_parts, **options)


def _is_recorder(value: Any) -> bool:
    return isinstance(value, nn.Module) and hasattr(value, "collect_parts")


def _wait(tasks: list[Any], path: str, num_parts: int, *, progress: bool) -> None:
    """Wait until an actor returns: then all parts are complete."""
    shown, lost = 0, None
    with progress_bar("collecting parts", num_parts, is_wanted=progress) as advance:
        while tasks:
            done, tasks = ray.wait(tasks, timeout=_SECONDS_BETWEEN_LOOKS)
            for task in done:
                try:
                    ray.get(task)
                except ray.exceptions.RayActorError as error:
                    lost = error
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                else:
                    return
            # Before an actor has begun, there is no recording.
            with contextlib.suppress(OSError), contextlib.closing(medium_at(path)) as medium:
                number = len(complete_ranks(medium))
                advance(0, 0, number - shown)
                shown = number
    raise RecordingError(
        f"all actors have died more often than max_restarts= allows; durable data is in {path}, "
        "and the same call goes on"
    ) from lost
