"""The program of a selection: the table of the calls to record."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from torch import nn

from scio_recorder.errors import LayerNotFoundError, UnsupportedNetError
from scio_recorder.layer import DepthIdx, Layer, Operation, OperationIdx, RowIdx, few, text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.attention_calls import AttentionCalls, find_attention
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.records import Inputs

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
    # Whether calls with recorded inputs can run again; then their state is noted.
    notes_moments: bool = True


# Its name in files of recorders that an earlier version has pickled.
Options = RecordOptions


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


class Program:
    """The calls that a pass must show, in the order in which modules returned at labelling.

    A module is hooked if at least one of its calls is selected, and then all its calls are counted.
    If calls are not counted, a module has one entry, which stands for all its calls.
    """

    def __init__(
        self, architecture: Architecture, recording: tuple[RowIdx, ...], options: RecordOptions
    ) -> None:
        self.attention = find_attention(architecture, options.attention)
        # What is kept for attention alone is in no records that users read.
        self.hidden = {
            one for calls in self.attention.values() for one in (calls.first, calls.last)
        }
        self.hidden -= {*recording}
        self.recording = recording
        rows = (*recording, *self.hidden)
        self.architecture = architecture = architecture.around(rows)
        self.options = options
        # Whether modules must run just as often as at labelling.
        self.counts_calls = options.calls == "labelled"
        # Also those around operations: their returns tell calls with equally many operations apart.
        self.modules: tuple[nn.Module, ...] = _distinct_modules(architecture, rows)
        index = {id(module): i for i, module in enumerate(self.modules)}
        # The functions to record in the own code of modules, both by index.
        self.functions = _functions(architecture, rows, index)
        num_entries = len(self.modules) + sum(map(len, self.functions.values()))
        # The flags of a pass in which no hook may take the fast path.
        self.never_fast = [False] * num_entries
        self.no_receivers: list[Any] = [None] * num_entries
        # Bare tuples: dynamo can't follow the hash of a subclass.
        calls: list[tuple[float, int, Any]] = [
            (architecture[label].completion or 0, index[id(module)], (label[0], label[1]))
            for module in self.modules
            for label in self._calls(module)
        ]
        calls += [
            (row.completion or 0, self.functions[index[id(row.module)]][row.function], row.label)
            for row in self._operations(index)
        ]
        calls.sort()
        self._tabulate(calls)

    def _tabulate(self, calls: Sequence[tuple[float, int, RowIdx]]) -> None:
        """Note what a pass must show, given the calls with their entries in order."""
        architecture, chosen = self.architecture, {*self.recording, *self.hidden}
        # By index: of a module, or of a function in the own code of one.
        self.expected: list[int] = [module for _, module, _ in calls]
        self.labels: list[RowIdx | None] = [
            label if label in chosen else None for _, _, label in calls
        ]
        # The name by which a module with several names was called, None for other modules.
        names = [architecture[label].called_as for _, _, label in calls]
        self.callers = names if self.counts_calls else [None] * len(names)
        self.positions: list[list[int]] = [[] for _ in self.never_fast]
        for position, module in enumerate(self.expected):
            self.positions[module].append(position)
        self.single: list[RowIdx | None] = [self._single(own) for own in self.positions]
        # The recorded operations.
        self.own_code = {label for label in self.recording if isinstance(label, OperationIdx)}
        # By the operation that completes it, the attention of a layer.
        self.kernels: dict[RowIdx, AttentionCalls] = {
            calls.last: calls for calls in self.attention.values()
        }
        # Calls that are not recorded, or not by their output alone.
        self.slow = {None, *self.hidden, *self.kernels}
        # The entries whose inputs are kept.
        pairs = zip(self.expected, self.labels, strict=True)
        self.keeps_inputs = {
            entry for entry, label in pairs if self.options.inputs or label in self.kernels
        }
        known = [label for label in self.labels if label is not None]
        self.order: list[RowIdx] = [label for label in known if label not in self.hidden]
        # The recorded labels under compilation, which can't look at the architecture.
        self.keys: dict[object, tuple[RowIdx, ...]] = {}
        for label in self.order:
            for key in (label, text_of(label), architecture[label].name):
                self.keys[key] = (*self.keys.get(key, ()), label)
        # The last selected call, after which a pass may stop.
        self.last = max((at for at, label in enumerate(self.labels) if label), default=-1)

    def _operations(self, index: Mapping[int, int]) -> Iterator[Operation]:
        """Yield the operations whose function is recorded in the own code around it."""
        entered: set[int] = set()
        chosen = {*self.recording, *self.hidden}
        for row in self.architecture.operations.values():
            entry = self.functions.get(index.get(id(row.module), -1), {}).get(row.function)
            is_first = entry not in entered and row.label in chosen
            if entry is not None and (self.counts_calls or is_first):
                entered.add(entry)
                yield row

    @cached_property
    def unrecorded(self) -> set[int]:
        """Entries of which only the calls count: those of modules around recorded operations."""
        rows = enumerate(self.positions)
        return {index for index, own in rows if not any(self.labels[at] for at in own)}

    def _single(self, positions: list[int]) -> RowIdx | None:
        """Return the label of a module that is called once, under one name, and recorded."""
        is_clear = self.counts_calls and [self.callers[at] for at in positions] == [None]
        return self.labels[positions[0]] if is_clear else None

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the network's modules, by ``id``."""
        root = self.architecture[0, 1].module
        return {} if root is None else {id(one): name for name, one in root.named_modules()}

    def _calls(self, module: nn.Module) -> tuple[RowIdx, ...]:
        if self.counts_calls:
            return self.architecture.calls(module)
        rows = (self.architecture[at] for at in self.recording)
        own = [row for row in rows if row.module is module and not isinstance(row, Operation)]
        return (own[0].label,) if own else self.architecture.calls(module)[:1]

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

    def wrong_own_code(self, seen: Sequence[int], before: int | None = None) -> list[str]:
        """Describe the functions that calls of a module share out in another way than at labelling.

        Otherwise two and three calls in place of three and two would pass for the same.
        """
        expected, found = self.expected[:before], []
        for owner, functions in self.functions.items():
            for function in functions.values():
                own = _shares(expected, owner, function), _shares(seen, owner, function)
                if own[0] != own[1]:
                    found.append(
                        f"{self._described(function)}: {own[0]} at labelling, {own[1]} now"
                    )
        return found

    def _described(self, index: int) -> str:
        """Name the recorded layers or operations of an entry."""
        rows = self.layers_of([index]) or [
            self.architecture[label] for label in self.architecture.calls(self.modules[index])
        ]
        what = "function" if index >= len(self.modules) else "module"
        return f"{few(rows, 4)}: calls of the {what}"

    @cached_property
    def starts(self) -> list[list[RowIdx | None]]:
        """The rows of each module's calls in the order in which these started, failed ones too."""
        if not self.counts_calls:
            return [[self.labels[at] for at in own] for own in self.positions]
        rows: dict[int, dict[int, RowIdx | None]] = {id(module): {} for module in self.modules}
        # A container can have a row more, without a call: it must not take the place of one.
        for row in sorted(self.architecture.values(), key=lambda row: row.executed):
            if id(row.module) in rows:
                rows[id(row.module)][row.call] = (row.depth, row.index)
        found = [[calls[number] for number in sorted(calls)] for calls in rows.values()]
        # Operations start in the order in which they return.
        own_code = self.positions[len(self.modules) :]
        return found + [[self.labels[at] for at in own] for own in own_code]

    @cached_property
    def rows(self) -> list[Layer | None]:
        """The first recorded row of each module, and of each function in own code, if any."""
        rows = [None if label is None else self.architecture[label] for label in self.labels]
        return [next((rows[at] for at in own if rows[at]), None) for own in self.positions]

    def layers_of(self, modules: Collection[int]) -> list[Layer]:
        """Return the recorded layers of modules, which are given by index."""
        calls = zip(self.expected, self.labels, strict=True)
        labels = [label for module, label in calls if module in modules and label is not None]
        return [self.architecture[label] for label in labels]

    def modules_of(self, labels: Iterable[RowIdx]) -> set[int]:
        """Return the indices of the modules of layers, leaving operations out."""
        found = {self.expected[self.labels.index(label)] for label in labels}
        return {index for index in found if index < len(self.modules)}

    @cached_property
    def encoders(self) -> list[nn.Module]:
        """The encoders around recorded own code.

        Where no function mode is around them, they make nested tensors, which torch's own attention
        does not take where one is.
        """
        owners = {id(self.modules[index]) for index in self.functions}
        rows = self.architecture.values()
        encoders = [row.module for row in rows if isinstance(row.module, nn.TransformerEncoder)]
        return [one for one in encoders if not owners.isdisjoint(map(id, one.modules()))]

    @cached_property
    def called(self) -> list[nn.Module]:
        """The modules that own code with a mode may call, without those that have such code."""
        having = [*self.encoders, *(self.modules[index] for index in self.functions)]
        owners = {id(module): module for module in having}
        found: dict[int, Any] = {}
        ran: set[int] = set()
        around: list[Layer] = []
        for row in filter(lambda row: row.executed, self.architecture.values()):
            while around and (around[-1].completion or 0) < (row.completion or 0):
                around.pop()
            if around and id(around[-1].module) in owners:
                found[id(row.module)] = row.module
            around.append(row)
            ran.add(id(row.module))
        for module in itertools.chain.from_iterable(owner.modules() for owner in owners.values()):
            # It may run next time, and where calls are not counted nothing else would show that.
            if not self.counts_calls or id(module) not in ran:
                found[id(module)] = module
        return [one for key, one in found.items() if key not in owners and takes_hooks(one)]


