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


def scaled_dot_product_attention(
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
    function.__name__: inspect.signature(function)
    for function in (scaled_dot_product_attention, functional.multi_head_attention_forward)
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


def heads_of_groups(row: Operation) -> int:
    """Return the number of heads of a layer that may give the kernel those of a group as queries.

    That is what transformers do with a single query, if several heads share keys and there is a
    mask. Other layers have 0.

    Parameters
    ----------
    row : Operation
        The call of the kernel at labelling.
    """
    has_groups = getattr(row.module, "num_key_value_groups", 1) > 1
    return row.output_shape[-3] if has_groups and row.function in KERNELS else 0


def with_all_heads(given: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """Return arguments of a call with a query for each head.

    Parameters
    ----------
    given : mapping
        Arguments of ``scaled_dot_product_attention``.
    num_heads : int
        The result of `heads_of_groups`.

    Examples
    --------
    >>> given = {"query": torch.ones(1, 2, 4, 8), "key": torch.ones(1, 2, 9, 8), "attn_mask": None}
    >>> with_all_heads(given, 8)["query"].shape
    torch.Size([1, 8, 1, 8])
    """
    query, key, mask = given["query"], given["key"], given["attn_mask"]
    if not num_heads or query.dim() < 4:
        return dict(given)
    *leading, shared, group = query.shape[:-1]
    if shared * group != num_heads or shared == num_heads or shared != key.shape[-3]:
        return dict(given)
    changed = {**given, "query": query.reshape(*leading, num_heads, 1, -1)}
    # Others are the same for all heads.
    if mask is not None and mask.shape[-3:-1] == (shared, group):
        changed["attn_mask"] = mask.reshape(*mask.shape[:-3], num_heads, 1, -1)
    return changed


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
        dimensions or four. They know nothing of the keys of ``bias_k`` and ``add_zero_attn``.
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
        Its arguments, but for ``static_k`` and ``static_v``.

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
    query, *others = map(functional.linear, sequences, matrices, biases)
    num_keys, batch = others[0].shape[:2]
    if given["bias_k"] is not None:
        rows = (given[name].expand(1, batch, -1) for name in ("bias_k", "bias_v"))
        others = [torch.cat(pair) for pair in zip(others, rows, strict=True)]
    if given["add_zero_attn"]:
        others = [functional.pad(one, (0, 0, 0, 0, 0, 1)) for one in others]
    masks, more = joined_masks(given), len(others[0]) - num_keys
    if masks["attn_mask"] is not None and more:
        masks["attn_mask"] = functional.pad(masks["attn_mask"], (0, more))
    by_head = (
        one.reshape(*one.shape[:2], given["num_heads"], -1).permute(1, 2, 0, 3)
        for one in (query, *others)
    )
    dropout = given["dropout_p"] if given["training"] else 0.0
    names = "query", "key", "value"
    return dict(zip(names, by_head, strict=True)) | masks | {"dropout_p": dropout, "scale": None}
