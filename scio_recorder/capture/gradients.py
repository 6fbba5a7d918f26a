"""Gradients with respect to what was recorded."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scio_recorder.nets.records import Recorded, Records
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import Held

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture


# As RemovableHandle wants them.
GradientHooks: TypeAlias = "OrderedDict[int, Callable[[dict[DepthIdx, Any]], object]]"


class _Layer:
    """The gradients of one layer's tensors, as far as they have come."""

    __slots__ = ("found", "rebuild")

    def __init__(self, count: int, rebuild: Callable[[Sequence[Any]], Any]) -> None:
        self.found: list[Any] = [None] * count
        self.rebuild = rebuild


class Gradients:
    """What the latest backward pass through one forward pass brought, or the sum of all of them.

    Hooks on tensors hold this object weakly: autograd's graph, which holds the hooks, would else
    keep gradients alive that were made with ``create_graph=True``, and these the graph.
    """

    def __init__(
        self, hooks: weakref.ref[GradientHooks] | None = None, *, accumulates: bool = False
    ) -> None:
        self._delivery = _Delivery(hooks)
        self._accumulates = accumulates
        self._layers: dict[DepthIdx, _Layer] = {}
        self._templates: dict[DepthIdx, tuple[int, Callable[[Sequence[Any]], Any]]] = {}
        self._task = -1
        # Hooks on parameters and inputs, which outlive the pass and its graph.
        self._lasting: list[RemovableHandle] = []

    def __del__(self) -> None:
        for handle in self._lasting:
            handle.remove()

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
        template = self._templates[label] = (len(tensors), rebuild)
        owner = weakref.ref(self)
        if task is not None and task == private.backward_pass():
            self._delivery.expect(task)
        for index, tensor in enumerate(tensors):
            if tensor.requires_grad:
                listener = _Listener(owner, self._delivery, label, index, task, template)
                handle = tensor.register_hook(listener)  # type: ignore[no-untyped-call]
                if tensor.is_leaf:
                    self._lasting.append(handle)

    def receive(self, label: DepthIdx, index: int, gradient: Tensor, task: int) -> None:
        """Take one gradient; the first one of a new backward pass replaces all earlier ones."""
        if task != self._task:
            self._task = task
            self._layers = self._layers if self._accumulates else {}
        if label not in self._layers:
            self._layers[label] = _Layer(*self._templates[label])
        found = self._layers[label].found
        earlier = found[index]
        is_sum = self._accumulates and earlier is not None
        found[index] = Held(earlier.peek() + gradient if is_sum else gradient)

    def records(self, architecture: Architecture) -> Records:
        """Return the gradients so far; a layer that got none is absent."""
        layers = sorted(self._layers.items())
        entries = {label: Recorded(layer.found, layer.rebuild) for label, layer in layers}
        return Records(architecture, entries, "gradient")


class _Listener:
    __slots__ = ("_delivery", "_index", "_label", "_owner", "_task", "_template")

    def __init__(
        self,
        owner: weakref.ref[Gradients],
        delivery: _Delivery,
        label: DepthIdx,
        index: int,
        task: int | None,
        template: tuple[int, Callable[[Sequence[Any]], Any]],
    ) -> None:
        self._owner = owner
        self._delivery = delivery
        self._label = label
        self._index = index
        self._task = task
        self._template = template

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:
            # Another output of the same node got one.
            return
        task = private.backward_pass() if self._task is None else self._task
        owner = self._owner()
        if owner is not None:
            owner.receive(self._label, self._index, gradient, task)
        self._delivery.receive(self._label, self._index, gradient, task, self._template)


class _Delivery:
    """Calls the user's hooks when a backward pass through one forward pass is over.

    The graph owns it, so that passes count that are no longer the latest. It holds neither the
    hooks, which may lead back to the graph, nor gradients: these belong to the engine, which lets
    go of them at the end of the backward pass, also of one that fails.
    """

    def __init__(self, hooks: weakref.ref[GradientHooks] | None) -> None:
        self._hooks = hooks
        self._arrived: weakref.WeakValueDictionary[int, _Arrived] = weakref.WeakValueDictionary()

    def expect(self, task: int) -> _Arrived | None:
        """Return what has come in a backward pass; None if nobody wants to know."""
        if self._hooks is None or not self._hooks():
            return None
        arrived = self._arrived.get(task)
        if arrived is None:
            arrived = self._arrived[task] = _Arrived()
            private.call_at_end_of_backward(partial(_deliver, self._hooks, arrived))
        return arrived

    def receive(
        self,
        label: DepthIdx,
        index: int,
        gradient: Tensor,
        task: int,
        template: tuple[int, Callable[[Sequence[Any]], Any]],
    ) -> None:
        """Take one gradient."""
        arrived = self.expect(task)
        if arrived is not None:
            layer = arrived.layers.get(label) or arrived.layers.setdefault(label, _Layer(*template))
            layer.found[index] = gradient


class _Arrived:
    """The gradients of one backward pass, as far as they have come."""

    __slots__ = ("__weakref__", "layers")

    def __init__(self) -> None:
        self.layers: dict[DepthIdx, _Layer] = {}


def _deliver(hooks: weakref.ref[GradientHooks], arrived: _Arrived) -> None:
    layers = sorted(arrived.layers.items())
    for hook in list((hooks() or {}).values()) if layers else ():
        hook({label: layer.rebuild(layer.found) for label, layer in layers})
