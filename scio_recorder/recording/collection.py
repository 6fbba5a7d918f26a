"""Collecting: a collection counts passes, whoever runs them, and makes a recording of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scio_recorder.capture.checkpoint_regions import is_rerun
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.watch import why_not_called
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import CollectError, RecorderError
from scio_recorder.layer import few
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.sharded import InStep
from scio_recorder.postprocessors.assigning import Postprocessors
from scio_recorder.recording import advice
from scio_recorder.recording.continuing import Continuing
from scio_recorder.recording.feed import Feed
from scio_recorder.recording.intake import CurrentBatch, Intakes
from scio_recorder.recording.made_with import made_with
from scio_recorder.recording.options import LayerOptions
from scio_recorder.recording.recording import Recording, open_recording
from scio_recorder.recording.rows import BatchRows, Source
from scio_recorder.stores import Job, State, Store, StoreWriter, as_store
from scio_recorder.stores.disk import check_copies
from scio_recorder.stores.disk_format.description import complete_ranks, medium_at, read_description
from scio_recorder.stores.disk_format.ids import Ids
from scio_recorder.stores.disk_format.reader import refuse_repeated_ids, scan
from scio_recorder.tensors.digests import weights_digest


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


@dataclass
class Collection:
    """Counts passes, whoever runs them: each counts once it has succeeded.

    Once it is open, each batch in turn is begun, taken unless it is durable already, and ended.
    Then the collection is finished, or abandoned.

    Parameters
    ----------
    capture : Capture
        Runs passes of the network.
    feed : Feed
        The batches, and the options of ``collect``.
    is_of_others : bool, default False
        Whether others run the passes: one may continue the samples of another, and more may follow
        one that fails. Reductions receive copies of a pass when it has ended.
    weights : str, optional
        The digest of the network's weights, if known.
    """

    capture: Capture
    feed: Feed
    is_of_others: bool = False
    weights: str | None = None

    def __post_init__(self) -> None:
        self.asked = self.feed.asked
        self.layers = LayerOptions(self.capture, self.asked)
        self._continuing = Continuing() if self.is_of_others and self.asked.rows else None
        # Whether batches have their optional entries, by name: all batches or none.
        self._has: dict[str, bool] = {}
        # The number of samples at labelling, if known.
        self._labelled: tuple[int] | None = None
        # The current batch, whether it is taken, and the number of its rows without repeats.
        self._current, self._is_taken, self._num_own_rows = CurrentBatch(), True, 0

    def open(self) -> None:
        """Open the store, and make what receives the outputs of layers."""
        store = self.feed.placed(as_store(self.asked.store), by_batches=self.layers.with_inputs)
        self._check(store)
        self.is_shared = store.is_shared
        self._writer = store.open(self.job(is_shared=store.is_shared))
        self._durable = Durable(self._writer)
        self._intakes = Intakes(self.layers, self._writer, waits=self.is_of_others)

    def job(self, *, is_shared: bool) -> Job:
        """Return the job that a store is given, which other processes may share."""
        # The net's present digest: passes in training mode change its buffers.
        settings = self._settings = self.layers.settings(self.capture.net)
        settings |= self.feed.place_settings(is_shared=is_shared)
        settings["made_with"] = made_with(self.capture.net)
        # Not self, which holds the writer: in a cycle, both would wait for the garbage collector.
        net, weights = self.capture.net, self.weights
        return Job(
            self.layers.architecture,
            self.layers.stored,
            self.feed.num_batches,
            # Reading all weights is only for stores that can be resumed.
            lambda: {**settings, "weights": weights or weights_digest(net)},
            self.asked.resume,
        )

    def _check(self, store: Store) -> None:
        architecture, layers = self.layers.architecture, self.layers
        if self.asked.store is None and layers.stored:
            named = few([architecture[label] for label in layers.stored], 3)
            raise CollectError(
                f"store=None keeps only reductions, but there is none for {named}: give "
                'reduce=, or a store such as "host"'
            )
        if store.is_shared and not (self.feed.has_ids or layers.has_shards):
            check_copies(architecture, layers.recording, store)
            raise CollectError(
                "each process sees samples of its own, and a running index would give different "
                "samples the same id: write sample_ids=lambda batch: ..."
            )
        if self.asked.resume and not store.can_resume:
            raise CollectError(
                f"resume=True needs a store on disk, but store is {self.asked.store!r}: write "
                'store="disk:PATH"'
            )

    @property
    def is_complete(self) -> bool:
        """Whether the store held all samples when it was opened."""
        return self._durable.is_complete

    @property
    def needs_batches(self) -> bool:
        """Whether batches are needed: not if a complete recording came from the same length."""
        length = (self._writer.state or {}).get("length")
        return not (self.is_complete and length == self.feed.length)

    @property
    def is_empty(self) -> bool:
        """Whether no pass counts, of this run or an earlier one."""
        return len(self._writer.sample_ids) == 0

    @property
    def is_trusted(self) -> bool:
        """Whether commits count: no reduction holds a part of a pass that failed."""
        return not self._intakes.holds_failed_pass

    def begin(self, batch: Any, inputs: Inputs, *, is_taken: bool = True) -> bool:
        """Go on to a batch, and return whether it is to be taken and is not durable already."""
        self._check_trusted()
        durable, with_inputs = self._durable, self.layers.with_inputs
        rows = self._rows_of(batch, inputs, is_taken)
        self._is_taken = is_taken and (self._continuing is None or self._continuing.is_taken)
        ids, number = self._ids_of(batch, inputs, rows)
        skip = durable.num_to_skip(ids, by_batches=with_inputs) if self._is_taken else 0
        rows = rows or BatchRows.of_samples(number, self._labelled)
        num_repeats = number - len(ids)
        own = rows.of_some(0, rows.num_samples - num_repeats) if num_repeats else rows
        self._num_own_rows = own.num_rows
        # It may continue durable samples: then it is durable itself if its rows are.
        is_durable = skip == len(ids) if number else durable.holds_rows(own.num_rows)
        kept = own.of_some(skip, own.num_samples) if skip else own
        is_part = bool(skip or num_repeats)
        start = self._writer.start
        self._current = CurrentBatch(batch, self.feed.number, ids, kept, skip, is_part, start)
        return self._is_taken and not (is_durable or durable.is_complete)

    def _rows_of(self, batch: Any, inputs: Inputs, is_taken: bool) -> BatchRows | None:
        """Return the rows of a batch; None if they are its samples."""
        kind = self.asked.rows
        if kind is None:
            return None
        source = self._source(batch, inputs)
        if self._continuing is None:
            return kind.of(source)
        return self._continuing.rows(kind, source, self._durable.samples_come, is_taken=is_taken)

    def _ids_of(self, batch: Any, inputs: Inputs, rows: BatchRows | None) -> tuple[Ids, int]:
        """Return the ids of a batch's samples, and their number with repeats at the end."""
        is_counted = self._is_taken or self.feed.is_numbering
        if not is_counted or (rows is not None and not rows.num_samples):
            # Given ids need no running index, and continued samples have theirs.
            return (), 0
        if rows is not None:
            return self.feed.ids(batch, inputs, rows.num_samples)
        is_first = self.feed.number == 0
        shapes = self._source(batch, inputs).shapes_at_labelling() if is_first else []
        if is_first and self.asked.sample_ids is None:
            advice.refuse_sample(shapes, inputs)
        ids, number = self.feed.ids(batch, inputs)
        if is_first:
            self._labelled = advice.labelled_number(shapes, number)
        return ids, number

    def _source(self, batch: Any, inputs: Inputs) -> Source:
        """Return where the entries of a batch are looked up."""
        net, architecture = self.capture.net, self.layers.architecture
        first, shapes = architecture[self.layers.recording[0]], architecture[0, 1].input_shape
        # If others run the passes, they choose the inputs of each.
        has = self._has if self._continuing is None else None
        return Source(net, batch, inputs.named(net), self.feed.number, first, shapes, has)

    def take(self, run: Callable[[Intakes], Any]) -> Any:
        """Run the pass of the batch, and commit those of its samples that are not durable.

        Parameters
        ----------
        run : callable
            Runs a pass with a sink, and returns the network's output.
        """
        return self._intakes.take(self._current, run, self._state)

    def drop(self) -> None:
        """Drop the batch, which has failed: it may come again."""
        self.feed.forget(self._current.ids)
        self._current = CurrentBatch()
        self._intakes.drop()
        if self._continuing is not None:
            self._continuing.drop()

    def end(self, output: Any = None) -> tuple[int, int]:
        """Count the batch; return the numbers of samples and bytes that were not durable before.

        Parameters
        ----------
        output : any
            The network's output, if others run the pass.
        """
        current, durable = self._current, self._durable
        # The next batch may be refused before it begins.
        self._current, current.batch = CurrentBatch(), None
        self.feed.num_samples += len(current.ids)
        if self._continuing is not None:
            self._continuing.count_pass(output)
        if not self._is_taken:
            return 0, 0
        durable.samples_come += len(current.ids)
        durable.rows_come += self._num_own_rows
        if durable.is_complete and self.feed.num_batches is None:
            # There may be no end at which to check.
            durable.check(is_end=False)
        return len(current.ids) - current.skip, current.rows.num_rows * self._writer.row_bytes

    def check_end(self) -> None:
        """Refuse the end of the data if fewer samples came than are durable."""
        self._check_trusted()
        if not (self.is_complete and self.is_of_others):
            self._durable.check()

    def _check_trusted(self) -> None:
        if not self.is_trusted:
            raise CollectError(
                "a reduction failed in the middle of a pass, and holds a part of that pass: "
                "collect again, from the beginning or after the durable samples"
            )

    def abandon(self) -> None:
        """End early: a durable store keeps what was committed, if that can be trusted."""
        self._writer.abandon(self._state if self.is_trusted else None)

    def finish(self, *, is_complete: bool = True) -> Recording:
        """Return all samples, or their summaries, by layer."""
        held = self._writer.finish(self._state, is_complete=is_complete)
        errors = {
            label: storing.relative_error
            for label, storing in self._intakes.storing.items()
            if storing.rounds
        }
        return Recording(
            self.layers.architecture,
            held,
            reductions=self.layers.reductions,
            relative_errors=errors,
            settings=self._settings,
        )

    def _state(self) -> State:
        return {**self._intakes.state(), "length": self.feed.length}


