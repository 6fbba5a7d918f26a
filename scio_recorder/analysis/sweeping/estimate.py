"""Attribution patching: what a patch would change, to first order, from one backward pass.

The estimate is the gradient of the metric with respect to what a layer returned, times the
difference of what it returned in both runs (Nanda, "Attribution Patching: Activation Patching At
Industrial Scale", 2023).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.analysis.sweeping.patches import has_positions
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import DepthIdx, Layer
from scio_recorder.nets.architecture import Architecture
from scio_recorder.tensors.structures import tensors


@contextlib.contextmanager
def differentiable(net: nn.Module) -> Iterator[None]:
    """Let all parameters require gradients for the length of a block, frozen ones too.

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


def gradients(metric: Any, records: Mapping[DepthIdx, Any]) -> dict[int, Tensor]:
    """Differentiate the metric with respect to what layers returned.

    Parameters
    ----------
    metric : torch.Tensor
        What the metric returned.
    records : mapping
        What each layer returned, on the graph.

    Returns
    -------
    dict
        By the identity of a tensor; without those on which the metric does not depend.

    Raises
    ------
    ComparisonError
        The metric is not on the graph.
    """
    if not isinstance(metric, Tensor) or not metric.requires_grad:
        raise ComparisonError(
            "estimate=True needs the gradient of the metric, and what it returned has none: let it "
            "return a tensor that is computed of the output by differentiable functions, without "
            "item(), detach(), argmax() or no_grad()"
        )
    leaves = [leaf for value in records.values() for leaf in tensors(value) if leaf.requires_grad]
    found = torch.autograd.grad(metric, leaves, allow_unused=True) if leaves else ()
    return {id(leaf): slope for leaf, slope in zip(leaves, found, strict=True) if slope is not None}


def estimates(
    architecture: Architecture,
    clean: Mapping[DepthIdx, Any],
    corrupted: Mapping[DepthIdx, Any],
    slopes: Mapping[int, Tensor],
    positions: Sequence[int] | None,
) -> Tensor:
    """Return by how much each patch changes the metric, to first order.

    Parameters
    ----------
    architecture : Architecture
        For names.
    clean, corrupted : mapping
        What each layer returned in the two runs; the result is in the order of the second.
    slopes : mapping
        What `gradients` returns for the corrupted run.
    positions : sequence of int or None
        Which positions are patched.

    Returns
    -------
    torch.Tensor
        Float64, [layers] or [layers, positions].

    Raises
    ------
    ComparisonError
        What a layer returned is not on the graph.
    """
    size = () if positions is None else (len(positions),)
    rows = []
    for label, value in corrupted.items():
        row = torch.zeros(size, dtype=torch.float64)
        leaves = tensors(value)
        for own, other in zip(leaves, tensors(clean[label]), strict=True):
            change = _change(own, other, slopes.get(id(own)), architecture[label])
            if change is None:
                continue
            if positions is None:
                row += change.sum().cpu()
            elif has_positions(own, leaves[0]):
                by_position = change.transpose(0, 1).flatten(1).sum(1).cpu()
                row += by_position[list(positions)]
        rows.append(row)
    return torch.stack(rows)


def _change(own: Tensor, other: Tensor, slope: Tensor | None, layer: Layer) -> Tensor | None:
    """Return gradient times difference, where they differ; None for nothing."""
    differs = own.detach() != other
    if not differs.any():
        return None
    if not own.requires_grad:
        raise ComparisonError(
            f"layer {layer} can't be estimated: what it returned is not on autograd's graph, "
            f"since it is of {own.dtype}, was made without gradients, or shares memory that the "
            "network writes to later. Sweep without estimate=, or record the layers around it"
        )
    if slope is None:
        return None
    wide = torch.complex128 if own.is_complex() else torch.float64
    step = torch.where(differs, other.to(wide) - own.detach().to(wide), 0)
    return (slope.to(wide).conj() * step).real
