"""Events, their log with places for late ones, and how calls log the gradients of their outputs.

NOTE [In what order gradients are logged]

Modules often return the tensor that their last child returned. Hooks on a tensor run in the order
in which they were registered, the child's first, but in backpropagation the gradient of the outer
module comes first. So each output of a node of the graph has one hook, which serves the calls that
returned it in reverse.

A call that returned several tensors makes one event, once all their gradients have come. If some
never come, the event waits for the end of the backward pass. Modules inside the call are
differentiated in the meantime, but come after it in the log, since its place is reserved.

Of a tensor that existed before the call, the gradient is left out: see `capture.gradients`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from scio_recorder.layer import few
from scio_recorder.lowlevel import CallStart, CallStarts, Returned, warn
from scio_recorder.tensors import private, tensors

REENTRANT = (
    "it ran in a region of reentrant checkpointing, which makes its graph in the backward pass. "
    "Write checkpoint(..., use_reentrant=False)"
)

# A place in a log: the stash of one event, or nothing yet.
Entry: TypeAlias = list[Any]
_SHOWN = 5


@dataclass
class Stash:
    """The part of an event that is kept.

    Parameters
    ----------
    name : str
        Qualified name of the module, ``""`` for the root.
    type : type
        The module's class.
    grad : bool
        False for a call of forward, True for the gradient of one.
    value : Any
        The return value of the module, or the tuple of gradients. ``stash_value`` has replaced
        every tensor in it.
    """

    name: str
    type: type[nn.Module]
    grad: bool
    value: Any

    @property
    def first_value(self) -> Any:
        """The first tensor in the value; without tensors, the first item of any kind."""
        inside = tensors(self.value)
        return inside[0] if inside else _first_item(self.value)


@dataclass
class Event(Stash):
    """A call or a gradient as ``stash`` sees it: nothing is copied yet.

    Parameters
    ----------
    name : str
        Qualified name of the module, ``""`` for the root.
    type : type
        The module's class.
    grad : bool
        False for a call of forward, True for the gradient of one.
    value : Any
        The return value of the module, or the tuple of gradients with respect to it: one entry
        for each of its tensors, None for a missing gradient.
    args : tuple
        The positional arguments of forward; empty if ``grad`` is True.
    kwargs : dict
        The keyword arguments of forward; empty if ``grad`` is True.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class EventLog:
    """The log of one tracker.

    Parameters
    ----------
    stash : callable
        Makes the stash of an event.

    Examples
    --------
    >>> log = EventLog(lambda event: event)
    >>> log.add("a")
    >>> later = log.reserve()
    >>> log.add("c")
    >>> log.stashes
    ['a', 'c']
    >>> log.add("b", later)
    >>> log.stashes
    ['a', 'b', 'c']
    """

    def __init__(self, stash: Callable[[Event], Any]) -> None:
        self._stash = stash
        self._entries: list[Entry] = []
        # By reason, the names of modules whose gradients are missing.
        self._missing: dict[str, set[str]] = {}
        self._warned: set[str] = set()

    @property
    def stashes(self) -> list[Any]:
        """The stashes of the events so far."""
        return [stash for entry in self._entries for stash in entry]

    def add(self, event: Event, entry: Entry | None = None) -> None:
        """Keep the stash of an event, at the end or in its place."""
        stash = self._stash(event)
        (self.reserve() if entry is None else entry).append(stash)

    def reserve(self) -> Entry:
        """Reserve a place after all events so far."""
        entry: Entry = []
        self._entries.append(entry)
        return entry

    def clear(self) -> None:
        """Forget all events; those whose gradients are still to come enter the new log."""
        self._entries = [entry for entry in self._entries if not entry]

    def miss(self, name: str, reason: str) -> None:
        """Note that gradients of a module are missing."""
        self._missing.setdefault(reason, set()).add(name)

    def warn_of_missing(self) -> None:
        """Name modules whose gradients are missing, each once."""
        for reason, names in list(self._missing.items()):
            new = sorted(names - self._warned)
            self._warned.update(new)
            if new:
                warn(
                    "gradients are missing from the log, or incomplete, for the output of module "
                    f"{few([*map(repr, new)], _SHOWN)}: {reason}"
                )


