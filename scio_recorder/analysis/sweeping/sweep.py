"""The effect of each recorded layer: corrupted runs in which its output is the clean one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scio_recorder.analysis.sweeping.bench import Bench
from scio_recorder.analysis.sweeping.effects import Effects
from scio_recorder.analysis.sweeping.estimate import (
    Marks,
    differentiable,
    estimates,
    gradients,
    mark,
)
from scio_recorder.analysis.sweeping.patches import Positions, check_alike, patched, resolved
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.program import Options
from scio_recorder.capture.replay import Replay
from scio_recorder.errors import ArgumentError, ComparisonError, UnsupportedNetError
from scio_recorder.layer import DepthIdx
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.sharded import is_sharded
from scio_recorder.postprocessors.base import describe
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import boolean
from scio_recorder.tensors.structures import map_tensors


def sweep(
    capture: Capture,
    clean: Any,
    corrupted: Any,
    metric: Any,
    positions: Positions,
    *,
    estimate: bool,
    whole_runs: bool,
) -> Effects:
    """Measure or estimate the effect of each layer that a capture records.

    Parameters
    ----------
    capture : Capture
        Knows the network, and which layers are recorded. It runs nothing.
    clean, corrupted, metric, positions, estimate, whole_runs
        As in ``Recorder.sweep``.
    """
    boolean("estimate", estimate, ArgumentError)
    boolean("whole_runs", whole_runs, ArgumentError)
    runs = Sweep(capture, clean, corrupted, metric)
    return runs.estimated(positions) if estimate else runs.patched(positions, whole_runs=whole_runs)


class Sweep:
    """Two runs of a network, and the share of each recorded layer in their difference.

    Parameters
    ----------
    capture : Capture
        Knows the network, and which layers are recorded. It runs nothing.
    clean, corrupted : Tensor, tuple or mapping
        The network's inputs in both runs.
    metric : callable
        Computes a number from the network's output.

    Raises
    ------
    ComparisonError, UnsupportedNetError
        There is nothing to sweep.
    """

    def __init__(self, capture: Capture, clean: Any, corrupted: Any, metric: Any) -> None:
        _check(capture, metric)
        self._net = capture.net
        self._architecture = capture.architecture
        self._labels = capture.recording
        self._clean = _inputs("clean", clean)
        self._corrupted = _inputs("corrupted", corrupted)
        self._metric = metric
        # A separate capture, so that the recorder keeps its records.
        self._capture = Capture(self._net, self._architecture, self._labels, Options(copy="always"))

    def patched(self, positions: Positions, *, whole_runs: bool) -> Effects:
        """Return the metric of a run for each layer and position.

        Parameters
        ----------
        positions : None, "all" or list of int
            The positions.
        whole_runs : bool
            Whether each run starts at the beginning of the network.
        """
        bench = Bench(self._net)
        replay = Replay(
            self._net, self._architecture, self._labels, None if whole_runs else bench.surroundings
        )

        def noted(*args: Any, **kwargs: Any) -> Any:
            return replay.noted(lambda: self._recorded(*args, **kwargs))

        def value(label: DepthIdx, position: int | None) -> float:
            def patch(output: Any) -> Any:
                return patched(output, found[label], position)

            def run(*args: Any, **kwargs: Any) -> Any:
                return replay.replaced(label, patch, lambda: self._net(*args, **kwargs))

            return bench.run(self._corrupted, run, self._number)

        with self._leaving_no_hooks(), replay.installed(), bench.open():
            clean = bench.run(self._clean, self._recorded, self._number)
            found = dict(self._capture.activations)
            corrupted = bench.run(self._corrupted, noted, self._number)
            check_alike(self._architecture, found, self._capture.activations)
            if bench.has_unseen_writes:
                replay.leave_out_nothing()
            if replay.is_incomplete:
                bench.run(self._corrupted, noted, self._number)
            # Its records take memory.
            self._capture.remove()
            chosen = resolved(self._architecture, found, positions)
            rows = [
                [value(label, at) for at in ([None] if chosen is None else chosen)]
                for label in self._labels
            ]
        values = torch.tensor(rows, dtype=torch.float64, device="cpu")
        values = values.squeeze(1) if chosen is None else values
        return Effects(self._architecture, self._labels, chosen, values, clean, corrupted)

    def estimated(self, positions: Positions) -> Effects:
        """Return first-order estimates of the same, from one pass forward and backward.

        Parameters
        ----------
        positions : None, "all" or list of int
            The positions.
        """
        bench = Bench(self._net)
        marks: Marks = {}

        def slopes(output: Any) -> tuple[float, Any, Any]:
            with torch.enable_grad():
                metric, records = self._metric(output), dict(self._capture.activations)
            return self._number_of(metric), records, gradients(metric, marks)

        with self._leaving_no_hooks(), bench.open(), differentiable(self._net):
            # Kernels may differ if gradients are on: both runs use the same.
            clean = bench.run(self._clean, partial(self._with_graph, None), self._number)
            found = map_tensors(Tensor.detach, dict(self._capture.activations))
            corrupted, records, slope = bench.run(
                self._corrupted, partial(self._with_graph, marks), slopes
            )
        check_alike(self._architecture, found, records)
        chosen = resolved(self._architecture, found, positions)
        # Records are in the order in which layers returned.
        records = {label: map_tensors(Tensor.detach, records[label]) for label in self._labels}
        changes = estimates(self._architecture, found, records, slope, chosen)
        return Effects(
            self._architecture,
            self._labels,
            chosen,
            corrupted + changes,
            clean,
            corrupted,
            is_estimate=True,
        )

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        return self._capture.run(self._net, args, kwargs)

    def _with_graph(self, marks: Marks | None, /, *args: Any, **kwargs: Any) -> Any:
        posts = None
        if marks is not None:
            posts = {label: partial(mark, marks, label) for label in self._labels}
        with torch.enable_grad():
            given = map_tensors(_on_graph, Inputs(args, kwargs))
            return self._capture.run(self._net, given.args, given.kwargs, given=posts)

    @contextlib.contextmanager
    def _leaving_no_hooks(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._capture.remove()

    def _number(self, output: Any) -> float:
        return self._number_of(self._metric(output))

    @staticmethod
    def _number_of(value: Any) -> float:
        try:
            if isinstance(value, str) or getattr(value, "shape", ()) != ():
                raise TypeError
            return float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise ComparisonError(
                f"the metric returned {describe(value)}: it must return one real number, a float "
                "or a tensor of shape (), such as output[0, 3] or output.mean()"
            ) from None


def _check(capture: Capture, metric: Any) -> None:
    """Refuse a sweep that can't work, before anything runs."""
    net = capture.net
    if not capture.recording:
        raise ComparisonError("nothing to sweep over: choose layers with record(...) first")
    if not capture.program.counts_calls:
        raise ComparisonError(
            'after record(..., calls="any") a layer stands for any number of calls: record '
            "without calls= to sweep over single calls"
        )
    if capture.watchers or capture.is_running:
        raise ComparisonError(
            "a sweep runs the network itself, and its runs must not count as passes of a block "
            "around it: leave the block of watch(...) or collecting(...) first"
        )
    if not callable(metric):
        raise ComparisonError(f"metric={metric!r}: give a function of the network's output")
    if any(map(private.is_compiled, net.modules())):
        raise UnsupportedNetError(
            "the network is compiled, in whole or in part, and runs of compiled code can't be "
            "patched: sweep over the network without torch.compile"
        )
    if is_sharded(net):
        raise UnsupportedNetError(
            "the network is sharded, and its outputs and state can't be patched and restored in "
            "one process alone: sweep over the network in one process"
        )


def _inputs(name: str, given: Any) -> Inputs:
    inputs = Inputs.of(given)
    if inputs is not None:
        return inputs
    raise ComparisonError(
        f"{name} is {describe(given)}: give a tensor, a tuple of positional inputs, a dict of "
        "keyword inputs, or both as a pair (tuple, dict)"
    )


def _on_graph(tensor: Tensor) -> Tensor:
    """Make an input require gradients if it can, so that layers without parameters do too."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    # Not a leaf: modules may work in place on their inputs.
    return tensor.requires_grad_().clone()
