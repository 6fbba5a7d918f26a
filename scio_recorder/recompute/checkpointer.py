"""Keeping every n-th activation of a chain of layers, and recomputing those in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scio_recorder.errors import ArgumentError, RecomputeError
from scio_recorder.lowlevel import random_state, restore_random
from scio_recorder.tensors import flatten, tensors, whole

ForwardFunction: TypeAlias = Callable[[Any, int], Any]


@dataclass(frozen=True)
class CheckpointConfig:
    """Which activations an :class:`ActivationCheckpointer` keeps, and how.

    Parameters
    ----------
    every : int, default 4
        Layers whose index is a multiple of this are boundaries, whose activation is kept.
    max_checkpoints : int, optional
        How many activations to keep at most; boundaries are kept beyond it too.
    mixed_precision : bool, default False
        Keep floating-point numbers of more than 16 bits as bfloat16, which has 8 bits of precision.

    Raises
    ------
    ArgumentError
        ``every`` is not an integer from 1 on, or ``max_checkpoints`` is not one from 0 on.

    Examples
    --------
    >>> CheckpointConfig(every=2)
    CheckpointConfig(every=2, max_checkpoints=None, mixed_precision=False)
    """

    every: int = 4
    max_checkpoints: int | None = None
    mixed_precision: bool = False

    def __post_init__(self) -> None:
        whole("every", self.every, 1, ArgumentError)
        if self.max_checkpoints is not None:
            whole("max_checkpoints", self.max_checkpoints, 0, ArgumentError)


class ActivationCheckpointer:
    """Keeps the outputs of layers at boundaries, and recomputes the outputs between them.

    An activation belongs to the layer that returned it. Kept activations are copies off the graph.
    Each comes with the state of the global random number generators behind its layer, so dropout
    and the like are recomputed with the same numbers.

    Parameters
    ----------
    config : CheckpointConfig, optional
        Which activations to keep, and how.

    Attributes
    ----------
    config : CheckpointConfig
        The configuration.
    memory_saved_bytes : int
        Bytes of the activations that the last :meth:`checkpointed_forward` did not keep.

    Notes
    -----
    Keeping every n-th of N activations and recomputing the others needs N / n + n of them in
    memory at a time instead of N (Chen et al., "Training Deep Nets with Sublinear Memory Cost",
    2016).

    Examples
    --------
    >>> layers = [torch.nn.Linear(3, 3) for _ in range(6)]
    >>> checkpointer = ActivationCheckpointer(CheckpointConfig(every=3))
    >>> forward = lambda x, i: layers[i](x)
    >>> out = checkpointer.checkpointed_forward(torch.ones(1, 3), range(6), forward)
    >>> checkpointer.num_checkpoints  # of layers 0 and 3
    2
    >>> again = checkpointer.recompute_from_checkpoint(5, range(6), forward)
    >>> torch.equal(out, again)
    True
    """

    def __init__(self, config: CheckpointConfig | None = None) -> None:
        self.config = CheckpointConfig() if config is None else config
        if not isinstance(self.config, CheckpointConfig):
            raise ArgumentError(f"config={config!r}: write CheckpointConfig(every=...)")
        self.memory_saved_bytes = 0
        self._kept: dict[int, _Checkpoint] = {}
        # Behind each layer of the last run: an activation may be kept later.
        self._random_states: dict[int, dict[str, Any]] = {}

    @property
    def num_checkpoints(self) -> int:
        """The number of kept activations."""
        return len(self._kept)

    @property
    def memory_stored_bytes(self) -> int:
        """The bytes of the kept activations."""
        return sum(_num_bytes(kept.value) for kept in self._kept.values())

    def is_checkpoint_layer(self, layer: int) -> bool:
        """Whether a layer is a boundary, whose activation is kept.

        Parameters
        ----------
        layer : int
            Its index.

        Returns
        -------
        bool
            True for multiples of ``config.every``.
        """
        return layer % self.config.every == 0

    def save(self, layer: int, activation: Any) -> None:
        """Keep a copy of a layer's output; it replaces an earlier one.

        Random numbers behind it are those of the last :meth:`checkpointed_forward` that ran the
        layer, or else those to come: use another object for a loop of your own.

        Parameters
        ----------
        layer : int
            Its index.
        activation : torch.Tensor or structure of tensors
            The output.

        Raises
        ------
        ArgumentError
            The index is not an integer from 0 on.
        RecomputeError
            ``config.max_checkpoints`` activations are kept already, and this layer is not a
            boundary.
        """
        layer = whole("layer", layer, 0, ArgumentError)
        limit = self.config.max_checkpoints
        is_extra = layer not in self._kept and not self.is_checkpoint_layer(layer)
        if limit is not None and is_extra and len(self._kept) >= limit:
            raise RecomputeError(
                f"layer {layer} is not a boundary (a multiple of every={self.config.every}), and "
                f"max_checkpoints={limit} activations are kept already: raise max_checkpoints, or "
                "choose `every` so that this layer is a boundary"
            )
        state = self._random_states.get(layer) or random_state()
        self._kept[layer] = _Checkpoint(activation, state, self.config.mixed_precision)

    def get(self, layer: int) -> Any:
        """Return a copy of the kept activation of a layer.

        Parameters
        ----------
        layer : int
            Its index.

        Returns
        -------
        torch.Tensor or structure of tensors
            The activation, in its original dtype, off the graph.

        Raises
        ------
        RecomputeError
            No activation of this layer is kept.
        """
        if layer not in self._kept:
            raise RecomputeError(
                f"no activation of layer {layer} is kept; kept layers: {self._shown()}. Recompute "
                f"it with recompute_from_checkpoint({layer}, layers, forward_fn)"
            )
        return self._kept[layer].restored()

    def checkpointed_forward(
        self, x: Any, layers: Sequence[int], forward_fn: ForwardFunction
    ) -> Any:
        """Run layers one after the other, and keep the outputs of those at boundaries.

        Activations kept before are dropped first.

        Parameters
        ----------
        x : torch.Tensor or structure of tensors
            The input of the first layer.
        layers : sequence of int
            The indices in the order in which to run, each once.
        forward_fn : callable
            ``forward_fn(x, i)`` returns the output of layer ``i`` for ``x``.

        Returns
        -------
        torch.Tensor or structure of tensors
            The output of the last layer.

        Raises
        ------
        RecomputeError
            An index appears twice.
        """
        _check_distinct(layers)
        self._kept.clear()
        self._random_states.clear()
        self.memory_saved_bytes = 0
        for layer in layers:
            x = forward_fn(x, layer)
            self._random_states[layer] = random_state()
            if self.is_checkpoint_layer(layer):
                self.save(layer, x)
            else:
                self.memory_saved_bytes += _num_bytes(x)
        return x

    def recompute_from_checkpoint(
        self, target: int, layers: Sequence[int], forward_fn: ForwardFunction
    ) -> Any:
        """Recompute a layer's output from the nearest activation kept at or before it.

        The result is bit for bit the same, if ``forward_fn`` depends on nothing else that has
        changed, and the activation was kept in full precision.

        Parameters
        ----------
        target : int
            Index of the layer.
        layers : sequence of int
            All indices in the order in which they ran.
        forward_fn : callable
            The function that :meth:`checkpointed_forward` was given.

        Returns
        -------
        torch.Tensor or structure of tensors
            The activation.

        Raises
        ------
        RecomputeError
            The target is not among the layers, or no activation is kept at or before it.
        """
        _check_distinct(layers)
        order = list(layers)
        if target not in order:
            raise RecomputeError(f"layer {target} is not among the given layers: {order}")
        until = order.index(target) + 1
        start = next((at for at in reversed(range(until)) if order[at] in self._kept), None)
        if start is None:
            raise RecomputeError(
                f"no activation is kept at or before layer {target}; kept layers: "
                f"{self._shown()}. Run checkpointed_forward from a boundary first"
            )
        checkpoint = self._kept[order[start]]
        x = checkpoint.restored()
        before = random_state()
        try:
            restore_random(checkpoint.random_state)
            for layer in order[start + 1 : until]:
                x = forward_fn(x, layer)
        finally:
            restore_random(before)
        return x

    def _shown(self) -> str:
        return str(sorted(self._kept)) if self._kept else "none"


class _Checkpoint:
    """A copy of one activation, which later in-place operations don't change."""

    def __init__(self, activation: Any, state: dict[str, Any], shrinks: bool) -> None:
        self.random_state = state
        leaves, self._rebuild = flatten(activation)
        self._dtypes = [leaf.dtype for leaf in leaves]
        self.value = [_copy(leaf, shrinks) for leaf in leaves]

    def restored(self) -> Any:
        pairs = zip(self.value, self._dtypes, strict=True)
        return self._rebuild([kept.to(dtype, copy=True) for kept, dtype in pairs])


def _copy(leaf: Tensor, shrinks: bool) -> Tensor:
    if shrinks and leaf.is_floating_point() and leaf.element_size() > 2:
        return leaf.detach().to(torch.bfloat16)
    return leaf.detach().clone()


def _num_bytes(activation: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(activation))


def _check_distinct(layers: Sequence[int]) -> None:
    twice = sorted({layer for layer in layers if list(layers).count(layer) > 1})
    if twice:
        raise RecomputeError(
            f"layers {twice} appear more than once, so their activations can't be told apart: "
            "give every call an index of its own"
        )
