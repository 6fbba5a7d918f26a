"""Reductions as JSON and back, so that a recording can be read without its original objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from scio_recorder import reductions
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.layer import RowIdx, text_of
from scio_recorder.reductions import Reduction
from scio_recorder.reductions.base import Reductions, SampleReduction, of_each, several


def recipes_of(given: Reductions) -> Any:
    """Return the recipes of a layer's reductions: a dict, or a list of dicts.

    Examples
    --------
    >>> recipes_of([reductions.Quantiles([0.5])])
    [{'kind': 'Quantiles', 'by_class': False, 'q': [0.5]}]
    """
    return of_each(_recipe, given)


def states_of(reductions: Mapping[RowIdx, Reductions]) -> dict[str, Any]:
    """Return the states of the reductions of each layer, by its label as text."""
    items = reductions.items()
    return {text_of(label): of_each(lambda one: one.state_dict(), given) for label, given in items}


def restore(reductions: Mapping[RowIdx, Reductions], states: Mapping[str, Any]) -> None:
    """Load the states that `states_of` returned into reductions."""
    for label, given in reductions.items():
        for reduction, state in zip(several(given), several(states[text_of(label)]), strict=True):
            reduction.load_state_dict(state)


def from_recipes(
    recipes: Any, states: Sequence[Any], where: str, given: Reductions | None = None
) -> Reductions:
    """Return the reductions of recipes, in their saved states.

    Only classes of this library are constructed, by names from a fixed list. States of several
    processes are merged. ``given`` are the same reductions if the caller has them; they may be of
    other classes.
    """
    try:
        patterns = [_pattern(recipe, where) for recipe in several(recipes)]
        patterns = patterns if given is None else several(given)
        each = zip(patterns, *map(several, states), strict=True)
        merged = [_merged(pattern, own, where) for pattern, *own in each]
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise RecordingError(f"{where}: its reduction can't be restored: {error}") from error
    return merged if isinstance(recipes, list) else merged[0]


def _recipe(reduction: Reduction) -> dict[str, Any]:
    kind = type(reduction).__name__
    if isinstance(reduction, SampleReduction) and _ours(kind) is type(reduction):
        return reduction.recipe
    return {"kind": kind, "custom": True}


def _pattern(recipe: Any, where: str) -> Reduction:
    """Return a reduction without data, or what stands for one of an unknown class."""
    options = dict(recipe)
    kind = options.pop("kind")
    ours = _ours(kind)
    if options.pop("custom", False) or ours is None:
        return _Unreadable(
            f"layer {where} was reduced by {kind}, which is not a reduction of this library and "
            "can't be restored without its class: collect with resume=True and the same reductions"
        )
    pattern: Reduction = ours.from_recipe(**options)
    return pattern


def _merged(pattern: Reduction, states: Sequence[dict[str, Any]], where: str) -> Reduction:
    if isinstance(pattern, _Unreadable):
        return pattern
    each = [pattern.fresh() for _ in states]
    for restored, state in zip(each, states, strict=True):
        restored.load_state_dict(state)
    for other in each[1:]:
        try:
            each[0].merge(other)
        except CollectError as error:
            return _Unreadable(
                f"layer {where} was reduced by {type(pattern).__name__} in {len(states)} "
                f"processes, whose results can't be merged: {error}"
            )
    return each[0]


class _Unreadable(Reduction):
    """Stands for a user's reduction: the rest of a recording can be read without it."""

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise RecordingError(self._message)

    update = merge = compute = reset = state_dict = load_state_dict = fresh = cast("Any", _refuse)


def _ours(kind: str) -> Any:
    """Return a class by its name from a fixed list."""
    return getattr(reductions, kind) if kind in reductions.__all__ else None
