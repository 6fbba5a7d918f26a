"""Writing a recording behind the back of whoever fills the next chunk.

NOTE [One chunk behind]

Filling a chunk and making one durable take turns on different things: the one waits for the net and
for memory, the other for the disk. So the chunk that is full goes to a thread, and the loop fills
another in the meantime. The next is handed over only when the last is durable: there are never more
than two, and a disk that is slower than the net holds the loop back.

What is handed over must not change, samples and state alike, until that is so. After a failure
nothing more is written: a chunk behind the one that is missing would leave a gap, and samples that
are durable must be the first ones.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from torch import Tensor

from scio_recorder.errors import RecordingError

if TYPE_CHECKING:
    from scio_recorder.stores.disk_format import KeptBatches, Packed, RunWriter
    from scio_recorder.stores.disk_format.ids import Ids


class BackgroundWriter:
    """Writes chunks in a thread, see the NOTE.

    Parameters
    ----------
    path : str
        The folder, for messages.
    writer : RunWriter
        What writes. It belongs to the thread from now on.
    """

    def __init__(self, path: str, writer: RunWriter) -> None:
        self._path = path
        self._writer = writer
        self._owner = os.getpid()
        # Begins with the first chunk: by then loaders have forked their workers.
        self._thread = ThreadPoolExecutor(1, "scio-disk")
        self._pending: Future[None] | None = None

    def append(
        self,
        chunk: dict[str, Tensor],
        ids: Ids,
        state: Packed,
        kept: KeptBatches | None = None,
    ) -> None:
        """Hand over one chunk, once the one before is durable; ``chunk`` is emptied when it is."""
        self.wait()
        self._pending = self._thread.submit(self._append, chunk, ids, state, kept)

    def check(self) -> None:
        """Raise if it is known by now that the last chunk could not be written."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all that was handed over is durable.

        Raises
        ------
        RecordingError, CollectError
            If it can't be; every later call raises the same.
        """
        if not self._is_owned:
            raise RecordingError(
                f"{self._path} is being written by the process that opened it, not this"
            )
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def finish(self, is_complete: bool = True) -> None:
        """Wait until all is durable, and declare the recording complete if it is."""
        self.wait()
        if is_complete:
            self._pending = self._thread.submit(self._writer.finish)
            self.wait()

    def close(self) -> None:
        """End the thread, and give up the lock, after the commit that may be under way."""
        # A forked child has no thread that could do this, and no lock to give up.
        if self._is_owned:
            self._thread.submit(self._writer.abort)
            self._thread.shutdown()

    @property
    def _is_owned(self) -> bool:
        return self._owner == os.getpid()

    def _append(
        self,
        chunk: dict[str, Tensor],
        ids: Ids,
        state: Packed,
        kept: KeptBatches | None,
    ) -> None:
        try:
            self._writer.append(chunk, ids, state=state, kept=kept)
        finally:
            # Memory can't grow while anything refers to it.
            chunk.clear()
