"""Reductions as JSON and back, so that a recording can be read without its original objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from scio_recorder import reductions
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.layer import DepthIdx, text_of
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


def states_of(reductions: Mapping[DepthIdx, Reductions]) -> dict[str, Any]:
    """Return the states of the reductions of each layer, by its label as text."""
    items = reductions.items()
    return {text_of(label): of_each(lambda one: one.state_dict(), given) for label, given in items}


def restore(reductions: Mapping[DepthIdx, Reductions], states: Mapping[str, Any]) -> None:
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
        if isinstance(recipes, list):
            patterns = given if isinstance(given, list) else [given] * len(recipes)
            each = zip(recipes, patterns, *states, strict=True)
            return [_merged(recipe, own, where, one) for recipe, one, *own in each]
        return _merged(recipes, states, where, given)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise RecordingError(f"{where}: its reduction can't be restored: {error}") from error


def _recipe(reduction: Reduction) -> dict[str, Any]:
    kind = type(reduction).__name__
    if isinstance(reduction, SampleReduction) and _ours(kind) is type(reduction):
        return reduction.recipe
    return {"kind": kind, "custom": True}


def _merged(
    recipe: dict[str, Any], states: Sequence[dict[str, Any]], where: str, given: Any = None
) -> Reduction:
    first, *others = [_restored(recipe, state, where, given) for state in states]
    if isinstance(first, _Unreadable):
        return first
    for other in others:
        try:
            first.merge(other)
        except CollectError as error:
            return _Unreadable(
                f"layer {where} was reduced by {recipe['kind']} in {len(states)} processes, whose "
                f"results can't be merged: {error}"
            )
    return first


def _restored(
    recipe: dict[str, Any], state: dict[str, Any], where: str, given: Reduction | None
) -> Reduction:
    options = dict(recipe)
    kind = options.pop("kind")
    ours = _ours(kind)
    if given is not None:
        restored = given.fresh()
        restored.load_state_dict(state)
        return restored
    if options.pop("custom", False) or ours is None:
        return _Unreadable(
            f"layer {where} was reduced by {kind}, which is not a reduction of this library and "
            "can't be restored without its class: collect with resume=True and the same reductions"
        )
    reduction: Reduction = ours.from_recipe(**options)
    reduction.load_state_dict(state)
    return reduction


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
