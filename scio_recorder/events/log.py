"""Events, the tracker that keeps a log of them, and `track`, which makes one.

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

import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from scio_recorder.errors import ArgumentError, LayerNotFoundError, UnsupportedNetError
from scio_recorder.layer import counted, few
from scio_recorder.lowlevel import (
    CallHook,
    CallHooks,
    CallStart,
    CallStarts,
    Returned,
    check_supported,
    is_rerun,
    nearest,
    needing,
    raise_of_caller,
    takes_hooks,
    warn,
)
from scio_recorder.tensors import has_memory, map_tensors, names_arguments, private, tensors

if TYPE_CHECKING:
    import pandas

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


# -- the log ---------------------------------------------------------------------------------------

Pattern: TypeAlias = str | re.Pattern[str] | None
Statistic: TypeAlias = Callable[[Tensor], Any]
StashValue: TypeAlias = Callable[[Tensor], Any]
StashEvent: TypeAlias = Callable[[Event], Any]


class Tracker:
    """Logs the outputs of modules, and the gradients with respect to them, in time order.

    Parameters
    ----------
    stash : callable
        ``Event -> Any``: returns what to keep of an event, usually a
        :class:`~scio_recorder.events.Stash`. The tensors of an event are those of the net, so copy
        what you keep.

    Notes
    -----
    When a tracker is garbage-collected, its hooks are removed.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with Tracker(lambda event: (event.name, event.grad)) as tracker:
    ...     tracker.register_all(net)
    ...     net(torch.ones(1, 2)).sum().backward()
    >>> list(tracker)
    [('0', False), ('1', False), ('', False), ('', True), ('1', True), ('0', True)]
    """

    def __init__(self, stash: StashEvent) -> None:
        self._log = EventLog(stash)
        self._hooks = CallHooks()
        self._starts = CallStarts()
        weakref.finalize(self, self._hooks.remove, waits=False).atexit = False

    @property
    def stashes(self) -> list[Any]:
        """The stashes of the events so far, in time order."""
        return self._log.stashes

    def register(self, module: nn.Module, name: str = "", grad: bool = True) -> None:
        """Log the calls of one module.

        Parameters
        ----------
        module : torch.nn.Module
            The module itself, without those inside it.
        name : str, default ""
            Its name in the log.
        grad : bool, default True
            Also log the gradients with respect to its output.

        Raises
        ------
        UnsupportedNetError
            The argument is not a module, or hooks can't observe it.
        """
        check_supported(module)
        self._register({name: module}, grad)

    def register_all(
        self,
        module: nn.Module,
        grad: bool = True,
        include: Pattern = None,
        exclude: Pattern = None,
    ) -> None:
        """Log the calls of a module, whose name is ``""``, and of those inside it.

        Parameters
        ----------
        module : torch.nn.Module
            The root.
        grad : bool, default True
            Log gradients as well.
        include, exclude : str or re.Pattern, optional
            Regular expressions, searched in the qualified name: modules whose name matches the
            first (by default all) and not the second are logged.

        Raises
        ------
        LayerNotFoundError
            ``include`` matches no name.
        UnsupportedNetError
            The argument is not a module, or hooks can't observe it.
        """
        check_supported(module)
        modules = {name: inner for name, inner in module.named_modules() if takes_hooks(inner)}
        names = _chosen(list(modules), include, exclude)
        self._register({name: modules[name] for name in names}, grad)

    def unregister(self) -> None:
        """Log no more calls; gradients of calls that were logged are still logged."""
        self._hooks.remove()
        self._log.warn_of_missing()
        self._warn_of_compiled()

    def clear(self) -> None:
        """Clear the log."""
        self._log.clear()

    def to_frame(
        self,
        stat: Statistic | Mapping[str, Statistic] = torch.std,
        stat_name: str | None = None,
    ) -> pandas.DataFrame:
        """Return the log as a table with one row for each event.

        Parameters
        ----------
        stat : callable or mapping, default torch.std
            ``Tensor -> number``, called with the first tensor of each value; integers and booleans
            are converted to float64. Or several functions by the names of their columns.
        stat_name : str, optional
            Name of the column of a single function; by default the function's name.

        Returns
        -------
        pandas.DataFrame
            Columns ``name``, ``type`` (the full name of the class), ``grad`` and the statistics,
            which are missing if an event has no tensor.

        Raises
        ------
        ArgumentError
            ``stat`` is not a function, raises or returns several numbers; or the results of
            ``stash`` lack name, type, grad or value.

        Examples
        --------
        >>> with track(nn.ReLU()) as events:
        ...     _ = events  # nothing has run
        >>> list(events.to_frame(torch.mean).columns)
        ['name', 'type', 'grad', 'mean']
        >>> list(events.to_frame({"mean": torch.mean, "largest": torch.max}).columns)
        ['name', 'type', 'grad', 'mean', 'largest']
        """
        with needing("frame", "a frame"):
            import pandas

        statistics = _named(stat, stat_name)
        rows = [_row(stash, statistics) for stash in self.stashes]
        columns = None if rows else ["name", "type", "grad", *statistics]
        return pandas.DataFrame(rows, columns=columns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.unregister()

    def __len__(self) -> int:
        return len(self.stashes)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stashes)

    def __getitem__(self, index: Any) -> Any:
        return self.stashes[index]

    def __repr__(self) -> str:
        return f"Tracker(stashes={len(self)}, tracking={len(self._hooks)})"

    def _register(self, modules: Mapping[str, nn.Module], grad: bool) -> None:
        ends = (self._begin, self._take_with_gradients) if grad else (None, self._take)
        self._hooks.add(*(CallHook(module, name, *ends) for name, module in modules.items()))

    def _take(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_rerun():
            return
        if private.transform_around() is not None:
            raise UnsupportedNetError(
                f"the module {name!r} runs inside a torch.func transform (vmap, grad, ...), whose "
                "tensors die with it and can't be logged: end the block of track() before"
            )
        self._log.add(Event(name, type(module), False, output, args, kwargs))

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._starts.begin(name, args, kwargs)

    def _take_with_gradients(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        self._take(name, module, args, kwargs, output)
        start = self._starts.end(name)
        if is_rerun():
            return
        if torch.is_grad_enabled():
            TrackedCall(name, type(module), output, start, self._log)
        elif any(at.is_reentrant and at.kept.next_functions for at in private.regions_around()):
            # The region is on the graph, and what is in it is not.
            self._log.miss(name, REENTRANT)

    def _warn_of_compiled(self) -> None:
        names = list(self._hooks.compiled)
        self._hooks.compiled.clear()
        if names:
            warn(
                f"calls of {counted(len(names), 'module')}, such as {names[-1]!r}, are missing "
                "from the log: they ran as compiled code, which can't be logged. Inside the block "
                "of track(), run the net itself instead of the result of torch.compile()"
            )


@names_arguments
def track(
    module: nn.Module,
    grad: bool = True,
    include: Pattern = None,
    exclude: Pattern = None,
    stash_value: StashValue | None = None,
    stash: StashEvent | None = None,
) -> Tracker:
    """Log the outputs of a module and of those inside it, and the gradients with respect to them.

    Parameters
    ----------
    module : torch.nn.Module
        Any module; it need not be labelled first.
    grad : bool, default True
        Log gradients as well.
    include, exclude : str or re.Pattern, optional
        Regular expressions, searched in the qualified name: modules whose name matches the first
        (by default all) and not the second are logged.
    stash_value : callable, optional
        ``Tensor -> Any``, applied to every tensor of a value; by default a copy in host memory.
    stash : callable, optional
        ``Event -> Any``, in place of `stash_value`: returns what to keep of an event.

    Returns
    -------
    Tracker
        The log, which is a context manager. Calls after its block are not logged, but the
        gradients of calls inside it are.

    Raises
    ------
    ArgumentError
        Both ``stash_value`` and ``stash`` are given, or another argument can't work.
    LayerNotFoundError
        ``include`` matches no name.
    UnsupportedNetError
        The argument is not a module, or hooks can't observe it.

    Warns
    -----
    UserWarning
        A gradient can't be observed: the module returns a view that is changed in place later. Or
        a module was compiled inside the block.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with track(net) as events:
    ...     net(torch.ones(1, 2)).sum().backward()
    >>> [(event.name, event.grad) for event in events]
    [('0', False), ('1', False), ('', False), ('', True), ('1', True), ('0', True)]
    >>> events[5].value[0].shape
    torch.Size([1, 3])
    """
    if stash is not None and stash_value is not None:
        raise ArgumentError(
            "stash and stash_value are both given: stash alone decides what is kept of an event, "
            "so let it apply the function to event.value"
        )
    if not isinstance(grad, bool):
        raise ArgumentError(f"grad={grad!r}: write True or False, and choose modules by include=")
    for name, function in (("stash_value", stash_value), ("stash", stash)):
        if function is not None and not callable(function):
            raise ArgumentError(f"{name}={function!r}: give a function")
    tracker = Tracker(stash or partial(_default_stash, stash_value or _copy_to_host))
    tracker.register_all(module, grad=grad, include=include, exclude=exclude)
    return tracker


def _copy_to_host(tensor: Tensor) -> Tensor:
    # A tensor without data, or whose memory is gone, can't be moved.
    has_data = has_memory(tensor) and not tensor.is_meta
    return tensor.detach().to("cpu" if has_data else "meta", copy=True)


def _default_stash(stash_value: StashValue, event: Event) -> Stash:
    return Stash(event.name, event.type, event.grad, map_tensors(stash_value, event.value))


def _chosen(names: list[str], include: Pattern, exclude: Pattern) -> list[str]:
    wanted, unwanted = _expression("include", include), _expression("exclude", exclude)
    included = [name for name in names if wanted is None or wanted.search(name)]
    if wanted is not None and not included:
        raise LayerNotFoundError(
            f"include={wanted.pattern!r}, a regular expression, matches no module's name"
            f"{nearest(wanted.pattern, names)}"
        )
    return [name for name in included if unwanted is None or not unwanted.search(name)]


def _expression(name: str, pattern: Pattern) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except (TypeError, re.error) as reason:
        raise ArgumentError(
            f"{name}={pattern!r} is no regular expression ({reason}): write one text, such as "
            '"encoder|head"'
        ) from reason


def _named(
    stat: Statistic | Mapping[str, Statistic], stat_name: str | None
) -> Mapping[str, Statistic]:
    if not isinstance(stat, Mapping):
        stat = {stat_name or str(getattr(stat, "__name__", "value")): stat}
    elif stat_name is not None:
        raise ArgumentError(
            f"stat_name={stat_name!r} names one statistic, but the keys of stat already name "
            "several"
        )
    for name, function in stat.items():
        if not callable(function) or name in ("name", "type", "grad"):
            raise ArgumentError(
                f"the statistic {name!r} is {function!r}: give a function Tensor -> number, such "
                'as torch.std, or several by name, such as {"mean": torch.mean, "std": torch.std}; '
                "the names name, type and grad are taken"
            )
    return stat


def _row(stash: Any, statistics: Mapping[str, Statistic]) -> dict[str, Any]:
    try:
        row = {name: item for name, item in vars(stash).items() if name != "value"}
        row["type"] = f"{stash.type.__module__}.{stash.type.__qualname__}"
        first = stash.first_value
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"stash= turned an event into a {type(stash).__name__}, which doesn't fit into a "
            "table: keep a scio_recorder.events.Stash(name, type, grad, value), or use "
            "list(events)"
        ) from None
    if isinstance(first, Tensor) and not (first.is_floating_point() or first.is_complex()):
        first = first.double()
    for name, function in statistics.items():
        try:
            row[name] = _number(function, first) if isinstance(first, Tensor) else None
        except Exception as error:
            what = f"the statistic {name!r} of an event of {stash.name!r} ({stash.type.__name__})"
            raise_of_caller(what, error, ArgumentError)
    return row


def _number(function: Statistic, tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        # The deviation of a single number, such as a loss, is simply missing.
        warnings.filterwarnings("ignore", message=".*degrees of freedom")
        number = function(tensor)
    return number.item() if isinstance(number, Tensor) else number
