"""Running a net over a dataset, and keeping what its layers return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scio_recorder.errors import CollectError
from scio_recorder.recording import Recording
from scio_recorder.recording.collect.feed import Feed
from scio_recorder.recording.collect.harvest import (
    Current,
    Harvest,
    Lane,
    ReducingLane,
    StoringLane,
)
from scio_recorder.recording.collect.options import (
    Reduce,
    Transforms,
    reductions_of,
    transforms_of,
    valid_dtype,
)
from scio_recorder.recording.collect.progress import progress_bar
from scio_recorder.recording.collect.resume_settings import settings_of
from scio_recorder.stores import Job, State, Store, StoreWriter, as_store
from scio_recorder.stores.disk_format.ids import Ids

if TYPE_CHECKING:
    from scio_recorder.capture import Capture
    from scio_recorder.nets.architecture import DepthIdx

__all__ = ["Request", "collect"]


@dataclass(frozen=True)
class Request:
    """The keywords of ``collect``."""

    store: str | Store | None = "auto"
    reduce: Reduce | None = None
    transform: Transforms | None = None
    every: int = 1
    max_batches: int | None = None
    to_inputs: Callable[[Any], Any] | None = None
    sample_ids: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None
    progress: bool = True
    resume: bool = False


def collect(
    capture: Capture, net: nn.Module, batches: Iterable[Any], request: Request
) -> Recording:
    """Run the net over all batches and keep what the recorded layers return.

    Parameters
    ----------
    capture : Capture
        Knows the recorded layers, and runs passes.
    net : torch.nn.Module
        The network.
    batches : iterable
        What a loader yields.
    request : Request
        The keywords, see ``Recorder.collect``.

    Returns
    -------
    Recording
        All samples, or their summaries, by layer.

    Raises
    ------
    CollectError
        The dataset can't be collected as asked.
    RecordingError
        The disk fails, or holds another recording.
    """
    return _Collection(capture, net, batches, request).run()


class _Collection:
    """One call of ``collect``."""

    def __init__(
        self, capture: Capture, net: nn.Module, batches: Iterable[Any], request: Request
    ) -> None:
        self._capture = capture
        self._net = net
        self._request = request
        program = capture.program
        self._architecture = program.architecture
        self._recording = program.recording
        if not self._recording:
            raise CollectError("nothing is selected: choose layers with record(...) first")
        if program.options.inputs and not program.counts_calls:
            raise CollectError('inputs=True can\'t be collected with calls="any": leave one out')
        self._feed = Feed(
            batches, request.every, request.max_batches, request.to_inputs, request.sample_ids
        )
        self._dtype = valid_dtype(request.dtype)
        self._reductions = reductions_of(self._architecture, self._recording, request.reduce)
        self._transforms = transforms_of(self._architecture, self._recording, request.transform)
        self._store = as_store(request.store)
        self._stored = tuple(label for label in self._recording if label not in self._reductions)
        self._check_store()
        # Whether a batch that failed may have left something in reductions.
        self._is_tainted = False

    def run(self) -> Recording:
        """Go through the batches."""
        writer = self._store.open(self._job())
        self._harvest = self._make_harvest(writer)
        self._restore(writer.state)
        if not writer.is_complete:
            try:
                self._run(writer)
            except BaseException:
                writer.abandon(None if self._is_tainted else self._state)
                raise
        return self._recorded(writer)

    def _check_store(self) -> None:
        store, request = self._store, self._request
        if request.store is None and self._stored:
            layers = ", ".join(str(self._architecture[label]) for label in self._stored)
            raise CollectError(
                f"store=None keeps reductions only, and there is none for {layers}: give "
                'reduce=, or a store such as "host"'
            )
        if store.is_shared and request.sample_ids is None:
            raise CollectError(
                "each of several processes sees samples of its own, and a running index would give "
                "different ones the same id: write sample_ids=lambda batch: ..."
            )
        if request.resume and not store.can_resume:
            raise CollectError(
                f"resume=True needs a store on disk, and store is {request.store!r}: write "
                'store="disk:PATH"'
            )

    def _job(self) -> Job:
        request = self._request

        def settings() -> dict[str, Any]:
            inputs = self._capture.program.options.inputs
            return settings_of(
                self._net,
                self._recording,
                self._reductions,
                self._dtype,
                request.every,
                inputs,
                transforms=self._transforms,
                has_to_inputs=request.to_inputs is not None,
                has_sample_ids=request.sample_ids is not None,
            )

        return Job(
            self._architecture, self._stored, self._feed.num_batches, settings, request.resume
        )

    def _make_harvest(self, writer: StoreWriter) -> Harvest:
        current = Current()
        lanes: dict[DepthIdx, Lane] = {}
        for label in self._recording:
            layer, transform = self._architecture[label], self._transforms.get(label)
            reductions = self._reductions.get(label)
            lanes[label] = (
                StoringLane(layer, transform, current, writer, self._dtype)
                if reductions is None
                else ReducingLane(layer, transform, current, reductions)
            )
        return Harvest(lanes, current, self._capture.program.options.inputs)

    @torch.no_grad()
    def _run(self, writer: StoreWriter) -> None:
        durable, seen, kept = writer.sample_ids, 0, 0
        num_durable, sample_bytes, is_empty = len(durable), 0, True
        with progress_bar(self._request.progress, self._feed.num_batches) as advance:
            for batch, is_taken in self._feed:
                is_empty = False
                if not is_taken:
                    seen += self._rows_passed_over(batch, seen)
                    continue
                inputs = self._feed.inputs(batch)
                ids = self._feed.ids(batch, inputs, seen)
                skip = min(max(0, num_durable - kept), len(ids))
                if skip:
                    self._check_boundary(skip, len(ids))
                    _check_order(ids[:skip], durable[kept : kept + skip], kept)
                if not 0 < skip == len(ids):
                    self._pass(writer, batch, inputs, ids, skip)
                seen, kept = seen + len(ids), kept + len(ids)
                added = len(ids) - skip
                # All layers have run by then, and no two passes differ in this.
                sample_bytes = sample_bytes or self._sample_bytes()
                advance(added, added * sample_bytes)
        if is_empty:
            raise CollectError("batches is empty: it gave no batch to run the net on")
        if kept < num_durable:
            raise CollectError(
                f"the recording holds {num_durable} samples already and the loader gave {kept}: "
                "resume with the same loader"
            )

    def _check_boundary(self, skip: int, rows: int) -> None:
        if self._capture.program.options.inputs and skip < rows:
            raise CollectError(
                f"the first {skip} of {rows} samples of a batch are durable already, and inputs "
                "are kept by whole batches: resume with the batch size of before"
            )

    def _rows_passed_over(self, batch: Any, seen: int) -> int:
        # Ids that are given need no running index, so that skipped batches aren't looked at.
        return len(self._feed.ids(batch, None, seen)) if self._request.sample_ids is None else 0

    def _pass(self, writer: StoreWriter, batch: Any, inputs: Any, ids: Ids, skip: int) -> None:
        harvest = self._harvest
        harvest.begin(batch, len(ids), skip, writer.start)
        try:
            self._capture.run(self._net, inputs.args, inputs.kwargs, sink=harvest)
        except BaseException:
            self._is_tainted = harvest.current.is_reduced
            raise
        calls = harvest.end()
        self._is_tainted = True
        try:
            writer.commit(ids[skip:], self._state, calls)
        except ValueError as error:
            raise CollectError(str(error)) from None
        self._is_tainted = False

    def _sample_bytes(self) -> int:
        lanes = self._harvest.lanes.values()
        return sum(lane.sample_bytes for lane in lanes if isinstance(lane, StoringLane))

    def _state(self) -> State:
        reductions = {
            str(self._architecture[label].label): _states(given)
            for label, given in self._reductions.items()
        }
        lanes = self._harvest.lanes.items()
        rounding = {
            str(self._architecture[label].label): [lane.lost, lane.total]
            for label, lane in lanes
            if isinstance(lane, StoringLane) and lane.rounds
        }
        return {"reductions": reductions, "rounding": rounding}

    def _restore(self, state: State | None) -> None:
        if state is None:
            return
        for label, given in self._reductions.items():
            saved = state["reductions"][str(self._architecture[label].label)]
            if isinstance(given, list):
                for reduction, one in zip(given, saved, strict=True):
                    reduction.load_state_dict(one)
            else:
                given.load_state_dict(saved)
        for label, lane in self._harvest.lanes.items():
            sums = state["rounding"].get(str(self._architecture[label].label))
            if isinstance(lane, StoringLane) and sums is not None:
                lane.rounds = True
                lane.lost, lane.total = sums

    def _recorded(self, writer: StoreWriter) -> Recording:
        held = writer.finish(self._state)
        errors = {
            label: lane.relative_error
            for label, lane in self._harvest.lanes.items()
            if isinstance(lane, StoringLane) and lane.relative_error is not None
        }
        return Recording(
            self._architecture,
            held,
            reductions=self._reductions,
            relative_errors=errors,
        )


def _states(given: Any) -> Any:
    return [r.state_dict() for r in given] if isinstance(given, list) else given.state_dict()


def _check_order(given: Any, durable: Any, first: int) -> None:
    for position, (one, other) in enumerate(zip(given, durable, strict=True), first):
        if one != other:
            raise CollectError(
                f"sample {position} of the loader is {one!r} and was {other!r} when the recording "
                "was begun: resume with the same samples in the same order (no shuffling)"
            )
