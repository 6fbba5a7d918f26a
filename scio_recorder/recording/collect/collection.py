"""Running a net over a dataset, and keeping what its layers return."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import CollectError
from scio_recorder.nets.records import Inputs
from scio_recorder.postprocessors.assigning import Postprocessors, assign
from scio_recorder.recording.collect.feed import Feed, advise_evaluation, advise_second_element
from scio_recorder.recording.collect.harvest import Harvest
from scio_recorder.stores import Job, Store, as_store
from scio_recorder.tensors.digests import weights_digest

if TYPE_CHECKING:
    from scio_recorder.capture import Capture
    from scio_recorder.recording.collect.options import Options
    from scio_recorder.recording.recording import Recording


@dataclass
class Collection:
    """One call of ``Recorder.collect``, which says what the keywords mean.

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
        writer = store.open(job)
        harvest = Harvest(self.options, writer)
        if not writer.is_complete:
            try:
                advise_evaluation(self.net, stacklevel=3)
                self._go_through(harvest, writer.sample_ids)
            except BaseException:
                harvest.abandon()
                raise
        return harvest.finish(settings)

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

    @torch.no_grad()
    def _go_through(self, harvest: Harvest, durable: Any) -> None:
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
                    harvest.take(batch, ids, skip, partial(self._pass, inputs))
                seen, kept = seen + len(ids), kept + len(ids)
                added = len(ids) - skip
                # All layers have run by then, and no two passes differ in this.
                sample_bytes = sample_bytes or harvest.sample_bytes
                advance(added, added * sample_bytes)
        if is_empty:
            raise CollectError("batches is empty: it gave no batch to run the net on")
        if kept < num_durable:
            raise CollectError(
                f"the recording holds {num_durable} samples already and the loader gave {kept}: "
                "resume with the same loader"
            )

    def _pass(self, inputs: Inputs, sink: Harvest) -> None:
        self.capture.run(
            self.net,
            inputs.args,
            inputs.kwargs,
            given=self._posts,
            stop=self.stop_early,
            sink=sink,
        )

    def _check_boundary(self, skip: int, rows: int) -> None:
        if self.options.with_inputs and skip < rows:
            raise CollectError(
                f"the first {skip} of {rows} samples of a batch are durable already, and inputs "
                "are kept by whole batches: resume with the batch size of before"
            )


def _check_order(given: Any, durable: Any, first: int) -> None:
    for position, (one, other) in enumerate(zip(given, durable, strict=True), first):
        if one != other:
            raise CollectError(
                f"sample {position} of the loader is {one!r} and was {other!r} when the recording "
                "was begun: resume with the same samples in the same order (no shuffling)"
            )
