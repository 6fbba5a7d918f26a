"""For programs with `Ray <https://docs.ray.io>`_: parts of a recording, by actors of a cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.recording import Recording, open_recording
from scio_recorder.stores import Disk, Store, as_store
from scio_recorder.stores.disk_format.bucket import is_url
from scio_recorder.stores.disk_format.claims import complete_parts
from scio_recorder.stores.disk_format.places import medium_at
from scio_recorder.tensors.arguments import whole

try:
    import ray
except ImportError as error:
    raise ImportError('Ray is not installed: pip install "scio-recorder[ray]"') from error

__all__ = ["collect_parts"]

_SECONDS_BETWEEN_LOOKS = 5.0
# What Ray's actors are given by names of their own; all others are resources of the user's.
_NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


def collect_parts(
    make_recorder: Callable[[], Any],
    make_batches: Callable[[int], Iterable[Any]],
    num_parts: int,
    *,
    store: str | Store,
    num_workers: int,
    resources: Mapping[str, float] | None = None,
    max_restarts: int = 3,
    progress: bool = True,
    **options: Any,
) -> Recording:
    """Collect a dataset in parts, by actors on the machines of a Ray cluster.

    Each actor makes a recorder and calls its ``collect_parts``. Ray restarts actors that die, and
    what one had made durable of a part is gone on with by whoever takes that part next.

    Parameters
    ----------
    make_recorder : callable
        Returns a ``Recorder`` with its layers recorded, on the device that the actor is given.
    make_batches : callable
        ``part -> batches``, as for :meth:`scio_recorder.Recorder.collect_parts`.
    num_parts : int
        How many parts there are.
    store : str or Store
        Where all machines of the cluster can write: "disk:PATH" on a shared file system, or a URL
        such as "s3://bucket/run".
    num_workers : int
        How many actors there are. Where the cluster has no room for all of them, those that it has
        room for do the work.
    resources : mapping, optional
        What each actor needs, such as ``{"CPU": 2, "GPU": 1}``; one CPU by default.
    max_restarts : int, default 3
        How often Ray restarts each actor that dies.
    progress : bool, default True
        Show a progress bar of parts, on a terminal.
    **options : any
        The other keywords of :meth:`scio_recorder.Recorder.collect_parts`, but for ``wait``.

    Returns
    -------
    Recording
        All parts.

    Raises
    ------
    CollectError
        As ``collect_parts`` raises it; what an actor raises is raised here, and ends the others.
    RecordingError
        As ``collect_parts`` raises it; or all actors have died more often than they are restarted.
        What is durable stays, and the same call goes on.

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
    where = _seen_by_all(as_store(store))
    named = {_NAMED.get(name, name): value for name, value in (resources or {"CPU": 1}).items()}
    own = {name: value for name, value in named.items() if name not in _NAMED.values()}
    kind: Any = ray.remote(_Worker).options(
        **{name: value for name, value in named.items() if name not in own},
        resources=own,
        max_restarts=whole("max_restarts", max_restarts, 0),
        max_task_retries=max_restarts,
    )
    functions = ray.put((make_recorder, make_batches))
    workers = [kind.remote() for _ in range(whole("num_workers", num_workers, 1))]
    options = {**options, "store": where, "progress": False}
    try:
        tasks = [worker.collect.remote(functions, number, options) for worker in workers]
        _wait(tasks, where.path, number, progress=progress)
    finally:
        for worker in workers:
            ray.kill(worker)
    return open_recording(where.path)


class _Worker:
    """What an actor does."""

    def collect(
        self, functions: tuple[Callable[[], Any], Any], num_parts: int, options: Any
    ) -> None:
        make_recorder, make_batches = functions
        make_recorder().collect_parts(make_batches, num_parts, **options)


def _seen_by_all(store: Store) -> Disk:
    """Return the store, with a path that means the same to all processes."""
    if not isinstance(store, Disk):
        raise CollectError(
            f"actors need a store that all of them see, and {type(store).__name__} is none: write "
            'store="disk:PATH" on a shared file system, or store="s3://BUCKET/RUN"'
        )
    path = store.path if is_url(store.path) else os.path.abspath(store.path)
    return Disk(path, store.chunk_bytes)


def _wait(tasks: list[Any], path: str, num_parts: int, *, progress: bool) -> None:
    """Return when one of the actors has: then all parts are complete."""
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
            # As long as no actor has begun, there is nothing to look at.
            with contextlib.suppress(OSError), contextlib.closing(medium_at(path)) as medium:
                number = len(complete_parts(medium))
                advance(0, 0, number - shown)
                shown = number
    raise RecordingError(
        f"all actors have died more often than they are restarted; what is durable is in {path}, "
        "and the same call goes on"
    ) from lost
