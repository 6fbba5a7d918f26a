"""Post-processors that apply another one: to a part of an activation, or to a layer's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.postprocessors.values import (
    FloatingMap,
    check_postprocessor,
    describe,
    index,
    integers,
    refuse_nested,
)

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class _OnPart(FloatingMap):
    """Applies a post-processor to parts of an activation, and puts the results back.

    Structures are mapped as by other post-processors. The dtype of a single tensor is left to the
    post-processor that acts on the part.
    """

    postprocessor: Callable[[Tensor], Tensor | None]

    def __call__(self, activation: Any) -> Any:
        if isinstance(activation, Tensor):
            return self._apply(activation)
        return super().__call__(activation)

    def _put(self, whole: Tensor, where: Any) -> Tensor:
        """Return a tensor with one part changed."""
        refuse_nested(self, whole)
        where = tuple(item.to(whole.device) if isinstance(item, Tensor) else item for item in where)
        try:
            # A copy: post-processors may work in place, and the tensor is the network's own.
            part = whole[where].clone()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise PostprocessorError(
                f"{self!r} was given {describe(whole)}, which has no such part: {error}. "
                "For positions in each sample, the index is (slice(None), positions)."
            ) from error
        self._check_distinct(whole, where, part)
        result = self.postprocessor(part)
        new = whole.clone()
        new[where] = self._checked(part, result)
        return new

    def _check_distinct(self, whole: Tensor, where: Any, part: Tensor) -> None:
        """Check that no position is named twice, if that can happen."""

    def _checked(self, part: Tensor, result: Any) -> Tensor:
        if result is None:
            return part
        kind = part.dtype, part.shape
        if not isinstance(result, Tensor) or (result.dtype, result.shape) != kind:
            raise PostprocessorError(
                f"{self!r} gave its post-processor {describe(part)} and got {describe(result)}. "
                "Return a tensor of the same shape and dtype, or None after working in place."
            )
        return result


@dataclass(frozen=True, eq=False)
class At(_OnPart):
    """Let another post-processor act on ``activation[index]``, and leave the rest as it is.

    Parameters
    ----------
    index : int, slice, None, Ellipsis, list, Tensor or tuple of these
        The index between the brackets of ``activation[...]``: positions, or a mask of booleans.
    postprocessor : callable
        ``Tensor -> Tensor or None``, such as another one of this module. It receives a copy of the
        part, of the shape of ``activation[index]``, and returns a tensor of that shape and dtype.

    Raises
    ------
    PostprocessorError
        ``index`` can't index a tensor or names a position twice; ``postprocessor`` can't be
        called; at a call, the activation has no such part, or the post-processor changes the shape
        or the dtype.

    Examples
    --------
    The last token of each sample ``[tokens, features]``:

    >>> import torch
    >>> from scio_recorder.postprocessors import Scale
    >>> At((slice(None), -1), Scale(3.0))(torch.ones(1, 2, 2))
    tensor([[[1., 1.],
             [3., 3.]]])
    """

    index: Any
    postprocessor: Callable[[Tensor], Tensor | None]

    def __post_init__(self) -> None:
        check_postprocessor("At", self.postprocessor)
        items = self.index if isinstance(self.index, tuple) else (self.index,)
        object.__setattr__(self, "index", tuple(_index_item(item) for item in items))

    def __repr__(self) -> str:
        items = [describe(item) if isinstance(item, Tensor) else repr(item) for item in self.index]
        return f"At(({', '.join(items)}{',' * (len(items) == 1)}), {self.postprocessor!r})"

    def _apply(self, activation: Tensor) -> Tensor:
        return self._put(activation, self.index)

    def _check_distinct(self, whole: Tensor, where: Any, part: Tensor) -> None:
        has_numbers = any(isinstance(item, Tensor) and item.dtype != torch.bool for item in where)
        # If a position is named twice, autograd would count its gradient twice.
        if not has_numbers or torch.compiler.is_compiling():
            return
        named = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
        named[where] = True
        if int(named.sum()) != part.numel():
            raise PostprocessorError(
                f"{self!r} names a position twice in {describe(whole)}. Name each position once."
            )


@dataclass(frozen=True, eq=False)
class Heads(_OnPart):
    """Let another post-processor act on some heads of the last dimension.

    The last dimension holds all heads side by side, ``[..., num_heads * size]``, as in attention
    before its output projection.

    Parameters
    ----------
    num_heads : int
        The number of heads.
    heads : int or iterable of int
        The heads to change; negative ones count from the end.
    postprocessor : callable
        ``Tensor -> Tensor or None``, such as another one of this module. It receives a copy of the
        heads, ``[..., len(heads), size]``, and returns a tensor of that shape and dtype.

    Raises
    ------
    PostprocessorError
        There is no such head, or one is named twice; ``postprocessor`` can't be called; at a call,
        the last dimension can't be split into this many heads, or the post-processor changes the
        shape or the dtype.

    References
    ----------
    Michel, Levy and Neubig, "Are Sixteen Heads Really Better than One?", NeurIPS 2019.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder.postprocessors import Ablate
    >>> Heads(3, [0, 2], Ablate())(torch.ones(1, 6))
    tensor([[0., 0., 1., 1., 0., 0.]])
    """

    num_heads: int
    heads: Any
    postprocessor: Callable[[Tensor], Tensor | None]

    def __post_init__(self) -> None:
        check_postprocessor("Heads", self.postprocessor)
        count = index("Heads", "num_heads", self.num_heads)
        heads = integers("Heads", "heads", self.heads)
        named = {head % count for head in heads if -count <= head < count} if count > 0 else set()
        if len(named) != len(heads):
            raise PostprocessorError(
                f"Heads was given heads={list(heads)} of num_heads={count}: name each head once, "
                "by its number from 0 to num_heads - 1."
            )
        object.__setattr__(self, "num_heads", count)
        object.__setattr__(self, "heads", heads)

    def _apply(self, activation: Tensor) -> Tensor:
        refuse_nested(self, activation)
        if not activation.dim() or activation.shape[-1] % self.num_heads:
            raise PostprocessorError(
                f"{self!r} was given {describe(activation)}, whose last dimension does not divide "
                f"into {self.num_heads} heads of one size."
            )
        size = activation.shape[-1] // self.num_heads
        whole = activation.reshape(*activation.shape[:-1], self.num_heads, size)
        heads = torch.tensor(self.heads, device="cpu")
        return self._put(whole, (..., heads, slice(None))).flatten(-2)


@dataclass(frozen=True)
class OnInput:
    """Let another post-processor act on the first tensor that a module's forward receives.

    This is the first positional argument that is a tensor, or a list, tuple or dictionary that
    holds one; after these, keyword arguments count in their order. The record of the layer is its
    output for the changed input, and recorded inputs are the changed ones.

    Parameters
    ----------
    postprocessor : callable
        ``Tensor -> Tensor or None``, such as another one of this module. None means that the
        tensor was changed in place.

    Raises
    ------
    PostprocessorError
        ``postprocessor`` can't be called; at a pass, the module receives no tensor.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> from scio_recorder.postprocessors import Scale
    >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Flatten()), input_size=(1, 2))
    >>> rnet.record("1")
    >>> rnet(torch.ones(1, 2), activation_postproc={"1": OnInput(Scale(3.0))})
    tensor([[3., 3.]])
    """

    postprocessor: Callable[[Any], Any]

    def __post_init__(self) -> None:
        # OnInput acts on no activation, so it can't be inside another one.
        inner = None if isinstance(self.postprocessor, OnInput) else self.postprocessor
        check_postprocessor("OnInput", inner)

    def __call__(self, activation: Any) -> NoReturn:
        """Refuse to act on an activation."""
        raise PostprocessorError(
            f"{self!r} was called with an activation: OnInput must be the outermost "
            "post-processor, given directly as activation_postproc, as in "
            "{selector: OnInput(At(0, Scale(2.0)))}."
        )


def _index_item(item: Any) -> Any:
    """Return one entry of an index; lists and arrays become new tensors."""
    if item is None or item is Ellipsis or isinstance(item, (slice, bool)):
        return item
    if not isinstance(item, (Tensor, np.ndarray, list, range)):
        return index("At", "index", item)
    try:
        positions = item if isinstance(item, Tensor) else torch.tensor(item, device="cpu")
        copy = positions.detach().clone()
    except (TypeError, ValueError, RuntimeError):
        copy = torch.empty(1, device="cpu")
    if not copy.numel():
        copy = copy.bool() if copy.dtype == torch.bool else copy.long()
    if copy.dtype not in (*_INTEGERS, torch.bool):
        raise PostprocessorError(
            f"At can't index with {describe(item)}: give integers, booleans or slices, and a tuple "
            "of these for several dimensions."
        )
    return copy
