"""Events of gradients of modules' outputs, by hooks on the tensors.

NOTE [In what order gradients are logged]

Modules often return the tensor that their last child returned. Hooks on a tensor run in the order
in which they were registered, the child's first, but in backpropagation the gradient of the outer
module comes first. So each output of a node of the graph has one hook, which serves the calls that
returned it in reverse.

A call that returned several tensors makes one event, once all their gradients have come. If some
never come, the event waits for the end of the backward pass. Modules inside the call are
differentiated in the meantime, but come after it in the log, since its place is reserved.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from scio_recorder.events.event import Entry, Event, EventLog
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import version_counter, version_of
from scio_recorder.tensors.structures import tensors


class GradientListeners:
    """The listeners of one log, to which the graph has weak references only."""

    def __init__(self, log: EventLog) -> None:
        self._log = weakref.ref(log)
        # A leaf, such as a parameter, outlives the log: the hooks on leaves go with these entries.
        self._on_leaves: MutableMapping[Tensor, _Listener] = WeakTensorKeyDictionary()

    def listen(self, name: str, kind: type[nn.Module], output: Any) -> None:
        """Listen to the gradients of one output."""
        items = output if isinstance(output, tuple | list) else [output]
        # As in torch's backward hooks, the entry of an item that is not a tensor is None.
        found = [tensor for item in items for tensor in (*tensors(item),) or (None,)]
        awaited = {id(t): t for t in found if t is not None and t.requires_grad}
        call = _TrackedCall(name, kind, [id(tensor) for tensor in found], awaited, self._log)
        for key, tensor in awaited.items():
            self._listener(tensor, name).calls.append((call, key))

    def _listener(self, tensor: Tensor, name: str) -> _Listener:
        node: Any = tensor.grad_fn
        known: Any = self._on_leaves if node is None else node.metadata
        key = tensor if node is None else (weakref.ref(self), tensor.output_nr)
        listener: _Listener | None = known.get(key)
        if listener is None or not listener.calls:
            listener = known[key] = _Listener(tensor)
        elif node is None:
            # A leaf outlives passes: an earlier one that was not differentiated is over.
            listener.calls = [entry for entry in listener.calls if entry[0].name != name]
        return listener


class _Listener:
    """The calls that returned one tensor, which the tensor's hook serves in reverse."""

    def __init__(self, tensor: Tensor) -> None:
        # Each with the key of the tensor in it.
        self.calls: list[tuple[_TrackedCall, int]] = []
        self._is_on_leaf = tensor.grad_fn is None
        hook = unserializable_hook(partial(_receive, weakref.ref(self)))  # type: ignore[no-untyped-call]  # torch leaves it without types
        self._handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def receive(self, gradient: Tensor | None) -> None:
        """Take a gradient of the tensor."""
        calls = self.calls[::-1]
        if self._is_on_leaf:
            self.calls = []
            self._handle.remove()
        for call, key in calls:
            call.receive(key, gradient)

    def __del__(self) -> None:
        self._handle.remove()


def _receive(listener: weakref.ref[_Listener], gradient: Tensor | None) -> None:
    alive = listener()
    if alive is not None:
        alive.receive(gradient)


class _PendingGradients(dict[int, "Tensor | None"]):
    """The gradients of one call in one backward pass so far, and their place in the log."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry


class _TrackedCall:
    """One call of a module whose output can be differentiated."""

    def __init__(
        self,
        name: str,
        kind: type[nn.Module],
        items: list[int],
        awaited: Mapping[int, Tensor],
        log: weakref.ref[EventLog],
    ) -> None:
        self.name = name
        self._kind = kind
        # The keys of everything that it returned, and the number of those with gradients.
        self._items = items
        self._num_awaited = len(awaited)
        self._log = log
        # By backward pass, whose engine holds them: a pass that fails leaves nothing.
        self._received: weakref.WeakValueDictionary[int, _PendingGradients]
        self._received = weakref.WeakValueDictionary()
        self._is_logged = not awaited
        inner = [tensor for tensor in awaited.values() if tensor.grad_fn is not None]
        views = [tensor for tensor in inner if private.base_of(tensor) is not None]
        self._views = [(version_counter(view), version_of(view)) for view in views]

    def receive(self, key: int, gradient: Tensor | None) -> None:
        """Take the gradient of one tensor."""
        task, log = private.backward_pass(), self._log()
        gradients = self._received.get(task)
        if gradients is None:
            gradients = _PendingGradients([] if log is None else log.reserve())
            self._received[task] = gradients
            private.call_at_end_of_backward(partial(self._end, gradients))
        gradients[key] = gradient
        if len(gradients) == self._num_awaited:
            self._end(gradients)

    def _end(self, gradients: _PendingGradients) -> None:
        """Log the gradients that have come, once."""
        received, log = dict(gradients), self._log()
        gradients.clear()
        self._is_logged |= bool(received)
        if log is not None and any(gradient is not None for gradient in received.values()):
            self._check_views()
            value = tuple(map(received.get, self._items))
            log.add(Event(self.name, self._kind, True, value, (), {}), gradients.entry)
            log.warn_of_lost()

    def _check_views(self) -> None:
        log = self._log()
        if log is not None and any(version_of(view) != then for view, then in self._views):
            log.lost.add(self.name)

    def __del__(self) -> None:
        # When a view is changed, autograd drops its node, and the listener with it.
        if not self._is_logged:
            self._check_views()
