"""One forward pass: its log of calls, and the records made of them when it ends."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from scio_recorder.capture.checkpoint_regions import Rerun
from scio_recorder.capture.gradients import CallKey, CallStart, Gradients
from scio_recorder.capture.keeping import (
    BARE,
    COPY,
    INPUT,
    LEARN,
    NOTHING,
    OUTPUT,
    Keeper,
    KeptValue,
    Setting,
    offload,
)
from scio_recorder.capture.program import Program, Sink
from scio_recorder.errors import FlowError
from scio_recorder.layer import RowIdx, few
from scio_recorder.nets.attention import AttentionRecords, AttentionSink
from scio_recorder.nets.labelling.torchinfo import calling_name
from scio_recorder.nets.records import Entries, Entry, Inputs, Recorded, Records, entry_of
from scio_recorder.nets.refusals import cast_for, refuse_unkeepable
from scio_recorder.nets.state.moment import LiveMoment
from scio_recorder.postprocessors.assigning import Assigned
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import Hold, holder, plain_version
from scio_recorder.tensors.properties import memories_of
from scio_recorder.tensors.structures import taken_apart


class StopForward(BaseException):
    """Ends a forward pass whose remaining layers are not requested.

    It is not an ``Exception``, since a network might catch that.
    """

    def __init__(self, owner: Pass) -> None:
        super().__init__()
        self.owner = owner


class _PendingInputs(NamedTuple):
    """The inputs of a call that has not returned yet."""

    args: Any
    kept: Any
    versions: Any
    moment: LiveMoment | None


class Ended(NamedTuple):
    """What a pass leaves."""

    activations: Records
    inputs: Records
    attention: AttentionRecords


class KeptCalls:
    """What a pass has kept of its calls: most are never read, and no entries are made of them.

    Parameters
    ----------
    program : Program
        That of the pass.
    outputs, inputs : sequence of (int, object, object)
        The position of each call, what was kept, and the versions of plain values.
    """

    def __init__(self, program: Program, outputs: Any, inputs: Any) -> None:
        self._program = program
        self._kept = outputs, inputs

    def activations(self) -> Entries:
        """Return the entries of outputs."""
        return self._shown(self._entries[0])

    def others(self, are_kept: bool) -> tuple[Records, AttentionRecords]:
        """Return the records of inputs and of attention; empty ones if a sink was given them."""
        program = self._program
        inputs, attention = program.no_records
        if are_kept and program.options.inputs:
            inputs = Records(program.architecture, self._inputs, "input")
        if are_kept and program.attention:
            attention = AttentionRecords(program.architecture, self._attention, "attention")
        return inputs, attention

    def _inputs(self) -> Entries:
        return self._shown(self._entries[1])

    def _attention(self) -> Entries:
        # It is computed from both.
        outputs, inputs = self._entries
        calls = self._program.attention.items()
        return {at: own.record(inputs, outputs) for at, own in calls if own.last.label in outputs}

    def _shown(self, entries: Entries) -> Entries:
        """Return the entries of what users read: not those that attention alone needs."""
        hidden = self._program.hidden
        return {label: entry for label, entry in entries.items() if label not in hidden}

    @cached_property
    def _entries(self) -> list[Entries]:
        # One entry for a tensor, which tells who else holds it.
        hold, kept = holder(), self._kept
        del self._kept
        return [self._by_label(calls, hold) for calls in kept]

    def _by_label(self, kept: Any, hold: Hold) -> Entries:
        """Make an entry for each layer: of its call, or of all calls if they aren't counted."""
        program, calls = self._program, dict[Any, list[Entry]]()
        for position, value, version in kept:
            label = program.labels[position]
            if label is not None and value is not NOTHING:
                calls.setdefault(label, []).append(_entry(value, version, hold))
        if program.counts_calls:
            return {label: entry for label, (entry,) in calls.items()}
        return {label: Recorded(calls.get(label, []), tuple) for label in program.order}


