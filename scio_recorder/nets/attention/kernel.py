"""Attention by functions of PyTorch: its fused kernel, and what projects at both ends of it."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from scio_recorder.errors import AttentionError
from scio_recorder.nets.attention.kind import (
    Attention,
    AttentionKind,
    SeenAttention,
    SeenOperation,
    TakeOut,
    differences_of,
    rounded,
    wide,
    with_heads,
)
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.properties import is_dense, undisturbed


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


class Groups(NamedTuple):
    """Heads that share keys, in groups, as modules of transformers name them."""

    size: int
    num_heads: int


class Kernel(AttentionKind):
    """Attention by one call of a function of PyTorch.

    Examples
    --------
    >>> query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    >>> output = functional.scaled_dot_product_attention(query, key, value)
    >>> Kernel().attention(None, (None, Inputs((query, key, value), {}), output))
    Attention(query [2, 4, 5, 8], key [2, 4, 5, 8], value [2, 4, 5, 8] of float32)
    """

    function = "scaled_dot_product_attention"
    signature = inspect.signature(_shown)

    def recogniser(self) -> Callable[[SeenOperation], SeenAttention | None]:
        """Return a function that recognises the call."""
        return self._recognise

    def _recognise(self, call: SeenOperation) -> SeenAttention | None:
        if call.function != self.function:
            return None
        layout = self._layout(call)
        seen = SeenAttention(self, call, call, layout)
        try:
            attention = self.attention(layout, (None, call.inputs, call.output))
        except AttentionError as error:
            return seen._replace(refusal=str(error))
        return seen._replace(sizes=self._sizes(attention))

    def _layout(self, call: SeenOperation) -> Groups | None:
        size = getattr(call.module, "num_key_value_groups", 1)
        return None if size == 1 else Groups(size, call.output.shape[1])

    def _sizes(self, attention: Attention) -> tuple[int, ...]:
        # Fewer dimensions are of one head.
        return attention.sizes if attention.output.dim() > 3 else ()

    def arguments(self, inputs: Inputs) -> inspect.BoundArguments:
        """Return the arguments of a call by name, with defaults.

        Raises
        ------
        AttentionError
            They do not say all that the kernel computes.
        """
        bound = self.signature.bind(*inputs.args, **inputs.kwargs)
        bound.apply_defaults()
        self._check(bound.arguments)
        return bound

    def _check(self, arguments: Mapping[str, Any]) -> None:
        received = [arguments[name] for name in ("query", "key", "value")]
        if not all(map(is_dense, received)):
            raise AttentionError("attention of nested or sparse tensors can't be read")
        if len({tensor.dim() for tensor in received}) > 1:
            raise AttentionError("queries, keys and values of different dimensions can't be read")
        # A net that has one has imported this, which imports the compiler.
        bias: Any = sys.modules.get("torch.nn.attention.bias")
        if bias is not None and isinstance(arguments["attn_mask"], bias.CausalBias):
            raise AttentionError("a CausalBias as mask can't be read: give its numbers as a tensor")

    def attention(self, layout: Groups | None, parts: Sequence[Any]) -> Attention:
        """Return the attention of a call."""
        _, inputs, output = parts
        arguments, is_unpacked = _unpacked(layout, self.arguments(inputs).arguments)
        output = output.flatten(1, 2)[:, :, None] if is_unpacked else output
        return KernelAttention(arguments, output)

    def changed(self, layout: Groups | None, inputs: Inputs, take_out: TakeOut) -> Inputs:
        """Return inputs with a mask that takes entries out."""
        bound = self.arguments(inputs)
        bound.arguments, _ = _unpacked(layout, bound.arguments)
        query, key = bound.arguments["query"], bound.arguments["key"]
        bias = all_bias(bound.arguments, (query.shape[-2], key.shape[-2]), query)
        bias = take_out(bias, _leading(bound.arguments))
        bound.arguments |= {"attn_mask": bias, "is_causal": False}
        return Inputs(bound.args, bound.kwargs)


def _leading(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dimensions [batch, ..., heads] of scores; there may be fewer."""
    names = "query", "key", "value", "attn_mask"
    received = (arguments[name] for name in names)
    shapes = [tensor.shape[:-2] for tensor in received if tensor is not None]
    # One head of keys may serve several queries, or all. Other lengths are equal, or 1.
    columns = itertools.zip_longest(*map(reversed, shapes), fillvalue=1)
    return tuple(map(max, columns))[::-1]


