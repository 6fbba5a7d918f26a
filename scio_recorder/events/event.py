"""Events, their stashes, the log with places for late events, and its table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, nn

from scio_recorder.errors import ArgumentError, needing, warn
from scio_recorder.layer import few
from scio_recorder.tensors.structures import tensors

if TYPE_CHECKING:
    import pandas


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
        found = tensors(self.value)
        return found[0] if found else _first_item(self.value)


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


Statistic: TypeAlias = Callable[[Tensor], Any]


def event_frame(
    stashes: Sequence[Any], stat: Statistic | Mapping[str, Statistic], stat_name: str | None
) -> pandas.DataFrame:
    """Return one row for each event, with one column for each statistic."""
    with needing("frame", "a frame"):
        import pandas

    statistics = _named(stat, stat_name)
    rows = [_row(stash, statistics) for stash in stashes]
    return pandas.DataFrame(rows, columns=None if rows else ["name", "type", "grad", *statistics])


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