def _entry(value: Any, version: Any, hold: Hold) -> Entry:
    if type(value) is KeptValue:
        return value.record(hold)
    if type(value) is Inputs:
        parts = entry_of((*value.args, *value.kwargs.values()), version, hold)
        return Recorded([parts], partial(_inputs_of, [*value.kwargs]))
    return value if type(value) is Recorded else entry_of(value, version, hold)


def _inputs_of(names: Sequence[str], parts: Sequence[Any]) -> Inputs:
    (values,) = parts
    num_args = len(values) - len(names)
    return Inputs(values[:num_args], dict(zip(names, values[num_args:], strict=True)))


class Pass:
    """The state of one forward pass, alive on one thread's stack.

    ``log`` holds three entries for each call: the index of the module, its output (or how that is
    kept), and the version at that moment. It is flat, so that the end of a pass can compare the
    columns with the expected ones without visiting each call.
    """

    # A module with several names that was called by another one than at labelling, and how.
    _misnamed = ""
    _positions: Sequence[int] = ()
    _keeper: Keeper | None = None
    gradients: Gradients | None = None
    rerun: Rerun | None = None
    # The function mode under which own code runs.
    mode: Any = None
    # Whether every call so far took the fast path, which notes plain values.
    is_bare = True

    def __init__(
        self,
        program: Program,
        setting: Setting,
        posts: Assigned,
        *,
        records_outputs: bool = True,
        stops: bool = False,
        sink: Sink | None = None,
    ) -> None:
        self.program = program
        self.setting = setting
        self.kinds = setting.kinds
        self.posts = posts
        self.records_outputs = records_outputs
        self._sink, self.has_sink = sink, sink is not None
        if sink is not None and program.attention:
            self._sink = AttentionSink(sink.receivers, program.attention)
        # If a module may run any number of times, a sink takes all its calls at once.
        self._hands_on = sink is not None and program.counts_calls
        self._keeps_outputs = records_outputs or (sink is not None and not self._hands_on)
        # The number of selected calls before the pass may stop.
        num_labelled = len(program.order) + len(program.hidden)
        self._left = num_labelled if stops and program.counts_calls else None
        options = program.options
        is_simple = not posts.acts and records_outputs and sink is None and not stops
        self.noted = setting.noted if is_simple else {}
        # Whether anything looks at the inputs of operations before these run.
        keeps_others = len(program.keeps_inputs) > len(self.noted)
        self.sees_inputs = bool(keeps_others or options.gradients or posts.acts)
        # Whether a plain value need only be noted.
        self._notes = is_simple and not (options.gradients or options.offload)
        self.fast = setting.fast if is_simple else program.never_fast
        self.is_fast = is_simple and setting.is_fast
        self.receivers = program.no_receivers
        if sink is not None:
            self.receivers = self._direct_receivers(self._sink, stops)
        self.log: list[Any] = []
        # By position, with versions; a position has several only if calls are not counted. The call
        # that received inputs is known only when it returns.
        self.inputs: list[tuple[int, Any, Any]] = []
        # How often each module, and own code, has started. A Counter takes longer to construct.
        self.starts: dict[object, int] = {}
        self._pending: dict[int, list[_PendingInputs]] = {}
        # The state in which calls with recorded inputs ran.
        self.moments: dict[RowIdx, LiveMoment] = {}
        self._counts: dict[int, int] = {}
        # The modules that other threads have called meanwhile, outside of any pass.
        self.called_in_other_threads: set[int] = set()

    def _direct_receivers(self, sink: Any, stops: bool) -> list[Any]:
        """Return the receivers to which hooks hand outputs directly, by entry."""
        program, options = self.program, self.program.options
        if self.records_outputs or options.inputs or options.gradients or stops or self.posts.acts:
            return program.no_receivers
        slow, receivers = program.slow, sink.receivers
        return [receivers[at] if at and at not in slow else None for at in program.single]

    def receive(self, index: int, args: Any, output: Any) -> Any:
        """Take a module's output; return what the network goes on with, None for the same."""
        self.is_bare = False
        positions, count = self.program.positions[index], self._counts.get(index, 0)
        self._counts[index] = count + 1
        start = None if self.gradients is None else self.gradients.starts.end(index)
        number = 0
        if not self.program.counts_calls:
            # All calls are at one position.
            count, number = 0, count
        label = None
        if count < len(positions):
            label = self.program.labels[positions[count]]
            if self.rerun is not None:
                self.rerun.note(self.program.firsts[index], CallKey(label, number))
            if self._pending.get(index):
                self._assign_inputs(index, args, positions[count], label)
            if self.program.callers[positions[count]] is not None:
                self._check_caller(positions[count], index)
        if label is None:
            self.log += index, NOTHING, 0
            return None
        if self._notes and self.kinds[OUTPUT][positions[count]] == BARE:
            version = plain_version(output)
            if version is not None:
                self.log += index, output, version
                return None
        handed = output
        if self.posts.acts:
            row = self.program.architecture[label]
            handed = self.posts.after(label, output, row)
        call = positions[count], CallKey(label, number), output, handed, start
        kept = private.apart_from_modes(self._keep, *call)
        self.log += index, kept, 0
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                raise StopForward(self)
        return None if handed is output else handed

    def _check_caller(self, position: int, index: int) -> None:
        expected, seen = self.program.callers[position], calling_name(self.program.names)
        if not seen.agrees(expected):
            layer = self.program.layers_of([index])[0]
            self._misnamed = f"{layer}: {str(expected)!r} at labelling, {str(seen)!r} now"

    def receive_inputs(self, index: int, args: Any, kwargs: Any) -> Any:
        """Take the inputs of a module's forward; return those that it receives instead."""
        changed = None
        if self.gradients is not None:
            self.gradients.starts.begin(index, args, kwargs)
        label = self._starting(index)
        if self.posts.on_inputs:
            if self.rerun is not None:
                self.rerun.note(self.program.firsts[index], CallKey(label), starts=True)
            if label in self.posts.on_inputs:
                layer = self.program.architecture[label]
                changed = args, kwargs = self.posts.before(label, args, kwargs, layer)
        # Which call of a module it is shows when it returns.
        is_recorded = label is not None or index < len(self.program.modules)
        if is_recorded and index in self.program.keeps_inputs:
            private.apart_from_modes(self._keep_inputs, index, args, kwargs)
        return changed

    def _starting(self, index: int) -> RowIdx | None:
        """Return the label of the call that starts, None if it is not recorded."""
        count = self.starts.get(index, 0)
        self.starts[index] = count + 1
        if index >= len(self.program.modules):
            # Calls of functions that failed are not listed, and none runs inside another.
            count = self._counts.get(index, 0)
        return self.program.starts[index].get(count if self.program.counts_calls else 0)

    def _assign_inputs(self, index: int, args: Any, position: int, label: RowIdx | None) -> None:
        """Assign inputs to a call that has returned, and drop those of calls that failed in it."""
        pending = self._pending[index]
        number = next((i for i, call in enumerate(pending) if call.args is args), len(pending) - 1)
        _, kept, versions, moment = pending[number]
        del pending[number:]
        if label is not None and self._sink is not None:
            self._sink.receive_inputs(label, kept)
        elif label is not None:
            self.inputs.append((position, kept, versions))
            if moment is not None:
                self.moments[label] = moment

    def _keep_inputs(self, index: int, args: Any, kwargs: Any) -> None:
        """Keep inputs until the call returns: calls may fail, and modules may call themselves."""
        value, modules = Inputs(args, dict(kwargs)), self.program.modules
        module = modules[index] if index < len(modules) else None
        kept: Any
        versions, kind = None, self.setting.input_kinds[index]
        if self._sink is not None:
            kept = self._sink.keep_inputs(self.program.rows[index], value)
        elif self.program.options.offload:
            kept = offload(taken_apart(value))
        else:
            kept = value
            versions = plain_version((*args, *kwargs.values())) if kind == BARE else None
            if versions is None:
                kept, _ = self._kept(taken_apart(value), kind)
        moment = LiveMoment.of(module, value) if self._sink is None and module is not None else None
        self._pending.setdefault(index, []).append(_PendingInputs(args, kept, versions, moment))

    def explain(self, error: Exception, inputs: Inputs) -> None:
        """Add notes to an error of the network on what has probably caused it."""
        self.posts.explain(error)
        cast = cast_for(self.program.architecture[0, 1].module, inputs, error)
        if cast is not None and self._sink is None:
            error.add_note(f"Probably {cast[1]}: convert it, as x.{cast[0]} does.")

    def abandon(self) -> None:
        """Drop everything: a traceback may keep this object alive."""
        for held in (self.log, self.inputs, self._pending, self.moments):
            held.clear()
        # An interruption can come where own code has ended and its mode is about to be left.
        if self.mode is not None:
            private.replace_function_mode(self.mode, None)
        self._keeper = None
        self.gradients = None
        self.rerun = None

    def _keep(
        self, position: int, call: CallKey, output: Any, handed: Any, start: CallStart | None
    ) -> Any:
        label: Any = call.label
        if self._sink is not None and self._hands_on:
            self._sink.receivers[label](output)
        if start is None and not self._keeps_outputs:
            return NOTHING
        apart = taken_apart(output)
        on_graph = apart.leaves
        # Asked before a copy takes the place of a tensor.
        returned = [*map(start.seen, on_graph)] if start is not None else []
        kept: Any = NOTHING
        if self._keeps_outputs:
            refuse_unkeepable(self.program.architecture[label], apart, self.setting.searched)
            if self.program.options.offload:
                kept = offload(apart)
            else:
                # A value that a sink receives at the end of the pass must not have changed by then.
                kind = COPY if self._sink is not None else self.kinds[OUTPUT][position]
                kept, on_graph = self._kept(apart, kind, handed)
        if self.gradients is not None and label not in self.program.hidden:
            # Gradients are received whether anything is kept here or not.
            self.gradients.attach(call, on_graph, apart.rebuild, returned)
        return kept

    def _kept(self, *value: Any) -> tuple[KeptValue, list[Tensor]]:
        if self._keeper is None:
            self._keeper = Keeper(self.setting)
        return self._keeper.keep(*value)

    def finish(self, unhooked: Collection[int] = ()) -> Ended | None:
        """Check the calls of the pass, and return what it leaves; None if its outputs are not kept.

        Reading a record shows whether a later operation has overwritten it. Later passes in this
        setting keep things as this pass has shown to be right.

        Parameters
        ----------
        unhooked : collection of int
            The entries whose hooks others have removed.

        Raises
        ------
        FlowError
            A module with a selected layer ran more or less often than at labelling, or unseen.
        """
        program, log = self.program, self.log
        modules = log[::3]
        if unhooked or not program.counts_calls:
            self._refuse_unseen_calls(unhooked)
        self._positions = range(len(modules))
        if self._misnamed:
            raise FlowError(
                "a module that the network holds under several names was called by another one "
                f"than at labelling, so labels no longer name the same calls:\n  "
                f"{self._misnamed}\nLabel the net as it is used (mode=, input_data=), or take "
                'calls by any name: record(..., calls="any")'
            )
        if modules != program.expected:
            if program.counts_calls:
                self._check_counts(modules)
            self._positions = self._positions_of(modules)
        outputs = zip(self._positions, log[1::3], log[2::3], strict=True)
        inputs = sorted(self.inputs, key=operator.itemgetter(0))
        if self._keeper is not None:
            if self._keeper.is_learning:
                self._learn()
            self._keeper.end()
        # What else holds a tensor is asked when it is read, as at once inside `watch`.
        log.clear()
        self.inputs = []
        if not self._keeps_outputs:
            # This leaves it open what the network overwrites.
            return None
        self.setting.is_new = False
        kept = KeptCalls(program, outputs, inputs)
        activations = Records(program.architecture, kept.activations)
        if self._sink is not None and not (self._hands_on or self.is_bare):
            for label in activations:
                self._sink.receivers[label](activations.peek(label))
        ended = Ended(activations, *kept.others(self._sink is None))
        if program.options.copy == "auto":
            for records in ended:
                records.copy_from_now_on = self.setting.copy
        return ended

    def _refuse_unseen_calls(self, unhooked: Collection[int]) -> None:
        """Refuse calls that no hook has seen, and whose number is not checked."""
        program, lacks = self.program, "the records of this pass lack calls"
        if unhooked:
            raise FlowError(
                f"{lacks} or inputs of {few(program.layers_of(unhooked), 4)}, since others have "
                "removed the hooks of these modules: remove yours by their handles, or call "
                "record(...) again"
            )
        if self.called_in_other_threads:
            raise FlowError(f"{lacks}.{self._explain_threads()}")
        unseen = program.inside_compiled_parts()
        self._refuse_replaced(Counter(self.log[::3]))
        if unseen:
            raise FlowError(
                f"{lacks}. A compiled part of the network runs {few(program.layers_of(unseen), 4)}"
                ", and compiled code ignores hooks that are added later: record that part, or "
                "compile the recorder instead, as in rnet.compile()"
            )

    def _learn(self) -> None:
        outputs = zip(self._positions, self.log[1::3], self.log[2::3], strict=True)
        calls = [(OUTPUT, *call) for call in outputs] + [(INPUT, *call) for call in self.inputs]
        kept = [
            (what, position, value, self.kinds[what][position])
            for what, position, value, _ in calls
            if type(value) is KeptValue and value is not NOTHING
        ]
        lasting: set[int] = set()
        if any(kind == LEARN for *_, kind in kept):
            # Batch norm and fused optimisers write to buffers and parameters without a new version.
            root = self.program.architecture[0, 1].module
            own = [] if root is None else [*root.buffers(), *root.parameters()]
            lasting = {memory for tensor in own for memory in memories_of(tensor)}
        seen = [(what, at, value.next_kind(kind, lasting)) for what, at, value, kind in kept]
        self.setting.learn(self.kinds, seen)

    def _positions_of(self, modules: list[int]) -> list[int]:
        """Return the positions of the calls, in a pass whose modules returned in another order."""
        seen: Counter[int] = Counter()
        positions = []
        for module in modules:
            known = self.program.positions[module]
            positions.append(known[min(seen[module], len(known) - 1)])
            seen[module] += 1
        return positions

    def _check_counts(self, modules: list[int]) -> None:
        # A pass that was stopped lacks the calls that would have come later.
        last = self.program.last + 1 if self._left == 0 else None
        counts, program = Counter(modules), self.program
        wrong = [f"\n  {text}" for text in program.wrong_calls(counts, last)]
        if wrong:
            self._refuse_replaced(counts)
            raise FlowError(
                "modules with recorded layers ran more or less often than at labelling, so labels "
                f"no longer name the same calls:{''.join(wrong)}\nA layer that did not run at all "
                "was skipped by the network, replaced by a fused kernel, compiled, or lost its "
                "hook to other code. Label the net as it is used (mode=, input_data=), record "
                'other layers, or take any number of calls: record(..., calls="any")'
                + self._explain_threads()
            )

    def _refuse_replaced(self, counts: Counter[int]) -> None:
        """Say that a layer was not called because its module was replaced, if so."""
        if replaced := self.program.replaced(counts):
            raise FlowError(
                f"{few(replaced, 4)} did not run, and the network no longer holds the module: it "
                "was replaced or removed after the network was wrapped. Label the changed network "
                "anew, by another Recorder(net, ...)"
            )

    def _explain_threads(self) -> str:
        """Return a sentence for an error, if other threads may be the cause."""
        if not self.called_in_other_threads:
            return ""
        layers = few(self.program.layers_of(self.called_in_other_threads), 4)
        return (
            f"\nMeanwhile another thread called {layers}. A pass has the calls of its own thread: "
            "record a module around those that the network runs in worker threads, or let it run "
            "them without"
        )