def _functions(
    architecture: Architecture, recording: tuple[RowIdx, ...], index: Mapping[int, int]
) -> dict[int, dict[str, int]]:
    """Return the functions of recorded operations, by the modules, with indices behind theirs."""
    found: dict[int, dict[str, int]] = {}
    number = len(index)
    for row in map(architecture.__getitem__, recording):
        if isinstance(row, Operation):
            _refuse_recursion(architecture, row)
            functions = found.setdefault(index[id(row.module)], {})
            if row.function not in functions:
                functions[row.function] = number
                number += 1
    return found


def _refuse_recursion(architecture: Architecture, row: Operation) -> None:
    around = architecture.enclosing(row.layer.label)
    if any(architecture[label].module is row.module for label in around):
        raise UnsupportedNetError(
            f"{row} is of a module that calls itself, whose own code runs inside itself: record "
            "the layer"
        )


def _shares(calls: Sequence[int], owner: int, function: int) -> list[int]:
    """Return how many calls of a function there were before each return of the module."""
    shares = [0]
    for call in calls:
        if call == owner:
            shares.append(0)
        shares[-1] += call == function
    return shares


def _distinct_modules(
    architecture: Architecture, recording: tuple[RowIdx, ...]
) -> tuple[nn.Module, ...]:
    found: dict[int, nn.Module] = {}
    for label in recording:
        module = architecture[label].module
        if module is None:
            raise LayerNotFoundError(
                f"layer {architecture[label]} has no module: this architecture was read from disk"
            )
        found.setdefault(id(module), module)
    return tuple(found.values())
