"""What modules receive in one pass: kept until their call returns, and changed on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scio_recorder.capture.keeping import Kept, keep_inputs
from scio_recorder.capture.offload import offload
from scio_recorder.capture.program import REFERENCE, Keeping, Program
from scio_recorder.nets.records import Copied, Inputs
from scio_recorder.nets.state.moment import LiveMoment
from scio_recorder.postprocessors.assigning import Postprocessor, apply_to_input, on_inputs

if TYPE_CHECKING:
    from scio_recorder.capture.sink import Sink
    from scio_recorder.layer import DepthIdx


class ReceivedInputs:
    """The inputs of one pass. Which call received them shows only when it returns."""

    __slots__ = (
        "_keeping",
        "_pending",
        "_program",
        "_sink",
        "_starts",
        "changes",
        "kept",
        "moments",
    )

    def __init__(
        self,
        program: Program,
        keeping: Keeping,
        posts: Mapping[DepthIdx, Postprocessor] | None,
        sink: Sink | None,
    ) -> None:
        self._program = program
        self._keeping = keeping
        self._sink = sink
        # The post-processors that act here.
        self.changes = on_inputs(posts)
        # By position; several of one position only where calls are not counted.
        self.kept: list[tuple[int, Kept | Copied]] = []
        # The state in which the calls ran whose inputs are recorded.
        self.moments: dict[DepthIdx, LiveMoment] = {}
        self._starts: dict[int, int] = {}
        self._pending: dict[int, list[tuple[Any, Any, LiveMoment | None]]] = {}

    def receive(self, index: int, args: Any, kwargs: Any) -> Any:
        """Take what a module's forward is about to receive; return what it receives instead."""
        changed = None
        if self.changes:
            label = self._started(index)
            if label is not None and label in self.changes:
                layer = self._program.architecture[label]
                changed = apply_to_input(self.changes[label], args, kwargs, layer)
                args, kwargs = changed
        if self._program.options.inputs:
            self._keep(index, args, kwargs)
        return changed

    def assign(self, index: int, args: Any, position: int, label: DepthIdx | None) -> None:
        """Give the call that has returned its inputs, and drop those of calls that failed in it."""
        pending = self._pending.get(index)
        if not pending:
            return
        own = next((i for i, (given, *_) in enumerate(pending) if given is args), len(pending) - 1)
        _, kept, moment = pending[own]
        del pending[own:]
        if label is None:
            return
        if self._sink is not None:
            self._sink.receive_inputs(label, kept)
        else:
            self.kept.append((position, kept))
            assert moment is not None
            self.moments[label] = moment

    def clear(self) -> None:
        """Let go of everything."""
        self.kept.clear()
        self.moments.clear()
        self._pending.clear()

    def _started(self, index: int) -> DepthIdx | None:
        """Return the label of the call of a module that is about to run."""
        count = self._starts.get(index, 0)
        self._starts[index] = count + 1
        starts = self._program.starts[index]
        return starts[min(count, len(starts) - 1)]

    def _keep(self, index: int, args: Any, kwargs: Any) -> None:
        """Keep inputs until the call returns: calls fail, and modules call themselves."""
        value, module = Inputs(args, dict(kwargs)), self._program.modules[index]
        moment = None
        if self._sink is not None:
            kept: Any = self._sink.keep_inputs(module, value)
        elif self._program.options.offload:
            kept = offload(value)
        else:
            kinds = {self._keeping.input_kinds[at] for at in self._program.positions[index]}
            kept = keep_inputs(value, min(kinds - {REFERENCE}, default=REFERENCE))
        if self._sink is None:
            moment = LiveMoment.of(module, value)
        self._pending.setdefault(index, []).append((args, kept, moment))
