"""The sink of ``collect``: hands what layers return to stores and reductions as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from scio_recorder.errors import CollectError
from scio_recorder.layer import text_of
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.recording.collect.intake import (
    CurrentBatch,
    ReducingIntake,
    StoringIntake,
)
from scio_recorder.recording.recording import Recording
from scio_recorder.stores import Held
from scio_recorder.stores.calls import KeptCall
from scio_recorder.stores.disk_format.ids import Ids
from scio_recorder.tensors.digests import Weights, digest_of

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.recording.collect.options import Options
    from scio_recorder.stores import State, StoreWriter


class Harvest:
    """Takes the activations of one pass after the other; a pass counts when it has ended well.

    Parameters
    ----------
    options : Options
        What was asked of each layer.
    writer : StoreWriter
        Where samples go.
    """

    def __init__(self, options: Options, writer: StoreWriter) -> None:
        self._options = options
        self._writer = writer
        self._current = CurrentBatch()
        self._storing: dict[DepthIdx, StoringIntake] = {}
        self.receivers: dict[DepthIdx, Callable[[Any], None]] = {}
        for label in options.recording:
            shared = options.architecture[label], options.transforms.get(label), self._current
            if label in options.reductions:
                receive = ReducingIntake(*shared, options.reductions[label]).receive
            else:
                storing = self._storing[label] = StoringIntake(*shared, writer, options.dtype)
                receive = storing.receive
            if options.with_inputs:
                receive = partial(self._receive_with_call, label, receive)
            self.receivers[label] = receive
        # Whether a batch that failed may have left something in reductions.
        self._is_tainted = False
        self._calls: dict[DepthIdx, dict[str, Any]] = {}
        self._weights = Weights()
        self._restore(writer.state)

    # What a pass hands over.

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> dict[str, Any]:
        """Copy what a module's forward is about to receive, and the state in which it will run."""
        architecture = self._options.architecture
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

    # What a batch becomes.

    def take(self, batch: Any, ids: Ids, skip: int, run: Callable[[Harvest], object]) -> None:
        """Run the pass of a batch, and commit its samples but for the first few.

        Parameters
        ----------
        batch : Any
            What the loader gave.
        ids : range, array.array or tuple
            One id for each of its samples.
        skip : int
            How many at its beginning are durable already.
        run : callable
            Runs the net with the sink that it is given.
        """
        current, self._calls = self._current, {}
        current.begin(batch, len(ids), skip, self._writer.start)
        try:
            run(self)
        except BaseException:
            self._is_tainted = current.is_reduced
            raise
        current.batch = None
        # Every layer of every batch would pay for a look.
        if self._options.dtype is not None:
            for intake in self._storing.values():
                intake.settle()
        calls = {text_of(label): call for label, call in sorted(self._calls.items())}
        self._is_tainted = True
        try:
            self._writer.commit(ids[skip:], self._state, calls)
        except ValueError as error:
            raise CollectError(str(error)) from None
        self._is_tainted = False

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample of all layers that are stored."""
        return sum(intake.sample_bytes for intake in self._storing.values())

    def abandon(self) -> None:
        """End early: keep what was committed, if it can be trusted."""
        self._writer.abandon(None if self._is_tainted else self._state)

    def finish(self, settings: Mapping[str, Any]) -> Recording:
        """Return all that was committed."""
        held: Held = self._writer.finish(self._state)
        errors = {
            label: intake.relative_error
            for label, intake in self._storing.items()
            if intake.relative_error is not None
        }
        return Recording(
            self._options.architecture,
            held,
            reductions=self._options.reductions,
            relative_errors=errors,
            settings=settings,
        )

    # What goes to disk with the samples, so that a collection can go on.

    def _state(self) -> State:
        return {
            "reductions": {
                text_of(label): [one.state_dict() for one in given]
                if isinstance(given, list)
                else given.state_dict()
                for label, given in self._options.reductions.items()
            },
            "rounding": {
                text_of(label): [intake.lost, intake.total]
                for label, intake in self._storing.items()
                if intake.rounds
            },
        }

    def _restore(self, state: State | None) -> None:
        if state is None:
            return
        for label, given in self._options.reductions.items():
            saved = state["reductions"][text_of(label)]
            pairs = zip(given, saved, strict=True) if isinstance(given, list) else [(given, saved)]
            for reduction, one in pairs:
                reduction.load_state_dict(one)
        for label, intake in self._storing.items():
            sums = state["rounding"].get(text_of(label))
            if sums is not None:
                intake.rounds = True
                intake.lost, intake.total = sums
