"""Running a net over a dataset: the loop, and the sink that takes what layers return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from scio_recorder.capture.engine import Capture
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import CollectError
from scio_recorder.layer import DepthIdx, text_of
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.postprocessors.assigning import Postprocessors, assign
from scio_recorder.recording.collect.feed import Feed, advise_evaluation, advise_second_element
from scio_recorder.recording.collect.intake import CurrentBatch, ReducingIntake, StoringIntake
from scio_recorder.recording.collect.options import Options
from scio_recorder.recording.recipes import states_of
from scio_recorder.recording.recording import Recording
from scio_recorder.stores import Job, State, Store, as_store
from scio_recorder.stores.calls import KeptCall
from scio_recorder.stores.disk_format.ids import Ids
from scio_recorder.tensors.digests import Weights, digest_of, weights_digest


@dataclass
class Collection:
    """One call of ``Recorder.collect``: a sink of passes, each of which counts once it ended well.

    Parameters
    ----------
    capture : Capture
        Runs passes.
    net : torch.nn.Module
        The network.
    feed : Feed
        The batches.
    options : Options
        What was asked of each layer.
    """

    capture: Capture
    net: nn.Module
    feed: Feed
    options: Options
    store: str | Store | None
    activation_postproc: Postprocessors | None
    stop_early: bool
    progress: bool
    resume: bool

    def run(self) -> Recording:
        """Go through the batches, and return all samples, or their summaries, by layer."""
        store, given, program = as_store(self.store), self.activation_postproc, self.capture.program
        self._check(store)
        self._posts = None if given is None else assign(program.architecture, program.order, given)
        # Of the net as it is now: passes in training mode change its buffers.
        settings = self.options.settings(
            self.net,
            self.feed.every,
            self._posts or (),
            to_inputs=self.feed.to_inputs is not None,
            sample_ids=self.feed.sample_ids is not None,
        )
        job = Job(
            program.architecture,
            self.options.stored,
            self.feed.num_batches,
            # Reading all weights is for stores that are resumed.
            lambda: {**settings, "weights": weights_digest(self.net)},
            self.resume,
        )
        self._writer = store.open(job)
        self._prepare()
        if not self._writer.is_complete:
            try:
                advise_evaluation(self.net, stacklevel=3)
                self._go_through(self._writer.sample_ids)
            except BaseException:
                # What was committed is kept, if it can be trusted.
                self._writer.abandon(None if self._is_tainted else self._state)
                raise
        return self._finished(settings)

    def _check(self, store: Store) -> None:
        if self.store is None and self.options.stored:
            architecture = self.options.architecture
            layers = ", ".join(str(architecture[label]) for label in self.options.stored)
            raise CollectError(
                f"store=None keeps reductions only, and there is none for {layers}: give "
                'reduce=, or a store such as "host"'
            )
        if store.is_shared and self.feed.sample_ids is None:
            raise CollectError(
                "each of several processes sees samples of its own, and a running index would give "
                "different ones the same id: write sample_ids=lambda batch: ..."
            )
        if self.resume and not store.can_resume:
            raise CollectError(
                f"resume=True needs a store on disk, and store is {self.store!r}: write "
                'store="disk:PATH"'
            )

    def _prepare(self) -> None:
        """Say what takes in each layer, in the state in which a collection was left."""
        options = self.options
        self._current = CurrentBatch()
        self._storing: dict[DepthIdx, StoringIntake] = {}
        self.receivers: dict[DepthIdx, Callable[[Any], None]] = {}
        for label in options.recording:
            shared = options.architecture[label], options.transforms.get(label), self._current
            if label in options.reductions:
                given = options.reductions[label]
                several = given if isinstance(given, list) else [given]
                receive = ReducingIntake(*shared, several).receive
            else:
                self._storing[label] = StoringIntake(*shared, self._writer, options.dtype)
                receive = self._storing[label].receive
            if options.with_inputs:
                receive = partial(self._receive_with_call, label, receive)
            self.receivers[label] = receive
        # Whether a batch that failed may have left something in reductions.
        self._is_tainted = False
        self._calls: dict[DepthIdx, dict[str, Any]] = {}
        self._weights = Weights()
        if self._writer.state is not None:
            self._restore(self._writer.state)

    @torch.no_grad()
    def _go_through(self, durable: Any) -> None:
        """Run the net on all batches, past the samples that are durable already, in order."""
        num_durable = len(durable)
        # Samples the loader has yielded, and those of taken batches among them.
        seen, kept, is_empty = 0, 0, True
        sample_bytes = 0
        is_advised = self.feed.to_inputs is not None
        with progress_bar("collecting", self.feed.num_batches, is_wanted=self.progress) as advance:
            for batch, is_taken in self.feed:
                is_empty = False
                if not is_taken:
                    # Ids that are given need no running index, and batches no look.
                    seen += 0 if self.feed.sample_ids else len(self.feed.ids(batch, None, seen))
                    continue
                is_advised = is_advised or advise_second_element(self.net, batch, stacklevel=5)
                inputs = self.feed.inputs(batch)
                ids = self.feed.ids(batch, inputs, seen)
                skip = min(max(0, num_durable - kept), len(ids))
                if skip:
                    self._check_boundary(skip, len(ids))
                    _check_order(ids[:skip], durable[kept : kept + skip], kept)
                if not 0 < skip == len(ids):
                    self._take(batch, inputs, ids, skip)
                seen, kept = seen + len(ids), kept + len(ids)
                added = len(ids) - skip
                # All layers have run by then, and no two passes differ in this.
                sample_bytes = sample_bytes or sum(
                    intake.sample_bytes for intake in self._storing.values()
                )
                advance(added, added * sample_bytes)
        if is_empty:
            raise CollectError("batches is empty: it gave no batch to run the net on")
        if kept < num_durable:
            raise CollectError(
                f"the recording holds {num_durable} samples already and the loader gave {kept}: "
                "resume with the same loader"
            )

    def _take(self, batch: Any, inputs: Inputs, ids: Ids, skip: int) -> None:
        """Run the pass of a batch, and commit its samples but for the first few."""
        current, self._calls = self._current, {}
        current.begin(batch, len(ids), skip, self._writer.start)
        try:
            args, kwargs = inputs
            stop, given = self.stop_early, self._posts
            self.capture.run(self.net, args, kwargs, given=given, stop=stop, sink=self)
        except BaseException:
            self._is_tainted = current.is_reduced
            raise
        current.batch = None
        # Every layer of every batch would pay for a look.
        if self.options.dtype is not None:
            for intake in self._storing.values():
                intake.settle()
        calls = {text_of(label): call for label, call in sorted(self._calls.items())}
        self._is_tainted = True
        try:
            self._writer.commit(ids[skip:], self._state, calls)
        except ValueError as error:
            raise CollectError(str(error)) from None
        self._is_tainted = False

    def _check_boundary(self, skip: int, rows: int) -> None:
        if self.options.with_inputs and skip < rows:
            raise CollectError(
                f"the first {skip} of {rows} samples of a batch are durable already, and inputs "
                "are kept by whole batches: resume with the batch size of before"
            )

    # What a pass hands over.

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> dict[str, Any]:
        """Copy what a module's forward is about to receive, and the state in which it will run."""
        architecture = self.options.architecture
        layer = architecture[architecture.calls(module)[0]]
        call = KeptCall(inputs, Moment.of(module, inputs), self._weights.digest(module))
        return self._writer.calls.keep(layer, call)

    def receive_inputs(self, label: DepthIdx, kept: dict[str, Any]) -> None:
        """Take what `keep_inputs` returned for a layer."""
        self._calls[label] = kept

    def _receive_with_call(
        self, label: DepthIdx, receive: Callable[[Any], None], activation: Any
    ) -> None:
        call = self._calls.get(label)
        if call is not None:
            call["output"] = digest_of(activation)
        receive(activation)

    # What a collection becomes.

    def _finished(self, settings: dict[str, Any]) -> Recording:
        held = self._writer.finish(self._state)
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
            settings=settings,
        )

    # What goes to disk with the samples, so that a collection can go on.

    def _state(self) -> State:
        rounding = {
            text_of(label): [intake.lost, intake.total]
            for label, intake in self._storing.items()
            if intake.rounds
        }
        return {"reductions": states_of(self.options.reductions), "rounding": rounding}

    def _restore(self, state: State) -> None:
        for label, given in self.options.reductions.items():
            saved = state["reductions"][text_of(label)]
            pairs = zip(given, saved, strict=True) if isinstance(given, list) else [(given, saved)]
            for reduction, one in pairs:
                reduction.load_state_dict(one)
        for label, intake in self._storing.items():
            sums = state["rounding"].get(text_of(label))
            if sums is not None:
                intake.rounds = True
                intake.lost, intake.total = sums


def _check_order(given: Any, durable: Any, first: int) -> None:
    for position, (one, other) in enumerate(zip(given, durable, strict=True), first):
        if one != other:
            raise CollectError(
                f"sample {position} of the loader is {one!r} and was {other!r} when the recording "
                "was begun: resume with the same samples in the same order (no shuffling)"
            )
