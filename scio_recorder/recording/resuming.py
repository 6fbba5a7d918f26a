"""What is durable of a dataset: counting it while data comes, and how to continue with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from scio_recorder.errors import CollectError, RecorderError
from scio_recorder.recording.recording import open_recording
from scio_recorder.stores import Store, StoreWriter, as_store
from scio_recorder.stores.disk_format.description import complete_ranks, medium_at, read_description
from scio_recorder.stores.disk_format.ids import Ids
from scio_recorder.stores.disk_format.run import refuse_repeated_ids, scan


class Durable:
    """Counts the samples and rows that come, beside those that are durable already.

    Parameters
    ----------
    writer : StoreWriter
        The writer of the store, which has just been opened.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self.is_complete = writer.is_complete
        self._ids = writer.sample_ids
        self._samples, self._rows = len(self._ids), writer.num_found_rows
        # What has come: only batches that are taken count.
        self.samples_come = self.rows_come = 0

    def num_to_skip(self, ids: Ids, *, by_batches: bool) -> int:
        """Return the number of samples at the beginning of a batch that are durable already.

        Parameters
        ----------
        ids : sequence
            The ids of the batch's samples.
        by_batches : bool
            Whether a batch can't be divided.
        """
        first = self.samples_come
        skip = min(max(0, self._samples - first), len(ids))
        if by_batches and 0 < skip < len(ids):
            raise CollectError(
                f"the first {skip} of {len(ids)} samples of a batch are durable already, but "
                "inputs are kept by whole batches: give the previous batch size"
            )
        durable = self._ids[first : first + skip] if skip else ()
        for position, (one, other) in enumerate(zip(ids, durable, strict=False), first):
            if one != other:
                raise CollectError(
                    f"sample {position} of the loader is {one!r}, but was {other!r} when the "
                    "recording began: give the same samples in the same order (no shuffling)"
                )
        return skip

    def holds_rows(self, number: int) -> bool:
        """Whether the next rows, this many, are durable already."""
        return 0 < number <= self._rows - self.rows_come

    def check(self, *, is_end: bool = True) -> None:
        """Refuse data with another number of samples, or of rows, than are durable.

        Parameters
        ----------
        is_end : bool, default True
            Whether all samples have come.
        """
        durable = self._samples, self._rows
        came = self.samples_come, self.rows_come if self._rows else 0
        samples, rows = (f"{number}{'' if is_end else ' or more'}" for number in came)
        counted = (f" in {durable[1]} rows", f" in {rows} rows") if durable[1] else ("", "")
        what = f"holds {durable[0]} samples{counted[0]} already, and {samples}{counted[1]} came now"
        if self.is_complete and came != durable and (is_end or came > durable):
            raise CollectError(
                f"the recording is complete: it {what}. Read it with open_recording, give the "
                "data that it was made from, or choose another folder"
            )
        if not self.is_complete and is_end and (came[0] < durable[0] or came[1] < durable[1]):
            raise CollectError(
                f"the recording {what}: give the same loader, or the same passes, as when it was "
                "begun"
            )


def check_ids_of_all(path: str) -> None:
    """Refuse samples that two processes have; the last one to end sees those of all.

    Parameters
    ----------
    path : str
        The recording that several processes fill, of which this one has ended.
    """
    with closing(medium_at(path)) as medium:
        if len(complete_ranks(medium)) == read_description(medium).world_size:
            refuse_repeated_ids(path, scan(medium))


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
