"""Choosing layers by selectors."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from scio_recorder.errors import LayerNotFoundError, RecorderError, SelectorTypeError, warn
from scio_recorder.layer import (
    Label,
    Layer,
    Operation,
    OperationIdx,
    RowIdx,
    TensorSpec,
    few,
    label_of,
    not_its_label,
    plain_label,
    text_of,
)
from scio_recorder.nets.architecture import (
    LABEL_WITH_IT,
    Architecture,
    explain_absence,
    glob_of,
    offer,
    shown,
)
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.refusals import check_supported

_T = TypeVar("_T")
# Modules that hold others and are never called themselves.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_OF_FUNCTION = "; calls of the function are operations:"
_GLOB = re.compile(r"[*?\[]")


def select(architecture: Architecture, selectors: Sequence[object]) -> tuple[RowIdx, ...]:
    """Return the layers that the selectors match.

    Parameters
    ----------
    architecture : Architecture
        The layers to choose from.
    selectors : sequence
        Each is a label (``(1, 3)`` or ``"1-3"``), a qualified name or a glob over names
        (``fnmatch``: ``*`` crosses dots), a compiled pattern to be searched in the name, a module
        type, a module, or a predicate ``Layer -> bool``. Names and modules stand for all their
        calls. Globs, patterns, types and predicates skip layers that did not run. Operations are
        chosen by an ``OperationIdx``, or by a text with a slash: ``"h.*/add:1"``, ``"3-2/add"``.

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
    chosen: set[RowIdx] = set()
    for selector in selectors:
        chosen.update(_matches(architecture, selector))
    return tuple(sorted(map(plain_label, chosen)))


def select_layers(
    architecture: Architecture, selectors: Sequence[object], what: str
) -> tuple[RowIdx, ...]:
    """Return the layers that the selectors match, where operations can't be meant.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    selectors : sequence
        As for :func:`select`.
    what : str
        The name of the function that was called, for messages.

    Returns
    -------
    tuple of (int, int)
        Sorted.

    Raises
    ------
    SelectorTypeError
        A selector is for operations.
    """
    for selector in selectors:
        if architecture.means_operation(selector):
            raise SelectorTypeError(
                f"{what} is for layers, and {selector!r} for operations inside them: name the "
                "layers around these"
            )
    return select(architecture, selectors)


def select_for_option(
    architecture: Architecture, selectors: Sequence[object], note: str
) -> tuple[RowIdx, ...]:
    """Return what `select` does for the values or keys of an option, which a note explains."""
    try:
        return select(architecture, selectors)
    except LayerNotFoundError as reason:
        # An option can't record operations, and what was written is no name of a function.
        reason.args = (str(reason).partition(_OF_FUNCTION)[0],)
        reason.add_note(note)
        raise


def by_selector(
    architecture: Architecture,
    recorded: Collection[RowIdx],
    entries: Mapping[Any, _T],
    what: str,
    error: type[RecorderError],
) -> dict[RowIdx, _T]:
    """Return the entry of a mapping for each recorded layer that a selector among its keys matches.

    Parameters
    ----------
    architecture : Architecture
        The layers.
    recorded : collection of (int, int)
        The recorded ones.
    entries : mapping
        Selectors -> entries.
    what : str
        The name of the argument, for messages.
    error : type
        The class of the error.

    Raises
    ------
    `error`
        A selector matches no recorded layer, or two match the same one.
    LayerNotFoundError
        A selector matches no layer.
    """
    chosen: dict[RowIdx, _T] = {}
    for selector, entry in entries.items():
        note = f"The keys of {what}= choose layers. Without keys, it is for all."
        chosen_by_it = select_for_option(architecture, [selector], note)
        matching = [label for label in chosen_by_it if label in recorded]
        if not matching:
            raise error(
                f"the selector {selector!r} of {what} names no recorded layer: record it too, by "
                + architecture.recording_also(shown(selector))
            )
        for label in matching:
            if label in chosen:
                raise error(
                    f"two entries of {what} match layer {architecture[label]}, the second by "
                    f"{selector!r}: make the selectors disjoint, or combine the two entries"
                )
            chosen[label] = entry
    if not torch.compiler.is_compiling():
        warn_of_longer_numbers(architecture, entries, chosen, recorded)
    return chosen


