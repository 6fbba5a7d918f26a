"""Gradients with respect to what was recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scio_recorder.records import Records

if TYPE_CHECKING:
    from scio_recorder.architecture import Architecture, DepthIdx

__all__ = ["Gradients"]


class _Layer:
    """The gradients of one layer's tensors, as far as they have come."""

    __slots__ = ("found", "rebuild")

    def __init__(self, count: int, rebuild: Callable[[Sequence[Any]], Any]) -> None:
        self.found: list[Tensor | None] = [None] * count
        self.rebuild = rebuild


class Gradients:
    """What the latest backward pass through one forward pass brought.

    Hooks on tensors hold this object weakly: autograd's graph, which holds the hooks, would else
    keep gradients alive that were made with ``create_graph=True``, and these the graph.
    """

    def __init__(self) -> None:
        self._layers: dict[DepthIdx, _Layer] = {}
        self._templates: dict[DepthIdx, tuple[int, Callable[[Sequence[Any]], Any]]] = {}
        self._task = -1

    def attach(
        self,
        label: DepthIdx,
        tensors: Sequence[Tensor],
        rebuild: Callable[[Sequence[Any]], Any],
        task: int | None = None,
    ) -> None:
        """Listen to the gradients of what a layer returned, before anything can change it.

        ``task`` is the backward pass that they belong to, where that is not the one that brings
        them: reentrant checkpointing runs backward passes inside the backward pass.
        """
        self._templates[label] = (len(tensors), rebuild)
        owner = weakref.ref(self)
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                listener = _Listener(owner, label, index, task)
                tensor.register_hook(listener)  # type: ignore[no-untyped-call]

    def receive(self, label: DepthIdx, index: int, gradient: Tensor, task: int) -> None:
        """Take one gradient; the first one of a new backward pass replaces all earlier ones."""
        if task != self._task:
            self._task = task
            self._layers = {}
        if label not in self._layers:
            self._layers[label] = _Layer(*self._templates[label])
        self._layers[label].found[index] = gradient

    def records(self, architecture: Architecture) -> Records:
        """Return the gradients so far; a layer that got none is absent."""
        layers = sorted(self._layers.items())
        return Records(
            architecture,
            [label for label, _ in layers],
            [layer.rebuild(layer.found) for _, layer in layers],
            [[(t, t._version) for t in layer.found if t is not None] for _, layer in layers],
            "gradient",
        )


class _Listener:
    __slots__ = ("_index", "_label", "_owner", "_task")

    def __init__(
        self, owner: weakref.ref[Gradients], label: DepthIdx, index: int, task: int | None
    ) -> None:
        self._owner = owner
        self._label = label
        self._index = index
        self._task = task

    def __call__(self, gradient: Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            task = torch._C._current_graph_task_id() if self._task is None else self._task
            owner.receive(self._label, self._index, gradient, task)
