"""Running a net over a dataset, and keeping what its layers return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import CollectError
from scio_recorder.nets.records import Inputs
from scio_recorder.postprocessors.assigning import Postprocessors, assign
from scio_recorder.recording.collect.advice import (
    advise_evaluation,
    takes_second_element,
    warn_of_second_element,
)
from scio_recorder.recording.collect.feed import Feed
from scio_recorder.recording.collect.harvest import Harvest
from scio_recorder.recording.collect.options import (
    Reduce,
    Transforms,
    reductions_of,
    transforms_of,
    valid_dtype,
)
from scio_recorder.recording.collect.resume_settings import settings_of
from scio_recorder.stores import Job, Store, as_store
from scio_recorder.tensors.digests import weights_digest

if TYPE_CHECKING:
    from scio_recorder.capture import Capture
    from scio_recorder.recording.recording import Recording


@dataclass
class Collection:
    """One call of ``Recorder.collect``, which says what the keywords mean.

    Parameters
    ----------
    capture : Capture
        Knows the recorded layers, and runs passes.
    net : torch.nn.Module
        The network.
    batches : iterable
        What a loader yields.
    """

    capture: Capture
    net: nn.Module
    batches: Iterable[Any]
    store: str | Store | None = "auto"
    reduce: Reduce | None = None
    transform: Transforms | None = None
    every: int = 1
    max_batches: int | None = None
    to_inputs: Callable[[Any], Any] | None = None
    sample_ids: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None
    activation_postproc: Postprocessors | None = None
    stop_early: bool = False
    progress: bool = True
    resume: bool = False

    def __post_init__(self) -> None:
        program = self.capture.program
        architecture, recording = program.architecture, program.recording
        if not recording:
            raise CollectError("nothing is selected: choose layers with record(...) first")
        if program.options.inputs and not program.counts_calls:
            raise CollectError('inputs=True can\'t be collected with calls="any": leave one out')
        self._feed = Feed(
            self.batches, self.every, self.max_batches, self.to_inputs, self.sample_ids
        )
        self._dtype = valid_dtype(self.dtype)
        self._reductions = reductions_of(architecture, recording, self.reduce)
        self._transforms = transforms_of(architecture, recording, self.transform)
        given = self.activation_postproc
        self._posts = None if given is None else assign(architecture, program.order, given)
        self._store = as_store(self.store)
        self._stored = tuple(label for label in recording if label not in self._reductions)
        self._check_store()

    def run(self) -> Recording:
        """Go through the batches, and return all samples, or their summaries, by layer."""
        program = self.capture.program
        # Of the net as it is now: passes in training mode change its buffers.
        settings = self._settings()
        writer = self._store.open(self._job(settings))
        harvest = Harvest(
            program.architecture,
            program.recording,
            self._reductions,
            self._transforms,
            self._dtype,
            writer,
            program.options.inputs,
        )
        if not writer.is_complete:
            try:
                advise_evaluation(self.net, stacklevel=3)
                self._go_through(harvest, writer.sample_ids)
            except BaseException:
                harvest.abandon()
                raise
        return harvest.finish(settings)

    def _check_store(self) -> None:
        if self.store is None and self._stored:
            architecture = self.capture.program.architecture
            layers = ", ".join(str(architecture[label]) for label in self._stored)
            raise CollectError(
                f"store=None keeps reductions only, and there is none for {layers}: give "
                'reduce=, or a store such as "host"'
            )
        if self._store.is_shared and self.sample_ids is None:
            raise CollectError(
                "each of several processes sees samples of its own, and a running index would give "
                "different ones the same id: write sample_ids=lambda batch: ..."
            )
        if self.resume and not self._store.can_resume:
            raise CollectError(
                f"resume=True needs a store on disk, and store is {self.store!r}: write "
                'store="disk:PATH"'
            )

    def _settings(self) -> dict[str, Any]:
        program = self.capture.program
        return settings_of(
            self.net,
            program.recording,
            self._reductions,
            self._dtype,
            self.every,
            program.options.inputs,
            transforms=self._transforms,
            postprocessors=self._posts or (),
            has_to_inputs=self.to_inputs is not None,
            has_sample_ids=self.sample_ids is not None,
        )

    def _job(self, settings: dict[str, Any]) -> Job:
        return Job(
            self.capture.program.architecture,
            self._stored,
            self._feed.num_batches,
            # Reading all weights is for stores that are resumed.
            lambda: {**settings, "weights": weights_digest(self.net)},
            self.resume,
        )

    @torch.no_grad()
    def _go_through(self, harvest: Harvest, durable: Any) -> None:
        """Run the net on all batches, past the samples that are durable already, in order."""
        num_durable = len(durable)
        # Samples the loader has yielded, and those of taken batches among them.
        seen, kept, is_empty = 0, 0, True
        sample_bytes = 0
        is_advised = self.to_inputs is not None
        with progress_bar("collecting", self._feed.num_batches, is_wanted=self.progress) as advance:
            for batch, is_taken in self._feed:
                is_empty = False
                if not is_taken:
                    # Ids that are given need no running index, and batches no look.
                    seen += 0 if self.sample_ids else len(self._feed.ids(batch, None, seen))
                    continue
                if not is_advised and takes_second_element(self.net, batch):
                    is_advised = True
                    warn_of_second_element(batch, stacklevel=5)
                inputs = self._feed.inputs(batch)
                ids = self._feed.ids(batch, inputs, seen)
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
        if self.capture.program.options.inputs and skip < rows:
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
