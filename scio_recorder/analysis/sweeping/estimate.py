"""Attribution patching: first-order estimates of the effects of patches, from one backward pass.

The estimate is the gradient of the metric with respect to a layer's output, times the difference
between its outputs in both runs (Nanda, "Attribution Patching: Activation Patching At Industrial
Scale", 2023).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from scio_recorder.errors import ComparisonError
from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.tensors.copies import is_dense, with_float64
from scio_recorder.tensors.structures import map_tensors, tensors

# For each tensor that a layer handed on, by label: its place in the graph, None if it has none.
Marks: TypeAlias = dict[DepthIdx, list[GradientEdge | None]]
# The result of `gradients`.
Slopes: TypeAlias = dict[DepthIdx, list[tuple[bool, Tensor | None]]]


@contextlib.contextmanager
def differentiable(net: nn.Module) -> Iterator[None]:
    """Let all parameters require gradients inside a block, frozen ones too.

    Parameters
    ----------
    net : torch.nn.Module
        The network. Only what is asked of autograd is computed in a backward pass.
    """
    frozen = [
        parameter
        for parameter in net.parameters()
        if not (parameter.requires_grad or parameter.is_inference())
        and (parameter.is_floating_point() or parameter.is_complex())
    ]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def mark(marks: Marks, label: DepthIdx, output: Any) -> Any:
    """Hand on a copy of a layer's output, and note its place in the graph.

    Parameters
    ----------
    marks : dict
        The places, by label; the new ones are added.
    label : (int, int)
        The layer.
    output : any
        Its output.

    Returns
    -------
    any
        The same structure of copies. A layer's output may also be used elsewhere, such as the input
        that an ``Identity`` returns, but a patch changes only what goes on from the layer.
    """
    marks[label] = []

    def handed(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            marks[label].append(None)
            return tensor
        copy = tensor.clone()
        # Its place now: the network may work on the copy in place.
        marks[label].append(get_gradient_edge(copy))
        return copy

    return map_tensors(handed, output)


def gradients(metric: Any, marks: Marks) -> Slopes:
    """Differentiate the metric with respect to the outputs that layers handed on.

    Parameters
    ----------
    metric : torch.Tensor
        The result of the metric.
    marks : dict
        The places that `mark` noted.

    Returns
    -------
    dict
        For each tensor that a layer returned, by label: whether it was on the graph, and the
        gradient, None if the metric does not depend on it.

    Raises
    ------
    ComparisonError
        The metric is not on the graph.
    """
    if not isinstance(metric, Tensor) or not metric.requires_grad:
        raise ComparisonError(
            "estimate=True needs the gradient of the metric, but the returned value has none: "
            "let the metric return a tensor that differentiable functions compute from the "
            "output, without item(), detach(), argmax() or no_grad()"
        )
    edges = [edge for own in marks.values() for edge in own if edge is not None]
    found = iter(torch.autograd.grad(metric, edges, allow_unused=True) if edges else ())
    return {
        label: [(edge is not None, None if edge is None else next(found)) for edge in own]
        for label, own in marks.items()
    }


def estimates(
    architecture: Architecture,
    clean: Mapping[DepthIdx, Any],
    corrupted: Mapping[DepthIdx, Any],
    slopes: Slopes,
    positions: Sequence[int] | None,
) -> Tensor:
    """Return the change of the metric by each patch, to first order.

    Parameters
    ----------
    architecture : Architecture
        Names the layers in errors.
    clean, corrupted : mapping
        The output of each layer in the two runs; the result is in the order of the second.
    slopes : mapping
        The result of `gradients` for the corrupted run.
    positions : sequence of int or None
        Which positions are patched.

    Returns
    -------
    torch.Tensor
        Float64, [layers] or [layers, positions].

    Raises
    ------
    ComparisonError
        A layer's output is not on the graph.
    """
    size = () if positions is None else (len(positions),)
    rows = []
    for label, value in corrupted.items():
        row = torch.zeros(size, dtype=torch.float64, device="cpu")
        leaves = tensors(value)
        others = tensors(clean[label])
        for own, other, slope in zip(leaves, others, slopes[label], strict=True):
            change = _change(own, other, *slope, architecture[label])
            if change is None:
                continue
            if positions is None:
                row += change.sum().cpu()
            elif has_positions(own, leaves[0]):
                by_position = change.transpose(0, 1).flatten(1).sum(1).cpu()
                row += by_position[list(positions)]
        rows.append(row)
    return torch.stack(rows)


def has_positions(tensor: Tensor, first: Tensor) -> bool:
    """Whether a tensor of a structure has the positions of the first one."""
    return is_dense(tensor) and tensor.dim() > 1 and tensor.shape[:2] == first.shape[:2]


def _change(
    own: Tensor, other: Tensor, is_on_graph: bool, slope: Tensor | None, layer: Layer
) -> Tensor | None:
    """Return the gradient times the difference; None if the metric does not change."""
    differs = own != other
    if not differs.any():
        return None
    if not is_on_graph:
        raise ComparisonError(
            f"layer {layer} can't be estimated: its output is not on autograd's graph, since its "
            f"dtype is {own.dtype} or it was made without gradients. Sweep without estimate=, or "
            "record the layers around it"
        )
    if slope is None:
        return None
    wide = torch.complex128 if own.is_complex() else torch.float64
    differs, own, other, slope = map(with_float64, (differs, own, other, slope))
    step = torch.where(differs, other.to(wide) - own.to(wide), 0)
    return (slope.to(wide).conj() * step).real
