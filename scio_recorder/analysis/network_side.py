"""A side of a comparison: a network that runs on batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from scio_recorder.analysis.sides import Block, Values
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.program import Options
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.collect.batch_rows import BatchRows
from scio_recorder.recording.collect.feed import Feed
from scio_recorder.tensors.structures import map_tensors


class NetworkSide:
    """A network that runs on the batches.

    Parameters
    ----------
    capture : Capture
        That of its recorder.
    net : torch.nn.Module
        The network.
    compiled : callable or None
        The recorder, where that is compiled and runs in place of the net.
    feed : Feed
        Says what the network is given for a batch.
    """

    def __init__(
        self,
        capture: Capture,
        net: nn.Module,
        compiled: Callable[..., Any] | None,
        feed: Feed,
    ) -> None:
        self.net = net
        self.feed = feed
        self.architecture = capture.program.architecture
        self.digests: frozenset[DepthIdx] = frozenset()
        self._own = self._capture = capture
        self._compiled = compiled

    @property
    def labels(self) -> tuple[DepthIdx, ...]:
        """All layers that ran; of a compiled recorder, those that it records."""
        if self._compiled is not None:
            return self.recorded
        return tuple(row.label for row in self.architecture.values() if row.executed)

    @property
    def recorded(self) -> tuple[DepthIdx, ...]:
        """The layers that its recorder records."""
        return self._own.program.recording

    @property
    def calls(self) -> Any:
        """Whether its recorder counts calls, as ``record`` was told."""
        return self._own.program.options.calls

    def knows_inputs(self, label: DepthIdx) -> bool:
        """Whether it is known what a layer received: not where compiled code runs."""
        return self._compiled is None

    @contextlib.contextmanager
    def opened(self, labels: Sequence[DepthIdx], *, inputs: bool, calls: Any) -> Iterator[None]:
        """Listen to some layers for the length of a block of code."""
        if self._compiled is not None:
            yield
            return
        # What one pass overwrites is not known before it, and a comparison must not fail for it.
        options = Options(inputs=inputs, copy="always", calls=calls, notes_moments=False)
        chosen = tuple(sorted(set(labels)))
        self._capture = Capture(self.net, self.architecture, chosen, options)
        try:
            yield
        finally:
            self._capture.remove()
            self._capture = self._own

    def at(self, block: Block) -> Values:
        """Run the network on a batch."""
        args, kwargs = self.feed.inputs(block.batch)
        if self._compiled is not None:
            sink = _CompiledSink(self.recorded)
            self._own.hand_on_compiled(partial(self._compiled, *args, **kwargs), sink)
            return _PassValues(sink.values.__getitem__, None, block.rows)
        self._capture.run(self.net, args, kwargs)
        outputs, inputs = self._capture.activations.peek, self._capture.inputs.peek
        has_inputs = self._capture.program.options.inputs
        return _PassValues(outputs, inputs if has_inputs else None, block.rows)


class _PassValues:
    """What a pass has left."""

    def __init__(
        self,
        outputs: Callable[[DepthIdx], Any],
        inputs: Callable[[DepthIdx], Any] | None,
        rows: BatchRows | None,
    ) -> None:
        self._outputs = outputs
        self._inputs = inputs
        self._rows = rows

    def output(self, label: DepthIdx) -> Any:
        return self._chosen(self._outputs(label))

    def inputs(self, label: DepthIdx) -> Inputs | None:
        return None if self._inputs is None else self._chosen(self._inputs(label))

    def is_digest(self, label: DepthIdx) -> bool:
        return False

    def _chosen(self, value: Any) -> Any:
        """Return the rows of each tensor that has some: padding is not compared."""
        rows = self._rows
        if rows is None:
            return value
        number = len(rows.shape)
        return map_tensors(
            lambda leaf: rows.choose(leaf) if tuple(leaf.shape[:number]) == rows.shape else leaf,
            value,
        )


class _CompiledSink:
    """Takes what a compiled pass hands over, copies of its own."""

    def __init__(self, labels: Sequence[DepthIdx]) -> None:
        self.values: dict[DepthIdx, Any] = {}
        self.receivers = {label: partial(self.values.__setitem__, label) for label in labels}

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> Any:
        """Compiled code calls no hook ahead of a module."""

    def receive_inputs(self, label: DepthIdx, kept: Any) -> None:
        """There are none."""
