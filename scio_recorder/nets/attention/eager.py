"""Attention of eager code: a softmax, and the product of what it returned with the values.

NOTE [What counts as weights]

Many products follow a softmax, and only one of its results is a product of weights. So what a
softmax returns is followed through the code: through functions that change its dtype, its shape or
its memory, drop some of it, or multiply it with a mask. What comes out of these is weights still.
What comes out of any other function is not, and where it is multiplied, the attention is refused.
What is multiplied with weights must not come out of a softmax itself, or out of a product of two
tensors that are no parameters, as in linear attention: it has features in place of keys. Where
other keys of the same weights are multiplied as well, or what the product returned is multiplied
again before it is projected, nothing shows the weights of all values, and all is refused. A
write into a view is seen by the version of the tensor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from scio_recorder.errors import AttentionError
from scio_recorder.nets.attention.kind import (
    Attention,
    AttentionKind,
    SeenAttention,
    SeenOperation,
    TakeOut,
    wide,
    with_heads,
)
from scio_recorder.nets.records import Inputs
from scio_recorder.tensors import private
from scio_recorder.tensors.properties import undisturbed, version_of
from scio_recorder.tensors.structures import tensors

_PRODUCTS = {"matmul", "bmm", "einsum"}
_KEEP_WEIGHTS = {
    *("bfloat16", "clone", "contiguous", "detach", "double", "float", "half", "to", "type"),
    *("dropout", "dropout_", "masked_fill", "masked_fill_", "nan_to_num", "nan_to_num_"),
    *("imul", "mul", "mul_", "multiply", "multiply_", "type_as", "rmul"),
    *("flatten", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"),
}
_SLICES = {"getitem", "narrow"}


class Layout(NamedTuple):
    """How a product has its operands.

    Attributes
    ----------
    place : int
        Which operand is the weights.
    weights, value, output : tuple of int
        The order in which their dimensions are [batch, heads, positions, ...]; empty if they are,
        or may be folded to [batch * heads, positions, ...].
    num_left_out : int
        How many of the last keys have weights and no values, as sinks have.
    """

    place: int = 0
    weights: tuple[int, ...] = ()
    value: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    num_left_out: int = 0

    @classmethod
    def of(cls, equation: str, place: int, num_dims: int) -> Self | None:
        """Return the layout of an ``einsum``; None if it is no product of weights and values.

        Examples
        --------
        >>> Layout.of("bqhk,bkhd->bqhd", 0, 4)[:4]
        (0, (0, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1, 3))
        """
        received, arrow, output = equation.replace(" ", "").partition("->")
        operands = received.split(",")
        if not arrow or len(operands) != 2:
            return None
        shared = "ABCDEFGHIJ"[: num_dims - len(operands[place].replace("...", ""))]
        operands = [operand.replace("...", shared) for operand in operands]
        weights, value = operands[place], operands[1 - place]
        output = output.replace("...", shared)
        leading = [name for name in weights if name in value and name in output]
        queries = [name for name in weights if name not in value]
        features = [name for name in value if name not in weights]
        # Softmaxes are over the last dimension of scores.
        keys = weights[-1]
        orders = (
            (weights, [*leading, *queries, keys]),
            (value, [*leading, keys, *features]),
            (output, [*leading, *queries, *features]),
        )
        has_all = all(sorted(names) == sorted(order) for names, order in orders)
        if not has_all or len(queries) != 1 or len(features) != 1:
            return None
        first, second, third = (tuple(map(names.index, order)) for names, order in orders)
        return cls(place, first, second, third)


class _Traced(NamedTuple):
    """A tensor that was computed from what a softmax returned.

    ``softmax`` is None behind a projection, or a product of other tensors than weights.
    """

    tensor: Callable[[], Tensor | None]
    version: Any
    code: object
    softmax: SeenOperation | None
    is_weights: bool
    is_product: bool


_UNTRACED = _Traced(lambda: None, None, None, None, False, False)


class Eager(AttentionKind):
    """Attention by a function that turns scores into weights, and a product.

    Parameters
    ----------
    function : str, default "softmax"
        The function, of scores and the dimension of keys, which must be the last.

    Examples
    --------
    >>> weights, value = torch.full((1, 2, 4, 4), 0.25), torch.ones(1, 2, 4, 8)
    >>> parts = weights, Inputs((weights, value), {}), weights @ value
    >>> Eager().attention(Layout(), parts).weights().shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(self, function: str = "softmax") -> None:
        self.function = function

    def recogniser(self) -> Callable[[SeenOperation], SeenAttention | None]:
        """Return a function that follows what the function returns."""
        return _Follower(self).see

    def attention(self, layout: Layout, parts: Sequence[Any]) -> Attention:
        """Return the attention of a call."""
        softmax, inputs, output = parts
        operands = _tensors_of(inputs)
        weights, value = operands[layout.place], operands[1 - layout.place]
        received = [(weights, layout.weights), (value, layout.value), (output, layout.output)]
        weights, value, output = (_ordered(*part, softmax.shape[:-2]) for part in received)
        softmax = _ordered(softmax, layout.weights, ())
        rows = softmax.shape[:-1]
        if weights.shape[:-1] == rows and output.shape == (*rows, value.shape[-1]):
            return EagerAttention(softmax, weights, value, output)
        shapes = [[*part.shape] for part in (weights, value, output)]
        raise AttentionError(
            f"{self.function} returned {[*softmax.shape]}, and what follows, {shapes}, is no "
            "product of weights [batch, heads, queries, keys] with values [batch, heads, keys, "
            "head_dim]"
        )

    def changed(self, layout: Layout, inputs: Inputs, take_out: TakeOut) -> Inputs:
        """Return inputs with scores of which entries are taken out."""
        scores = self.scores(inputs)
        if scores is None:
            raise AttentionError(f"{self.function} is not over the last dimension of scores")
        ordered = _ordered(scores, layout.weights, ())
        keys, left_out = ordered.tensor_split([ordered.shape[-1] - layout.num_left_out], -1)
        changed = torch.cat([take_out(keys, ordered.shape[:-2]), left_out], -1)
        if layout.weights:
            changed = changed.permute(*map(layout.weights.index, range(changed.dim())))
        if inputs.args:
            return Inputs((changed, *inputs.args[1:]), inputs.kwargs)
        return Inputs((), inputs.kwargs | {"input": changed})

    def scores(self, inputs: Inputs) -> Tensor | None:
        """Return the scores that the function receives, None if keys are not their last dimension.

        Parameters
        ----------
        inputs : Inputs
            What it receives.
        """
        args, kwargs = inputs
        scores: Tensor = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        is_dense = not (scores.is_nested or scores.is_sparse)
        return scores if is_dense and scores.dim() > 1 and dim in (-1, scores.dim() - 1) else None


