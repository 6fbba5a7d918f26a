"""The effect of each recorded layer: corrupted runs in which its output is the clean one."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from scio_recorder.analysis.sweeping.effects import Effects
from scio_recorder.analysis.sweeping.estimate import (
    Marks,
    differentiable,
    estimates,
    gradients,
    has_positions,
    mark,
)
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.program import RecordOptions
from scio_recorder.errors import ArgumentError, ComparisonError, UnsupportedNetError, warn
from scio_recorder.layer import DepthIdx, Layer, shapes_of
from scio_recorder.layer import describe as spec_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.sharded import is_sharded
from scio_recorder.nets.state.untouched import NetState, untouched
from scio_recorder.postprocessors.floating_map import describe
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import boolean
from scio_recorder.tensors.copies import is_dense, twin
from scio_recorder.tensors.structures import flatten, map_tensors, tensors

T = TypeVar("T")
Positions: TypeAlias = Literal["all"] | Iterable[int] | None

_WRITE = 'write positions=None, "all" or a list such as [0, -1]'


def sweep(
    capture: Capture,
    clean: Any,
    corrupted: Any,
    metric: Any,
    positions: Positions,
    *,
    estimate: bool,
    whole_runs: bool | None,
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
    if whole_runs is not None:
        boolean("whole_runs", whole_runs, ArgumentError)
        warn(
            "whole_runs= does nothing any more: each run of a sweep is a whole run, so leave it out"
        )
    runs = Sweep(capture, clean, corrupted, metric)
    return runs.estimated(positions) if estimate else runs.patched(positions)


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
        self._capture = Capture(
            self._net, self._architecture, self._labels, RecordOptions(copy="always")
        )

    def patched(self, positions: Positions) -> Effects:
        """Return the metric of a run for each layer and position.

        Parameters
        ----------
        positions : None, "all" or list of int
            The positions.
        """
        with self._runs() as state:
            run = partial(self._run, state, self._number)
            clean = run(self._clean)
            found = dict(self._capture.activations)
            corrupted = run(self._corrupted)
            check_alike(self._architecture, found, self._capture.activations)
            chosen = resolved(self._architecture, found, positions)
            places = [None] if chosen is None else chosen
            patches = [
                {label: partial(patched, clean=found[label], position=at)}
                for label in self._labels
                for at in places
            ]
            values = [run(self._corrupted, given=patch, records=False) for patch in patches]
            _check_repeated(corrupted, run(self._corrupted, records=False))
        size = (len(self._labels), *([] if chosen is None else [len(chosen)]))
        table = torch.tensor(values, dtype=torch.float64, device="cpu").view(size)
        return Effects(self._architecture, self._labels, chosen, table, clean, corrupted)

    def estimated(self, positions: Positions) -> Effects:
        """Return first-order estimates of the same, from one pass forward and backward.

        Parameters
        ----------
        positions : None, "all" or list of int
            The positions.
        """
        marks: Marks = {}
        marking = {label: partial(mark, marks, label) for label in self._labels}

        def slopes(output: Any) -> tuple[float, Any, Any]:
            metric, records = self._metric(output), dict(self._capture.activations)
            return _number_of(metric), records, gradients(metric, marks)

        # Kernels may differ if gradients are on: both runs use the same.
        with differentiable(self._net), self._runs() as state, torch.enable_grad():
            run = partial(self._run, state, copied=_twin_on_graph)
            clean = run(self._number, self._clean)
            found = map_tensors(Tensor.detach, dict(self._capture.activations))
            corrupted, records, slope = run(slopes, self._corrupted, given=marking)
        check_alike(self._architecture, found, records)
        chosen = resolved(self._architecture, found, positions)
        # Records are in the order in which layers returned.
        records = {label: map_tensors(Tensor.detach, records[label]) for label in self._labels}
        changes = estimates(self._architecture, found, records, slope, chosen)
        given = self._architecture, self._labels, chosen, corrupted + changes, clean, corrupted
        return Effects(*given, is_estimate=True)

    @contextlib.contextmanager
    def _runs(self) -> Iterator[NetState]:
        """Run the network inside the block, which leaves no trace, without gradients."""
        no_graph = torch.inference_mode(False), torch.no_grad()
        with untouched(self._net, self._clean, self._corrupted) as state, no_graph[0], no_graph[1]:
            try:
                yield state
            finally:
                self._capture.remove()

    def _run(
        self,
        state: NetState,
        measure: Callable[[Any], T],
        inputs: Inputs,
        *,
        given: Mapping[DepthIdx, Callable[[Any], Any]] | None = None,
        records: bool = True,
        copied: Callable[[Tensor], Tensor] = twin,
    ) -> T:
        """Run the network from the noted state, on copies of inputs, and measure its output."""
        args, kwargs = map_tensors(copied, inputs)
        keywords: Any = {"given": given, "records_outputs": records}
        try:
            return measure(self._capture.run(self._net, args, kwargs, **keywords))
        finally:
            state.put_back()

    def _number(self, output: Any) -> float:
        return _number_of(self._metric(output))


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


def _check_repeated(first: float, last: float) -> None:
    """Raise unless a run at the end gives the same metric as at first."""
    if first != last and not (math.isnan(first) and math.isnan(last)):
        raise ComparisonError(
            f"the metric of the corrupted run was {first} at first, and {last} when it ran again "
            "at the end: the network, or the metric, keeps state that can't be put back, such as "
            "a global variable or an iterator. Effects of layers can't be told from that: keep "
            "such state in attributes of the network"
        )


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


def _twin_on_graph(tensor: Tensor) -> Tensor:
    """Copy an input, and put it on the graph, so that layers without parameters are on it too."""
    copy = twin(tensor)
    if not (copy.is_floating_point() or copy.is_complex()):
        return copy
    # Not a leaf: modules may work in place on their inputs.
    return copy.requires_grad_().clone()


# -- patches ---------------------------------------------------------------------------------------


def patched(corrupted: Any, clean: Any, position: int | None) -> Any:
    """Return the structure that goes on in place of a layer's output.

    Parameters
    ----------
    corrupted : Any
        The layer's output, which does not change.
    clean : Any
        Its output in another run, of the same structure.
    position : int or None
        The position of dimension 1 that is taken from there; None for all.

    Returns
    -------
    Any
        The structure with copies of the clean tensors. With a position, tensors whose first two
        dimensions are not those of the first tensor stay the corrupted ones.

    Examples
    --------
    >>> import torch
    >>> patched(torch.zeros(1, 3), torch.ones(1, 3), 1)
    tensor([[0., 1., 0.]])
    """
    leaves, rebuild = flatten(corrupted)
    pairs = zip(leaves, tensors(clean), strict=True)
    if position is None:
        return rebuild([twin(other) for _, other in pairs])
    return rebuild(
        [
            _mixed(own, other, position) if has_positions(own, leaves[0]) else own
            for own, other in pairs
        ]
    )


def _mixed(own: Tensor, other: Tensor, position: int) -> Tensor:
    mixed = own.detach().clone()
    mixed[:, position] = other[:, position]
    return mixed


def check_alike(
    architecture: Architecture, clean: Mapping[DepthIdx, Any], corrupted: Mapping[DepthIdx, Any]
) -> None:
    """Refuse layers whose structures, shapes or dtypes differ between the two runs."""
    for label, one in clean.items():
        specs = spec_of(one), spec_of(corrupted[label])
        if not tensors(one):
            raise ComparisonError(
                f"layer {architecture[label]} returns no tensor, so there is nothing to patch: "
                "record other layers"
            )
        if specs[0] != specs[1]:
            shown = " and ".join(str(shapes_of(spec)) for spec in specs)
            shown = shown if shapes_of(specs[0]) != shapes_of(specs[1]) else f"{specs}"
            raise ComparisonError(
                f"layer {architecture[label]} returns {shown} in the clean and in the corrupted "
                "run, but only outputs of equal shapes can be patched: give both runs inputs of "
                "one shape (texts of equally many tokens), or record other layers"
            )


def resolved(
    architecture: Architecture, found: Mapping[DepthIdx, Any], positions: Positions
) -> list[int] | None:
    """Return positions as a list; raise if a layer lacks one of them.

    Parameters
    ----------
    architecture : Architecture
        Names the layers in errors.
    found : mapping
        The output of each layer.
    positions : None, "all" or iterable of int
        The requested positions.
    """
    if positions is None:
        return None
    lengths = {label: _length(architecture[label], value) for label, value in found.items()}
    if isinstance(positions, str):
        if positions != "all":
            raise ComparisonError(f"positions={positions!r}: {_WRITE}")
        return list(range(_common(architecture, lengths)))
    chosen = _integers(positions)
    for label, length in lengths.items():
        for position in chosen:
            if not -length <= position < length:
                raise ComparisonError(
                    f"there is no position {position} in layer {architecture[label]}, whose "
                    f"dimension 1 has a length of {length}"
                )
    return chosen


def _length(layer: Layer, value: Any) -> int:
    first = tensors(value)[0]
    if not is_dense(first) or first.dim() < 2:
        raise ComparisonError(
            f"layer {layer} returns {shapes_of(spec_of(value))}, which has no dimension 1 whose "
            "positions could be patched: write positions=None, or record other layers"
        )
    return first.shape[1]


def _common(architecture: Architecture, lengths: Mapping[DepthIdx, int]) -> int:
    (first, length), *others = lengths.items()
    for label, other in others:
        if other != length:
            raise ComparisonError(
                'positions="all" needs layers with the same number of positions: layer '
                f"{architecture[first]} has {length}, layer {architecture[label]} has {other}. "
                "Sweep them one after the other, or write the positions as a list"
            )
    return length


def _integers(positions: Any) -> list[int]:
    given = positions.tolist() if isinstance(positions, Tensor) else positions
    try:
        found = list(given)
        if not found or any(isinstance(position, bool) for position in found):
            raise TypeError
        return [operator.index(position) for position in found]
    except TypeError:
        raise ComparisonError(f"positions={positions!r}: {_WRITE}") from None
