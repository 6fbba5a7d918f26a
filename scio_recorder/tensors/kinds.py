"""What kind of tensor one is, and how to get plain numbers out of those that are spread out."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a number at every place of a regular array.

    Parameters
    ----------
    tensor : torch.Tensor
        Any.

    Returns
    -------
    bool
        False for sparse, nested and quantised tensors.

    Examples
    --------
    >>> is_dense(torch.ones(2)), is_dense(torch.ones(2).to_sparse())
    (True, False)
    """
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor as a whole that is spread over several processes; others as they are.

    Parameters
    ----------
    tensor : torch.Tensor
        A ``DTensor``, of which all processes of its mesh call this, or any other.

    Returns
    -------
    torch.Tensor
        Off the graph where it was gathered.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> gathered(x) is x
    True
    """
    # DTensors are known by their method: importing their class takes long, and few have any.
    gather = None if type(tensor) is Tensor else getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor
    with torch.no_grad():
        whole: Tensor = gather()
    return whole.detach()
