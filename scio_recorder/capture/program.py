"""The program of a selection: the table of the calls to record."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from torch import nn

from scio_recorder.layer import (
    DepthIdx,
    Layer,
    Operation,
    OperationIdx,
    RowIdx,
    few,
    plain_label,
    text_of,
)
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.attention import AttentionRecords, find_attention
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs, Records
from scio_recorder.tensors import private

CopyPolicy = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class RecordOptions:
    """The keywords of ``record``."""

    inputs: bool = False
    gradients: bool | Literal["accumulate"] = False
    copy: CopyPolicy = "auto"
    offload: bool = False
    # "any": modules may run any number of times, and a name stands for the tuple of all calls in a
    # pass.
    calls: Literal["labelled", "any"] = "labelled"
    # The layers whose attention is recorded.
    attention: tuple[DepthIdx, ...] = ()

    @property
    def in_use(self) -> dict[str, object]:
        """The keywords other than the default ones, as they are written."""
        given = {name: value for name, value in vars(self).items() if value != _DEFAULTS[name]}
        layers = [text_of(label) for label in self.attention]
        return {**given, "attention": layers} if layers else given


_DEFAULTS = vars(RecordOptions())


class Sink(Protocol):
    """Receives the outputs of recorded layers, in place of the records of the pass.

    A sink must copy what it needs before it returns: the network goes on with the same tensors and
    may overwrite them. The outputs of a pass count only once the pass has succeeded.
    """

    @property
    def receivers(self) -> Mapping[RowIdx, Callable[[Any], None]]:
        """For each layer, the function that receives its output, a tensor or a structure.

        If a module is called once in a pass, the hook itself calls the function: every layer of
        every batch would pay for anything in between.
        """

    def keep_inputs(self, row: Layer, inputs: Inputs) -> Any:
        """Copy the inputs that a module's forward is about to receive; its call is known later."""

    def receive_inputs(self, label: RowIdx, kept: Any) -> None:
        """Take the result of `keep_inputs` for a layer, just before the layer's output."""


class OwnCode(NamedTuple):
    """A module in whose own code functions are recorded.

    ``calls`` has the entries of these functions by name, for each call of the module in the order
    in which they start; if calls are not counted, once for all.
    """

    module: nn.Module
    calls: Sequence[Mapping[str, int]]


