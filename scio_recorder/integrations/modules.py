"""Choosing modules of a net that nobody has labelled."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from scio_recorder.errors import LayerNotFoundError, SelectorTypeError
from scio_recorder.nets.labelling.supported import check_supported

__all__ = ["choose_modules"]


def choose_modules(root: nn.Module, selectors: Iterable[Any]) -> dict[str, nn.Module]:
    """Return the modules that any of the selectors chooses, by name and in the order of the net.

    Parameters
    ----------
    root : torch.nn.Module
        The net.
    selectors : iterable
        Names, globs, compiled patterns, module types and modules; none for all modules that have
        none inside them.

    Returns
    -------
    dict of str to torch.nn.Module
        By qualified name; the root by that of its class.

    Raises
    ------
    LayerNotFoundError
        A selector chooses nothing.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> list(choose_modules(net, [nn.ReLU, "0"]))
    ['0', '1.1']
    """
    modules = dict(root.named_modules())
    chosen = {name for selector in selectors for name in _matching(modules, selector)}
    if not chosen:
        chosen = {name for name, module in modules.items() if not any(module.children())}
    found = {name: module for name, module in modules.items() if name in chosen}
    for module in found.values():
        check_supported(module)
    return {name or type(root).__name__: module for name, module in found.items()}


def _matching(modules: dict[str, nn.Module], selector: Any) -> list[str]:
    chooses = _condition(selector)
    matching = [name for name, module in modules.items() if chooses(name, module)]
    if not matching:
        raise LayerNotFoundError(f"{selector!r} chooses no module{_hint(modules, selector)}")
    return matching


def _condition(selector: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, str):
        return lambda name, module: name == selector or fnmatchcase(name, selector)
    if isinstance(selector, re.Pattern):
        return lambda name, module: selector.search(name) is not None
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda name, module: isinstance(module, selector)
    if isinstance(selector, nn.Module):
        return lambda name, module: module is selector
    hint = ": labels need Recorder, here write the name" if isinstance(selector, tuple) else ""
    raise SelectorTypeError(
        f"{selector!r} can't choose modules{hint}; a selector is a qualified name or glob, a "
        "compiled pattern, a module type or a module"
    )


def _hint(modules: dict[str, nn.Module], selector: Any) -> str:
    close = difflib.get_close_matches(str(selector), list(modules), n=4)
    return f"; the closest names are {', '.join(map(repr, close))}" if close else ""
