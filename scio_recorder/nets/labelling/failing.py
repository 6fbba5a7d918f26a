"""What a user is told when a net fails in the dry run that labels its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from scio_recorder.layer import describe, shapes_of
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.wrong_dtype import cast_for
from scio_recorder.tensors.structures import tensors

_ADVICE = {
    "input_size": "input_size includes the batch dimension and gives float inputs; for others "
    "write dtypes=[torch.long], or give input_data",
    "input_data": "input_data is what forward takes: a tensor, a tuple of positional inputs or a "
    'dict of keyword inputs, such as tokenizer(texts, return_tensors="pt")',
    "meta": "The parameters have no data here, as when they are offloaded, nor has an input made "
    "of input_size: give input_data= with a tensor on the device where the network runs",
}


def failed_run(net: nn.Module, keywords: Mapping[str, Any], cause: BaseException) -> str:
    """Return the message of a dry run that failed.

    Parameters
    ----------
    net : torch.nn.Module
        The network that failed.
    keywords : Mapping
        The keywords of `Recorder`.
    cause : BaseException
        The error that the network raised.

    Returns
    -------
    str
        What the net was given, its error, and what to give instead.

    Examples
    --------
    >>> keywords = {"input_data": "a text"}
    >>> print(failed_run(nn.ReLU(), keywords, TypeError("must be Tensor")))
    the dry run of ReLU on input_data='a text' failed with TypeError: must be Tensor
    input_data is what forward takes: a tensor, a tuple of positional inputs or a dict of keyword \
inputs, such as tokenizer(texts, return_tensors="pt")
    """
    given = "input_size" if keywords["input_data"] is None else "input_data"
    is_on_meta = given == "input_size" and str(keywords["device"]).startswith("meta")
    value, advice = keywords[given], _ADVICE["meta" if is_on_meta else given]
    has_tensors = given == "input_data" and tensors(value)
    shown = f"tensors of shape {shapes_of(describe(value))}" if has_tensors else repr(value)
    inputs = Inputs.of(tuple(value) if isinstance(value, list) else value)
    cast = inputs and cast_for(net, inputs, cause)
    if cast:
        advice = f"Probably {cast[1]}: convert it, as input_data=x.{cast[0]} does"
    return (
        f"the dry run of {type(net).__name__} on {given}={shown[:300]} failed with "
        f"{type(cause).__name__}: {cause}\n{advice}"
    )
