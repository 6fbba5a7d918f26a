"""The effect of each recorded layer: corrupted runs in which its output is the clean one.

An estimate of it (attribution patching) is the gradient of the metric with respect to a layer's
output, times the difference between its outputs in both runs (Nanda, "Attribution Patching:
Activation Patching At Industrial Scale", 2023).
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from scio_recorder.analysis.effects import Effects
from scio_recorder.capture.engine import Capture
from scio_recorder.capture.program import RecordOptions
from scio_recorder.errors import ArgumentError, ComparisonError, UnsupportedNetError, warn
from scio_recorder.layer import DepthIdx, Layer, few
from scio_recorder.layer import describe as spec_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs, shown_shapes
from scio_recorder.nets.sharded import is_sharded
from scio_recorder.nets.state.untouched import untouched
from scio_recorder.postprocessors.floating_map import describe
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import boolean
from scio_recorder.tensors.copies import is_dense, twin, with_float64
from scio_recorder.tensors.structures import flatten, map_tensors, tensors

Positions: TypeAlias = Literal["all"] | Iterable[int] | None
_Outputs: TypeAlias = Mapping[DepthIdx, Any]
_Run: TypeAlias = Callable[..., tuple[Any, dict[DepthIdx, Any]]]

_WRITE = 'write positions=None, "all" or a list such as [0, -1]'
_SHOWN = 6


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
        warn(
            "whole_runs= does nothing any more: each run of a sweep is a whole run, so leave it out"
        )
    _check(capture, metric)
    inputs = _inputs("clean", clean), _inputs("corrupted", corrupted)
    measured = _estimated if estimate else _patched
    return measured(capture, *inputs, metric, positions)


def _patched(
    capture: Capture, clean: Inputs, corrupted: Inputs, metric: Any, positions: Positions
) -> Effects:
    """Return the metric of a run for each layer and position."""
    labels = capture.recording
    with _running(capture, clean, corrupted) as run:
        number = partial(_number, metric)
        first, outputs = run(clean, number)
        before, others = run(corrupted, number)
        chosen = _places(capture.architecture, outputs, others, positions)
        values = [
            run(corrupted, number, {label: partial(patched, clean=outputs[label], position=at)})[0]
            for label in labels
            for at in ([None] if chosen is None else chosen)
        ]
        _check_repeated(before, run(corrupted, number, {})[0])
    size = (len(labels), *([] if chosen is None else [len(chosen)]))
    table = torch.tensor(values, dtype=torch.float64, device="cpu").view(size)
    return Effects(capture.architecture, labels, chosen, table, first, before)


def _estimated(
    capture: Capture, clean: Inputs, corrupted: Inputs, metric: Any, positions: Positions
) -> Effects:
    """Return first-order estimates of the same, from one pass forward and backward."""
    marks: dict[DepthIdx, _Mark] = {}
    marking = {label: partial(_mark, marks, label) for label in capture.recording}

    def slopes(output: Any) -> tuple[float, list[Tensor | None]]:
        value = metric(output)
        edges = [edge for mark in marks.values() for edge in mark.edges if edge is not None]
        return _number_of(value), _gradients(value, edges)

    # Kernels may differ if gradients are on: both runs use the same.
    with _running(capture, clean, corrupted, with_gradients=True) as run:
        first, outputs = run(clean, partial(_number, metric))
        outputs = map_tensors(Tensor.detach, outputs)
        (before, found), _ = run(corrupted, slopes, marking)
    others = {label: mark.output for label, mark in marks.items()}
    chosen = _places(capture.architecture, outputs, others, positions)
    gradients = iter(found)
    rows = {
        label: _estimate(capture.architecture[label], outputs[label], mark, gradients, chosen)
        for label, mark in marks.items()
    }
    labels = capture.recording
    table = before + torch.stack([rows[label] for label in labels])
    return Effects(capture.architecture, labels, chosen, table, first, before, is_estimate=True)


@contextlib.contextmanager
def _running(
    capture: Capture, clean: Inputs, corrupted: Inputs, *, with_gradients: bool = False
) -> Iterator[_Run]:
    """Yield a function that runs the network from its present state, to which it is put back.

    It runs on copies of inputs, and returns what a function makes of the output, and the records,
    none if post-processors are given.
    """
    net = capture.net
    # A separate capture, so that the recorder keeps its records.
    own = Capture(net, capture.architecture, capture.recording, RecordOptions(copy="always"))

    def run(inputs: Inputs, measure: Callable[[Any], Any], given: Any = None) -> Any:
        if with_gradients:
            _require_gradients(net)
        args, kwargs = map_tensors(_twin_on_graph if with_gradients else twin, inputs)
        try:
            output = own.run(net, args, kwargs, given=given, records_outputs=given is None)
            return measure(output), dict(own.activations) if given is None else {}
        finally:
            state.put_back()

    with (
        untouched(net, clean, corrupted) as state,
        # It ends with gradients as they were when it began.
        torch.inference_mode(False),
        torch.set_grad_enabled(with_gradients),
    ):
        try:
            yield run
        finally:
            own.remove()


def _number(metric: Any, output: Any) -> float:
    return _number_of(metric(output))


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
            _mixed(own, other, position) if _has_positions(own, leaves[0]) else own
            for own, other in pairs
        ]
    )


def _mixed(own: Tensor, other: Tensor, position: int) -> Tensor:
    mixed = own.detach().clone()
    mixed[:, position] = other[:, position]
    return mixed


def _has_positions(tensor: Tensor, first: Tensor) -> bool:
    """Whether a tensor of a structure has the positions of the first one."""
    return is_dense(tensor) and tensor.dim() > 1 and tensor.shape[:2] == first.shape[:2]


def _places(
    architecture: Architecture, clean: _Outputs, corrupted: _Outputs, positions: Positions
) -> list[int] | None:
    """Return positions as a list; refuse outputs that can't be patched there."""
    for label, output in clean.items():
        _check_alike(architecture[label], output, corrupted[label])
    if positions is None:
        return None
    firsts = {str(architecture[label]): tensors(one)[0] for label, one in clean.items()}
    lengths = {layer: _length(layer, first) for layer, first in firsts.items()}
    if not isinstance(positions, str):
        return _listed(positions, lengths)
    if positions != "all":
        raise ComparisonError(f"positions={positions!r}: {_WRITE}")
    if len(set(lengths.values())) > 1:
        shown = few([f"layer {layer} has {length}" for layer, length in lengths.items()], _SHOWN)
        raise ComparisonError(
            f'positions="all" needs layers with the same number of positions: {shown}. '
            "Sweep them one after the other, or write the positions as a list"
        )
    return list(range(next(iter(lengths.values()))))


