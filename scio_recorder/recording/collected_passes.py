"""Collecting the passes of a block, whoever runs them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from scio_recorder.capture.checkpoint_regions import is_rerun
from scio_recorder.capture.watch import WHY_NOT_CALLED
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import CollectError, RecorderError
from scio_recorder.nets.records import Inputs
from scio_recorder.postprocessors.assigning import Postprocessors
from scio_recorder.recording.collection import Collection
from scio_recorder.recording.recording import Recording


class CollectedPasses:
    """The passes of a block, collected; its `recording` exists after the block.

    Parameters
    ----------
    collection : Collection
        The collection that takes the passes, and outlives failed ones.
    """

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._recording: Recording | None = None
        self._why_none = "the block has not ended: read `recording` after it"
        # Only one pass at a time can write rows.
        self._lock = threading.RLock()

    @property
    def recording(self) -> Recording:
        """The recording; after an exception, it holds the passes that had ended before.

        Raises
        ------
        CollectError
            The block has not ended, or nothing was collected.
        """
        if self._recording is None:
            raise CollectError(f"there is no recording: {self._why_none}")
        return self._recording

    def __repr__(self) -> str:
        return f"CollectedPasses({self._collection.feed.number})"

    @contextlib.contextmanager
    def open(self, *, progress: bool) -> Iterator[None]:
        """Open the store inside a block.

        Parameters
        ----------
        progress : bool
            Whether to show a progress bar.
        """
        collection = self._collection
        collection.open()
        try:
            with progress_bar("collecting passes", None, is_wanted=progress) as self._advance:
                yield
            collection.check_end()
            if collection.is_empty:
                raise CollectError(
                    "the network was not called in the block, or all passes failed: "
                    f"{WHY_NOT_CALLED}"
                )
        except BaseException as error:
            self._keep_what_ended(error)
            raise
        self._recording = collection.finish()

    def _keep_what_ended(self, error: BaseException) -> None:
        collection = self._collection
        self._why_none = f"the block ended by {error!r}, and no pass that counts before it"
        if collection.is_empty or not collection.is_trusted:
            collection.abandon()
            return
        try:
            self._recording = collection.finish(is_complete=False)
        except RecorderError as failure:
            # The exception in the block must be the one that is reported.
            self._why_none = f"the block ended by {error!r}, and then: {failure}"

    def run(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        given: Postprocessors | None = None,
        records_outputs: bool = True,
    ) -> Any:
        """Run the network, as `Capture.run` does, and collect the pass."""
        collection, capture = self._collection, self._collection.capture
        if not records_outputs or capture.is_running or is_rerun():
            return capture.run(call, args, kwargs, given=given, records_outputs=records_outputs)
        given = capture.acting(given)
        with self._lock:
            try:
                output = self._take(call, Inputs(args, kwargs), given)
            except BaseException:
                collection.drop()
                raise
            self._advance(*collection.end(output))
            collection.feed.number += 1
        return output

    def _take(self, call: Callable[..., Any], inputs: Inputs, given: Postprocessors | None) -> Any:
        collection = self._collection
        capture, batch = collection.capture, inputs.named(collection.capture.net)
        options: dict[str, Any] = {"given": given, "records_outputs": capture.is_watched}
        is_taken = collection.feed.is_taken and not collection.is_complete
        if collection.begin(batch, Inputs((), batch), is_taken=is_taken):
            return collection.take(lambda sink: capture.run(call, *inputs, sink=sink, **options))
        return capture.run(call, *inputs, **options)