def go_through(
    collection: Collection,
    *,
    compiled: Callable[..., Any] | None,
    progress: contextlib.AbstractContextManager[Advance],
) -> Recording:
    """Run the net on all batches, and return all samples, or their summaries, by layer.

    Parameters
    ----------
    collection : Collection
        Takes the passes.
    compiled : callable or None
        The recorder, if it is compiled and runs in place of the net.
    progress : context manager
        Gives the function that is called with numbers of samples and bytes.
    """
    capture, net, posts = collection.capture, collection.capture.net, collection.layers.posts
    stop = collection.asked.stop_early
    if compiled is not None:
        _check_compiled(collection)

    def run(inputs: Inputs, sink: Intakes | None) -> Any:
        args, kwargs = inputs
        if compiled is None:
            return capture.run(
                net, args, kwargs, given=posts, records_outputs=False, stop=stop, sink=sink
            )
        call = partial(compiled, *args, activation_postproc=posts, **kwargs)
        return call() if sink is None else capture.hand_on_compiled(call, sink)

    together = InStep(net)
    _open(collection, together)
    if collection.needs_batches or not together.is_alone:
        try:
            advice.advise_evaluation(net)
            _run_batches(collection, run, _leaving_out(collection, together), progress)
        except BaseException:
            collection.abandon()
            raise
    recording = collection.finish()
    # Ids of parts are compared when these are put together, and shards have the same samples.
    is_of_ranks = collection.is_shared and collection.feed.part is None
    if is_of_ranks and recording.path is not None and not collection.layers.has_shards:
        check_ids_of_all(recording.path)
    return recording


