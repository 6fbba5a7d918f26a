"""An event log as a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from scio_recorder.errors import ArgumentError

if TYPE_CHECKING:
    import pandas


Statistic: TypeAlias = Callable[[Tensor], Any]


def event_frame(
    stashes: Sequence[Any], stat: Statistic | Mapping[str, Statistic], stat_name: str | None
) -> pandas.DataFrame:
    """Return one row for each event, with one column for each statistic."""
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
            f"stat_name={stat_name!r} is for one statistic, and the keys of stat name several"
        )
    for name, function in stat.items():
        if not callable(function) or name in ("name", "type", "grad"):
            raise ArgumentError(
                f"the statistic {name!r} is {function!r}: give a function Tensor -> number, such "
                'as torch.std, or several by name, such as {"mean": torch.mean, "std": torch.std}; '
                "name, type and grad are columns already"
            )
    return stat


def _row(stash: Any, statistics: Mapping[str, Statistic]) -> dict[str, Any]:
    try:
        row = {name: item for name, item in vars(stash).items() if name != "value"}
        row["type"] = f"{stash.type.__module__}.{stash.type.__qualname__}"
        first = stash.first_value
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"stash= has made a {type(stash).__name__} of an event, of which no table can be made: "
            "keep a scio_recorder.events.Stash(name, type, grad, value), or use list(events)"
        ) from None
    if isinstance(first, Tensor) and not (first.is_floating_point() or first.is_complex()):
        first = first.double()
    for name, function in statistics.items():
        row[name] = _number(function, first) if isinstance(first, Tensor) else None
    return row


def _number(function: Statistic, tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        # A deviation of one number, such as a loss, is just missing.
        warnings.filterwarnings("ignore", message=".*degrees of freedom")
        number = function(tensor)
    return number.item() if isinstance(number, Tensor) else number
