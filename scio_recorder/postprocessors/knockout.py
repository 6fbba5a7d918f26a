"""A post-processor of attention, which changes what a kernel or a softmax receives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from scio_recorder.errors import PostprocessorError
from scio_recorder.nets.attention_arguments import (
    bias_of,
    bound_arguments,
    has_further_keys,
    joined_masks,
)
from scio_recorder.nets.records import Inputs
from scio_recorder.postprocessors.floating_map import integers, refuse_nested

# If scores lie so far apart, the weight of the lower one is zero in every dtype. The lowest number
# of a dtype, -1e9 and -1e4 in masks are meant like minus infinity.
_ZERO_BELOW = 5000.0


@dataclass(frozen=True)
class Knockout:
    """Let some queries of an attention not attend to some keys.

    The weights of all other keys grow, so that they sum up to 1 again. Minus infinity is added to
    the mask of the attention's kernel, or to the scores that a softmax receives.

    Parameters
    ----------
    queries, keys : int or iterable of int
        Positions in the call of the attention, in every sample; negative ones count from the end.
        With a cache, a call may have fewer queries than keys.
    heads : int or iterable of int, optional
        By default all.

    Raises
    ------
    PostprocessorError
        ``queries``, ``keys`` or ``heads`` are no integers; at a pass, there is no such position or
        head, or a query would be left without a key: those left, if any, are masked, by minus
        infinity or another number below -5,000. A query that had none before is left as it is.

    References
    ----------
    Geva et al., "Dissecting Recall of Factual Associations in Auto-Regressive Language Models",
    EMNLP 2023 (arXiv:2304.14767).

    Examples
    --------
    >>> Knockout(queries=[-1], keys=range(2), heads=0)
    Knockout(queries=(-1,), keys=(0, 1), heads=(0,))
    """

    queries: int | Iterable[int]
    keys: int | Iterable[int]
    heads: int | Iterable[int] | None = None

    def __post_init__(self) -> None:
        for name, given in vars(self).copy().items():
            if given is not None or name != "heads":
                object.__setattr__(self, name, integers("Knockout", name, given))

    def __call__(self, activation: Any) -> NoReturn:
        """Refuse to act on an activation."""
        raise PostprocessorError(
            f"{self!r} was called with an activation: Knockout must be the outermost "
            "post-processor, given directly for a layer that computes attention, as in "
            'activation_postproc={"h.*.attn": Knockout(queries=[-1], keys=[0])}.'
        )

    def changed(self, function: str, inputs: Inputs) -> Inputs:
        """Return the changed inputs of a call of an attention kernel or a softmax.

        Parameters
        ----------
        function : str
            "scaled_dot_product_attention", "multi_head_attention_forward" or "softmax".
        inputs : Inputs
            What it is about to receive.

        Returns
        -------
        Inputs
            What it receives instead. No tensor is changed in place.

        Raises
        ------
        PostprocessorError
            See above.
        """
        refuse_nested(self, [*inputs.args, *inputs.kwargs.values()][0])
        if function == "softmax":
            return self._of_softmax(inputs)
        given = bound_arguments(function, inputs)
        if function == "multi_head_attention_forward":
            given.arguments |= self._of_masks(given.arguments)
        else:
            given.arguments |= self._of_mask(given.arguments)
        return Inputs(given.args, given.kwargs)

    def _of_softmax(self, inputs: Inputs) -> Inputs:
        args, kwargs = inputs
        scores = args[0] if args else kwargs["input"]
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if scores.dim() < 2 or dim not in (-1, scores.dim() - 1):
            raise PostprocessorError(
                f"{self!r} needs a softmax over the last dimension of scores [batch, heads, "
                f"queries, keys], not over dimension {dim} of {[*scores.shape]}"
            )
        changed = self._without(scores, scores.shape[:-2])
        if not args:
            return Inputs((), kwargs | {"input": changed})
        return Inputs((changed, *args[1:]), kwargs)

    def _of_mask(self, given: dict[str, Any]) -> dict[str, Any]:
        query, sizes = given["query"], (given["query"].shape[-2], given["key"].shape[-2])
        bias = self._without(_bias(given, sizes, query), query.shape[:-2])
        return {"attn_mask": bias, "is_causal": False}

    def _of_masks(self, given: dict[str, Any]) -> dict[str, Any]:
        if has_further_keys(given):
            raise PostprocessorError(
                f"{self!r} can't act on attention with bias_k, add_zero_attn, static_k or static_v"
            )
        query = given["query"]
        leading = (query.shape[1] if query.dim() == 3 else 1), given["num_heads"]
        bias = _bias(joined_masks(given), (len(query), len(given["key"])), query)
        bias = self._without(bias, leading)
        if bias.dim() > 2:
            bias = bias.expand(*leading, -1, -1).flatten(0, 1)
        return {"attn_mask": bias, "key_padding_mask": None, "is_causal": False}

    def _without(self, bias: Tensor, leading: Sequence[int]) -> Tensor:
        """Return scores, or what is added to them, with minus infinity for chosen keys."""
        num_queries, num_keys = bias.shape[-2:]
        where = self._named("queries", num_queries)[:, None] & self._named("keys", num_keys)
        if self.heads is not None:
            if len(leading) < 2:
                raise PostprocessorError(f"{self!r}: this attention has no dimension of heads")
            where = self._named("heads", leading[-1])[:, None, None] & where
            bias = bias.expand(*leading, -1, -1)
        result = bias.masked_fill(where.to(bias.device), -math.inf)
        before, after = bias.amax(-1), result.amax(-1)
        # Half of it, since scores have been added to the lowest number.
        had = before > torch.finfo(bias.dtype).min / 2
        empty = (had & (before - after > _ZERO_BELOW)).nonzero().tolist()
        if empty:
            of_head = "" if self.heads is None else f" of head {empty[0][-2]}"
            raise PostprocessorError(
                f"{self!r} leaves query {empty[0][-1]}{of_head} without a key. Leave it one; "
                "to take out a head, write OnInput(Heads(...)) for the projection that follows."
            )
        return torch.where(had[..., None], result, bias)

    def _named(self, name: str, count: int) -> Tensor:
        """Return whether each of a number of positions is named."""
        given = getattr(self, name)
        outside = [at for at in given if not -count <= at < count]
        if outside:
            raise PostprocessorError(
                f"{self!r} names {name} {outside}, and the call of the attention has {count} {name}"
            )
        named = torch.zeros(count, dtype=torch.bool, device="cpu")
        named[list(given)] = True
        return named


def _bias(masks: dict[str, Any], sizes: tuple[int, int], query: Tensor) -> Tensor:
    """Return what masks add to all scores, zeros if there are none."""
    bias = bias_of(masks, sizes, torch.arange(sizes[0], device=query.device), query.dtype)
    return query.new_zeros(sizes) if bias is None else bias.expand(*bias.shape[:-2], *sizes)