class _Follower:
    """Follows what a function returns, up to a product."""

    def __init__(self, kind: Eager) -> None:
        self._kind = kind
        self._traced: dict[int, _Traced] = {}

    def see(self, operation: SeenOperation) -> SeenAttention | None:
        """Take an operation that has returned."""
        code, function = operation.code, operation.function
        if function == self._kind.function:
            self._forget_dead()
            is_weights = self._kind.scores(operation.inputs) is not None
            self._trace(operation, code, operation, is_weights)
            return None
        received = _tensors_of(operation.inputs)
        traced = [known for known in map(self._find, received) if known is not None]
        has_parameter = any(map(_is_parameter, received))
        is_product = function in _PRODUCTS
        if is_product and has_parameter:
            # What another layer has returned is projected.
            traced = [known for known in traced if known.code is code]
        if not traced and (has_parameter or not is_product):
            return None
        # A projection has no samples, also where it was cast, and is no parameter any more.
        projects = has_parameter or (is_product and len({part.dim() for part in received}) > 1)
        first = max(traced, key=lambda known: known.softmax is not None, default=_UNTRACED)
        softmax = None if first.is_product and projects else first.softmax
        if is_product:
            completed = self._completed(operation, received, projects)
            self._trace(operation, code, softmax, is_product=True)
            return completed
        is_kept = function in _KEEP_WEIGHTS or (
            function in _SLICES and _begins(operation.output, received[0])
        )
        is_weights = is_kept and len(traced) == 1 and first.is_weights
        self._trace(operation, first.code, softmax, is_weights, first.is_product)
        return None

    def _find(self, tensor: Tensor) -> _Traced | None:
        traced = self._traced.get(id(tensor))
        if traced is None or traced.tensor() is not tensor:
            return None
        is_same = traced.version == version_of(tensor)
        return traced if is_same else traced._replace(is_weights=False)

    def _trace(
        self,
        operation: SeenOperation,
        code: object,
        softmax: SeenOperation | None,
        is_weights: bool = False,
        is_product: bool = False,
    ) -> None:
        for tensor in tensors(operation.output):
            state = version_of(tensor), code, softmax, is_weights, is_product
            self._traced[id(tensor)] = _Traced(weakref.ref(tensor), *state)

    def _forget_dead(self) -> None:
        alive = self._traced.items()
        self._traced = {key: traced for key, traced in alive if traced.tensor() is not None}

    def _completed(
        self, operation: SeenOperation, received: Sequence[Tensor], projects: bool
    ) -> SeenAttention | None:
        """Return the attention that a product completes, or why it is none that can be read."""
        traced = [
            (place, known)
            for place, tensor in enumerate(received)
            if (known := self._find(tensor)) and known.code is operation.code
        ]
        place, weights = next(((at, known) for at, known in traced if known.softmax), (0, None))
        if weights is None or weights.softmax is None or (weights.is_product and projects):
            return None
        seen = SeenAttention(self._kind, weights.softmax, operation)
        softmax = weights.softmax.output
        num_left_out = softmax.shape[-1] - received[place].shape[-1]
        if not weights.is_weights:
            return seen._replace(
                refusal=f"what is multiplied is not what {self._kind.function} returned",
                refuses_all=weights.is_product or num_left_out > 0,
            )
        if len(traced) > 1:
            return seen._replace(refusal="the values come out of a product, or a softmax")
        layout = _layout_of(operation, place, received[place].dim())
        if layout is None:
            return seen._replace(refusal="this is no product of weights with values")
        try:
            parts = softmax, operation.inputs, operation.output
            attention = self._kind.attention(layout, parts)
        except AttentionError as error:
            return seen._replace(refusal=str(error))
        sizes = attention.sizes if softmax.dim() > 3 else ()
        return seen._replace(layout=layout._replace(num_left_out=num_left_out), sizes=sizes)