def _unpacked(layout: Groups | None, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments with a query for each head, and whether they are others.

    If several heads share keys, and there is a mask, transformers give the kernel the heads of a
    group as queries of one head, where there is a single query.
    """
    query, key, mask = (arguments[name] for name in ("query", "key", "attn_mask"))
    if layout is None:
        return dict(arguments), False
    heads = key.shape[1], layout.size
    if query.shape[1:3] != heads or math.prod(heads) != layout.num_heads:
        return dict(arguments), False
    unpacked = {"query": query.flatten(1, 2)[:, :, None], "enable_gqa": True}
    # Other masks are the same for all heads.
    if mask is not None and mask.shape[1:3] == heads:
        unpacked["attn_mask"] = mask.flatten(1, 2)[:, :, None]
    return {**arguments, **unpacked}, True


class KernelAttention(Attention):
    """Attention by a kernel, whose weights nobody has seen."""

    query: Tensor
    key: Tensor
    # Whether PyTorch has computed the weights step by step, in the dtype of the query.
    _is_eager = False

    def __init__(self, arguments: Mapping[str, Any], output: Tensor) -> None:
        query, key, value = (with_heads(arguments[name]) for name in ("query", "key", "value"))
        leading = _leading(arguments)
        # Without a dimension of heads, there is one.
        leading = leading if len(leading) > 1 else (*[1] * (1 - len(leading)), *leading, 1)
        sizes = *leading, query.shape[-2], key.shape[-2]
        super().__init__(query, key, value, output, sizes)
        self._arguments = arguments

    def _computed(self, heads: Tensor, queries: Tensor) -> Tensor:
        dtype = wide(self.query.dtype, self._device)
        scores = self._scores(heads, queries, self.query.dtype if self._is_eager else dtype)
        weights = scores.softmax(-1).to(dtype)
        # Kernels return zeros for a row that is masked whole.
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        return weights if self._is_eager else weights.masked_fill_(nothing, 0.0)

    def _scores(self, heads: Tensor, queries: Tensor, dtype: torch.dtype) -> Tensor:
        arguments = self._arguments
        if arguments["dropout_p"]:
            raise AttentionError(
                f"the kernel dropped weights with probability {arguments['dropout_p']}, and which "
                "ones is not known: call eval() first"
            )
        # Under autocast the kernel received another dtype than it computed with.
        query, key = (
            self._of_heads(tensor, heads).to(self.output.dtype).to(dtype)
            for tensor in (self.query.index_select(-2, queries), self.key)
        )
        scale: float = query.shape[-1] ** -0.5
        scale = scale if arguments["scale"] is None else arguments["scale"]
        scores = (query * scale) @ key.transpose(-2, -1)
        sizes = self.query.shape[-2], key.shape[-2]
        bias = bias_of(arguments, sizes, queries, self.query.dtype)
        if bias is None:
            return scores
        if self.query.dtype != self.output.dtype:
            bias = bias.to(self.output.dtype)
        # A mask lacks the dimensions that the queries lack.
        bias = with_heads(bias, 4 - arguments["query"].dim())
        return scores + (bias if bias.dim() < 3 else self._of_heads(bias, heads)).to(dtype)

    def _without_dropout(self) -> Attention:
        arguments, dtype = self._arguments, self.output.dtype
        if not arguments["dropout_p"]:
            return self
        # On the graph, checkpointing would count what is saved for a backward pass.
        with undisturbed(self._device.type):
            again = {name: rounded(value, dtype) for name, value in arguments.items()}
            again |= {"dropout_p": 0.0, "enable_gqa": False}
            if arguments["query"].dim() > 3:
                every = torch.arange(self._num_heads, device=self._device)
                for name in ("query", "key", "value"):
                    again[name] = self._of_heads(again[name], every)
            return KernelAttention(again, functional.scaled_dot_product_attention(**again))


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
        bias = as_bias(~bias, dtype) if bias.dtype is torch.bool else bias
    if masks["is_causal"]:
        # The first query sees the first key, also where their numbers differ.
        causal = as_bias(torch.arange(sizes[1], device=queries.device) > queries[:, None], dtype)
        bias = causal if bias is None else bias + causal
    return bias


def all_bias(masks: Mapping[str, Any], sizes: tuple[int, int], query: Tensor) -> Tensor:
    """Return what masks add to all scores, zeros if there are none."""
    bias = bias_of(masks, sizes, torch.arange(sizes[0], device=query.device), query.dtype)
    return query.new_zeros(sizes) if bias is None else bias.expand(*bias.shape[:-2], *sizes)


def as_bias(left_out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a mask adds to scores: minus infinity where it is True."""
    numbers = torch.zeros(left_out.shape, dtype=dtype, device=left_out.device)
    return numbers.masked_fill_(left_out, -math.inf)


# -- multi_head_attention_forward, which projects at both ends ------------------------------------


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
