"""Attention by ``multi_head_attention_forward``, which projects at both ends."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scio_recorder.errors import AttentionError
from scio_recorder.nets.attention.kernel import Groups, Kernel, KernelAttention, all_bias, as_bias
from scio_recorder.nets.attention.kind import (
    Attention,
    SeenOperation,
    TakeOut,
    differences_of,
    rounded,
)
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.arithmetic import undisturbed


class MultiHead(Kernel):
    """Attention by the function that ``nn.MultiheadAttention`` calls, which says its own layout."""

    function = "multi_head_attention_forward"
    signature = inspect.signature(functional.multi_head_attention_forward)

    def _layout(self, call: SeenOperation) -> None:
        return None

    def _sizes(self, attention: Attention) -> tuple[int, ...]:
        return ()

    def _check(self, arguments: Mapping[str, Any]) -> None:
        names = "bias_k", "static_k", "static_v"
        if arguments["add_zero_attn"] or any(arguments[name] is not None for name in names):
            raise AttentionError(
                "attention with bias_k, add_zero_attn, static_k or static_v can't be read"
            )

    def attention(self, layout: Groups | None, parts: Sequence[Any]) -> Attention:
        """Return the attention of a call."""
        _, inputs, (output, _) = parts
        return ProjectedAttention(self.arguments(inputs).arguments, output)

    def changed(self, layout: Groups | None, inputs: Inputs, take_out: TakeOut) -> Inputs:
        """Return inputs with one mask that takes entries out."""
        bound = self.arguments(inputs)
        query, key = bound.arguments["query"], bound.arguments["key"]
        leading = (query.shape[1] if query.dim() == 3 else 1), bound.arguments["num_heads"]
        bias = all_bias(_joined_masks(bound.arguments), (len(query), len(key)), query)
        bias = take_out(bias, leading)
        if bias.dim() > 2:
            bias = bias.expand(*leading, -1, -1).flatten(0, 1)
        bound.arguments |= {"attn_mask": bias, "key_padding_mask": None, "is_causal": False}
        return Inputs(bound.args, bound.kwargs)


class ProjectedAttention(KernelAttention):
    """Attention between projections."""

    def __init__(self, arguments: Mapping[str, Any], output: Tensor) -> None:
        with undisturbed(output.device.type):
            # Under autocast everything is rounded first.
            arguments = {name: rounded(value, output.dtype) for name, value in arguments.items()}
            super().__init__(_projected(arguments), output)
        self._out = arguments["out_proj_weight"], arguments["out_proj_bias"]
        self._is_eager = arguments["need_weights"]

    def _difference(self, weights: Tensor, heads: Tensor, queries: Tensor) -> tuple[float, float]:
        # The output is a sum over all heads.
        every = torch.arange(self._num_heads, device=self._device)
        weights = weights if every.equal(heads) else self._computed(every, queries)
        mixed = (weights @ self.value.to(weights.dtype)).permute(2, 0, 1, 3).flatten(2)
        expected = functional.linear(mixed, *(rounded(part, weights.dtype) for part in self._out))
        output = self.output if self.output.dim() == 3 else self.output[:, None]
        return differences_of(expected, output[queries])


def _joined_masks(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the masks of ``multi_head_attention_forward`` as ``scaled_dot_product_attention``'s.

    Parameters
    ----------
    arguments : mapping
        Those of ``multi_head_attention_forward``.

    Returns
    -------
    dict
        ``is_causal`` and ``attn_mask``: None, or numbers of shape [..., queries, keys], of two
        dimensions or four.
    """
    bias, padding = arguments["attn_mask"], arguments["key_padding_mask"]
    # Otherwise it is a hint, and the mask counts.
    if arguments["is_causal"] and padding is None and not arguments["need_weights"]:
        return {"attn_mask": None, "is_causal": True}
    # Here True leaves out.
    bias, padding = (
        as_bias(mask, arguments["query"].dtype)
        if mask is not None and mask.dtype is torch.bool
        else mask
        for mask in (bias, padding)
    )
    if bias is not None and bias.dim() == 3:
        bias = bias.reshape(-1, arguments["num_heads"], *bias.shape[1:])
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        bias = padding if bias is None else bias + padding
    return {"attn_mask": bias, "is_causal": False}


def _projected(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the kernel that ``multi_head_attention_forward`` calls.

    Parameters
    ----------
    arguments : mapping
        Those of ``multi_head_attention_forward``.

    Returns
    -------
    dict
        Arguments of ``scaled_dot_product_attention``, of shape [batch, heads, positions, head_dim].
    """
    sequences = [arguments[name] for name in ("query", "key", "value")]
    if sequences[0].dim() == 2:
        sequences = [sequence[:, None] for sequence in sequences]
    matrices = [arguments[f"{name}_proj_weight"] for name in "qkv"]
    if not arguments["use_separate_proj_weight"]:
        matrices = [*arguments["in_proj_weight"].chunk(3)]
    bias = arguments["in_proj_bias"]
    biases = [None] * 3 if bias is None else [*bias.chunk(3)]
    query, key, value = (
        projection.reshape(*projection.shape[:2], arguments["num_heads"], -1).permute(1, 2, 0, 3)
        for projection in map(functional.linear, sequences, matrices, biases)
    )
    dropout = arguments["dropout_p"] if arguments["training"] else 0.0
    projections = {"query": query, "key": key, "value": value}
    return projections | _joined_masks(arguments) | {"dropout_p": dropout, "scale": None}