class EagerAttention(Attention):
    """Attention whose weights a network has computed itself."""

    def __init__(self, softmax: Tensor, weights: Tensor, value: Tensor, output: Tensor) -> None:
        self._softmax = softmax
        self._weights = with_heads(weights)
        super().__init__(None, None, with_heads(value), output, tuple(self._weights.shape))

    def _computed(self, heads: Tensor, queries: Tensor) -> Tensor:
        weights = self._of_heads(self._weights.index_select(-2, queries), heads)
        return weights.to(wide(weights.dtype, self._device))

    def entropy(self) -> Tensor:
        """Return how widely queries attend, by what the softmax returned."""
        with undisturbed(self._device.type):
            dtype = wide(self._softmax.dtype, self._device)
            entropies: Tensor = torch.special.entr(with_heads(self._softmax).to(dtype)).sum(-1)
            return entropies


def _layout_of(operation: SeenOperation, place: int, num_dims: int) -> Layout | None:
    """Return the layout of a product, None if it is none of weights and values."""
    if operation.function != "einsum":
        return Layout() if place == 0 else None
    equation = operation.inputs.args[0]
    return Layout.of(equation, place, num_dims) if isinstance(equation, str) else None


def _is_parameter(tensor: Tensor) -> bool:
    return any(isinstance(part, nn.Parameter) for part in (tensor, private.base_of(tensor)))


def _tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors that a function received, those in lists too, in their order."""
    parts: list[Any] = []
    for value in (*inputs.args, *inputs.kwargs.values()):
        parts += value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, Tensor)]


def _begins(output: Any, tensor: Tensor) -> bool:
    """Whether what was taken of a tensor is its first keys, or all, in their places."""
    if not isinstance(output, Tensor) or private.base_of(output) is None:
        return False
    base = private.base_of(tensor)
    if private.base_of(output) is not (tensor if base is None else base):
        return False
    places = [(part.storage_offset(), part.stride(), part.shape[:-1]) for part in (output, tensor)]
    return places[0] == places[1]


def _ordered(tensor: Tensor, order: Sequence[int], leading: Sequence[int]) -> Tensor:
    """Return a tensor as [batch, heads, positions, ...], which may be folded at its beginning."""
    if order and len(order) != tensor.dim():
        raise AttentionError("an operand of its product lacks dimensions, which are broadcast")
    if order:
        return tensor.permute(*order)
    is_folded = tensor.dim() == 3 and leading and len(tensor) == math.prod(leading)
    return tensor.reshape(*leading, *tensor.shape[1:]) if is_folded else tensor
