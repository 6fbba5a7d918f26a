"""Running a net over a dataset: the loop over the batches of a collection."""

from __future__ import annotations

import torch

from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import CollectError
from scio_recorder.recording.collect.collection import Collection
from scio_recorder.recording.collect.feed import advise_evaluation, advise_second_element
from scio_recorder.recording.recording import Recording


def go_through(collection: Collection, *, stop_early: bool, progress: bool) -> Recording:
    """Run the net on all batches, and return all samples, or their summaries, by layer.

    Parameters
    ----------
    collection : Collection
        What takes the passes.
    stop_early : bool
        Whether the net runs no further than the last recorded layer.
    progress : bool
        Whether to show a progress bar.
    """
    collection.open()
    if not collection.is_complete:
        try:
            advise_evaluation(collection.net, stacklevel=3)
            _run_batches(collection, stop_early, progress)
        except BaseException:
            collection.abandon()
            raise
    return collection.finish()


@torch.no_grad()
def _run_batches(collection: Collection, stop_early: bool, progress: bool) -> None:
    """Run the net on all batches, past the samples that are durable already, in order."""
    net, feed, posts = collection.net, collection.feed, collection.posts
    is_empty, is_advised = True, feed.to_inputs is not None
    with progress_bar("collecting", feed.num_batches, is_wanted=progress) as advance:
        for batch, is_taken in feed:
            is_empty = False
            if not is_taken and feed.sample_ids is not None:
                # Ids that are given need no running index.
                continue
            is_advised = is_advised or advise_second_element(net, batch, stacklevel=5)
            inputs = feed.inputs(batch)
            if collection.begin(batch, inputs, is_taken=is_taken):
                collection.take(net, inputs, given=posts, records_outputs=False, stop=stop_early)
            added = collection.end()
            if is_taken:
                advance(*added)
    if is_empty:
        raise CollectError("batches is empty: it gave no batch to run the net on")
    collection.check_end()
