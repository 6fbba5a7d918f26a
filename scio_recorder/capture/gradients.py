"""Gradients with respect to recorded activations.

NOTE [Gradients that are left out]

A module may return a tensor that existed before its call, as ``nn.Identity`` does. Hooks see the
sum of the gradients of all uses of a tensor, also of those beside the module, and another tensor in
its place would change the order in which autograd adds them up. So such gradients are left out.
Nodes of the graph are numbered, so that a number at the start of a call tells them from new ones.
The numbers are those of a thread, and the node of a view is made anew if its base was changed, so
inputs that come back unchanged are known as such, too.
Leaves are left out as well: they are inputs or parameters, or hold their gradient themselves.
If a view, or what it is a view of, is overwritten, what uses it later no longer leads to its node:
the node's gradient is only that of earlier uses, and is left out, too.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from scio_recorder.capture.program import RecordOptions
from scio_recorder.errors import ArgumentError
from scio_recorder.layer import RowIdx
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Recorded, Records
from scio_recorder.tensors import private
from scio_recorder.tensors.ownership import HeldTensor, has_place
from scio_recorder.tensors.properties import Version, version_counter, version_of
from scio_recorder.tensors.structures import Rebuild

# As RemovableHandle wants them.
GradientHooks: TypeAlias = "OrderedDict[int, Callable[[dict[RowIdx, Any]], object]]"


class CallKey(NamedTuple):
    """One call of a module in a pass."""

    label: RowIdx | None  # None if it is not recorded
    number: int = 0  # among the calls of the pass, if a label stands for all of them


class CallStart(NamedTuple):
    """What there was when a call of a module began."""

    # The operations that autograd had noted in this thread.
    num_operations: int = 0
    # The versions of the tensors among the inputs, by ``id``.
    versions: Mapping[int, int] = MappingProxyType({})

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor that the call returned was there, and is as it was, or is a leaf."""
        if not has_place(tensor) or self.versions.get(id(tensor)) == version_of(tensor):
            return True
        return private.place_of(tensor.grad_fn) < self.num_operations

    def seen(self, tensor: Tensor) -> Returned:
        """Note of a tensor, as the call returns it, what tells whether its gradient is whole."""
        is_view = private.base_of(tensor) is not None and not tensor.is_inference()
        counter = version_counter(tensor) if is_view and tensor.requires_grad else None
        return Returned(self.has(tensor), counter, counter is not None and version_of(counter))


class Returned(NamedTuple):
    """A tensor when a call returned it."""

    existed: bool
    # Those of a view on the graph.
    counter: Tensor | None
    version: Version

    @property
    def is_overwritten(self) -> bool:
        """Whether it is a view that was overwritten since, or is one of something that was."""
        return self.counter is not None and version_of(self.counter) != self.version


class CallStarts:
    """The starts of the calls of modules that have not returned."""

    # Why a call has no gradients.
    LEFT_OUT = (
        "it returned a tensor that existed before its call, such as its input, or a parameter, "
        "and autograd adds up the gradients of all uses of that. See the layer that made the "
        "tensor, let this one return a new one, such as x.clone(), or read .grad of a parameter or "
        "an input"
    )

    OVERWRITTEN = (
        "it returned a view that the network overwrote, itself or what it is a view of, so that "
        "autograd has no node for all uses of it. Let the layer return a new tensor, such as "
        "x.clone(), or write that operation out of place"
    )

    def __init__(self) -> None:
        self._starts: defaultdict[object, list[CallStart]] = defaultdict(list)

    def begin(self, module: object, args: Any, kwargs: Any) -> None:
        """Note the start of a call of a module, which is given by a name or a number."""
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        versions = {id(tensor): version_of(tensor) for tensor in inputs}
        start = CallStart(private.num_operations(), versions)
        self._starts[module, get_ident()].append(start)

    def end(self, module: object) -> CallStart:
        """Return the start of the call that ends, one of nothing if it was not noted.

        Those of calls that failed stay behind.
        """
        starts = self._starts[module, get_ident()]
        return starts.pop() if starts else CallStart()


