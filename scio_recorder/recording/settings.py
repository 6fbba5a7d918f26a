"""What a recording says about how it was made, as JSON: reductions, versions and the net."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, NoReturn, cast

from torch import nn

from scio_recorder import reductions
from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.layer import RowIdx, text_of
from scio_recorder.reductions import Reduction
from scio_recorder.reductions.base import Reductions, SampleReduction, of_each, several
from scio_recorder.tensors import private
from scio_recorder.tensors.properties import dtype_name


def made_with(net: nn.Module) -> dict[str, Any]:
    """Return the versions that run now, and what a net is, as JSON.

    Parameters
    ----------
    net : torch.nn.Module
        The net whose activations are recorded.

    Returns
    -------
    dict
        The versions of ``scio_recorder``, ``torch``, ``python``, ``numpy`` and of the package that
        the class of the net comes from, under the name of each; ``net``, the name of that class;
        ``dtypes`` and ``devices`` of its parameters; ``attention``, the implementation that a net
        of transformers has chosen; ``training``, its flag; ``time``, in UTC.

    Examples
    --------
    >>> import torch
    >>> made = made_with(nn.Linear(2, 1))
    >>> made["torch"] == torch.__version__, made["net"], made["dtypes"], made["devices"]
    (True, 'torch.nn.modules.linear.Linear', ['float32'], ['cpu'])
    """
    kind = type(net)
    # A class that code has made may have no module.
    package = str(kind.__module__ or "builtins").partition(".")[0]
    versions = {
        "scio_recorder": _version("scio_recorder"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        package: _version(package),
    }
    parameters = list(net.parameters())
    facts = {
        **versions,
        "net": f"{kind.__module__}.{kind.__qualname__}",
        "dtypes": sorted(map(dtype_name, {parameter.dtype for parameter in parameters})),
        "devices": sorted({str(parameter.device) for parameter in parameters}),
        "attention": private.attention_of(net),
        "training": net.training,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in facts.items() if value is not None}


@cache
def _version(package: str) -> str | None:
    """Return the version of an imported package; None for code that has none."""
    version = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(version, str):
        return str(version)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_words(made: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> str:
    """Return what a recording was made with, in one line; empty if it does not know.

    Parameters
    ----------
    made : mapping
        From `made_with`, or from a file.
    other : mapping, optional
        That of another recording: only entries that differ from it are named, but for the time.

    Examples
    --------
    >>> made = {"torch": "2.13.0", "dtypes": ["bfloat16", "float32"], "time": "now"}
    >>> in_words(made), in_words(made, {**made, "torch": "2.12.0", "time": "then"})
    ('torch 2.13.0, dtypes bfloat16 + float32, time now', 'torch 2.13.0')
    """
    texts = {
        str(name): " + ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in made.items()
        if other is None or (value != other.get(name) and name != "time")
    }
    return ", ".join(f"{name} {text}" for name, text in texts.items() if text)


def fresh(pattern: Any) -> Reductions:
    """Return new reductions like those that ``reduce=`` gives for a layer; refuse other values."""
    is_list = isinstance(pattern, list | tuple)
    patterns = pattern if is_list else [pattern]
    if patterns and all(isinstance(each, Reduction) for each in patterns):
        each = [reduction.fresh() for reduction in patterns]
        return each if is_list else each[0]
    wrong = next((each for each in patterns if not isinstance(each, Reduction)), pattern)
    shown = wrong.__name__ if isinstance(wrong, type) else repr(wrong)
    hint = f": write {shown}()" if isinstance(wrong, type) else ""
    if isinstance(wrong, str) and wrong.capitalize() in reductions.__all__:
        hint = f": write reductions.{wrong.capitalize()}()"
    raise CollectError(
        f"reduce has {shown} where a reduction is expected{hint}; give objects such as "
        "scio_recorder.reductions.Mean(), a list of them, or a mapping by selector"
    )


def recipe_of(reduction: Reduction) -> dict[str, Any]:
    """Return the recipe of a reduction, from which `from_recipes` makes a new one.

    Examples
    --------
    >>> recipe_of(reductions.Quantiles([0.5]))
    {'kind': 'Quantiles', 'by_class': False, 'q': [0.5]}
    """
    kind = type(reduction).__name__
    if isinstance(reduction, SampleReduction) and _ours(kind) is type(reduction):
        return reduction.recipe
    return {"kind": kind, "custom": True}


def states_of(reductions: Mapping[RowIdx, Reductions]) -> dict[str, Any]:
    """Return the states of the reductions of each layer, by its label as text."""
    items = reductions.items()
    return {
        text_of(label): of_each(lambda reduction: reduction.state_dict(), each)
        for label, each in items
    }


def restore(reductions: Mapping[RowIdx, Reductions], states: Mapping[str, Any]) -> None:
    """Load the states that `states_of` returned into reductions."""
    for label, each in reductions.items():
        for reduction, state in zip(several(each), several(states[text_of(label)]), strict=True):
            reduction.load_state_dict(state)


def from_recipes(
    recipes: Any, states: Sequence[Any], where: str, known: Reductions | None = None
) -> Reductions:
    """Return the reductions of recipes, in their saved states.

    Only classes of this library are constructed, by names from a fixed list. States of several
    processes are merged. ``given`` are the same reductions if the caller has them; they may be of
    other classes.
    """
    try:
        patterns = [_pattern(recipe, where) for recipe in several(recipes)]
        patterns = patterns if known is None else several(known)
        each = zip(patterns, *map(several, states), strict=True)
        merged = [_merged(pattern, states_of_layer, where) for pattern, *states_of_layer in each]
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        raise RecordingError(f"{where}: its reduction can't be restored: {error}") from error
    return merged if isinstance(recipes, list) else merged[0]


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
