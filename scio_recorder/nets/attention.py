"""Attention: the weights of a call, computed from its arguments and checked by its output.

NOTE [What weights are checked by]

Fused kernels never hold the weights of attention. They are computed again from the arguments, only
for the heads and queries that are asked for, and times the values they must give the kernel's
output. A kernel that does something else than its arguments say (or a record that is not what the
kernel received) is an error, not another number. `_ROUNDING` says how far apart two right
computations may be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from scio_recorder.display.figure import draw_attention
from scio_recorder.errors import ArgumentError, AttentionError
from scio_recorder.nets.attention_arguments import (
    bias_of,
    bound_arguments,
    has_further_keys,
    projected,
)
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.arithmetic import float32_products_are_exact, undisturbed
from scio_recorder.tensors.properties import dtype_name, is_dense

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Index: TypeAlias = int | slice | Sequence[int] | Tensor | None

# By the dtype of the output, the largest error that rounding explains. The largest that was found
# among PyTorch's kernels on a CPU, also for single queries of up to 4,096 keys with scores of up to
# 1,300, was 2.3e-13, 4.4e-5, 8.6e-4 and 8.3e-3. Another scale, a mask or keys of another head give
# a tenth and more.
_ROUNDING = {
    torch.float64: 1e-12,
    torch.float32: 2e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
# The number of queries whose weights are computed at once for `Attention.error`.
_BLOCK = 256


class Attention(ABC):
    """The attention of one call: what it received, what it returned, and its weights.

    Read from ``rnet.attention``, or made by `attention_of` and `eager_attention_of`.

    Attributes
    ----------
    query, key : Tensor or None
        [batch, heads, positions, head_dim], as the kernel received them; ``key`` perhaps with fewer
        heads, each for several of the queries'. None in eager code. Queries of more dimensions keep
        them: [batch, ..., heads, positions, head_dim]. Those of three, [batch, positions,
        head_dim], are of one head: [batch, 1, positions, head_dim]. Where transformers give the
        heads of a group as queries of one head, they are heads again.
    value : Tensor
        [batch, heads, positions, head_dim], perhaps with fewer heads.
    output : Tensor
        What the kernel returned.

    Examples
    --------
    >>> query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    >>> output = functional.scaled_dot_product_attention(query, key, value)
    >>> inputs = Inputs((query, key, value), {})
    >>> attention = attention_of("scaled_dot_product_attention", inputs, output)
    >>> attention.weights(heads=[0], queries=[-1]).shape
    torch.Size([2, 1, 1, 5])
    >>> attention
    Attention(query [2, 4, 5, 8], key [2, 4, 5, 8], value [2, 4, 5, 8] of float32)
    """

    def __init__(
        self,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor,
        output: Tensor,
        shape: tuple[int, int],
    ) -> None:
        self.query = query
        self.key = key
        self.value = value
        self.output = output
        self._num_heads, self._num_queries = shape
        self._device = value.device

    def __repr__(self) -> str:
        parts = {"query": self.query, "key": self.key, "value": self.value}
        shapes = [f"{name} {[*one.shape]}" for name, one in parts.items() if one is not None]
        return f"Attention({', '.join(shapes)} of {dtype_name(self.value.dtype)})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"an Attention has no attribute {name!r}: its weights() are a tensor [batch, "
                "heads, queries, keys]",
                name=name,
                obj=self,
            )

        def __getitem__(self, index: Any) -> Any:
            raise TypeError(
                "rnet.attention[layer] is an Attention, no tensor: for one [batch, heads, queries, "
                "keys] write rnet.attention[layer].weights()"
            )

    def weights(self, heads: Index = None, queries: Index = None) -> Tensor:
        """Return weights of attention, computed for some heads and queries.

        Parameters
        ----------
        heads, queries : int, slice, sequence of int or Tensor, optional
            Those wanted, as PyTorch indexes a dimension; by default all. Negative ones count from
            the end. A single number drops the dimension; a list keeps it.

        Returns
        -------
        Tensor
            [batch, heads, queries, keys], of float32 or more, detached. A row that is masked whole
            is zero, as in fused kernels (NaN where PyTorch was asked for weights and computed NaN).
            In eager code they are what the product with the values received, such as after dropout.

        Raises
        ------
        ArgumentError
            There is no such head or query.
        AttentionError
            The weights do not explain what the kernel returned, or dropout acted inside it.
        """
        at = self._chosen("head", heads, self._num_heads)
        rows = self._chosen("query", queries, self._num_queries)
        chosen = at.reshape(-1), rows.reshape(-1)
        with undisturbed(self._device.type):
            weights = self._computed(*chosen)
            self._check(_relative(*self._difference(weights, *chosen)))
        weights = weights if at.dim() else weights.select(-3, 0)
        return weights if rows.dim() else weights.select(-2, 0)

    def entropy(self) -> Tensor:
        """Return how widely queries attend: the entropy of their weights before dropout, in nats.

        Returns
        -------
        Tensor
            [batch, heads, queries], of float32 or more, detached: 0 where one key has all weight or
            all keys are masked, the logarithm of n where n keys have the same. In eager code it is
            that of what the softmax returned.

        Raises
        ------
        AttentionError
            The weights do not explain what the kernel returned. If dropout acted inside it, it is
            called once more, without.
        """
        whole = self._without_dropout()
        every = torch.arange(self._num_queries, device=self._device)
        parts = (whole.weights(queries=some) for some in torch.split(every, _BLOCK))
        return torch.cat([torch.special.entr(one).sum(-1) for one in parts], -1)

    @cached_property
    def error(self) -> float:
        """The largest difference between weights times values and the output, over its magnitude.

        The magnitude is the largest absolute value of the output. `weights` judges the part that it
        is asked for in the same way.

        Raises
        ------
        AttentionError
            Dropout acted inside the kernel.
        """
        heads = torch.arange(self._num_heads, device=self._device)
        every = torch.arange(self._num_queries, device=self._device)
        found = [(0.0, 0.0)]
        with undisturbed(self._device.type):
            for start in range(0, self._num_queries, _BLOCK):
                queries = every[start : start + _BLOCK]
                found += [self._difference(self._computed(heads, queries), heads, queries)]
        # Unlike Python's, this maximum keeps a NaN.
        return _relative(*torch.tensor(found, dtype=torch.float64, device="cpu").amax(0).tolist())

    def plot(
        self, head: int | None = None, *, tokens: Sequence[str] | None = None, sample: int = 0
    ) -> Figure:
        """Draw the weights of a head, or of all heads as small maps; needs matplotlib.

        Parameters
        ----------
        head : int, optional
            The head; by default all.
        tokens : sequence of str, optional
            Texts of the keys, and of the queries if there are as many; by default their numbers.
        sample : int, default 0
            Which sample of the batch; of several batch dimensions, they are counted as one.

        Returns
        -------
        matplotlib.figure.Figure
            The figure, which a notebook shows and ``savefig`` writes.

        Raises
        ------
        ArgumentError
            There is no such head or sample, or the numbers of texts and tokens differ.
        AttentionError
            As for `weights`.
        """
        heads = self._chosen("head", head, self._num_heads).reshape(-1).tolist()
        weights = self.weights(heads).flatten(0, -4)
        at = int(self._chosen("sample", sample, len(weights)))
        drawn = weights[at].double().cpu().numpy()
        names = [[*map(str, range(size))] for size in drawn.shape[1:]]
        if tokens is not None:
            if len(tokens) != len(names[1]):
                raise ArgumentError(f"there are {len(tokens)} tokens for {len(names[1])} keys")
            names = [list(tokens) if len(tokens) == len(side) else side for side in names]
        title = "weights of attention, colours on a square-root scale"
        title = title if len(weights) == 1 else f"sample {at} of {len(weights)}: {title}"
        return draw_attention(title, drawn, [f"head {one}" for one in heads], (names[0], names[1]))

    def _without_dropout(self) -> Attention:
        """Return the attention of a call whose weights are those before dropout."""
        return self

    @abstractmethod
    def _computed(self, heads: Tensor, queries: Tensor) -> Tensor:
        """Return weights [batch, heads, queries, keys] in float32 or more."""

    def _check(self, error: float) -> None:
        dtype = self.output.dtype
        if dtype is torch.float32 and not float32_products_are_exact(self._device):
            dtype = torch.bfloat16
        if not error <= _ROUNDING[dtype]:
            raise AttentionError(
                "the weights don't explain what the kernel returned: times the values, they differ "
                f"from its output by {error:.1e} of its largest magnitude, and rounding in "
                f"{dtype_name(dtype)} explains {_ROUNDING[dtype]:.0e}. So the kernel computes "
                "something else than its arguments say"
            )

    def _difference(self, weights: Tensor, heads: Tensor, queries: Tensor) -> tuple[float, float]:
        """Return the largest difference from the output, and the output's largest magnitude."""
        value = self._of_heads(self.value, heads).to(self.output.dtype)
        output = _with_heads(self.output).index_select(-2, queries)
        return _differences(weights @ value.to(weights.dtype), self._of_heads(output, heads))

    def _of_heads(self, tensor: Tensor, heads: Tensor) -> Tensor:
        """Return the part of some heads of a tensor in which several may share one."""
        return tensor.index_select(-3, heads * tensor.shape[-3] // self._num_heads)

    def _chosen(self, what: str, given: Index, count: int) -> Tensor:
        """Return indices from 0 on, without a dimension for a single number."""
        every = torch.arange(count, device=self._device)
        given = list(given) if isinstance(given, tuple | range) else given
        try:
            return every if given is None else every[given]
        except (IndexError, TypeError) as error:
            raise ArgumentError(f"there is no {what} {given!r} of {count}: {error}") from None


class _KernelAttention(Attention):
    """Attention by a kernel, whose weights nobody has seen."""

    query: Tensor
    key: Tensor
    # Whether PyTorch has computed the weights step by step, in the dtype of the query.
    _is_eager = False

    def __init__(self, given: Mapping[str, Any], output: Tensor) -> None:
        received = [given[name] for name in ("query", "key", "value")]
        if len({one.dim() for one in received}) > 1:
            raise AttentionError("queries, keys and values of different dimensions can't be read")
        query, key, value = map(_with_heads, received)
        num_heads = max(one.shape[-3] for one in (query, key, value))
        super().__init__(query, key, value, output, (num_heads, query.shape[-2]))
        self._given = given

    def _computed(self, heads: Tensor, queries: Tensor) -> Tensor:
        wide = _wide(self.query.dtype, self._device)
        scores = self._scores(heads, queries, self.query.dtype if self._is_eager else wide)
        weights = scores.softmax(-1).to(wide)
        # Kernels return zeros for a row that is masked whole.
        nothing = (scores == -math.inf).all(-1, keepdim=True)
        return weights if self._is_eager else weights.masked_fill_(nothing, 0.0)

    def _scores(self, heads: Tensor, queries: Tensor, dtype: torch.dtype) -> Tensor:
        given = self._given
        if given["dropout_p"]:
            raise AttentionError(
                f"the kernel dropped weights with probability {given['dropout_p']}, and which ones "
                "is not known: call eval() first"
            )
        # Under autocast the kernel received another dtype than it computed with.
        query, key = (
            self._of_heads(one, heads).to(self.output.dtype).to(dtype)
            for one in (self.query.index_select(-2, queries), self.key)
        )
        scale: float = query.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
        scores = (query * scale) @ key.transpose(-2, -1)
        sizes = self._num_queries, key.shape[-2]
        bias = bias_of(given, sizes, queries, self.query.dtype)
        if bias is None:
            return scores
        if self.query.dtype != self.output.dtype:
            bias = bias.to(self.output.dtype)
        # A mask lacks the dimensions that the queries lack.
        bias = _with_heads(bias, 4 - given["query"].dim())
        return scores + (bias if bias.dim() < 3 else self._of_heads(bias, heads)).to(dtype)

    def _without_dropout(self) -> Attention:
        given, dtype = self._given, self.output.dtype
        if not given["dropout_p"]:
            return self
        again = {name: _rounded(one, dtype) for name, one in given.items()} | {"dropout_p": 0.0}
        if self.query.shape[-3] != self.key.shape[-3]:
            again["enable_gqa"] = True
        with undisturbed(self._device.type):
            return _KernelAttention(again, functional.scaled_dot_product_attention(**again))


class _ProjectedAttention(_KernelAttention):
    """Attention of ``multi_head_attention_forward``, which projects at both ends."""

    def __init__(self, given: Mapping[str, Any], output: Tensor) -> None:
        if has_further_keys(given):
            raise AttentionError(
                "attention with bias_k, add_zero_attn, static_k or static_v can't be read"
            )
        with undisturbed(output.device.type):
            # Under autocast everything is rounded first.
            given = {name: _rounded(one, output.dtype) for name, one in given.items()}
            super().__init__(projected(given), output)
        self._out = given["out_proj_weight"], given["out_proj_bias"]
        self._is_eager = given["need_weights"]

    def _difference(self, weights: Tensor, heads: Tensor, queries: Tensor) -> tuple[float, float]:
        # The output is a sum over all heads.
        every = torch.arange(self._num_heads, device=self._device)
        weights = weights if every.equal(heads) else self._computed(every, queries)
        mixed = (weights @ self.value.to(weights.dtype)).permute(2, 0, 1, 3).flatten(2)
        expected = functional.linear(mixed, *(_rounded(one, weights.dtype) for one in self._out))
        output = self.output if self.output.dim() == 3 else self.output[:, None]
        return _differences(expected, output[queries])


class _EagerAttention(Attention):
    """Attention whose weights a network has computed itself."""

    def __init__(self, softmax: Tensor, weights: Tensor, value: Tensor, output: Tensor) -> None:
        self._softmax = softmax
        self._weights = _with_heads(weights)
        num_heads, num_queries = self._weights.shape[-3:-1]
        super().__init__(None, None, _with_heads(value), output, (num_heads, num_queries))

    def _computed(self, heads: Tensor, queries: Tensor) -> Tensor:
        weights = self._of_heads(self._weights.index_select(-2, queries), heads)
        return weights.to(_wide(weights.dtype, self._device))

    def entropy(self) -> Tensor:
        with undisturbed(self._device.type):
            wide = _wide(self._softmax.dtype, self._device)
            entropies: Tensor = torch.special.entr(_with_heads(self._softmax).to(wide)).sum(-1)
            return entropies


def attention_of(function: str, inputs: Inputs, output: Any) -> Attention:
    """Return the attention of a call of a kernel.

    Parameters
    ----------
    function : {"scaled_dot_product_attention", "multi_head_attention_forward"}
        The kernel's name.
    inputs : Inputs
        What it received.
    output : Tensor or (Tensor, Tensor or None)
        What it returned.

    Raises
    ------
    AttentionError
        A tensor is nested or sparse, queries and keys differ in their number of dimensions, or
        there are keys of ``bias_k``, ``add_zero_attn`` or ``static_k``.
    """
    given = bound_arguments(function, inputs).arguments
    if function == "multi_head_attention_forward":
        return _ProjectedAttention(given, output[0])
    return _KernelAttention(given, output)


def eager_attention_of(
    softmax_output: Tensor, product_inputs: Inputs, product_output: Any
) -> Attention:
    """Return the attention of eager code: a softmax, and a product with the values.

    Parameters
    ----------
    softmax_output : Tensor
        [batch, heads, queries, keys], what the softmax returned. It only serves to tell whether the
        product is one with its weights.
    product_inputs : Inputs
        What ``matmul``, ``bmm`` or ``einsum`` received: first the weights, of the shape of
        ``softmax_output`` or with fewer keys, then the values. Either may be folded to [batch *
        heads, ...] for ``bmm``.
    product_output : Tensor
        [batch, heads, queries, head_dim], what it returned; perhaps folded as well.

    Raises
    ------
    AttentionError
        It is no product of weights with values, in these shapes.
    """
    given = (*product_inputs.args, *product_inputs.kwargs.values(), product_output)
    leading, rows = softmax_output.shape[:-2], [*softmax_output.shape[:-1]]
    tensors = [_unfolded(one, leading) for one in given if isinstance(one, Tensor)]
    shapes = [[*one.shape] for one in tensors]
    if len(tensors) == 3 and shapes[0][:-1] == rows and shapes[2] == [*rows, shapes[1][-1]]:
        return _EagerAttention(softmax_output, *tensors)
    raise AttentionError(
        f"a softmax returned {[*softmax_output.shape]}, and what follows, {shapes}, is no product "
        "of weights [batch, heads, queries, keys] with values [batch, heads, keys, head_dim]"
    )


def _with_heads(tensor: Tensor, missing: int | None = None) -> Tensor:
    """Return a tensor [batch, heads, positions, ...] with the dimensions that are missing."""
    if not is_dense(tensor):
        raise AttentionError("attention of nested or sparse tensors can't be read")
    for _ in range(4 - tensor.dim() if missing is None else missing):
        tensor = tensor.unsqueeze(-3)
    return tensor


def _unfolded(tensor: Tensor, leading: Sequence[int]) -> Tensor:
    """Return a tensor [batch * heads, ...], as ``bmm`` takes it, as [batch, heads, ...]."""
    is_folded = tensor.dim() == 3 and len(tensor) == math.prod(leading)
    return tensor.reshape(*leading, *tensor.shape[1:]) if is_folded else tensor


def _wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    is_double = dtype is torch.float64 or not float32_products_are_exact(device)
    return torch.float64 if is_double else torch.float32


def _rounded(given: Any, dtype: torch.dtype) -> Any:
    is_rounded = isinstance(given, Tensor) and given.is_floating_point()
    return given.to(dtype) if is_rounded else given


def _differences(expected: Tensor, output: Tensor) -> tuple[float, float]:
    """Return the largest difference, and the largest finite magnitude of the output."""
    if not output.numel():
        return 0.0, 0.0
    output = output.to(expected.dtype)
    # NaNs and infinities in the same places are equal.
    is_equal = torch.isclose(expected, output, rtol=0.0, atol=0.0, equal_nan=True)
    worst = (expected - output).abs().masked_fill(is_equal, 0.0).max()
    return worst.item(), output.nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def _relative(worst: float, largest: float) -> float:
    return worst / largest if largest else worst
