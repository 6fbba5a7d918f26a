"""One forward pass: its log of events, and what becomes of them when it ends."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from scio_recorder.capture.ending import all_calls, entry_of, flow_error, next_kind
from scio_recorder.capture.gradients import Gradients
from scio_recorder.capture.keeping import NOTHING, Keeper, Kept, overwritten
from scio_recorder.capture.offload import offload
from scio_recorder.capture.program import COPY, LEARN, Keeping, Program
from scio_recorder.capture.receiving import ReceivedInputs
from scio_recorder.errors import UnsupportedNetError
from scio_recorder.nets.records import Entry, Records
from scio_recorder.postprocessors.assigning import Postprocessor, apply
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import Hold, holder
from scio_recorder.tensors.structures import Rebuild, flatten

if TYPE_CHECKING:
    from scio_recorder.capture.checkpoint_regions import Rerun
    from scio_recorder.capture.sink import Sink
    from scio_recorder.layer import DepthIdx, Layer


class StopForward(BaseException):
    """Ends a forward pass whose remaining layers nobody asked for.

    No ``Exception``, which a network might catch.
    """

    def __init__(self, owner: Pass) -> None:
        super().__init__()
        self.owner = owner


class Pass:
    """The state of one forward pass, alive on one thread's stack.

    ``log`` holds three entries an event: the index of the module, what it returned (or how that is
    kept), and the version at that moment. Flat, so that the end of a pass can compare the columns
    with what is expected without visiting each event.
    """

    __slots__ = (
        "_counts",
        "_is_bare",
        "_keeper",
        "_seen_plain",
        "fast",
        "gradients",
        "is_fast",
        "keeping",
        "keeps_outputs",
        "log",
        "posts",
        "program",
        "received",
        "receivers",
        "records_outputs",
        "rerun",
        "sink",
        "stop_after",
    )

    def __init__(
        self,
        program: Program,
        keeping: Keeping,
        posts: dict[DepthIdx, Postprocessor] | None,
        records_outputs: bool,
        stop_after: int | None,
        sink: Sink | None = None,
    ) -> None:
        self.program = program
        self.keeping = keeping
        self.posts = posts
        self.received = ReceivedInputs(program, keeping, posts, sink)
        self.records_outputs = records_outputs and sink is None
        # A sink takes all calls of a module at once, where it may run any number of times.
        self.keeps_outputs = records_outputs and (sink is None or not program.counts_calls)
        self.sink = sink
        # The number of selected events that remain until the pass may stop.
        self.stop_after = stop_after if program.counts_calls else None
        is_simple = posts is None and self.records_outputs and stop_after is None
        self.fast = keeping.fast if is_simple else _NEVER_FAST[len(keeping.fast)]
        self.is_fast = is_simple and keeping.is_fast
        # What hooks hand outputs to directly, by module.
        self.receivers = _NO_RECEIVERS[len(keeping.fast)]
        options = program.options
        is_involved = posts is not None or options.inputs or options.gradients
        if sink is not None and stop_after is None and not is_involved:
            self.receivers = [label and sink.receivers[label] for label in program.single]
        self.log: list[Any] = []
        self.gradients: Gradients | None = None
        self.rerun: Rerun | None = None
        # Whether every event so far took the fast path, which logs bare tensors.
        self._is_bare = True
        self._keeper: Keeper | None = None
        self._counts: dict[int, int] = {}
        self._seen_plain: set[int] = set()

    def receive(self, index: int, args: Any, output: Any, references: int) -> Any:
        """Take what a module returned; return what the network goes on with, None for the same."""
        self._is_bare = False
        position = self._position(index)
        label = None if position is None else self.program.labels[position]
        if position is not None:
            if self.rerun is not None:
                self.rerun.note(position)
            if self.program.options.inputs:
                self.received.assign(index, args, position, label)
        if position is None or label is None:
            self.log += index, NOTHING, 0
            return None
        handed = output
        if self.posts is not None and label in self.posts and label not in self.received.changes:
            handed = apply(self.posts[label], output, self.program.architecture[label])
        kept: Any = NOTHING
        if self.sink is not None and not self.keeps_outputs:
            self.sink.receivers[label](output)
        elif self.keeps_outputs:
            kept, handed = self._keep(position, label, output, handed, references)
        self.log += index, kept, 0
        if self.stop_after is not None:
            self.stop_after -= 1
            if self.stop_after <= 0:
                raise StopForward(self)
        return None if handed is output else handed

    def abandon(self) -> None:
        """Let go of everything: a traceback may keep this object alive."""
        self.log.clear()
        self.received.clear()
        self._keeper = None
        self.gradients = None
        self.rerun = None

    def _position(self, index: int) -> int | None:
        positions = self.program.positions[index]
        count = self._counts.get(index, 0)
        self._counts[index] = count + 1
        if not self.program.counts_calls:
            return positions[0]
        return positions[count] if count < len(positions) else None

    def _keep(
        self, position: int, label: DepthIdx, output: Any, handed: Any, references: int
    ) -> tuple[Any, Any]:
        options = self.program.options
        if options.offload:
            if options.gradients:
                self._listen(label, *flatten(output))
            return offload(output), handed
        _refuse_unkeepable(output, self.program.architecture[label])
        if self._keeper is None:
            self._keeper = Keeper()
        # What a sink is given at the end of the pass must still be what it was.
        kind = COPY if self.sink is not None else self.keeping.kinds[position]
        if isinstance(output, Tensor):
            self._seen_plain.add(position)
        kept, handed = self._keeper.keep(output, handed, kind, references)
        if options.gradients:
            self._listen(label, [leaf.original for leaf in kept.leaves], kept.rebuild)
        return kept, handed

    def _listen(self, label: DepthIdx, leaves: list[Tensor], rebuild: Rebuild) -> None:
        if self.gradients is None:
            self.gradients = Gradients()
        self.gradients.attach(label, leaves, rebuild)

    def finish(self) -> tuple[Records, Records | None]:
        """Check the calls of the pass, and return its activations and inputs.

        Whether a later operation has overwritten a record is seen when that is read.

        Raises
        ------
        FlowError
            A module with a selected layer ran more or less often than at labelling.
        """
        modules, values, versions = self.log[::3], self.log[1::3], self.log[2::3]
        positions = range(len(modules))
        if modules != self.program.expected:
            if self.program.counts_calls:
                self._check_counts(modules)
            positions = self._positions(modules)  # type: ignore[assignment]
        hold = holder()
        activations = self._activations(positions, values, versions, hold)
        if self.sink is not None and self.keeps_outputs:
            for label in activations:
                self.sink.receivers[label](activations.peek(label))
        return activations, self._inputs(hold)

    def learned(self) -> Keeping | None:
        """Return how outputs are to be kept from now on, None for as in this pass."""
        options = self.program.options
        keeps_nothing = (self._is_bare or self.sink is not None) and not self.received.kept
        if keeps_nothing or options.copy == "always" or options.offload:
            return None
        kinds, input_kinds = list(self.keeping.kinds), list(self.keeping.input_kinds)
        events = list(zip(self._positions(self.log[::3]), self.log[1::3], strict=True))
        known = [(at, kept) for at, kept in events if type(kept) is Kept and kept is not NOTHING]
        hits = overwritten([kept for _, kept in known])
        lasting = self._lasting() if LEARN in kinds else set()
        for (position, kept), is_hit in zip(known, hits, strict=True):
            kind = next_kind(self.keeping.kinds[position], kept, is_hit, lasting)
            # Of several calls, the one that needs most decides: kinds are in that order.
            kinds[position] = max(kinds[position], kind)
        for at, given in self.received.kept:
            if isinstance(given, Kept):
                (is_hit,) = overwritten([given])
                kind = next_kind(self.keeping.input_kinds[at], given, is_hit, lasting)
                input_kinds[at] = max(input_kinds[at], kind)
        plain = self.keeping.plain | self._seen_plain
        if (kinds, input_kinds) == (
            self.keeping.kinds,
            self.keeping.input_kinds,
        ) and plain == self.keeping.plain:
            return None
        return Keeping(self.program, kinds, input_kinds, plain)

    def _lasting(self) -> set[int]:
        """Return the memory of all buffers and parameters.

        Batch norm and fused optimisers write theirs without a new version.
        """
        root = next(iter(self.program.architecture.values())).module
        own = [] if root is None else [*root.buffers(), *root.parameters()]
        return {private.memory_of(tensor) for tensor in own}

    def _positions(self, modules: list[int]) -> list[int]:
        """Tell the events of a pass apart whose modules returned in another order."""
        seen: Counter[int] = Counter()
        positions = []
        for module in modules:
            known = self.program.positions[module]
            positions.append(known[min(seen[module], len(known) - 1)])
            seen[module] += 1
        return positions

    def _check_counts(self, modules: list[int]) -> None:
        program, seen = self.program, Counter(modules)
        expected = Counter(program.expected)
        if self.stop_after == 0:
            # Stopped on purpose: what was to come then is nobody's loss.
            expected = Counter(program.expected[: program.last + 1])
        if seen == expected:
            return
        raise flow_error(program, expected, seen)

    def _activations(
        self, positions: Any, values: list[Any], versions: list[Any], hold: Hold
    ) -> Records:
        program = self.program
        if not self.keeps_outputs:
            return Records(program.architecture)
        labels = program.labels
        if self._is_bare and type(positions) is range and program.counts_calls:
            return Records.of_tensors(program.architecture, program.order, values, versions)
        found = [
            (label, entry_of(value, version, hold))
            for label, value, version in zip(
                map(labels.__getitem__, positions), values, versions, strict=True
            )
            if label is not None and value is not NOTHING
        ]
        return Records(program.architecture, self._by_layer(found))

    def _inputs(self, hold: Hold) -> Records | None:
        program = self.program
        if not program.options.inputs or self.sink is not None:
            return None
        inputs = sorted(self.received.kept, key=operator.itemgetter(0))
        found = [(program.labels[at], entry_of(kept, 0, hold)) for at, kept in inputs]
        return Records(program.architecture, self._by_layer(found), "input")

    def _by_layer(self, found: list[tuple[Any, Entry]]) -> dict[Any, Entry]:
        """Make one entry a layer of all its calls, where they are not counted."""
        return dict(found) if self.program.counts_calls else all_calls(found, self.program.order)


def _refuse_unkeepable(output: Any, layer: Layer) -> None:
    if isinstance(output, Iterator):
        raise UnsupportedNetError(
            f"layer {layer} returns a {type(output).__name__}, which can be read only once, by the "
            "network: record the layers inside it"
        )
    if private.is_inside_transform():
        raise UnsupportedNetError(
            f"layer {layer} runs inside a torch.func transform (vmap, grad, ...), whose tensors "
            "die with the transform: record a layer around the transform"
        )


class _Repeated(dict[int, list[Any]]):
    def __init__(self, value: object) -> None:
        super().__init__()
        self._value = value

    def __missing__(self, length: int) -> list[Any]:
        return self.setdefault(length, [self._value] * length)


_NEVER_FAST, _NO_RECEIVERS = _Repeated(False), _Repeated(None)
