"""Running a net over a dataset: the loop over the batches of a collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from scio_recorder.display.progress import Advance
from scio_recorder.errors import CollectError
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.sharded import InStep
from scio_recorder.recording.advice import advise_evaluation, advise_second_element
from scio_recorder.recording.collection import Collection
from scio_recorder.recording.given_ids import check_all
from scio_recorder.recording.naming_batch import naming_batch
from scio_recorder.recording.recording import Recording


def go_through(
    collection: Collection,
    *,
    compiled: Callable[..., Any] | None,
    stop_early: bool,
    progress: AbstractContextManager[Advance],
) -> Recording:
    """Run the net on all batches, and return all samples, or their summaries, by layer.

    Parameters
    ----------
    collection : Collection
        Takes the passes.
    compiled : callable or None
        The recorder, if it is compiled and runs in place of the net.
    stop_early : bool
        Whether the net stops after the last recorded layer.
    progress : context manager
        Gives the function that is called with numbers of samples and bytes.
    """
    capture, net = collection.capture, collection.capture.net
    if compiled is not None:
        _check_compiled(collection, stop_early)

    def run(inputs: Inputs, sink: Collection | None) -> Any:
        args, kwargs = inputs
        options: dict[str, Any] = {"given": collection.posts, "records_outputs": False}
        if compiled is None:
            return capture.run(net, args, kwargs, sink=sink, stop=stop_early, **options)
        call = partial(compiled, *args, activation_postproc=collection.posts, **kwargs)
        return call() if sink is None else capture.hand_on_compiled(call, sink)

    together = InStep(net)
    _open(collection, together)
    if collection.needs_batches or not together.is_alone:
        try:
            advise_evaluation(net)
            _run_batches(collection, run, _leaving_out(collection, together), progress)
        except BaseException:
            collection.abandon()
            raise
    recording = collection.finish()
    # Ids of parts are compared when these are put together, and shards have the same samples.
    is_of_ranks = collection.is_shared and collection.feed.part is None
    if is_of_ranks and recording.path is not None and not collection.options.has_shards:
        check_all(recording.path)
    return recording


def _open(collection: Collection, together: InStep) -> None:
    """Open a collection, or refuse in all processes: one alone would leave others in a pass."""
    try:
        collection.open()
    except Exception:
        together.all(False)
        raise
    if not together.all(True):
        collection.abandon()
        raise CollectError(
            "another process, which runs each pass of this net together with this one, has refused "
            "to collect, and says why: nothing was run"
        )


def _leaving_out(collection: Collection, together: InStep) -> Callable[[bool], bool]:
    """Return a function that says whether to leave out a pass without anything new here.

    See NOTE [Passes in step]. It asks the others, if they run in step with this one, until one of
    them needs a pass.
    """
    if together.is_alone:
        return bool
    asks = collection.resume and collection.is_shared

    def is_left_out(has_nothing_new: bool) -> bool:
        nonlocal asks
        asks = asks and together.all(has_nothing_new)
        return asks

    return is_left_out


@torch.no_grad()
def _run_batches(
    collection: Collection,
    run: Callable[[Inputs, Collection | None], Any],
    is_left_out: Callable[[bool], bool],
    progress: AbstractContextManager[Advance],
) -> None:
    """Run the net on all batches in order, without samples that are durable already."""
    net, feed = collection.capture.net, collection.feed
    is_empty, is_advised = True, feed.to_inputs is not None
    with progress as advance:
        for batch, is_taken in feed:
            is_empty = False
            if not (is_taken or feed.is_numbering):
                # Given ids need no running index.
                continue
            is_advised = is_advised or advise_second_element(net, batch)
            inputs = feed.inputs(batch)
            is_new = collection.begin(batch, inputs, is_taken=is_taken)
            if is_taken and not is_left_out(not is_new):
                own = batch if feed.to_inputs is None else None
                with naming_batch(feed.number, collection.options.architecture, net, inputs, own):
                    if is_new:
                        collection.take(partial(run, inputs, collection))
                    else:
                        run(inputs, None)
            added = collection.end()
            if is_taken:
                advance(*added)
    if is_empty and not feed.may_be_empty:
        used = "; an iterator can be used only once, so give a list, a DataLoader or a new iterator"
        more = used if isinstance(feed.batches, Iterator) else ""
        raise CollectError(f"batches is empty: it gave no batch to run the net on{more}")
    collection.check_end()


def _check_compiled(collection: Collection, stop_early: bool) -> None:
    if stop_early or collection.options.with_inputs:
        what = "stop_early=True" if stop_early else "record(..., inputs=True)"
        raise CollectError(
            f"the recorder is compiled, and {what} needs hooks that compiled code does not run: "
            "leave it out, or collect with a recorder that is not compiled"
        )
