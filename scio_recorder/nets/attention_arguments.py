"""The arguments of an attention kernel: what they are called, and what their masks add to scores.

The kernels are ``scaled_dot_product_attention``, and ``multi_head_attention_forward``, which
projects its queries, keys and values before.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scio_recorder.layer import Operation
from scio_recorder.nets.records import Inputs


def _shown(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Show the signature of PyTorch's function, which has none that can be read."""


KERNELS = {
    "scaled_dot_product_attention": inspect.signature(_shown),
    "multi_head_attention_forward": inspect.signature(functional.multi_head_attention_forward),
}


def bound_arguments(function: str, inputs: Inputs) -> inspect.BoundArguments:
    """Return the arguments of a call of an attention kernel by name, with defaults.

    Parameters
    ----------
    function : str
        A key of `KERNELS`.
    inputs : Inputs
        What it received.

    Examples
    --------
    >>> inputs = Inputs((1, 2, 3), {"is_causal": True})
    >>> bound_arguments("scaled_dot_product_attention", inputs).args
    (1, 2, 3, None, 0.0, True)
    """
    given = KERNELS[function].bind(*inputs.args, **inputs.kwargs)
    given.apply_defaults()
    return given


def unpacked(row: Operation, inputs: Inputs) -> Inputs:
    """Return the inputs of a kernel with a query for each head.

    If several heads share keys, and there is a mask, transformers give the kernel the heads of a
    group as queries of one head, where there is a single query.

    Parameters
    ----------
    row : Operation
        The call of the kernel at labelling.
    inputs : Inputs
        What it receives now.
    """
    groups = getattr(row.module, "num_key_value_groups", 1)
    if groups == 1 or row.function != "scaled_dot_product_attention":
        return inputs
    given = bound_arguments(row.function, inputs)
    query, key, mask = (given.arguments[name] for name in ("query", "key", "attn_mask"))
    heads = key.shape[1], groups
    if query.shape[1:3] != heads or math.prod(heads) != row.output_shape[1]:
        return inputs
    given.arguments |= {"query": query.flatten(1, 2)[:, :, None], "enable_gqa": True}
    # Other masks are the same for all heads.
    if mask is not None and mask.shape[1:3] == heads:
        given.arguments["attn_mask"] = mask.flatten(1, 2)[:, :, None]
    return Inputs(given.args, given.kwargs)


def bias_of(
    masks: Mapping[str, Any], sizes: tuple[int, int], queries: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return what ``attn_mask`` and ``is_causal`` add to the scores of some queries.

    Parameters
    ----------
    masks : mapping
        These arguments of ``scaled_dot_product_attention``.
    sizes : (int, int)
        The numbers of queries and keys.
    queries : Tensor
        The wanted ones, from 0 on.
    dtype : torch.dtype
        That of the result, unless it is a mask of numbers.

    Returns
    -------
    Tensor or None
        Of shape [..., queries, keys]; None if they add nothing.

    Examples
    --------
    >>> masks = {"attn_mask": None, "is_causal": True}
    >>> bias_of(masks, (3, 3), torch.tensor([1]), torch.float32)
    tensor([[0., 0., -inf]])
    """
    bias: Tensor | None = masks["attn_mask"]
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], *sizes).index_select(-2, queries)
        # True attends.
        bias = added(~bias, dtype) if bias.dtype is torch.bool else bias
    if masks["is_causal"]:
        # The first query sees the first key, also where their numbers differ.
        causal = added(torch.arange(sizes[1], device=queries.device) > queries[:, None], dtype)
        bias = causal if bias is None else bias + causal
    return bias


def added(left_out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a mask adds to scores: minus infinity where it is True."""
    numbers = torch.zeros(left_out.shape, dtype=dtype, device=left_out.device)
    return numbers.masked_fill_(left_out, -math.inf)


def has_further_keys(given: Mapping[str, Any]) -> bool:
    """Whether ``multi_head_attention_forward`` is given keys other than projections of ``key``."""
    names = "bias_k", "static_k", "static_v"
    return given["add_zero_attn"] or any(given[name] is not None for name in names)


def joined_masks(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of ``multi_head_attention_forward`` as ``scaled_dot_product_attention``'s.

    Parameters
    ----------
    given : mapping
        Arguments of ``multi_head_attention_forward``.

    Returns
    -------
    dict
        ``is_causal`` and ``attn_mask``: None, or numbers of shape [..., queries, keys], of two
        dimensions or four.
    """
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    # Otherwise it is a hint, and the mask counts.
    if given["is_causal"] and padding is None and not given["need_weights"]:
        return {"attn_mask": None, "is_causal": True}
    dtype = given["query"].dtype
    # Here True leaves out.
    bias, padding = (
        added(one, dtype) if one is not None and one.dtype is torch.bool else one
        for one in (mask, padding)
    )
    if bias is not None and bias.dim() == 3:
        bias = bias.reshape(-1, given["num_heads"], *bias.shape[1:])
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        bias = padding if bias is None else bias + padding
    return {"attn_mask": bias, "is_causal": False}


def projected(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the kernel that ``multi_head_attention_forward`` calls.

    Parameters
    ----------
    given : mapping
        Its arguments, without `has_further_keys`.

    Returns
    -------
    dict
        Arguments of ``scaled_dot_product_attention``, of shape [batch, heads, positions, head_dim].
    """
    sequences = [given[name] for name in ("query", "key", "value")]
    if sequences[0].dim() == 2:
        sequences = [one[:, None] for one in sequences]
    matrices = [given[f"{name}_proj_weight"] for name in "qkv"]
    if not given["use_separate_proj_weight"]:
        matrices = [*given["in_proj_weight"].chunk(3)]
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else [*bias.chunk(3)]
    query, key, value = (
        one.reshape(*one.shape[:2], given["num_heads"], -1).permute(1, 2, 0, 3)
        for one in map(functional.linear, sequences, matrices, biases)
    )
    dropout = given["dropout_p"] if given["training"] else 0.0
    projections = {"query": query, "key": key, "value": value}
    return projections | joined_masks(given) | {"dropout_p": dropout, "scale": None}