def _check_alike(layer: Layer, clean: Any, corrupted: Any) -> None:
    if not tensors(clean):
        raise ComparisonError(
            f"layer {layer} returns no tensor, so there is nothing to patch: record other layers"
        )
    if spec_of(clean) != spec_of(corrupted):
        raise ComparisonError(
            f"layer {layer} returns {shown_shapes(clean)} in the clean run and "
            f"{shown_shapes(corrupted)} in the corrupted run, but only outputs of equal shapes can "
            "be patched: give both runs inputs of one shape (texts of equally many tokens), or "
            "record other layers"
        )


def _length(layer: str, first: Tensor) -> int:
    if is_dense(first) and first.dim() > 1:
        return first.shape[1]
    raise ComparisonError(
        f"layer {layer} returns {shown_shapes(first)}, which has no dimension 1 whose positions "
        "could be patched: write positions=None, or record other layers"
    )


def _listed(positions: Iterable[int], lengths: dict[str, int]) -> list[int]:
    try:
        given = list(positions)
        chosen = [operator.index(position) for position in given]
        if not chosen or any(isinstance(position, bool) for position in given):
            raise TypeError
    except TypeError:
        raise ComparisonError(f"positions={positions!r}: {_WRITE}") from None
    for layer, length in lengths.items():
        for position in chosen:
            if not -length <= position < length:
                raise ComparisonError(
                    f"there is no position {position} in layer {layer}, whose dimension 1 has a "
                    f"length of {length}"
                )
    return chosen


