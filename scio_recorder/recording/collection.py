"""Collecting: a collection counts passes, whoever runs them, and makes a recording of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from scio_recorder.capture.checkpoint_regions import is_rerun
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.program import Sink
from scio_recorder.capture.watch import why_not_called
from scio_recorder.display.progress import Advance, progress_bar
from scio_recorder.errors import ArgumentError, CollectError, RecorderError, caught_as
from scio_recorder.layer import TensorSpec, few, text_of
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.sharded import InStep
from scio_recorder.postprocessors.assigning import Postprocessors
from scio_recorder.recording.collect_sink import (
    Batch,
    CollectSink,
    LayerSinks,
)
from scio_recorder.recording.feed import Advice, Feed, raise_for_batch
from scio_recorder.recording.options import LayerOptions
from scio_recorder.recording.recording import Recording, open_recording
from scio_recorder.recording.row_kinds import Continuing
from scio_recorder.recording.rows import BatchRows, Source
from scio_recorder.stores import Job, State, Store, StoreWriter, as_store
from scio_recorder.stores.disk import check_copies
from scio_recorder.stores.disk_format.reader import Ids
from scio_recorder.stores.disk_format.tensor_file import expect
from scio_recorder.stores.files import complete_ranks, medium_at, parsing
from scio_recorder.tensors.digests import WeightDigests, weights_digest


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
        for position, (come, other) in enumerate(zip(ids, durable, strict=False), first):
            if come != other:
                raise CollectError(
                    f"sample {position} of the loader is {come!r}, but was {other!r} when the "
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
        more, has_rows = "" if is_end else " or more", bool(self._rows)
        held = f"{durable[0]} samples" + f" in {durable[1]} rows" * has_rows
        now = f"{came[0]}{more}" + f" in {came[1]}{more} rows" * has_rows
        what = f"holds {held} already, and {now} came now"
        if self.is_complete and came != durable and (is_end or came > durable):
            raise CollectError(
                f"the recording is complete: it {what}. Read it with open_recording, give the "
                "data that it was made from, or choose another folder"
            )
        if not self.is_complete and is_end and (came[0] < durable[0] or came[1] < durable[1]):
            raise CollectError(
                f"the recording {what}: give the same loader, or the same passes, as before"
            )


@dataclass
class Collection:
    """A collection that is about to begin: what is to be collected, and where it is kept.

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
    is_of_others: bool = field(default=False, kw_only=True)
    weights: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.asked = self.feed.asked
        self.layers = LayerOptions(self.capture, self.asked)

    def open(self) -> OpenCollection:
        """Open the store, and return the collection that takes batches."""
        store = self.feed.placed(as_store(self.asked.store), by_batches=self.layers.with_inputs)
        self._check(store)
        return OpenCollection(self, store)

    def settings(self, *, is_shared: bool) -> dict[str, Any]:
        """Return the settings that a recording keeps; other processes may share the store."""
        return {
            **self.layers.settings(self.capture.net),
            **self.feed.place_settings(is_shared=is_shared),
        }

    def job(self, settings: dict[str, Any]) -> Job:
        """Return the job that a store is given."""
        return Job(
            self.layers.architecture,
            self.layers.stored,
            self.feed.num_batches,
            # Reading all weights is only for stores that can be resumed. Their present digest
            # counts: passes in training mode change the net's buffers.
            lambda: {**settings, "weights": self.weights or weights_digest(self.capture.net)},
            self.asked.resume,
        )

    def _check(self, store: Store) -> None:
        architecture, layers = self.layers.architecture, self.layers
        if self.asked.store is None and layers.stored:
            named = few([layers.recorded[label] for label in layers.stored], 3)
            raise CollectError(
                f"store=None keeps only reductions, but there is none for {named}: give "
                'reduce=, or a store such as "host"'
            )
        layers.refuse_shards()
        if store.is_shared and self.feed.is_numbering and self.feed.part is None:
            check_copies(architecture, layers.recording, store)
            raise CollectError(
                "each process sees samples of its own, and a running index would give different "
                "samples the same id: write sample_ids=lambda batch: ..."
            )
        if self.asked.resume and not store.can_resume:
            raise CollectError(
                f'resume=True needs a disk, not {self.asked.store!r}: write store="disk:PATH"'
            )


