"""The sink that takes the passes of a collection, and makes a recording of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from scio_recorder.capture.engine import Capture
from scio_recorder.errors import CollectError
from scio_recorder.layer import DepthIdx, text_of
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.postprocessors.assigning import Postprocessors, assign
from scio_recorder.recording.advice import refuse_sample
from scio_recorder.recording.batch_rows import BatchRows
from scio_recorder.recording.continuing import Continuing
from scio_recorder.recording.feed import Feed
from scio_recorder.recording.intake import (
    CurrentBatch,
    ReducingIntake,
    RowColumns,
    StoringIntake,
)
from scio_recorder.recording.options import Options
from scio_recorder.recording.probing import Doubts
from scio_recorder.recording.recording import Recording
from scio_recorder.recording.resuming import (
    check_boundary,
    check_number,
    check_order,
    restore_state,
    state_of,
)
from scio_recorder.recording.rows import Source
from scio_recorder.reductions.base import several
from scio_recorder.stores import Job, State, Store, as_store
from scio_recorder.stores.disk import check_copies
from scio_recorder.stores.disk_format.ids import Ids
from scio_recorder.stores.kept_inputs import KeptCall
from scio_recorder.tensors.digests import Weights, digest_of, weights_digest


@dataclass
class Collection:
    """A sink of passes, whoever runs them: each counts once it has succeeded.

    Once it is open, each batch in turn is begun, taken unless it is durable already, and ended.
    Then the collection is finished, or abandoned.

    Parameters
    ----------
    capture : Capture
        Runs passes of the network.
    feed : Feed
        The batches.
    options : Options
        The options of each layer.
    store, activation_postproc
        As in ``collect``.
    resume : bool
        Whether to continue the store's recording.
    is_of_others : bool, default False
        Whether others run the passes: one may continue the samples of another, and more may follow
        one that fails. Reductions receive copies of a pass when it has ended.
    weights : str, optional
        The digest of the network's weights, if known.
    """

    capture: Capture
    feed: Feed
    options: Options
    store: str | Store | None
    activation_postproc: Postprocessors | None
    resume: bool
    is_of_others: bool = False
    weights: str | None = None

    def open(self) -> None:
        """Open the store, and make what receives the outputs of layers."""
        store = self.feed.placed(as_store(self.store), by_batches=self.options.with_inputs)
        self._check(store)
        self.is_shared, self._length = store.is_shared, self.feed.length
        self._writer = store.open(self.job(is_shared=store.is_shared))
        self._num_durable = len(self._writer.sample_ids)
        self._num_durable_rows = self._writer.num_found_rows
        self._prepare()

    def job(self, *, is_shared: bool) -> Job:
        """Return the job that a store is given, which other processes may share."""
        given, program = self.activation_postproc, self.capture.program
        # Post-processors by layer.
        self.posts = None if given is None else assign(program.architecture, program.order, given)
        # The net's present digest: passes in training mode change its buffers.
        settings = self._settings = self.options.settings(
            self.capture.net,
            self.feed.every,
            self.posts or (),
            to_inputs=self.feed.to_inputs is not None,
            sample_ids=self.feed.sample_ids is not None,
        )
        settings |= self.feed.place_settings(is_shared=is_shared)
        # Not self, which holds the writer: in a cycle, both would wait for the garbage collector.
        net, weights = self.capture.net, self.weights
        return Job(
            self.options.architecture,
            self.options.stored,
            self.feed.num_batches,
            # Reading all weights is only for stores that can be resumed.
            lambda: {**settings, "weights": weights or weights_digest(net)},
            self.resume,
        )

    @property
    def is_complete(self) -> bool:
        """Whether the store held all samples when it was opened."""
        return self._writer.is_complete

    @property
    def needs_batches(self) -> bool:
        """Whether batches are needed: not if a complete recording came from the same length."""
        length = (self._writer.state or {}).get("length")
        return not (self.is_complete and length == self._length)

    def _check(self, store: Store) -> None:
        if self.store is None and self.options.stored:
            architecture = self.options.architecture
            layers = ", ".join(str(architecture[label]) for label in self.options.stored)
            raise CollectError(
                f"store=None keeps only reductions, but there is none for {layers}: give "
                'reduce=, or a store such as "host"'
            )
        if store.is_shared and not (self.feed.has_ids or self.options.has_shards):
            check_copies(self.options.architecture, self.options.recording, store)
            raise CollectError(
                "each process sees samples of its own, and a running index would give different "
                "samples the same id: write sample_ids=lambda batch: ..."
            )
        if self.resume and not store.can_resume:
            raise CollectError(
                f"resume=True needs a store on disk, but store is {self.store!r}: write "
                'store="disk:PATH"'
            )

    def _prepare(self) -> None:
        """Make the intake of each layer, in the state in which a collection was left."""
        options = self.options
        self._current = CurrentBatch()
        # Numbers of samples of all batches so far, and of taken ones, with the rows of the latter.
        self._seen, self._kept, self._kept_rows = 0, 0, 0
        # The current batch: its ids, whether it is taken, and the number of its rows.
        self._ids: Ids = ()
        self._is_taken, self._num_rows = True, 0
        self._row_bytes = 0
        self._continuing = Continuing() if self.is_of_others and options.rows else None
        # Whether batches have their optional entries, by name: all batches or none.
        self._has: dict[str, bool] = {}
        as_they_are = (at for at in options.recording if at not in options.transforms)
        self._doubts = Doubts(self.capture.net, map(options.architecture.__getitem__, as_they_are))
        self._row_columns = RowColumns(self._writer)
        self._storing: dict[DepthIdx, StoringIntake] = {}
        self._reducing: list[ReducingIntake] = []
        self.receivers: dict[DepthIdx, Callable[[Any], None]] = {}
        run_aside = self.capture.site.local.run_aside
        for label in options.recording:
            given = options.transforms.get(label)
            transform = None if given is None else partial(run_aside, given)
            shared = options.architecture[label], transform, self._current
            if label in options.reductions:
                reductions = several(options.reductions[label])
                reducing = ReducingIntake(*shared, reductions, waits=self.is_of_others)
                self._reducing.append(reducing)
                receive = reducing.receive
            else:
                self._storing[label] = StoringIntake(*shared, self._writer, options.dtype)
                receive = self._storing[label].receive
            if options.with_inputs:
                receive = partial(self._receive_with_call, label, receive)
            self.receivers[label] = receive
        # Whether a failed batch may have changed reductions.
        self._is_tainted = False
        self._calls: dict[DepthIdx, dict[str, Any]] = {}
        self._weights = Weights()
        if self._writer.state is not None:
            made = options.reductions, self._storing, self._row_columns
            restore_state(self._writer.state, *made)

    @property
    def is_empty(self) -> bool:
        """Whether no pass counts, of this run or an earlier one."""
        return len(self._writer.sample_ids) == 0

    def begin(self, batch: Any, inputs: Inputs, *, is_taken: bool = True) -> bool:
        """Go on to a batch, and return whether it is to be taken and is not durable already."""
        self._check_trusted()
        self._ids, skip, is_durable, num_repeats = (), 0, False, 0
        rows = self._rows_of(batch, inputs, is_taken)
        self._is_taken = is_taken and (self._continuing is None or self._continuing.is_taken)
        # Given ids need no running index, and continued samples have theirs.
        is_counted = self._is_taken or self.feed.is_numbering
        if is_counted and (rows is None or rows.num_samples):
            number = None if rows is None else rows.num_samples
            if rows is None and self.feed.number == 0 and self.feed.sample_ids is None:
                refuse_sample(self.capture.net, self.options.architecture[0, 1].input_shape, inputs)
            self._ids, number = self.feed.ids(batch, inputs, self._seen, number)
            num_repeats = number - len(self._ids)
            rows = rows or BatchRows.of_samples(number, self.feed.sample_ids is not None)
            if self._is_taken:
                skip = self._num_to_skip(self._ids)
                is_durable = len(self._ids) == skip and skip + num_repeats > 0
        rows = rows or BatchRows.of_samples(0)
        rows = rows.of_some(0, rows.num_samples - num_repeats)
        self._num_rows = rows.num_rows
        if not rows.num_samples:
            # It continues durable samples, and is durable itself if its rows are.
            is_durable = 0 < self._num_rows <= self._num_durable_rows - self._kept_rows
        self._current.begin(batch, rows, skip, self._writer.start, num_repeats)
        return self._is_taken and not (is_durable or self.is_complete)

    def _rows_of(self, batch: Any, inputs: Inputs, is_taken: bool) -> BatchRows | None:
        """Return the rows of a batch; None if they are its samples."""
        options = self.options
        if options.rows is None:
            return None
        root, first = (options.architecture[label] for label in ((0, 1), options.recording[0]))
        named, number = inputs.named(self.capture.net), self.feed.number
        # If others run the passes, they choose the inputs of each.
        has = self._has if self._continuing is None else None
        source = Source(self.capture.net, batch, named, number, str(first), root.input_shape, has)
        if self._continuing is None:
            rows = options.rows.of(source)
        else:
            rows = self._continuing.rows(options.rows, source, self._kept, is_taken=is_taken)
        return self._doubts.settled(rows, inputs)

    def _num_to_skip(self, ids: Ids) -> int:
        """Return the number of samples at the beginning of a batch that are durable already."""
        kept = self._kept
        skip = min(max(0, self._num_durable - kept), len(ids))
        if skip:
            if self.options.with_inputs:
                check_boundary(skip, len(ids))
            check_order(ids[:skip], self._writer.sample_ids[kept : kept + skip], kept)
        return skip

    def take(self, run: Callable[[], Any]) -> Any:
        """Run the pass of the batch, and commit those of its samples that are not durable.

        Parameters
        ----------
        run : callable
            Runs a pass with this sink, and returns the network's output.
        """
        current, self._calls = self._current, {}
        # Before the pass, since one that can't be kept need not run. Rows kept nowhere take no
        # memory.
        if self.store is not None or self.options.keeps_rows:
            self._row_columns.put(current, len(self._writer.sample_ids), self.feed.number)
        try:
            output = run()
        except BaseException:
            self._is_tainted = current.is_reduced
            raise
        self._commit()
        return output

    def _commit(self) -> None:
        """Count the pass, which has succeeded."""
        current = self._current
        try:
            for intake in self._reducing if self.is_of_others else ():
                intake.settle()
        except BaseException:
            self._is_tainted = current.is_reduced
            raise
        # Every layer of every batch would pay for the check.
        if self.options.dtype is not None:
            for storing in self._storing.values():
                storing.settle()
        calls = {text_of(label): call for label, call in sorted(self._calls.items())}
        self._is_tainted = True
        try:
            ids = self._ids[current.skip :]
            rows = None if current.rows.are_samples else current.num_rows
            self._writer.commit(ids, self._state, calls, rows=rows)
        except ValueError as error:
            raise CollectError(str(error)) from None
        self._is_tainted = False

    def drop(self) -> None:
        """Drop the batch, which has failed: it may come again."""
        self._current.batch = None
        for intake in self._reducing:
            intake.drop()
        if self._continuing is not None:
            self._continuing.drop()
        self.feed.forget(self._ids)
        self._ids = ()

    def end(self, output: Any = None) -> tuple[int, int]:
        """Count the batch; return the numbers of samples and bytes that were not durable before.

        Parameters
        ----------
        output : any
            The network's output, if others run the pass.
        """
        self._current.batch = None
        ids, self._ids = self._ids, ()
        self._seen += len(ids)
        if self._continuing is not None:
            self._continuing.settle(output)
        if not self._is_taken:
            return 0, 0
        self._kept += len(ids)
        self._kept_rows += self._num_rows
        if self.is_complete and self.feed.num_batches is None:
            # There may be no end at which to check.
            self._check_number(is_end=False)
        # All layers have run by now, and all passes agree in this.
        self._row_bytes = self._row_bytes or self._writer.row_bytes
        return len(ids) - self._current.skip, self._current.num_rows * self._row_bytes

    def check_end(self) -> None:
        """Refuse the end of the data if fewer samples came than are durable."""
        self._check_trusted()
        if not (self.is_complete and self.is_of_others):
            self._check_number()

    def _check_number(self, *, is_end: bool = True) -> None:
        came, durable = self._kept, self._num_durable
        rows = self._kept_rows if self._num_durable_rows else 0
        check_number(
            (came, rows),
            (durable, self._num_durable_rows),
            is_complete=self.is_complete,
            is_end=is_end,
        )

    def _check_trusted(self) -> None:
        if not self.is_trusted:
            raise CollectError(
                "a reduction failed in the middle of a pass, and holds a part of that pass: "
                "collect again, from the beginning or after the durable samples"
            )

    # The methods of a sink.

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> dict[str, Any]:
        """Copy the inputs that a module is about to receive, and the state in which it will run."""
        architecture = self.options.architecture
        layer = architecture[architecture.calls(module)[0]]
        call = KeptCall(inputs, Moment.of(module, inputs), self._weights.digest(module))
        return self._writer.calls.keep(layer, call)

    def receive_inputs(self, label: DepthIdx, kept: dict[str, Any]) -> None:
        """Take the result of `keep_inputs` for a layer."""
        self._calls[label] = kept

    def _receive_with_call(
        self, label: DepthIdx, receive: Callable[[Any], None], activation: Any
    ) -> None:
        call = self._calls.get(label)
        if call is not None:
            call["output"] = digest_of(activation)
        receive(activation)

    # The end of a collection.

    @property
    def is_trusted(self) -> bool:
        """Whether commits count: no reduction holds a part of a pass that failed."""
        return not self._is_tainted

    def abandon(self) -> None:
        """End early: a durable store keeps what was committed, if that can be trusted."""
        self._writer.abandon(self._state if self.is_trusted else None)

    def finish(self, *, is_complete: bool = True) -> Recording:
        """Return all samples, or their summaries, by layer."""
        held = self._writer.finish(self._state, is_complete=is_complete)
        errors = {
            label: intake.relative_error
            for label, intake in self._storing.items()
            if intake.relative_error is not None
        }
        return Recording(
            self.options.architecture,
            held,
            reductions=self.options.reductions,
            relative_errors=errors,
            settings=self._settings,
        )

    def _state(self) -> State:
        made = self.options.reductions, self._storing, self._row_columns
        return state_of(*made, self._length)