# -- estimates -------------------------------------------------------------------------------------


class _Mark(NamedTuple):
    """A copy of a layer's output, and for each tensor its place in the graph, if it has one."""

    output: Any
    edges: list[GradientEdge | None]


def _require_gradients(net: nn.Module) -> None:
    """Let frozen parameters require gradients as well, until the state is put back."""
    for one in net.parameters():
        if not one.is_inference() and (one.is_floating_point() or one.is_complex()):
            one.requires_grad_(True)


def _twin_on_graph(tensor: Tensor) -> Tensor:
    """Copy an input, and put it on the graph, so that layers without parameters are on it too."""
    copy = twin(tensor)
    if not (copy.is_floating_point() or copy.is_complex()):
        return copy
    # Not a leaf: modules may work in place on their inputs.
    return copy.requires_grad_().clone()


def _mark(marks: dict[DepthIdx, _Mark], label: DepthIdx, output: Any) -> Any:
    """Hand on a copy of a layer's output, and note its place in the graph.

    A layer's output may also be used elsewhere, such as the input that an ``Identity`` returns,
    but a patch changes only what goes on from the layer.
    """
    marks[label] = _Mark(map_tensors(twin, output), [])

    def handed(tensor: Tensor) -> Tensor:
        copy = tensor.clone() if tensor.requires_grad else tensor
        # Its place now: the network may work on the copy in place.
        marks[label].edges.append(get_gradient_edge(copy) if copy.requires_grad else None)
        return copy

    return map_tensors(handed, output)


def _gradients(metric: Any, edges: list[GradientEdge]) -> list[Tensor | None]:
    """Return the gradient of the metric at each place; None where it does not depend on that."""
    if not isinstance(metric, Tensor) or not metric.requires_grad:
        raise ComparisonError(
            "estimate=True needs the gradient of the metric, but the returned value has none: "
            "let the metric return a tensor that differentiable functions compute from the "
            "output, without item(), detach(), argmax() or no_grad()"
        )
    return list(torch.autograd.grad(metric, edges, allow_unused=True)) if edges else []


def _estimate(
    layer: Layer,
    clean: Any,
    mark: _Mark,
    gradients: Iterator[Tensor | None],
    positions: list[int] | None,
) -> Tensor:
    """Return the change of the metric by patches of a layer, to first order."""
    size = () if positions is None else (len(positions),)
    row = torch.zeros(size, dtype=torch.float64, device="cpu")
    leaves = tensors(mark.output)
    for own, other, edge in zip(leaves, tensors(clean), mark.edges, strict=True):
        slope = None if edge is None else next(gradients)
        differs = own != other
        if not differs.any():
            continue
        if edge is None:
            raise ComparisonError(
                f"layer {layer} can't be estimated: its output is not on autograd's graph, since "
                f"its dtype is {own.dtype} or it was made without gradients. Sweep without "
                "estimate=, or record the layers around it"
            )
        if slope is None:
            continue
        wide = torch.complex128 if own.is_complex() else torch.float64
        step = torch.where(with_float64(differs), _wide(other, wide) - _wide(own, wide), 0)
        change = (_wide(slope, wide).conj() * step).real
        if positions is None:
            row += change.sum().cpu()
        elif _has_positions(own, leaves[0]):
            row += change.transpose(0, 1).flatten(1).sum(1).cpu()[positions]
    return row


def _wide(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return with_float64(tensor).to(dtype)
