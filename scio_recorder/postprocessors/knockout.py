"""A post-processor of attention, which changes what a kernel or a softmax receives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from scio_recorder.errors import AttentionError, PostprocessorError
from scio_recorder.nets.attention import AttentionCalls
from scio_recorder.nets.records import Inputs
from scio_recorder.postprocessors.values import integers

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
        for name, value in vars(self).copy().items():
            if value is not None or name != "heads":
                object.__setattr__(self, name, integers("Knockout", name, value))

    def __call__(self, activation: Any) -> NoReturn:
        """Refuse to act on an activation."""
        raise PostprocessorError(
            f"{self!r} was called with an activation: Knockout must be the outermost "
            "post-processor, given directly for a layer that computes attention, as in "
            'activation_postproc={"h.*.attn": Knockout(queries=[-1], keys=[0])}.'
        )

    def take_out(self, bias: Tensor, leading: Sequence[int]) -> Tensor:
        """Return scores, or what is added to them, with minus infinity for chosen keys.

        Parameters
        ----------
        bias : Tensor
            [..., queries, keys].
        leading : sequence of int
            The dimensions in front of these that scores have: [batch, ..., heads].

        Raises
        ------
        PostprocessorError
            See above.
        """
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
        positions = getattr(self, name)
        outside = [at for at in positions if not -count <= at < count]
        if outside:
            raise PostprocessorError(
                f"{self!r} names {name} {outside}, and the call of the attention has {count} {name}"
            )
        named = torch.zeros(count, dtype=torch.bool, device="cpu")
        named[list(positions)] = True
        return named


@dataclass(frozen=True)
class KnockoutOf:
    """A knockout of the attention of one layer, which changes what its first operation receives."""

    knockout: Knockout
    calls: AttentionCalls

    def changed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        """Return the changed inputs of the operation; no tensor is changed in place."""
        try:
            return self.calls.changed(Inputs(args, dict(kwargs)), self.knockout.take_out)
        except AttentionError as error:
            raise PostprocessorError(f"{self.knockout!r} can't act: {error}") from error