class OpenCollection:
    """A collection whose store is open: each batch in turn is begun, taken if new, and ended.

    Then the collection is finished, or abandoned.

    Parameters
    ----------
    collection : Collection
        What is to be collected.
    store : Store
        Where it is kept.
    """

    def __init__(self, collection: Collection, store: Store) -> None:
        self.capture, self.feed = collection.capture, collection.feed
        self.asked, self.layers = collection.asked, collection.layers
        # Whether others run the passes, and whether other processes fill the store too.
        self.is_of_others, self.is_shared = collection.is_of_others, store.is_shared
        self._settings = collection.settings(is_shared=store.is_shared)
        self._writer = writer = store.open(collection.job(self._settings))
        self._durable = Durable(writer)
        # Whether the store held all samples when it was opened.
        self.is_complete = writer.is_complete
        self._sinks = LayerSinks(self.layers, writer, waits=self.is_of_others)
        self._weights = WeightDigests() if self.layers.with_inputs else None
        self._continuing = Continuing() if self.is_of_others and self.asked.rows else None
        of_dataset = None if self.is_of_others else self.layers
        self._advice = Advice(self.capture.net, self.asked, of_dataset)
        self._source = partial(
            Source,
            self.capture.net,
            layer=next(iter(self.layers.recorded.values())),
            labelled=self.layers.architecture[0, 1].input_shape,
            # If others run the passes, they choose the inputs of each.
            has=None if self._continuing else {},
        )
        # The names of the columns of rows: the first batch has all of them.
        self._columns: list[str] = []
        # The number of samples at labelling, if known.
        self._labelled: tuple[int] | None = None
        # Whether commits count: no reduction holds a part of a pass that failed.
        self.is_trusted = True
        if writer.state is not None:
            with parsing("the state of the recording to go on with"):
                # Recordings of versions without rows have no columns.
                names = expect(expect(writer.state, dict).get("columns", []), list)
                self._columns = [expect(name, str) for name in names]
                self._sinks.restore(writer.state)

    @property
    def needs_batches(self) -> bool:
        """Whether batches are needed: not if a complete recording came from the same length."""
        length = (self._writer.state or {}).get("length")
        return not (self.is_complete and length == self.feed.length)

    @property
    def is_empty(self) -> bool:
        """Whether no pass counts, of this run or an earlier one."""
        return len(self._writer.sample_ids) == 0

    def begin(self, loaded: Any, inputs: Inputs, *, is_taken: bool = True) -> Batch:
        """Begin a batch: find its rows and ids, and what of it is not durable already.

        Parameters
        ----------
        loaded : any
            The loader's batch.
        inputs : Inputs
            The net's inputs for it.
        is_taken : bool, default True
            Whether it is one of those to take.
        """
        self._check_trusted()
        durable, source = self._durable, self._source(loaded, inputs, self.feed.number)
        self._advice.look_at(source)
        kind, continued, rows = self.asked.rows, None, None
        if self._continuing is not None and kind is not None:
            first = durable.samples_come
            continued, rows = self._continuing.begin(kind, source, first, is_taken=is_taken)
            is_taken &= continued.sequences.is_taken
        elif kind is not None:
            rows = kind.of(source)
        ids, number = self._ids(source, rows, is_taken=is_taken)
        rows = rows or BatchRows(("batch",), (number,), number, labelled=self._labelled)
        num_repeats = number - len(ids)
        if num_repeats:
            rows = rows.of_some(0, rows.num_samples - num_repeats)
        skip = durable.num_to_skip(ids, by_batches=self.layers.with_inputs) if is_taken else 0
        # It may continue durable samples: then it is durable itself if its rows are.
        is_durable = skip == len(ids) if number else durable.holds_rows(rows.num_rows)
        return Batch(
            loaded,
            source.number,
            ids,
            rows.of_some(skip, rows.num_samples) if skip else rows,
            rows.num_rows,
            self._writer.start,
            skip,
            is_part=bool(skip or num_repeats),
            is_taken=is_taken,
            is_new=is_taken and not (is_durable or self.is_complete),
            continued=continued,
        )

    def _ids(self, source: Source, rows: BatchRows | None, *, is_taken: bool) -> tuple[Ids, int]:
        """Return the ids of a batch's samples, and their number with repeats at the end."""
        is_counted = is_taken or self.feed.is_numbering
        if not is_counted or (rows is not None and not rows.num_samples):
            # Given ids need no running index, and continued samples have theirs.
            return (), 0
        number = None if rows is None else rows.num_samples
        ids, number = self.feed.ids(source.batch, source.inputs, number)
        if rows is None and source.number == 0:
            self._labelled = source.number_at_labelling(number)
        return ids, number

    def take(self, batch: Batch, run: Callable[[CollectSink], Any]) -> Any:
        """Run the pass of a batch, and commit those of its samples that are not durable.

        If there are none, only other processes keep something of it, which run it with this one.

        Parameters
        ----------
        batch : Batch
            The batch, which has begun.
        run : callable
            Runs a pass with a sink, and returns the network's output.
        """
        if not batch.is_new:
            return run(CollectSink(self._sinks, batch, self._writer.calls))
        # Before the pass, since one that can't be kept need not run. Rows kept nowhere take no
        # memory.
        if batch.rows.columns and self.layers.keeps_rows:
            self._put_columns(batch)
        sink = CollectSink(self._sinks, batch, self._writer.calls, self._weights)
        try:
            output = run(sink)
            for label, kept in batch.waiting.items():
                self._sinks.reduces[label].reduce(batch, kept)
        except BaseException:
            self.is_trusted = not batch.is_reduced
            raise
        self._commit(batch, sink)
        return output

    def _put_columns(self, batch: Batch) -> None:
        """Keep the facts about each row of a batch, beside the layers."""
        columns, writer = batch.rows.columns, self._writer
        self._columns = self._columns or list(columns)
        for name in self._columns:
            values = columns.get(name)
            if values is None:
                raise CollectError(
                    f"batch {batch.number} has no field {name!r}, which earlier batches had: "
                    "give it with all batches, or say with fields= what to keep"
                )
            if name == "sample":
                values = values + (len(writer.sample_ids) - batch.skip)
            spec = TensorSpec((), values.dtype)
            column = writer.columns.get(name) or writer.column(name, spec, values)
            if values.dtype != column.spec.dtype:
                raise CollectError(
                    f"the field {name!r} is {values.dtype} after {column.spec.dtype}: convert it "
                    "with fields={...: lambda batch: ...}"
                )
            column.place(batch.start, len(values)).copy_(values)

    def _commit(self, batch: Batch, sink: CollectSink) -> None:
        """Count a pass, which has succeeded."""
        # The first pass shows which layers return shards.
        self.layers.refuse_shards()
        self._sinks.count(batch)
        calls = {text_of(label): call for label, call in sorted(sink.calls.items())}
        rows = None if batch.rows.are_samples else batch.rows.num_rows
        self.is_trusted = False
        try:
            self._writer.commit(batch.ids[batch.skip :], self._state, calls, rows=rows)
        except ValueError as error:
            raise CollectError(str(error)) from None
        self.is_trusted = True

    def end(self, batch: Batch, output: Any = None) -> tuple[int, int]:
        """Count a batch; return the numbers of samples and bytes that were not durable before.

        Parameters
        ----------
        batch : Batch
            The batch, which was taken or left out.
        output : any
            The network's output, if others run the pass.
        """
        durable = self._durable
        self.feed.num_samples += len(batch.ids)
        if self._continuing is not None and batch.continued is not None:
            self._continuing.count(batch.continued, output)
        if not batch.is_taken:
            return 0, 0
        durable.samples_come += len(batch.ids)
        durable.rows_come += batch.num_rows
        if self.is_complete and self.feed.num_batches is None:
            # There may be no end at which to check.
            durable.check(is_end=False)
        return len(batch.ids) - batch.skip, batch.rows.num_rows * self._writer.row_bytes

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
        return Recording(
            self.layers.architecture,
            held,
            reductions=self.layers.reductions,
            relative_errors=self._sinks.relative_errors,
            settings=self._settings,
        )

    def _state(self) -> State:
        """Return what resuming needs besides the rows, for a commit."""
        return {**self._sinks.state(), "columns": self._columns, "length": self.feed.length}


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
        What is to be collected.
    compiled : callable or None
        The recorder, if it is compiled and runs in place of the net.
    progress : context manager
        Gives the function that is called with numbers of samples and bytes.
    """
    capture, net, posts = collection.capture, collection.capture.net, collection.layers.posts
    stop = collection.asked.stop_early
    if compiled is not None:
        _check_compiled(collection)

    def run(inputs: Inputs, sink: Sink) -> Any:
        options: Any = {"posts": posts, "records_outputs": False, "stop": stop, "sink": sink}
        if compiled is None:
            return capture.run(net, *inputs, **options)
        call = partial(compiled, *inputs.args, activation_postproc=posts, **inputs.kwargs)
        return capture.hand_on_compiled(call, sink)

    together = InStep(net)
    opened = _opened(collection, together)
    if opened.needs_batches or not together.is_alone:
        try:
            _run_batches(opened, run, _leaving_out(opened, together), progress)
        except BaseException:
            opened.abandon()
            raise
    return opened.finish()


def _opened(collection: Collection, together: InStep) -> OpenCollection:
    """Open a collection, or refuse in all processes: one alone would leave others in a pass."""
    try:
        opened = collection.open()
    except Exception:
        together.all(False)
        raise
    if not together.all(True):
        opened.abandon()
        raise CollectError(
            "another process, which runs each pass of this net together with this one, has refused "
            "to collect, and says why: nothing was run"
        )
    return opened


def _leaving_out(opened: OpenCollection, together: InStep) -> Callable[[bool], bool]:
    """Return a predicate: may this process leave out a pass without anything new here.

    See NOTE [Passes in step] in ``nets/sharded.py``. It asks the others, if they run in step with
    this one, until one of them needs a pass.
    """
    if together.is_alone:
        return bool
    asks = opened.asked.resume and opened.is_shared

    def is_left_out(has_nothing_new: bool) -> bool:
        nonlocal asks
        asks = asks and together.all(has_nothing_new)
        return asks

    return is_left_out


@torch.no_grad()
def _run_batches(
    opened: OpenCollection,
    run: Callable[[Inputs, Sink], Any],
    is_left_out: Callable[[bool], bool],
    progress: contextlib.AbstractContextManager[Advance],
) -> None:
    """Run the net on all batches in order, without samples that are durable already."""
    feed, net, architecture = opened.feed, opened.capture.net, opened.layers.architecture
    with progress as advance:
        for loaded, is_taken in feed:
            inputs = feed.inputs(loaded)
            batch = opened.begin(loaded, inputs, is_taken=is_taken)
            if is_taken and not is_left_out(not batch.is_new):
                try:
                    opened.take(batch, partial(run, inputs))
                except Exception as error:
                    shown = loaded if feed.asked.to_inputs is None else None
                    raise_for_batch(error, feed.number, architecture, net, inputs, shown)
            counted = opened.end(batch)
            if is_taken:
                advance(*counted)
    # Other processes may have batches if this one has none.
    may_be_empty = feed.part is not None or (feed.share is not None and not feed.share.is_even)
    if feed.number == 0 and not may_be_empty:
        used = "; an iterator can be used only once, so give a list, a DataLoader or a new iterator"
        more = used if isinstance(feed.batches, Iterator) else ""
        raise CollectError(f"batches is empty: it gave no batch to run the net on{more}")
    opened.check_end()


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
    opened : OpenCollection
        Takes the passes, and outlives failed ones.
    """

    def __init__(self, opened: OpenCollection) -> None:
        self._opened = opened
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

    def __getitem__(self, key: object) -> NoReturn:
        raise caught_as(
            ArgumentError, TypeError(), f"write collection.recording[{key!r}], after the block"
        )

    def __repr__(self) -> str:
        return f"CollectedPasses({self._opened.feed.number})"

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Take passes inside a block, and make the recording when it ends."""
        opened = self._opened
        bar = progress_bar("collecting passes", None, is_wanted=opened.asked.progress)
        try:
            with bar as self._advance:
                yield
            opened.check_end()
            if opened.is_empty:
                raise CollectError(
                    "the network was not called in the block, or all passes failed: "
                    f"{why_not_called(opened.capture.net)}"
                )
        except BaseException as error:
            self._keep_what_ended(error)
            raise
        self._recording = opened.finish()

    def _keep_what_ended(self, error: BaseException) -> None:
        self._why_none = f"the block ended by {error!r}, and no pass that counts before it"
        if self._opened.is_empty or not self._opened.is_trusted:
            self._opened.abandon()
            return
        try:
            self._recording = self._opened.finish(is_complete=False)
        except RecorderError as failure:
            # The exception in the block must be the one that is reported.
            self._why_none = f"the block ended by {error!r}, and then: {failure}"

    def run(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        posts: Postprocessors | None = None,
        records_outputs: bool = True,
    ) -> Any:
        """Run the network, as `Capture.run` does, and collect the pass."""
        capture = self._opened.capture
        if not records_outputs or capture.is_running or is_rerun():
            return capture.run(call, args, kwargs, posts=posts, records_outputs=records_outputs)
        posts = capture.acting(posts)
        with self._lock:
            return self._collect(call, Inputs(args, kwargs), posts)

    def _collect(
        self, call: Callable[..., Any], inputs: Inputs, posts: Postprocessors | None
    ) -> Any:
        opened, capture = self._opened, self._opened.capture
        named = inputs.named(capture.net)
        is_taken = opened.feed.is_taken and not opened.is_complete
        # Functions of rows and ids may call the network.
        begin = partial(opened.layers.run_aside, opened.begin)
        batch: Batch = begin(named, Inputs((), named), is_taken=is_taken)

        def run(sink: CollectSink | None = None) -> Any:
            is_watched = capture.is_watched
            return capture.run(call, *inputs, posts=posts, records_outputs=is_watched, sink=sink)

        try:
            output = opened.take(batch, run) if batch.is_new else run()
        except BaseException:
            opened.feed.forget(batch.ids)
            raise
        self._advance(*opened.end(batch, output))
        opened.feed.number += 1
        return output


@contextlib.contextmanager
def saying_what_is_durable(
    store: str | Store | None, num_parts: int | None = None
) -> Iterator[None]:
    """Let Ctrl-C or a failing disk say in a note how to continue with what is durable.

    Parameters
    ----------
    store : str, Store or None
        As given to ``collect``.
    num_parts : int, optional
        The number of parts, if processes fill the store in parts.
    """
    try:
        yield
    except (KeyboardInterrupt, OSError) as interruption:
        # A refusal of this library has no number.
        is_failure = getattr(interruption, "errno", 0) is not None
        path = getattr(as_store(store), "path", None)
        text = "" if path is None or not is_failure else what_is_durable(path, num_parts)
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