class Gradients:
    """The gradients of the latest backward pass through a forward pass, or the sum of all.

    Hooks on tensors hold this object weakly. Otherwise autograd's graph, which holds the hooks,
    would keep gradients alive that were made with ``create_graph=True``, and these would keep the
    graph.
    """

    def __init__(self, hooks: weakref.ref[GradientHooks] | None, options: RecordOptions) -> None:
        self._delivery = _Delivery(hooks, weakref.ref(self), options.calls == "labelled")
        self._accumulates = options.gradients == "accumulate"
        self._arrived: list[_Arrived] = []
        # The layers of which gradients are left out, see NOTE [Gradients that are left out].
        self._left_out: set[RowIdx | None] = set()
        # Those that returned a view which was overwritten.
        self.overwritten: set[RowIdx | None] = set()
        self.starts = CallStarts()
        self._with_grad = torch.is_grad_enabled()
        # Autograd runs on those of the forward pass.
        self._streams = private.current_streams()

    def attach(
        self,
        call: CallKey,
        tensors: Sequence[Tensor],
        rebuild: Rebuild,
        returned: Sequence[Returned],
        task: int | None = None,
    ) -> None:
        """Receive the gradients of a call's output from now on, before anything can change it.

        ``returned`` is what is known of each tensor that they stand for. ``task`` is the backward
        pass that they belong to, if another one brings them: reentrant checkpointing runs backward
        passes inside the backward pass.
        """
        delivery = self._delivery
        delivery.templates[call] = len(tensors), rebuild
        if task is not None and task == private.backward_pass():
            delivery.expect(task)
        for index, tensor in enumerate(tensors):
            if not tensor.requires_grad:
                continue
            if returned[index].existed:
                self._left_out.add(call.label)
                continue
            receive = partial(delivery.receive, call, index, task, returned[index])
            # Otherwise, saving the network's output would warn of the hook.
            listener = unserializable_hook(receive)  # type: ignore[no-untyped-call]  # torch leaves it without types
            tensor.register_hook(listener)  # type: ignore[no-untyped-call]  # torch leaves it without types

    def begin(self, arrived: _Arrived) -> None:
        """Begin a backward pass, whose first gradient has come."""
        self._arrived = [*self._arrived, arrived] if self._accumulates else [arrived]

    def records(self, architecture: Architecture) -> Records:
        """Return the gradients so far; a layer that received none is absent."""

        def summed(call: CallKey, count: int, rebuild: Rebuild) -> Recorded:
            passes = [arrived.get(call) or [None] * count for arrived in self._arrived]
            sums = [
                Recorded([part for part in parts if part], _sum)
                for parts in zip(*passes, strict=True)
            ]
            return Recorded(sums, rebuild)

        entries = self._delivery.by_layer(
            self._arrived, summed, lambda every: Recorded(every, tuple)
        )
        records = Records(architecture, entries, "gradient")
        records.streams = self._streams
        records.why_none = (
            "none has arrived since the latest pass: call loss.backward()"
            if self._with_grad
            else "the latest pass ran without gradients: run it outside of torch.no_grad() and "
            "torch.inference_mode(), and call loss.backward()"
        )
        reasons = dict.fromkeys(self._left_out, CallStarts.LEFT_OUT)
        reasons |= dict.fromkeys(self.overwritten, CallStarts.OVERWRITTEN)
        records.reasons = {at: why for at, why in reasons.items() if at is not None}
        return records


class _Arrived(dict[CallKey, "list[HeldTensor | None]"]):
    """The gradients of one backward pass through one forward pass that have come so far."""


class _Delivery:
    """Takes gradients, and calls the user's hooks when a backward pass is over.

    Autograd's graph owns this object, so gradients of earlier passes still arrive. It holds neither
    the hooks, which may refer to the graph, nor gradients. Those belong to the owner, and to the
    engine, which drops them at the end of the backward pass, even if it fails.
    """

    def __init__(
        self,
        hooks: weakref.ref[GradientHooks] | None,
        owner: weakref.ref[Gradients],
        counts_calls: bool,
    ) -> None:
        self._hooks = hooks
        self._owner = owner
        self._counts_calls = counts_calls
        self._arrived: weakref.WeakValueDictionary[int, _Arrived] = weakref.WeakValueDictionary()
        # In the order in which calls returned.
        self.templates: dict[CallKey, tuple[int, Rebuild]] = {}

    def by_layer(
        self,
        arrived: Sequence[_Arrived],
        value_of: Callable[[CallKey, int, Rebuild], Any],
        join: Callable[[list[Any]], Any],
    ) -> dict[RowIdx, Any]:
        """Return the value of the only call of each layer that was reached, or all joined."""
        reached = {call.label for gradients in arrived for call in gradients}
        values: dict[Any, list[Any]] = {}
        for call, template in self.templates.items():
            if call.label in reached:
                values.setdefault(call.label, []).append(value_of(call, *template))
        if self._counts_calls:
            return {label: calls[0] for label, calls in values.items()}
        return {label: join(calls) for label, calls in values.items()}

    def expect(self, task: int) -> _Arrived:
        """Return the gradients that have come in a backward pass."""
        arrived = self._arrived.get(task)
        if arrived is None:
            arrived = self._arrived[task] = _Arrived()
            if self._hooks is not None and self._hooks():
                private.call_at_end_of_backward(partial(self._deliver, arrived))
        return arrived

    def receive(
        self,
        call: CallKey,
        index: int,
        task: int | None,
        returned: Returned,
        gradient: Tensor | None,
    ) -> None:
        """Take one gradient; the first one of a new backward pass replaces all earlier ones."""
        if gradient is None:
            # Another output of the same node got one.
            return
        owner = self._owner()
        if returned.is_overwritten:
            if owner is not None:
                owner.overwritten.add(call.label)
            return
        arrived = self.expect(private.backward_pass() if task is None else task)
        if owner is not None and not arrived:
            owner.begin(arrived)
        count, _ = self.templates[call]
        kept = HeldTensor(private.unmapped(gradient))
        arrived.setdefault(call, [None] * count)[index] = kept

    def _deliver(self, arrived: _Arrived) -> None:
        def built(call: CallKey, count: int, rebuild: Rebuild) -> Any:
            parts = arrived.get(call) or [None] * count
            return rebuild([None if part is None else part.peek() for part in parts])

        hooks = self._hooks and self._hooks()
        for hook in list((hooks or {}).values()) if arrived else ():
            hook(self.by_layer([arrived], built, tuple))


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    # Nested ones have no shape.
    if len({gradient.shape for gradient in gradients if not gradient.is_nested}) > 1:
        shapes = ", ".join(str(tuple(gradient.shape)) for gradient in gradients)
        raise ArgumentError(
            f'gradients="accumulate" can\'t add up gradients of the shapes {shapes}: backward '
            "passes under vmap must have equally many rows; write gradients=True"
        )
    return functools.reduce(operator.add, gradients) if gradients else None
