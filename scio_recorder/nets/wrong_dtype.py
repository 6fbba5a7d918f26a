"""Advice on inputs of a dtype with which a network can't compute."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.dtypes import dtype_name

_CASTS = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long",
}
# One of these is in each message of torch about a dtype.
_ABOUT_DTYPES = re.compile("type|not implemented for", re.IGNORECASE)


def cast_for(net: nn.Module | None, inputs: Inputs, error: BaseException) -> tuple[str, str] | None:
    """Return the method that gives a network's first tensor the expected dtype, and a sentence.

    The expected dtype is that of the first module with parameters of its own.

    Parameters
    ----------
    net : torch.nn.Module or None
        The network.
    inputs : Inputs
        What it was given.
    error : BaseException
        The error that it raised.

    Returns
    -------
    (str, str) or None
        None if the error is about something else.

    Examples
    --------
    >>> error = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
    >>> inputs = Inputs((torch.ones(2, 3, dtype=torch.float64),), {})
    >>> cast_for(nn.Linear(3, 2), inputs, error)
    ('float()', 'the input is float64, and the weights of the network take float32')
    """
    values = (*inputs.args, *inputs.kwargs.values())
    given = next((value.dtype for value in values if isinstance(value, Tensor)), None)
    if net is None or given is None or not _ABOUT_DTYPES.search(str(error)):
        return None
    for module in net.modules():
        own = next(module.parameters(recurse=False), None)
        if own is not None:
            takes_indices = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            wanted = torch.int64 if takes_indices else own.dtype
            if given == wanted or wanted not in _CASTS:
                return None
            return f"{_CASTS[wanted]}()", (
                f"the input is {dtype_name(given)}, and the weights of the network take "
                f"{dtype_name(wanted)}"
            )
    return None
