"""The tracker that keeps a log of events, and `track`, which makes one."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.errors import ArgumentError, LayerNotFoundError, UnsupportedNetError
from scio_recorder.events.event import REENTRANT, Event, EventLog, Stash, TrackedCall
from scio_recorder.layer import counted
from scio_recorder.lowlevel import (
    CallHook,
    CallHooks,
    CallStarts,
    check_supported,
    is_rerun,
    nearest,
    needing,
    takes_hooks,
    warn,
)
from scio_recorder.tensors import has_memory, map_tensors, names_arguments, private

if TYPE_CHECKING:
    import pandas


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
            ``stat`` is not a function, or the results of ``stash`` lack name, type, grad or value.

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
        row[name] = _number(function, first) if isinstance(first, Tensor) else None
    return row


def _number(function: Statistic, tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        # The deviation of a single number, such as a loss, is simply missing.
        warnings.filterwarnings("ignore", message=".*degrees of freedom")
        number = function(tensor)
    return number.item() if isinstance(number, Tensor) else number
