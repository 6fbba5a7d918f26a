"""A side of a comparison: a network that runs on batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from scio_recorder.analysis.comparing.sides import Block, Values, digests_of
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.program import Options
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.records import Inputs
from scio_recorder.recording.batch_rows import BatchRows
from scio_recorder.recording.feed import Feed
from scio_recorder.recording.naming_batch import naming_batch
from scio_recorder.tensors.copies import twin
from scio_recorder.tensors.structures import map_tensors


class NetworkSide:
    """A network that runs on the batches.

    Parameters
    ----------
    capture : Capture
        The capture of its recorder.
    compiled : callable or None
        The recorder, if it is compiled and runs in place of the net.
    feed : Feed
        Makes the network's inputs from a batch.
    """

    def __init__(self, capture: Capture, compiled: Callable[..., Any] | None, feed: Feed) -> None:
        self.net = capture.net
        self.feed = feed
        self.architecture = capture.program.architecture
        self.digests: frozenset[DepthIdx] = frozenset()
        self._own = self._capture = capture
        self._compiled = compiled
        # Whether other networks run on the same batches.
        self.shares_batches = False
        self._keeps_digests = False

    @property
    def labels(self) -> tuple[DepthIdx, ...]:
        """All layers that ran; for a compiled recorder, those that it records."""
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

    @property
    def left_out(self) -> tuple[str, ...]:
        """No layers: all outputs of a network can be compared."""
        return ()

    def knows_inputs(self, label: DepthIdx) -> bool:
        """Whether the inputs of layers are known: not those of compiled code."""
        return self._compiled is None

    @contextlib.contextmanager
    def opened(
        self, labels: Sequence[DepthIdx], *, inputs: bool, calls: Any, digests: bool
    ) -> Iterator[None]:
        """Record some layers inside a block; of those in ``digests``, only digests are kept."""
        self._keeps_digests = digests
        if self._compiled is not None:
            yield
            return
        # Nobody knows before a pass what it overwrites, and a comparison must not fail for that.
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
        given = self.feed.inputs(block.batch)
        # Networks write into tensors, and fill caches.
        args, kwargs = map_tensors(twin, given) if self.shares_batches else given
        with naming_batch(block.number, self.architecture, self.net, given):
            return self._run(block, args, kwargs)

    def _run(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        capture = self._capture
        if self._compiled is None and not self._keeps_digests:
            capture.run(self.net, args, kwargs)
            outputs, inputs = capture.activations, capture.inputs
            has_inputs = capture.program.options.inputs
            return Values(
                lambda label: _chosen(outputs.peek(label), block.rows),
                lambda label: _chosen(inputs.peek(label), block.received) if has_inputs else None,
            )
        sink = _Sink(capture.program.recording, block, keeps_digests=self._keeps_digests)
        if self._compiled is None:
            capture.run(self.net, args, kwargs, records_outputs=False, sink=sink)
        else:
            capture.hand_on_compiled(partial(self._compiled, *args, **kwargs), sink)
        return Values(sink.values.__getitem__, is_digest=lambda label: sink.keeps_digests)


class _Sink:
    """Takes the outputs of layers: as digests at the hook, or as the copies of a compiled pass."""

    def __init__(self, labels: Sequence[DepthIdx], block: Block, *, keeps_digests: bool) -> None:
        self.values: dict[DepthIdx, Any] = {}
        self._rows = block.rows
        self.keeps_digests = keeps_digests
        self.receivers = {label: partial(self._receive, label) for label in labels}

    def _receive(self, label: DepthIdx, value: Any) -> None:
        chosen = _chosen(value, self._rows)
        self.values[label] = digests_of(chosen) if self.keeps_digests else chosen

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> Any:
        """Keep nothing: inputs are not requested."""

    def receive_inputs(self, label: DepthIdx, kept: Any) -> None:
        """Take nothing."""


def _chosen(value: Any, rows: BatchRows | None) -> Any:
    """Return the chosen rows of each tensor that has rows: padding is not compared."""
    if rows is None:
        return value
    number = len(rows.shape)
    return map_tensors(
        lambda leaf: rows.choose(leaf) if tuple(leaf.shape[:number]) == rows.shape else leaf,
        value,
    )
