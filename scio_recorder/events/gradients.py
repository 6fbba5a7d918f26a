"""Listening to the gradients of modules' outputs, by hooks on the tensors.

NOTE [In what order gradients are logged]

Modules often return the tensor that their last child returned. Hooks on a tensor run in the order
in which they were registered, the child's first, but in backpropagation the gradient of the outer
module comes first. So each output of a node of the graph has one listener, which serves the calls
that returned it in reverse.

A call that returned several tensors makes one event, once all their gradients have come. If some
never come, the event waits for the end of the backward pass. Modules inside the call are
differentiated in the meantime, but come after it in the log, since its place is reserved.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from scio_recorder.events.event import Event, Journal, Place
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import version_counter
from scio_recorder.tensors.structures import tensors

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class GradientListeners:
    """The listeners of one log, to which the graph has weak references only."""

    def __init__(self, journal: Journal) -> None:
        self._journal = weakref.ref(journal)
        # Hooks on leaves, such as parameters, would stay as long as these.
        self._on_leaves: MutableMapping[Tensor, _Listener] = WeakTensorKeyDictionary()
        weakref.finalize(self, _remove_hooks, self._on_leaves).atexit = False

    def listen(self, name: str, kind: type[nn.Module], output: Any) -> None:
        """Listen to the gradients of one output."""
        leaves, places = _leaves_and_places(output)
        if not any(leaf.requires_grad for leaf in leaves):
            return
        call = _Call(name, kind, leaves, places, self._journal)
        for index, leaf in enumerate(leaves):
            if leaf.requires_grad:
                self._listener(leaf).add(call, index)

    def _listener(self, tensor: Tensor) -> _Listener:
        node: Any = tensor.grad_fn
        if node is None:
            known = self._on_leaves.get(tensor)
            if known is None:
                known = self._on_leaves[tensor] = _Listener(is_on_leaf=True)
            if known.hook is None:
                known.hook = tensor.register_hook(known)  # type: ignore[no-untyped-call]  # torch leaves it without types
            return known
        key = (weakref.ref(self), tensor.output_nr)
        listener: _Listener | None = node.metadata.get(key)
        if listener is None:
            listener = node.metadata[key] = _Listener()
            tensor.register_hook(listener)  # type: ignore[no-untyped-call]  # torch leaves it without types
        return listener


class _Listener:
    """A hook that is called with the gradient of one output of one node."""

    __slots__ = ("_entries", "_is_on_leaf", "hook")
    __torch_unserializable__ = True  # Else, torch.save warns.

    def __init__(self, *, is_on_leaf: bool = False) -> None:
        self._entries: list[tuple[_Call, int]] = []
        self._is_on_leaf = is_on_leaf
        self.hook: RemovableHandle | None = None

    def add(self, call: _Call, index: int) -> None:
        """Serve a call that returned the tensor at an index."""
        if self._is_on_leaf:
            # A leaf outlives passes: an earlier one that was not differentiated is over.
            self._entries = [entry for entry in self._entries if entry[0].name != call.name]
        self._entries.append((call, index))

    def __call__(self, gradient: Tensor | None) -> None:
        entries = self._entries[::-1]
        if self._is_on_leaf:
            self._entries = []
            self.remove()
        for call, index in entries:
            call.receive(index, gradient)

    def remove(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


class _Pending:
    """The gradients of one call in one backward pass that have come so far."""

    def __init__(self, call: _Call, place: Place | None) -> None:
        self.gradients: dict[int, Tensor | None] = {}
        self._call = call
        self._place = place

    def close(self) -> None:
        """Log the gradients that have come, once."""
        gradients, self.gradients = self.gradients, {}
        if gradients:
            self._call.emit(gradients, self._place)


class _Call:
    """One call of a module whose output can be differentiated."""

    def __init__(
        self,
        name: str,
        kind: type[nn.Module],
        leaves: list[Tensor],
        places: list[int | None],
        journal: weakref.ref[Journal],
    ) -> None:
        self.name = name
        self._kind = kind
        self._places = places
        self._num_awaited = sum(leaf.requires_grad for leaf in leaves)
        # By backward pass, whose engine holds them: a pass that fails leaves nothing.
        self._pending: weakref.WeakValueDictionary[int, _Pending] = weakref.WeakValueDictionary()
        self._journal = journal
        self._is_logged = False
        inner = [leaf for leaf in leaves if leaf.grad_fn is not None]
        views = [version_counter(leaf) for leaf in inner if private.base_of(leaf) is not None]
        self._views = [(counter, counter._version) for counter in views]

    def receive(self, index: int, gradient: Tensor | None) -> None:
        """Take the gradient of one tensor."""
        if self._num_awaited == 1:
            self.emit({index: gradient})
            return
        task = private.backward_pass()
        pending = self._pending.get(task)
        if pending is None:
            journal = self._journal()
            pending = _Pending(self, None if journal is None else journal.keep_place())
            self._pending[task] = pending
            private.call_at_end_of_backward(pending.close)
        pending.gradients[index] = gradient
        if len(pending.gradients) == self._num_awaited:
            pending.close()

    def emit(self, gradients: dict[int, Tensor | None], place: Place | None = None) -> None:
        """Log the gradients of this call in one backward pass."""
        self._is_logged = True
        journal = self._journal()
        if journal is None or all(gradient is None for gradient in gradients.values()):
            return
        self._check_views()
        value = tuple(None if at is None else gradients.get(at) for at in self._places)
        journal.add(Event(self.name, self._kind, True, value, (), {}), place)
        journal.warn_of_lost()

    def _check_views(self) -> None:
        journal = self._journal()
        if journal is not None and any(view._version != version for view, version in self._views):
            journal.lost.add(self.name)

    def __del__(self) -> None:
        # When a view is changed, autograd drops its node, and the listener with it.
        if not self._is_logged:
            self._check_views()


def _remove_hooks(listeners: Mapping[Tensor, _Listener]) -> None:
    for listener in list(listeners.values()):
        listener.remove()


def _leaves_and_places(output: Any) -> tuple[list[Tensor], list[int | None]]:
    """Return an output's distinct tensors, and the tensor of each entry of the event's value.

    As in torch's backward hooks, the entry of an item that is not a tensor is None.
    """
    items = output if isinstance(output, tuple | list) else [output]
    found: list[Tensor | None] = []
    for item in items:
        found += tensors(item) or [None]
    leaves = {id(tensor): tensor for tensor in found if tensor is not None}
    index = {key: place for place, key in enumerate(leaves)}
    return list(leaves.values()), [index.get(id(tensor)) for tensor in found]
