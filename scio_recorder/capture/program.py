"""The program of a selection: the table of the calls to record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from torch import nn

from scio_recorder.errors import LayerNotFoundError
from scio_recorder.layer import DepthIdx, Layer, few, text_of
from scio_recorder.nets.architecture import Architecture
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
    def receivers(self) -> Mapping[DepthIdx, Callable[[Any], None]]:
        """For each layer, the function that receives its output, a tensor or a structure.

        If a module is called once in a pass, the hook itself calls the function: every layer of
        every batch would pay for anything in between.
        """

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> Any:
        """Copy the inputs that a module's forward is about to receive; its call is known later."""

    def receive_inputs(self, label: DepthIdx, kept: Any) -> None:
        """Take the result of `keep_inputs` for a layer, just before the layer's output."""


class Program:
    """The calls that a pass must show, in the order in which modules returned at labelling.

    A module is hooked if at least one of its calls is selected, and then all its calls are counted.
    If calls are not counted, a module has one entry, which stands for all its calls.
    """

    def __init__(
        self, architecture: Architecture, recording: tuple[DepthIdx, ...], options: RecordOptions
    ) -> None:
        self.architecture = architecture
        self.recording = recording
        self.options = options
        # Whether modules must run just as often as at labelling.
        self.counts_calls = options.calls == "labelled"
        self.modules: tuple[nn.Module, ...] = _distinct_modules(architecture, recording)
        # The flags of a pass in which no hook may take the fast path.
        self.never_fast = [False] * len(self.modules)
        self.no_receivers: list[Any] = [None] * len(self.modules)
        index = {id(module): i for i, module in enumerate(self.modules)}
        # Bare tuples: dynamo can't follow the hash of a subclass.
        calls = sorted(
            (architecture[label].completion or 0, index[id(module)], (label[0], label[1]))
            for module in self.modules
            for label in self._calls(module)
        )
        chosen = set(recording)
        self.expected: list[int] = [module for _, module, _ in calls]
        self.labels: list[DepthIdx | None] = [
            label if label in chosen else None for _, _, label in calls
        ]
        # The name by which a module with several names was called, None for other modules.
        names = [architecture[label].called_as for _, _, label in calls]
        self.callers = names if self.counts_calls else [None] * len(names)
        self.positions: list[list[int]] = [[] for _ in self.modules]
        for position, module in enumerate(self.expected):
            self.positions[module].append(position)
        self.single: list[DepthIdx | None] = [self._single(own) for own in self.positions]
        self.order: list[DepthIdx] = [label for label in self.labels if label is not None]
        # The recorded labels under compilation, which can't look at the architecture.
        self.keys: dict[object, tuple[DepthIdx, ...]] = {}
        for label in self.order:
            for key in (label, text_of(label), architecture[label].name):
                self.keys[key] = (*self.keys.get(key, ()), label)
        # The last selected call, after which a pass may stop.
        self.last = max((at for at, label in enumerate(self.labels) if label), default=-1)

    def _single(self, positions: list[int]) -> DepthIdx | None:
        """Return the label of a module that is called once, under one name, and recorded."""
        is_clear = self.counts_calls and [self.callers[at] for at in positions] == [None]
        return self.labels[positions[0]] if is_clear else None

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the network's modules, by ``id``."""
        root = self.architecture[0, 1].module
        return {} if root is None else {id(one): name for name, one in root.named_modules()}

    def _calls(self, module: nn.Module) -> tuple[DepthIdx, ...]:
        if self.counts_calls:
            return self.architecture.calls(module)
        chosen = (at for at in self.recording if self.architecture[at].module is module)
        return (next(chosen),)

    def wrong_calls(self, seen: Mapping[int, int], before: int | None = None) -> list[str]:
        """Describe the modules whose calls are not those at labelling, up to a position."""
        expected = Counter(self.expected[:before])
        return [
            f"{few(self.layers_of([index]), len(positions))}: calls of the module: "
            f"{expected[index]} at labelling, {seen.get(index, 0)} now"
            for index, positions in enumerate(self.positions)
            if seen.get(index, 0) != expected[index]
        ]

    @cached_property
    def starts(self) -> list[list[DepthIdx | None]]:
        """The rows of each module's calls in the order in which these started, failed ones too."""
        if not self.counts_calls:
            return [[self.labels[at] for at in own] for own in self.positions]
        rows: dict[int, dict[int, DepthIdx]] = {id(module): {} for module in self.modules}
        # A container can have a row more, without a call: it must not take the place of one.
        for row in sorted(self.architecture.values(), key=lambda row: row.executed):
            if id(row.module) in rows:
                rows[id(row.module)][row.call] = (row.depth, row.index)
        return [[calls[number] for number in sorted(calls)] for calls in rows.values()]

    def layers_of(self, modules: Collection[int]) -> list[Layer]:
        """Return the recorded layers of modules, which are given by index."""
        calls = zip(self.expected, self.labels, strict=True)
        labels = [label for module, label in calls if module in modules and label is not None]
        return [self.architecture[label] for label in labels]

    def modules_of(self, labels: Iterable[DepthIdx]) -> set[int]:
        """Return the indices of the modules of layers."""
        return {self.expected[self.labels.index(label)] for label in labels}


def _distinct_modules(
    architecture: Architecture, recording: tuple[DepthIdx, ...]
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
