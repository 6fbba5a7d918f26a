"""Selectors -> layers."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from torch import nn

from scio_recorder.errors import LayerNotFoundError, SelectorTypeError
from scio_recorder.layer import DepthIdx, Label, Layer, label_of
from scio_recorder.nets.architecture import Architecture

_GLOB = re.compile(r"[*?\[]")


def select(architecture: Architecture, selectors: Sequence[object]) -> tuple[DepthIdx, ...]:
    """Return the layers that any of the selectors names.

    Parameters
    ----------
    architecture : Architecture
        The layers to choose from.
    selectors : sequence
        Each is a label (``(1, 3)`` or ``"1-3"``), a qualified name or a glob over names
        (``fnmatch``: ``*`` crosses dots), a compiled pattern to be searched in the name, a module
        type, a module, or a predicate ``Layer -> bool``. Names and modules stand for all their
        calls. Globs, patterns, types and predicates pass over layers that did not run.

    Returns
    -------
    tuple of (int, int)
        Sorted, without duplicates.

    Raises
    ------
    LayerNotFoundError
        A selector matched no layer that ran.
    SelectorTypeError
        Something that can't select layers.

    Examples
    --------
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> _, architecture = label_net(net, input_size=(1, 4))
    >>> select(architecture, ["1-2", nn.Linear])
    ((1, 1), (1, 2))
    """
    chosen: set[DepthIdx] = set()
    for selector in selectors:
        chosen.update(_matches(architecture, selector))
    return tuple(sorted((int(depth), int(index)) for depth, index in chosen))


def select_modules(architecture: Architecture, selectors: Sequence[object]) -> tuple[DepthIdx, ...]:
    """Return the layers that stand for modules, however often these run.

    Parameters
    ----------
    architecture : Architecture
        The layers to choose from.
    selectors : sequence
        What :func:`select` takes.

    Returns
    -------
    tuple of (int, int)
        The first call of each module; sorted, without duplicates.

    Raises
    ------
    LayerNotFoundError
        A selector matched no layer that ran, or is the label of a further call of a module.
    SelectorTypeError
        Something that can't select layers.

    Examples
    --------
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> relu = nn.ReLU()
    >>> _, architecture = label_net(nn.Sequential(relu, relu), input_size=(1, 4))
    >>> select(architecture, ["0"]), select_modules(architecture, ["0"])
    (((1, 1), (1, 2)), ((1, 1),))
    """
    calls: dict[int, list[Layer]] = {}
    for row in architecture.values():
        if row.executed:
            calls.setdefault(id(row.module), []).append(row)
    first = {key: min(rows, key=operator.attrgetter("call")) for key, rows in calls.items()}
    chosen = select(architecture, selectors)
    for selector in selectors:
        label = label_of(selector)
        if label is not None and label in chosen and architecture[label].call > 0:
            raise LayerNotFoundError(
                f"layer {architecture[label]} is a further call of its module, and with "
                f'calls="any" all calls are one entry: write {architecture[label].name!r}'
            )
    rows = (first[id(architecture[label].module)] for label in chosen)
    return tuple(sorted({(row.depth, row.index) for row in rows}))


def _matches(architecture: Architecture, selector: object) -> Iterable[DepthIdx]:
    if isinstance(selector, str):
        return _by_text(architecture, selector)
    if isinstance(selector, re.Pattern):
        pattern = _text_pattern(selector)
        return _broad(architecture, selector, _by_name(architecture, pattern.search))
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return _broad(architecture, selector, _by_type(architecture, selector))
    if isinstance(selector, nn.Module):
        return _by_module(architecture, selector)
    label = label_of(selector)
    if label is not None:
        return _by_label(architecture, label)
    if callable(selector) and not isinstance(selector, type):
        return _broad(architecture, selector, _by_predicate(architecture, selector))
    raise _unusable(selector)


def _by_text(architecture: Architecture, text: str) -> Iterable[DepthIdx]:
    label = label_of(text)
    if label is not None and label in architecture:
        return _by_label(architecture, label)
    if text in architecture.names:
        return _executed(architecture, architecture.rows_of(text), f"the module {text!r}")
    if _GLOB.search(text):
        matcher = re.compile(fnmatch.translate(text)).match
        return _broad(architecture, text, _by_name(architecture, matcher))
    if label is not None:
        raise LayerNotFoundError(architecture.explain_missing_label(label))
    raise LayerNotFoundError(architecture.explain_missing_name(text))


def _by_label(architecture: Architecture, label: Label) -> Iterable[DepthIdx]:
    if label not in architecture:
        raise LayerNotFoundError(architecture.explain_missing_label(label))
    return _executed(architecture, [label], f"the layer {architecture[label]}")


def _by_module(architecture: Architecture, module: nn.Module) -> Iterable[DepthIdx]:
    rows = [row.label for row in architecture.values() if row.module is module]
    what = f"the {type(module).__name__} that was given"
    if not rows and not any(row.module is not None for row in architecture.values()):
        raise LayerNotFoundError(
            f"{what} can't be found in an architecture read from disk, which has no modules: "
            "select by label or name"
        )
    if not rows:
        raise LayerNotFoundError(
            f"{what} has no layer: it is no module of this net (a copy of one is another module), "
            "or did not run at labelling"
        )
    return _executed(architecture, rows, what)


def _executed(
    architecture: Architecture, labels: Sequence[DepthIdx], what: str
) -> Iterable[DepthIdx]:
    ran = [label for label in labels if architecture[label].executed]
    if not ran:
        raise LayerNotFoundError(
            f"{what} did not run at labelling, so there is nothing to record: select the layers "
            "inside or around it, or label the net with an input at which it runs"
        )
    return ran


def _by_name(architecture: Architecture, matcher: Callable[[str], object]) -> Iterable[DepthIdx]:
    matching = (name for name in architecture.names if matcher(name))
    return [label for name in matching for label in architecture.rows_of(name)]


def _by_type(architecture: Architecture, kind: type[nn.Module]) -> Iterable[DepthIdx]:
    return [row.label for row in architecture.values() if _is_of(row, kind)]


def _is_of(layer: Layer, kind: type[nn.Module]) -> bool:
    # An architecture that was read from disk knows classes by name only.
    by_name = layer.module is None and layer.type_name == kind.__name__
    return by_name or isinstance(layer.module, kind)


def _by_predicate(
    architecture: Architecture, predicate: Callable[[Layer], Any]
) -> Iterable[DepthIdx]:
    ran = [row for row in architecture.values() if row.executed]
    return [row.label for row in ran if _holds(predicate, row)]


def _holds(predicate: Callable[[Layer], Any], layer: Layer) -> bool:
    try:
        answer = predicate(layer)
    except Exception as error:
        raise LayerNotFoundError(
            f"the predicate {_shown(predicate)} failed at layer {layer} with "
            f"{type(error).__name__}: {error}"
        ) from error
    # NumPy's booleans are no bools.
    if type(answer).__name__ not in ("bool", "bool_"):
        raise SelectorTypeError(
            f"the predicate {_shown(predicate)} gave {answer!r} at layer {layer}: it must return "
            "True or False"
        )
    return bool(answer)


def _broad(
    architecture: Architecture, selector: object, labels: Iterable[DepthIdx]
) -> Iterable[DepthIdx]:
    matching = list(labels)
    ran = [label for label in matching if architecture[label].executed]
    if ran:
        return ran
    if matching:
        shown = ", ".join(str(architecture[label]) for label in matching[:4])
        raise LayerNotFoundError(
            f"{_shown(selector)} matches only layers that did not run at labelling ({shown}), so "
            "there is nothing to record"
        )
    raise LayerNotFoundError(_nothing_matched(architecture, selector))


def _nothing_matched(architecture: Architecture, selector: object) -> str:
    if isinstance(selector, type):
        kinds = sorted({row.type_name for row in architecture.values() if row.executed})
        return f"no layer is a {selector.__name__}; there are {', '.join(kinds[:20])}"
    if isinstance(selector, str):
        closest = architecture.explain_missing_name(re.sub(r"[*?\[\]]", "", selector))
        hint = closest.partition("; ")[2]
        return f"no name matches {selector!r}" + (f"; {hint}" if hint else "")
    return f"{_shown(selector)} matches no layer"


def _text_pattern(pattern: re.Pattern[Any]) -> re.Pattern[str]:
    if isinstance(pattern.pattern, bytes):
        raise SelectorTypeError(f"{pattern!r} searches bytes, and names are text: drop the b")
    return pattern


def _unusable(selector: object) -> LayerNotFoundError:
    kinds = (
        'a selector is (1, 3), "1-3", a qualified name or glob, a compiled pattern, a module type, '
        "a module or a predicate"
    )
    if isinstance(selector, list | tuple | AbstractSet | Mapping | range):
        return SelectorTypeError(f"{selector!r} is a collection: unpack it with *. {kinds}")
    try:
        number = operator.index(selector)  # type: ignore[arg-type]
    except TypeError:
        return SelectorTypeError(f"{_shown(selector)} can't select layers: {kinds}")
    return SelectorTypeError(
        f"{number} is a single number and names no layer: a label is a pair with its own brackets, "
        "record((1, 3)) instead of record(1, 3)"
    )


def _shown(selector: object) -> str:
    return str(getattr(selector, "__qualname__", None) or repr(selector))