def _first_item(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list) and value:
        return _first_item(value[0])
    return value


class _Calls(list["tuple[TrackedCall, int]"]):
    """The calls that returned one tensor, each with the key of the tensor in it.

    The graph holds them by the node that made the tensor, and goes with that.
    """


def _receive(calls: weakref.ref[_Calls], gradient: Tensor | None) -> None:
    gradient = None if gradient is None else private.unmapped(gradient)
    for call, key in (calls() or [])[::-1]:
        call.receive(key, gradient)


class _PendingGradients(dict[int, "Tensor | None"]):
    """The gradients of one call in one backward pass so far, and their place in the log."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry


class TrackedCall:
    """One call of a module whose output can be differentiated.

    The graph holds it, and it holds the log weakly.

    Parameters
    ----------
    name : str
        The name of the module.
    kind : type
        Its class.
    output : Any
        What it returned.
    start : CallStart
        What there was when the call began.
    log : EventLog
        Takes the event.
    """

    def __init__(
        self, name: str, kind: type[nn.Module], output: Any, start: CallStart, log: EventLog
    ) -> None:
        self._name = name
        self._kind = kind
        self._log = weakref.ref(log)
        items = output if isinstance(output, tuple | list) else [output]
        # As in torch's backward hooks, the entry of an item that is not a tensor is None.
        outputs = [tensor for item in items for tensor in (*tensors(item),) or (None,)]
        self._items = [id(tensor) for tensor in outputs]
        # Of tensors with gradients.
        self._returned: dict[int, Returned] = {}
        # By backward pass, whose engine holds them: a pass that fails leaves nothing.
        self._received: weakref.WeakValueDictionary[int, _PendingGradients]
        self._received = weakref.WeakValueDictionary()
        self._is_logged = False
        for tensor in {id(tensor): tensor for tensor in outputs}.values():
            if tensor is not None and tensor.requires_grad:
                self._listen(tensor, start)

    def _listen(self, tensor: Tensor, start: CallStart) -> None:
        node: Any = tensor.grad_fn
        if node is None:
            # A leaf outlives the graph, and so would a hook on it.
            self._miss(CallStarts.LEFT_OUT)
            return
        self._returned[id(tensor)] = start.seen(tensor)
        calls = node.metadata.get((self._log, tensor.output_nr))
        if calls is None:
            calls = node.metadata[self._log, tensor.output_nr] = _Calls()
            hook = unserializable_hook(partial(_receive, weakref.ref(calls)))  # type: ignore[no-untyped-call]  # torch leaves it without types
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        calls.append((self, id(tensor)))

    def receive(self, key: int, gradient: Tensor | None) -> None:
        """Take the gradient of one tensor."""
        task, log = private.backward_pass(), self._log()
        gradients = self._received.get(task)
        if gradients is None:
            gradients = _PendingGradients([] if log is None else log.reserve())
            self._received[task] = gradients
            private.call_at_end_of_backward(partial(self._end, gradients))
        if self._returned[key].existed:
            self._miss(CallStarts.LEFT_OUT)
            gradient = None
        elif self._returned[key].is_overwritten:
            gradient = None
        gradients[key] = gradient
        if len(gradients) == len(self._returned):
            self._end(gradients)

    def _end(self, gradients: _PendingGradients) -> None:
        """Log the gradients that have come, once."""
        received, log = dict(gradients), self._log()
        gradients.clear()
        self._is_logged |= bool(received)
        if log is None or not received:
            return
        self._check_views()
        if any(gradient is not None for gradient in received.values()):
            value = tuple(map(received.get, self._items))
            log.add(Event(self._name, self._kind, True, value, (), {}), gradients.entry)
        log.warn_of_missing()

    def _check_views(self) -> None:
        if any(tensor.is_overwritten for tensor in self._returned.values()):
            self._miss(CallStarts.OVERWRITTEN)

    def _miss(self, reason: str) -> None:
        log = self._log()
        if log is not None:
            log.miss(self._name, reason)

    def __del__(self) -> None:
        # When a view is changed, autograd drops its node, and the calls with it.
        if not self._is_logged:
            self._check_views()
