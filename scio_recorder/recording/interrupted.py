"""Interrupted collections: what is durable, and how to continue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from scio_recorder.errors import RecorderError
from scio_recorder.recording.recording import open_recording
from scio_recorder.stores import Store, as_store
from scio_recorder.stores.disk_format.description import complete_ranks, medium_at


@contextmanager
def saying_what_is_durable(
    store: str | Store | None, num_parts: int | None = None
) -> Iterator[None]:
    """Let Ctrl-C inside the block say in a note how to continue with what is on disk.

    Parameters
    ----------
    store : str, Store or None
        As given to ``collect``.
    num_parts : int, optional
        The number of parts, if processes fill the store in parts.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        path = getattr(as_store(store), "path", None)
        text = "" if path is None else what_is_durable(path, num_parts)
        if text:
            interruption.add_note(text)
        raise


def what_is_durable(path: str, num_parts: int | None) -> str:
    """Say how to continue with what a collection has on disk; empty if there is nothing.

    Parameters
    ----------
    path : str
        Where the recording lies.
    num_parts : int or None
        The number of parts, if there are parts.
    """
    try:
        if num_parts is not None:
            with closing(medium_at(path)) as medium:
                done = len(complete_ranks(medium))
            others = "durable data of the others stays, and the same call goes on"
            return f"{done:,} of {num_parts:,} parts are complete, {others}"
        samples = open_recording(path).num_samples
    except RecorderError:
        # There is no recording yet.
        return ""
    return f"{samples:,} samples are durable, resume=True goes on after them" if samples else ""
