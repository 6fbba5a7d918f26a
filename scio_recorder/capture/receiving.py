"""What modules receive in one pass: kept until their call returns, and changed on the way in."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from scio_recorder.capture.keeping import Keeper, Kept, offload
from scio_recorder.capture.learning import INPUT, LEARN, Keeping
from scio_recorder.capture.program import Program, Sink
from scio_recorder.nets.records import Copied, Inputs
from scio_recorder.nets.state.moment import LiveMoment
from scio_recorder.postprocessors.assigning import Assigned

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


class ReceivedInputs:
    """The inputs of one pass. Which call received them shows only when it returns."""

    def __init__(
        self,
        program: Program,
        keeping: Keeping,
        keeper: Keeper,
        posts: Assigned,
        sink: Sink | None,
    ) -> None:
        self._program = program
        self._kinds = keeping.kinds[INPUT]
        self._keeper = keeper
        self._posts = posts
        self._sink = sink
        # By position; several of one position only where calls are not counted.
        self.kept: list[tuple[int, Kept | Copied]] = []
        # The state in which the calls ran whose inputs are recorded.
        self.moments: dict[DepthIdx, LiveMoment] = {}
        self._starts: Counter[int] = Counter()
        self._pending: dict[int, list[tuple[Any, Any, LiveMoment | None]]] = {}

    def receive(self, index: int, args: Any, kwargs: Any) -> Any:
        """Take what a module's forward is about to receive; return what it receives instead."""
        changed = None
        if self._posts.on_inputs:
            starts, count = self._program.starts[index], self._starts[index]
            self._starts[index] += 1
            label = starts[min(count, len(starts) - 1)]
            if label in self._posts.on_inputs:
                layer = self._program.architecture[label]
                changed = args, kwargs = self._posts.before(label, args, kwargs, layer)
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
        if label is not None and self._sink is not None:
            self._sink.receive_inputs(label, kept)
        elif label is not None and moment is not None:
            self.kept.append((position, kept))
            self.moments[label] = moment

    def clear(self) -> None:
        """Let go of everything."""
        self.kept.clear()
        self.moments.clear()
        self._pending.clear()

    def _keep(self, index: int, args: Any, kwargs: Any) -> None:
        """Keep inputs until the call returns: calls fail, and modules call themselves."""
        value, module = Inputs(args, dict(kwargs)), self._program.modules[index]
        kept: Any
        if self._sink is not None:
            kept = self._sink.keep_inputs(module, value)
        elif self._program.options.offload:
            kept = offload(value)
        else:
            kinds = {self._kinds[at] for at in self._program.positions[index]}
            kept, _ = self._keeper.keep(value, LEARN if LEARN in kinds else max(kinds))
        moment = LiveMoment.of(module, value) if self._sink is None else None
        self._pending.setdefault(index, []).append((args, kept, moment))
