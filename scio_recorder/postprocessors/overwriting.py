"""Post-processors that overwrite what autograd needs: backward says so, and what to write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import MutationError
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import tensors

# Views between a module's output and the operation that saved it.
_MAX_VIEWS = 4

Versions = list[tuple[Tensor, int, Any]]


def versions_on_graph(output: Any) -> Versions:
    """Note the versions and nodes of tensors before something may change them in place.

    Parameters
    ----------
    output : Any
        A tensor or a structure of them.

    Returns
    -------
    list
        To be given to :func:`explain_overwriting`; empty where autograd keeps nothing, or hands
        what it keeps to hooks, as inside ``allow_mutation_on_saved_tensors``.

    Examples
    --------
    >>> len(versions_on_graph(torch.ones(2, requires_grad=True).exp()))
    1
    """
    if not torch.is_grad_enabled() or private.active_saved_tensors_hooks():
        return []
    found = (tensor for tensor in tensors(output) if tensor.grad_fn is not None)
    return [(tensor, tensor._version, tensor.grad_fn) for tensor in found]


def explain_overwriting(before: Versions, layer: object) -> None:
    """Let a backward pass that must fail say why, and what to write instead.

    Parameters
    ----------
    before : list
        What :func:`versions_on_graph` returned.
    layer : object
        For the message.
    """
    for tensor, version, node in before:
        if tensor._version != version:
            spoiled = _spoiled(node)
            if spoiled is not None:
                spoiled.register_prehook(_Explanation(str(layer)))


class _Explanation:
    """Raises in place of autograd, which does not know who changed the tensor."""

    def __init__(self, layer: str) -> None:
        self._layer = layer

    def __call__(self, gradients: Any) -> None:
        raise MutationError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: the post-processor of layer {self._layer} works in place on what the "
            "layer returned, which the layer needs as it was. Write it out of place, as x * 2 for "
            "x.mul_(2), or run the forward and the backward pass inside "
            "`with torch.autograd.graph.allow_mutation_on_saved_tensors():`"
        )


def _spoiled(node: Any) -> Any:
    for _ in range(_MAX_VIEWS):
        if node is None or private.has_lost_a_tensor(node):
            return node
        ahead = node.next_functions
        node = ahead[0][0] if len(ahead) == 1 else None
    return None