class Program:
    """The calls that a pass must show, in the order in which they returned at labelling.

    Entries stand for who is called: a module, or a function in the own code of one call of a
    module. A module has an entry if at least one of its calls is selected, a function if it is in
    any call of its module, and then all their calls are counted. If calls are not counted, each has
    one entry, which stands for all its calls.
    """

    def __init__(
        self, architecture: Architecture, recording: tuple[RowIdx, ...], options: RecordOptions
    ) -> None:
        wanted = options.attention
        self.attention = find_attention(architecture, wanted) if wanted else {}
        # What is kept for attention alone is in no records that users read.
        self.hidden = {row.label for calls in self.attention.values() for row in calls}
        self.hidden -= {*recording}
        self.recording = recording
        rows = (*recording, *self.hidden)
        self.architecture = architecture = architecture.around(rows, options.in_use)
        self.options = options
        # Whether modules must run just as often as at labelling.
        self.counts_calls = options.calls == "labelled"
        chosen = [architecture[label] for label in rows]
        inside = [row for row in chosen if isinstance(row, Operation)]
        self.modules = _distinct_modules(row for row in chosen if not isinstance(row, Operation))
        operations = [*architecture.operations.values()] if self.counts_calls else inside
        self.functions = self._own_code(operations)
        if self.counts_calls:
            labels = (at for module in self.modules for at in architecture.calls(module))
            chosen = [*(architecture[label] for label in labels), *operations]
        # For each entry, the one of the function in the first call of its module: in other places
        # than a pass it is not known which call runs.
        self.firsts: list[int] = [
            *range(len(self.modules)),
            *(calls[0][name] for _, calls in self.functions for call in calls for name in call),
        ]
        # The flags of a pass in which no hook may take the fast path.
        self.never_fast = [False] * len(self.firsts)
        self.no_receivers: list[Any] = [None] * len(self.firsts)
        self._tabulate(sorted(chosen, key=lambda row: row.completion or 0))
        self.functions += [OwnCode(encoder, [{}]) for encoder in self._encoders()]

    def _own_code(self, operations: Sequence[Operation]) -> list[OwnCode]:
        """Return the modules of operations, whose functions get numbers behind those of modules."""
        rows: dict[int, list[Operation]] = {}
        for row in operations:
            rows.setdefault(id(row.module), []).append(row)
        numbers, own_code = itertools.count(len(self.modules)), list[OwnCode]()
        for module in _distinct_modules(operations):
            operations_in = rows[id(module)]
            names = dict.fromkeys(row.function for row in operations_in)
            num_calls = 1 + max(row.call for row in operations_in) if self.counts_calls else 1
            calls = [{name: next(numbers) for name in names} for _ in range(num_calls)]
            own_code.append(OwnCode(module, calls))
        return own_code

    def _tabulate(self, calls: Sequence[Layer]) -> None:
        """Note what a pass must show, given the calls in the order in which they returned."""
        recorded = {*self.recording, *self.hidden}
        modules = {id(module): entry for entry, module in enumerate(self.modules)}
        functions = {id(code.module): code.calls for code in self.functions}
        # By position: the entry that is called, and the label of the call if it is recorded.
        self.expected: list[int] = []
        self.labels: list[RowIdx | None] = []
        # The name by which a module with several names was called, None for other modules.
        self.callers: list[Any] = []
        self.positions: list[list[int]] = [[] for _ in self.never_fast]
        # The labels of the calls of each entry, by their numbers among those that start.
        self.starts: list[dict[int, RowIdx | None]] = [{} for _ in self.never_fast]
        for position, row in enumerate(calls):
            label: RowIdx | None = plain_label(row.label)
            label = label if label in recorded else None
            if isinstance(row, Operation):
                entries = functions[id(row.module)][row.call if self.counts_calls else 0]
                entry, number = entries[row.function], row.index
            else:
                entry, number = modules[id(row.module)], row.call
            self.expected.append(entry)
            self.labels.append(label)
            self.callers.append(row.called_as if self.counts_calls else None)
            self.positions[entry].append(position)
            self.starts[entry][number if self.counts_calls else 0] = label
        self._note_uses()

    def _note_uses(self) -> None:
        """Note what hooks, blocks and post-processors ask of the table."""
        # The label of a module that is called once, under one name, and recorded.
        self.single: list[RowIdx | None] = [None] * len(self.positions)
        for entry, positions in enumerate(self.positions if self.counts_calls else ()):
            if len(positions) == 1 and self.callers[positions[0]] is None:
                self.single[entry] = self.labels[positions[0]]
        # The recorded operations.
        self.own_code = {label for label in self.recording if isinstance(label, OperationIdx)}
        # The operations that complete attention.
        kernels = {calls.last.label for calls in self.attention.values()}
        # Calls that are not recorded, or not by their output alone.
        self.slow = {None, *self.hidden, *kernels}
        # The entries whose inputs are kept.
        self.keeps_inputs = set(self.expected) if self.options.inputs else set[int]()
        self.order: list[RowIdx] = []
        # The recorded labels under compilation, which can't look at the architecture.
        self.keys: dict[object, tuple[RowIdx, ...]] = {}
        # The last selected call, after which a pass may stop.
        self.last = -1
        for position, label in enumerate(self.labels):
            if label in kernels:
                self.keeps_inputs.add(self.expected[position])
            if label is None:
                continue
            self.last = position
            if label not in self.hidden:
                self.order.append(label)
                for key in (label, text_of(label), self.architecture[label].name):
                    self.keys[key] = (*self.keys.get(key, ()), label)

    @cached_property
    def no_records(self) -> tuple[Records, AttentionRecords]:
        """What a pass leaves of inputs and of attention that are not recorded."""
        inputs = Records(self.architecture, what="input")
        return inputs, AttentionRecords(self.architecture, what="attention")

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the network's modules, by ``id``."""
        return {id(module): name for name, module in self._root.named_modules()}

    @property
    def _root(self) -> Any:
        return self.architecture[0, 1].module

    def wrong_calls(
        self, seen: Mapping[int, int], before: int | None = None, *, of_functions: bool = True
    ) -> list[str]:
        """Describe the modules whose calls are not those at labelling, up to a position."""
        expected = Counter(self.expected[:before])
        num_entries = len(self.positions) if of_functions else len(self.modules)
        return [
            f"{self._described(index)}: {expected[index]} at labelling, {seen.get(index, 0)} now"
            for index in range(num_entries)
            if seen.get(index, 0) != expected[index]
        ]

    def _described(self, index: int) -> str:
        """Name the recorded layers or operations of an entry."""
        labels = [self.labels[at] for at in self.positions[index]]
        rows = [self.architecture[label] for label in labels if label]
        if index < len(self.modules):
            return f"{few(rows, 4)}: calls of the module"
        if rows:
            return f"{few(rows, 4)}: calls of the function"
        others = few(self.layers_of([self.firsts[index]]), 4)
        return f"{others}: calls of the function in another call of the module"

    @cached_property
    def rows(self) -> dict[int, Layer]:
        """The first recorded row of each entry that has one."""
        calls = zip(self.expected[::-1], self.labels[::-1], strict=True)
        return {entry: self.architecture[label] for entry, label in calls if label}

    def layers_of(self, entries: Collection[int]) -> list[Layer]:
        """Return the recorded layers and operations of entries; those of functions are `firsts`."""
        calls = zip(self.expected, self.labels, strict=True)
        labels = [label for entry, label in calls if label and self.firsts[entry] in entries]
        return [self.architecture[label] for label in labels]

    def replaced(self, seen: Mapping[int, int]) -> list[Layer]:
        """Return the layers without calls whose modules are no longer in the network."""
        missing = [row for entry, row in self.rows.items() if not seen.get(entry)]
        modules = set(self._root.modules() if missing else ())
        return [row for row in missing if row.module not in modules]

    def modules_of(self, labels: Iterable[RowIdx]) -> set[int]:
        """Return the indices of the modules of layers, leaving operations out."""
        entries = {self.expected[self.labels.index(label)] for label in labels}
        return {entry for entry in entries if entry < len(self.modules)}

    def inside_compiled_parts(self) -> set[int]:
        """Return the entries whose calls run in compiled parts of the network, unseen by hooks."""
        if private.DYNAMO not in sys.modules:
            return set()
        parts = [part for part in self._root.modules() if private.is_compiled(part)]
        inside = {id(module) for part in parts for module in part.modules() if module is not part}
        entries = {entry for entry, module in enumerate(self.modules) if id(module) in inside}
        compiled = inside | {id(part) for part in parts}
        own_code = [code.calls for code in self.functions if id(code.module) in compiled]
        return entries.union(*[names.values() for calls in own_code for names in calls])

    def _encoders(self) -> list[nn.Module]:
        """Return the encoders around recorded own code.

        Where no function mode is around them, they make nested tensors, which torch's own attention
        does not take where one is, and their layers call a fused kernel in place of their modules.
        """
        if not self.functions:
            return []
        owners = {id(code.module) for code in self.functions}
        kinds = nn.TransformerEncoder, nn.TransformerEncoderLayer
        encoders = _distinct_modules(
            row
            for row in self.architecture.values()
            if isinstance(row.module, kinds) and id(row.module) not in owners
        )
        return [encoder for encoder in encoders if owners & {*map(id, encoder.modules())}]

    @cached_property
    def called(self) -> list[OwnCode]:
        """The modules that recorded own code may call, without any functions."""
        if not self.functions:
            return []
        owners = {id(code.module): code.module for code in self.functions}
        called: dict[int, Any] = {}
        ran: set[int] = set()
        around: list[Layer] = []
        for row in filter(lambda row: row.executed, self.architecture.values()):
            while around and (around[-1].completion or 0) < (row.completion or 0):
                around.pop()
            if around and id(around[-1].module) in owners:
                called[id(row.module)] = row.module
            around.append(row)
            ran.add(id(row.module))
        for module in itertools.chain.from_iterable(owner.modules() for owner in owners.values()):
            # It may run next time, and where calls are not counted nothing else would show that.
            if not self.counts_calls or id(module) not in ran:
                called[id(module)] = module
        others = (module for key, module in called.items() if key not in owners)
        return [OwnCode(module, []) for module in others if takes_hooks(module)]


def _distinct_modules(rows: Iterable[Layer]) -> tuple[nn.Module, ...]:
    modules: dict[int, Any] = {id(row.module): row.module for row in rows}
    return tuple(modules.values())
