"""A kind of attention: how it is recognised and changed, and how its weights are read.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.errors import ArgumentError, AttentionError, caught_as
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors.arguments import names_arguments
from scio_recorder.tensors.properties import (
    dtype_name,
    float32_products_are_exact,
    is_dense,
    undisturbed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Changes scores [..., queries, keys], or what is added to them, given the dimensions in front of
# the last two that the scores have.
TakeOut: TypeAlias = Callable[[Tensor, Sequence[int]], Tensor]
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


@dataclass(repr=False, eq=False)
class Attention(ABC):
    """The attention of one call: what it received, what it returned, and its weights.

    Read from ``rnet.attention``, where a kind of attention has made it.

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
    sizes : tuple of int
        Those of all weights, [batch, ..., heads, queries, keys].

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> x = torch.randn(2, 5, 8)
    >>> rnet = Recorder(nn.MultiheadAttention(8, 4, batch_first=True), input_data=(x, x, x))
    >>> rnet.record("", attention=True)
    >>> _ = rnet(x, x, x)
    >>> rnet.attention[""].weights(heads=[0], queries=[-1]).shape
    torch.Size([2, 1, 1, 5])
    >>> rnet.attention[""]
    Attention(query [2, 4, 5, 2], key [2, 4, 5, 2], value [2, 4, 5, 2] of float32)
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    output: Tensor
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        self._num_heads, self._num_queries = self.sizes[-3:-1]
        self._device = self.value.device

    def __repr__(self) -> str:
        parts = {"query": self.query, "key": self.key, "value": self.value}
        shapes = [f"{name} {[*part.shape]}" for name, part in parts.items() if part is not None]
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
            raise caught_as(
                ArgumentError,
                TypeError(),
                "rnet.attention[layer] is an Attention, no tensor: for one [batch, heads, queries, "
                "keys] write rnet.attention[layer].weights()",
            )

    @names_arguments
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
        return torch.cat([torch.special.entr(weights).sum(-1) for weights in parts], -1)

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
        differences = [(0.0, 0.0)]
        with undisturbed(self._device.type):
            for start in range(0, self._num_queries, _BLOCK):
                queries = every[start : start + _BLOCK]
                differences += [self._difference(self._computed(heads, queries), heads, queries)]
        worst = torch.tensor(differences, dtype=torch.float64, device="cpu")
        # Unlike Python's, this maximum keeps a NaN.
        return _relative(*worst.amax(0).tolist())

    @names_arguments
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
        from scio_recorder.display.figure import draw_attention

        title = "weights of attention, colours on a square-root scale"
        title = title if len(weights) == 1 else f"sample {at} of {len(weights)}: {title}"
        return draw_attention(
            title, drawn, [f"head {head}" for head in heads], (names[0], names[1])
        )

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
        if math.isnan(error):
            raise AttentionError(
                "the weights can't be checked: the call received or returned NaN, and kernels "
                "differ in what they make of it"
            )
        if error > _ROUNDING[dtype]:
            raise AttentionError(
                "the weights don't explain what the kernel returned: times the values, they differ "
                f"from its output by {error:.1e} of its largest magnitude, and rounding in "
                f"{dtype_name(dtype)} explains {_ROUNDING[dtype]:.0e}. So the kernel computes "
                "something else than its arguments say"
            )

    def _difference(self, weights: Tensor, heads: Tensor, queries: Tensor) -> tuple[float, float]:
        """Return the largest difference from the output, and the output's largest magnitude."""
        value = self._of_heads(self.value, heads).to(self.output.dtype)
        output = with_heads(self.output).index_select(-2, queries)
        return differences_of(weights @ value.to(weights.dtype), self._of_heads(output, heads))

    def _of_heads(self, tensor: Tensor, heads: Tensor) -> Tensor:
        """Return the part of some heads of a tensor in which several may share one."""
        return tensor.index_select(-3, heads * tensor.shape[-3] // self._num_heads)

    def _chosen(self, what: str, index: Index, count: int) -> Tensor:
        """Return indices from 0 on, without a dimension for a single number."""
        every = torch.arange(count, device=self._device)
        index = list(index) if isinstance(index, tuple | range) else index
        try:
            if isinstance(index, str):
                raise TypeError("leave it out for all")
            return every if index is None else every[index]
        except (IndexError, TypeError) as error:
            raise ArgumentError(f"there is no {what} {index!r} of {count}: {error}") from None


class SeenOperation(NamedTuple):
    """An operation that has just returned.

    Attributes
    ----------
    code : object
        The call of a module whose own code made it.
    module : torch.nn.Module or None
        That module.
    function, index : str, int
        As in the label of an operation.
    inputs : Inputs
        What it received.
    output : Any
        What it returned.
    """

    code: object
    module: nn.Module | None
    function: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name
    inputs: Inputs
    output: Any


class SeenAttention(NamedTuple):
    """The operations by which own code has just computed attention.

    Attributes
    ----------
    kind : AttentionKind
        The kind of attention.
    first, last : SeenOperation, or OperationIdx once labels are known
        The inputs of the first decide who attends to whom; the inputs and the output of the last
        tell the weights. A kernel is both.
    layout : Any
        What the kind must know of the call to read and change its attention.
    sizes : tuple of int
        The sizes [batch, ..., heads, queries, keys] of weights whose batch and heads could be in
        another order; empty if there is only one order.
    refusal : str
        Why the attention can be neither read nor changed; empty if it can.
    refuses_all : bool
        Whether this holds for the first operation, whatever else its output is multiplied with.
    """

    kind: AttentionKind
    first: Any
    last: Any
    layout: Any = None
    sizes: tuple[int, ...] = ()
    refusal: str = ""
    refuses_all: bool = False


class AttentionKind(ABC):
    """How one kind of attention is recognised, read and changed.

    A kind is a row of ``KINDS``, and nothing else in the library knows its functions. It has no
    state: objects of it are kept with operations, and pickled. `Eager` is the kind of any one
    function that turns scores into weights, which a product follows.
    """

    @abstractmethod
    def recogniser(self) -> Callable[[SeenOperation], SeenAttention | None]:
        """Return a function that is given operations in order, and returns what one completes.

        It runs inside of the network's forward, so what it raises is taken for the network's error.
        """

    @abstractmethod
    def attention(self, layout: Any, parts: Sequence[Any]) -> Attention:
        """Return the attention of a call.

        Parameters
        ----------
        layout : Any
            That of the `SeenAttention`.
        parts : (Any, Inputs, Any)
            What the first operation returned, and what the last received and returned.

        Raises
        ------
        AttentionError
            The attention can't be read.
        """

    @abstractmethod
    def changed(self, layout: Any, inputs: Inputs, take_out: TakeOut) -> Inputs:
        """Return other inputs for the first operation, so that some entries are taken out.

        Parameters
        ----------
        layout : Any
            That of the `SeenAttention`.
        inputs : Inputs
            What the first operation is about to receive, of which nothing is changed in place.
        take_out : callable
            Takes entries out of scores, or of what is added to them.

        Raises
        ------
        AttentionError
            The attention can't be read, and so it can't be changed.
        """


def with_heads(tensor: Tensor, missing: int | None = None) -> Tensor:
    """Return a tensor [batch, heads, positions, ...] with the dimensions that are missing."""
    if not is_dense(tensor):
        raise AttentionError("attention of nested or sparse tensors can't be read")
    for _ in range(4 - tensor.dim() if missing is None else missing):
        tensor = tensor.unsqueeze(-3)
    return tensor


def wide(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which weights are computed."""
    is_double = dtype is torch.float64 or not float32_products_are_exact(device)
    return torch.float64 if is_double else torch.float32


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """Return a value in a dtype, if it is a tensor of floating-point numbers."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def differences_of(expected: Tensor, output: Tensor) -> tuple[float, float]:
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