def selector_for(architecture: Architecture, label: RowIdx, among: Collection[RowIdx]) -> str:
    """Return a glob for a layer and those at its place in other blocks, or else its name.

    Parameters
    ----------
    architecture : Architecture
        The layers.
    label : (int, int)
        The layer.
    among : collection of (int, int)
        The layers that are meant. If the glob would match one of another kind, the name is given.

    Examples
    --------
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> net = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()))
    >>> _, architecture = label_net(net, input_size=(1, 4))
    >>> selector_for(architecture, (2, 1), [(2, 1), (2, 2)]), selector_for(architecture, (0, 1), [])
    ('*.*', '0-1')
    """
    row = architecture[label]
    glob = glob_of(row.name)
    kinds = {_kind(architecture[at]) for at in _candidates(architecture, glob) if at in among}
    return (glob if kinds == {_kind(row)} else row.name) or text_of(row.label)


def _kind(row: Layer) -> object:
    """Return what layers have in common to which the same function can be applied."""
    spec = row.output_spec
    if isinstance(spec, TensorSpec):
        return row.type_name
    return tuple(spec) if isinstance(spec, Mapping) else type(spec)


def select_modules(architecture: Architecture, selectors: Sequence[object]) -> tuple[RowIdx, ...]:
    """Return the layers that stand for modules, however often these run.

    Parameters
    ----------
    architecture : Architecture
        The layers to choose from.
    selectors : sequence
        As for :func:`select`.

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
    # Rows stand in the order in which calls start.
    first: dict[object, RowIdx] = {}
    for row in (*architecture.values(), *architecture.operations.values()):
        if row.executed:
            first.setdefault(_callee(row), row.label)
    chosen = select(architecture, selectors)
    for selector in selectors:
        label = label_of(selector)
        if label is not None and label in chosen and architecture[label].call > 0:
            raise LayerNotFoundError(
                f"layer {architecture[label]} is a further call of its module, but with "
                f'calls="any" all calls are one entry: write {architecture[label].name!r}'
            )
        if architecture.means_operation(selector):
            text = str(OperationIdx(*selector)) if isinstance(selector, tuple) else str(selector)
            function, _, index = text.rpartition("/")[2].partition(":")
            if index:
                raise LayerNotFoundError(
                    f'{text!r} is one call of {function}, but with calls="any" all calls are one '
                    f"entry: write {text.rpartition(':')[0]!r}"
                )
    return tuple(sorted({plain_label(first[_callee(architecture[label])]) for label in chosen}))


def _callee(row: Layer) -> object:
    """Return what one entry stands for if calls are not counted: a module, or its function."""
    return id(row.module), row.function if isinstance(row, Operation) else None


def did_not_run(
    root: nn.Module, architecture: Architecture, selectors: Sequence[object]
) -> list[str]:
    """Return the names of modules that did not run at labelling although selectors match them.

    Parameters
    ----------
    root : torch.nn.Module
        The labelled net.
    architecture : Architecture
        Its layers.
    selectors : sequence
        As for :func:`select`; labels and predicates match none.

    Returns
    -------
    list of str
        In the order of the net, without containers that are never called.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> net = nn.MultiheadAttention(2, 1)
    >>> _, architecture = label_net(net, input_data=(torch.ones(1, 1, 2),) * 3)
    >>> did_not_run(net, architecture, [nn.Linear])
    ['out_proj']
    """
    ran = {id(row.module) for row in architecture.values() if row.executed}
    unlabelled = _unlabelled(root)
    matching: set[RowIdx] = set()
    for selector in selectors:
        if isinstance(selector, str) and selector not in unlabelled.names and "/" in selector:
            # That of operations in the own code of modules.
            selector = selector.rpartition("/")[0]
        if isinstance(selector, str | re.Pattern | type | nn.Module) and not label_of(selector):
            with suppress(LayerNotFoundError, SelectorTypeError):
                matching.update(_candidates(unlabelled, selector))
    modules = dict(root.named_modules())
    return [
        name
        for name in (unlabelled[label].name for label in sorted(matching))
        if id(modules[name]) not in ran
        and takes_hooks(modules[name])
        and type(modules[name]).forward is not nn.Module.forward
    ]


def look_alikes(
    architecture: Architecture, selectors: Sequence[object], chosen: Sequence[RowIdx]
) -> list[Layer]:
    """Return layers that multiply by a matrix, as `nn.Linear` does, if it misses most of them.

    Parameters
    ----------
    architecture : Architecture
        The layers.
    selectors : sequence
        As for :func:`select`.
    chosen : sequence of (int, int)
        What they match.

    Returns
    -------
    list of Layer
        Layers that no selector matches; empty unless ``nn.Linear`` is a selector and they are more
        than those that it matches. GPT-2 of transformers has such layers, of a class ``Conv1D``.

    Examples
    --------
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.Linear(4, 3)), input_size=(1, 4))
    >>> look_alikes(architecture, [nn.Linear], [(1, 1)])
    []
    """
    if not any(selector is nn.Linear for selector in selectors):
        return []
    modules = {id(architecture[label].module) for label in chosen}
    rows = [row for row in architecture.values() if row.executed and _has_matrix(row)]
    others = [row for row in rows if id(row.module) not in modules]
    return others if 2 * len(others) > len(rows) else []


def warn_of_longer_numbers(
    architecture: Architecture,
    selectors: Iterable[object],
    chosen: Collection[RowIdx],
    recorded: Collection[RowIdx] | None = None,
) -> None:
    """Warn if a glob misses rows because their numbers have two digits, and ``?`` stands for one.

    Parameters
    ----------
    architecture : Architecture
        The layers, and operations.
    selectors : iterable
        As for :func:`select`.
    chosen : collection of RowIdx
        What all of them match.
    recorded : collection of RowIdx, optional
        If it is given, no other rows are meant.

    Examples
    --------
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(*[nn.ReLU()] * 12), input_size=(1, 4))
    >>> warn_of_longer_numbers(architecture, ["*"], list(architecture))
    """

    def names(labels: Iterable[RowIdx]) -> dict[str, None]:
        return dict.fromkeys(architecture[label].name.partition(":")[0] for label in labels)

    taken = names(chosen)
    for selector in selectors:
        longer = _longer_numbers(architecture, selector)
        meant = [label for label in longer if recorded is None or label in recorded]
        missed = [name for name in names(meant) if name not in taken]
        if missed:
            warn(
                f"{selector!r} misses {few(missed, 4)}, since ? stands for one character: add "
                f"{str(selector).replace('?', '??')!r}, or give the modules, as in "
                "record(*net.transformer.h)"
            )


def _longer_numbers(architecture: Architecture, selector: object) -> Sequence[RowIdx]:
    """Return the rows of numbers of two digits, if a glob matches those of one digit."""
    if not isinstance(selector, str) or "?" not in selector or selector in architecture.names:
        return ()
    with suppress(LayerNotFoundError):
        select(architecture, [selector.replace("?", "[0-9]")])
        return select(architecture, [selector.replace("?", "[0-9][0-9]")])
    return ()


def _has_matrix(row: Layer) -> bool:
    weight, shape = getattr(row.module, "weight", None), row.output_shape
    return (
        isinstance(weight, Tensor)
        and weight.ndim == 2
        and not isinstance(row.module, nn.Embedding | nn.EmbeddingBag)
        and isinstance(shape, tuple)
        and shape[-1:] in [tuple(weight.shape[:1]), tuple(weight.shape[1:])]
    )


def choose_modules(root: nn.Module, selectors: Sequence[object]) -> dict[str, nn.Module]:
    """Return the modules of a net without labels that any of the selectors chooses.

    Parameters
    ----------
    root : torch.nn.Module
        The net.
    selectors : sequence
        As for :func:`select`, except labels; without any, all modules without submodules.

    Returns
    -------
    dict of str to torch.nn.Module
        By qualified name, in the order of the net; the root by the name of its class.

    Raises
    ------
    LayerNotFoundError
        A selector chooses nothing.
    SelectorTypeError
        Something that can't choose modules.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> list(choose_modules(net, [nn.ReLU, "0"]))
    ['0', '1.1']
    """
    for selector in selectors:
        if label_of(selector) is not None and not isinstance(selector, str):
            raise SelectorTypeError(f"{selector!r}: labels need a Recorder; here write the name")
    unlabelled = _unlabelled(root)
    chosen = select(unlabelled, selectors or [lambda row: not any(row.module.children())])
    modules: dict[str, nn.Module] = {}
    for row in map(unlabelled.__getitem__, chosen):
        check_supported(row.module)
        modules[row.name or row.type_name] = root.get_submodule(row.name)
    return modules


def _unlabelled(root: nn.Module) -> Architecture:
    rows = [
        Layer(Label((0, i)), name, module, type(module).__name__, 0, None, 0, True, i, None)
        for i, (name, module) in enumerate(root.named_modules())
    ]
    return Architecture(rows, {row.name: [row.label] for row in rows})


def _matches(architecture: Architecture, selector: object) -> Sequence[RowIdx]:
    matching = list(_candidates(architecture, selector))
    ran = [label for label in matching if architecture[label].executed]
    if ran:
        return ran
    if matching:
        raise LayerNotFoundError(_none_ran(architecture, selector, matching))
    raise LayerNotFoundError(_nothing_matched(architecture, selector))


def _none_ran(architecture: Architecture, selector: object, matching: Sequence[RowIdx]) -> str:
    rows = [architecture[label] for label in matching]
    if isinstance(rows[0], Operation):
        return (
            f"{rows[0]} runs inside a torch.func transform (vmap, grad, ...), whose tensors die "
            "with the transform: record what is around it"
        )
    advice = "select layers inside or around them, or label the net with an input at which they run"
    if isinstance(selector, str) and all(isinstance(row.module, _CONTAINERS) for row in rows):
        advice = f"record all that is in them, by record({f'{selector}.*'!r})"
    module, name = rows[0].module, rows[0].name
    if len(rows) == 1 and isinstance(module, _CONTAINERS):
        inside = [architecture.rows_of(f"{name}.{child}") for child, _ in module.named_children()]
        if inside and all(labels and architecture[labels[0]].executed for labels in inside):
            path = re.sub(r"\.(\d+)(?![^.])", r"[\1]", f".{name}")
            values = ".values()" * isinstance(module, nn.ModuleDict)
            advice = f"record what it holds, by record(*rnet.net{path}{values})"
    return (
        f"{shown(selector)} matches only layers that did not run at labelling "
        f"({few(rows, 4)}), so there is nothing to record: {advice}"
    )


def _candidates(architecture: Architecture, selector: Any) -> Iterable[RowIdx]:
    """Return the layers that a selector matches, whether they ran or not."""
    labels, label = architecture.rows_at(selector), label_of(selector)
    is_name = isinstance(selector, str) and selector in architecture.names
    if labels or is_name or isinstance(selector, nn.Module):
        return labels
    is_of_operation = architecture.means_operation(selector)
    if isinstance(selector, str) and _GLOB.search(selector) and not is_of_operation:
        return _named(architecture, re.compile(r"\A" + fnmatch.translate(selector)))
    if is_of_operation or label is not None:
        raise LayerNotFoundError(explain_absence(architecture, selector))
    if isinstance(selector, str):
        raise LayerNotFoundError(_no_such_module(architecture, selector))
    if isinstance(selector, re.Pattern):
        return _named(architecture, selector)
    rows = list(architecture.values())
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return [row.label for row in rows if _is_of(row, selector)]
    if callable(selector) and not isinstance(selector, type):
        return [row.label for row in rows if row.executed and _holds(selector, row)]
    raise _unusable(architecture, selector)


def _no_such_module(architecture: Architecture, name: str) -> str:
    rows, kind = list(architecture.values()), name.removeprefix("nn.")
    if any(row.type_name == kind for row in rows):
        return (
            f"no module has the qualified name {name!r}; to choose by type, give the class {kind} "
            f'and not its name, or lambda layer: layer.type_name == "{kind}"'
        )
    hint, function = "", re.split(r"[.:]\d*", name.partition(":")[0])[-1]
    of_torch = getattr(functional, function, getattr(torch, function, None))
    # No code calls functions that are not documented, and the end of a name means a module.
    is_module = any(row.name.endswith(f".{function}") for row in rows)
    if callable(of_torch) and of_torch.__doc__ and not is_module:
        hint = f'{_OF_FUNCTION} record("*/{function}")'
    elif pair := re.fullmatch(r"\(?(\d+)\W+(\d+)\)?", name):
        hint = f'; a label is written "{pair[1]}-{pair[2]}"'
    elif "\\" in name:
        hint = "; a pattern is given compiled, as re.compile(...)"
    types = {row.name: row.type_name for row in rows}
    near = offer(name, architecture.names, types)
    return f"no module has the qualified name {name!r}; {near}{hint}"


def _named(architecture: Architecture, pattern: re.Pattern[Any]) -> list[RowIdx]:
    if isinstance(pattern.pattern, bytes):
        raise SelectorTypeError(f"{pattern!r} searches bytes, but names are strings: drop the b")
    names = filter(pattern.search, architecture.names)
    return [label for name in names for label in architecture.rows_of(name)]


def _is_of(layer: Layer, kind: type[nn.Module]) -> bool:
    # An architecture that was read from disk knows classes by name only.
    by_name = layer.module is None and layer.type_name == kind.__name__
    return by_name or isinstance(layer.module, kind)


def _holds(predicate: Callable[[Layer], Any], layer: Layer) -> bool:
    try:
        answer = predicate(layer)
    except Exception as error:
        raise LayerNotFoundError(
            f"the predicate {shown(predicate)} failed for layer {layer} with "
            f"{type(error).__name__}: {error}. It is given a Layer, as in lambda layer: "
            'layer.name.endswith("mlp")'
        ) from error
    # NumPy's booleans are not instances of bool.
    if type(answer).__name__ not in ("bool", "bool_"):
        raise SelectorTypeError(
            f"the predicate {shown(predicate)} returned {answer!r} for layer {layer}: it must "
            "return True or False"
        )
    return bool(answer)


def _nothing_matched(architecture: Architecture, selector: object) -> str:
    if isinstance(selector, type):
        kinds = sorted({row.type_name for row in architecture.values() if row.executed})
        return f"no layer is a {selector.__name__}; there are {', '.join(kinds[:20])}"
    if isinstance(selector, str) and fnmatch.filter(architecture.names, selector):
        return (
            f"{selector!r} matches only modules that did not run at labelling: {LABEL_WITH_IT}, or "
            "record the layer around it, if a function does its work"
        )
    if isinstance(selector, str | re.Pattern):
        text = selector if isinstance(selector, str) else selector.pattern
        types = {row.name: row.type_name for row in architecture.values()}
        return f"no name matches {selector!r}; {offer(text, architecture.names, types)}"
    if not isinstance(selector, nn.Module):
        return f"{shown(selector)} matches no layer"
    if not any(row.module is not None for row in architecture.values()):
        reason = "the architecture was read from disk, without modules: select by label or name"
    else:
        reason = (
            "it is not a module of this net (nor is a copy), or did not run at labelling; if so, "
            + LABEL_WITH_IT
        )
    return f"{shown(selector)} has no layer: {reason}"


def _unusable(architecture: Architecture, selector: Any) -> LayerNotFoundError:
    kinds = (
        'a selector is (1, 3), "1-3", a qualified name or glob, a compiled pattern, a module type, '
        "a module or a predicate"
    )
    if isinstance(selector, Layer):
        return SelectorTypeError(not_its_label(selector))
    if isinstance(selector, list | tuple | range) and {*map(type, selector)} == {int}:
        return SelectorTypeError(
            f"{selector!r} is no label, which is a pair (depth, index) in its own parentheses, as "
            "in record((1, 2), (1, 3))"
        )
    is_by_name = isinstance(selector, Mapping) and not any(map(label_of, selector))
    if is_by_name and any(isinstance(value, tuple) for value in selector.values()):
        kind = type(selector).__name__
        return SelectorTypeError(f"the values of a {kind} are layers: write record(*x.values())")
    if isinstance(selector, list | tuple | AbstractSet | Mapping | range):
        return SelectorTypeError(f"{selector!r} is a collection: unpack it with *; {kinds}")
    try:
        number = operator.index(selector)
    except TypeError:
        return SelectorTypeError(f"{shown(selector)} can't select layers: {kinds}")
    named = f', or "{number}" for the layer of this name' * (str(number) in architecture.names)
    return SelectorTypeError(
        f"{number} is a single number and names no layer: a label is a pair in its own "
        f"parentheses, so write record((1, 3)) instead of record(1, 3){named}"
    )