def check_ids_of_all(path: str) -> None:
    """Refuse samples that two processes have; the last one to end sees those of all.

    Parameters
    ----------
    path : str
        The recording that several processes fill, of which this one has ended.
    """
    with contextlib.closing(medium_at(path)) as medium:
        if len(complete_ranks(medium)) == read_description(medium).world_size:
            refuse_repeated_ids(path, scan(medium))


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
    """Return a predicate: may this process leave out a pass without anything new here.

    See NOTE [Passes in step] in ``nets/sharded.py``. It asks the others, if they run in step with
    this one, until one of them needs a pass.
    """
    if together.is_alone:
        return bool
    asks = collection.asked.resume and collection.is_shared

    def is_left_out(has_nothing_new: bool) -> bool:
        nonlocal asks
        asks = asks and together.all(has_nothing_new)
        return asks

    return is_left_out


@torch.no_grad()
def _run_batches(
    collection: Collection,
    run: Callable[[Inputs, Intakes | None], Any],
    is_left_out: Callable[[bool], bool],
    progress: contextlib.AbstractContextManager[Advance],
) -> None:
    """Run the net on all batches in order, without samples that are durable already."""
    net, feed = collection.capture.net, collection.feed
    is_ours = feed.asked.to_inputs is None
    is_advised = not is_ours
    may_count_padding = advice.takes_positions(net)
    with progress as advance:
        for batch, is_taken in feed:
            is_advised = is_advised or advice.advise_second_element(net, batch)
            inputs = feed.inputs(batch)
            if may_count_padding:
                may_count_padding = not advice.advise_positions(inputs.named(net))
            is_new = collection.begin(batch, inputs, is_taken=is_taken)
            if is_taken and not is_left_out(not is_new):
                try:
                    if is_new:
                        collection.take(partial(run, inputs))
                    else:
                        run(inputs, None)
                except Exception as error:
                    own, architecture = batch if is_ours else None, collection.layers.architecture
                    advice.raise_for_batch(error, feed.number, architecture, net, inputs, own)
            added = collection.end()
            if is_taken:
                advance(*added)
    if feed.number == 0 and not feed.may_be_empty:
        used = "; an iterator can be used only once, so give a list, a DataLoader or a new iterator"
        more = used if isinstance(feed.batches, Iterator) else ""
        raise CollectError(f"batches is empty: it gave no batch to run the net on{more}")
    collection.check_end()


def _check_compiled(collection: Collection) -> None:
    stop_early = collection.asked.stop_early
    if stop_early or collection.layers.with_inputs:
        what = "stop_early=True" if stop_early else "record(..., inputs=True)"
        raise CollectError(
            f"the recorder is compiled, and {what} needs hooks that compiled code does not run: "
            "leave it out, or collect with a recorder that is not compiled"
        )


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
                    f"{why_not_called(collection.capture.net)}"
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
        # Functions of rows and ids may call the network.
        begin = partial(collection.layers.run_aside, collection.begin)
        if begin(batch, Inputs((), batch), is_taken=is_taken):
            return collection.take(lambda sink: capture.run(call, *inputs, sink=sink, **options))
        return capture.run(call, *inputs, **options)


@contextlib.contextmanager
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
            with contextlib.closing(medium_at(path)) as medium:
                done = len(complete_ranks(medium))
            others = "durable data of the others stays, and the same call goes on"
            return f"{done:,} of {num_parts:,} parts are complete, {others}"
        samples = open_recording(path).num_samples
    except RecorderError:
        # There is no recording yet.
        return ""
    return f"{samples:,} samples are durable, resume=True goes on after them" if samples else ""
