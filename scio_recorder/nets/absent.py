"""Messages about a label or a name that no layer has, with those that exist."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable

from scio_recorder.layer import DepthIdx, text_of

_SHOWN = 6


def no_such_label(label: DepthIdx, labels: Iterable[DepthIdx]) -> str:
    """Return a sentence: the label does not exist, and which labels do.

    Examples
    --------
    >>> no_such_label((1, 3), [(0, 1), (1, 1), (1, 2)])
    'no layer has the label 1-3: labels of depth 1 go from 1-1 to 1-2'
    """
    known = list(labels)
    indices = [index for depth, index in known if depth == label[0]]
    if indices:
        there = f"labels of depth {label[0]} go from {label[0]}-1 to {label[0]}-{max(indices)}"
    else:
        there = f"depths go from 0 to {max((depth for depth, _ in known), default=0)}"
    return f"no layer has the label {text_of(label)}: {there}"


def no_such_name(name: str, names: Iterable[str]) -> str:
    """Return a sentence: no module has the name, and which names are close to it.

    Examples
    --------
    >>> no_such_name("conv", ["conv1", "relu"])
    "no module has the qualified name 'conv'; the closest names are 'conv1'"
    """
    return f"no module has the qualified name {name!r}; {offer(name, names)}"


def offer(wanted: str, names: Iterable[str]) -> str:
    """Offer names in place of one, or of a glob or a pattern, that matches nothing.

    Examples
    --------
    >>> offer("layer4.*", ["", "layer1", "layer2", "head"])
    "the closest names are 'layer2', 'layer1'"
    """
    known = list(filter(None, names))
    plain = re.sub(r"[^\w.]+", "", wanted).strip(".")
    close = fnmatch.filter(known, f"*.{wanted}")[:4]
    close = close or difflib.get_close_matches(plain, known, n=4, cutoff=0.5)
    if not close:
        # A user may know only the end of a name.
        ends = {name.rpartition(".")[2]: name for name in known}
        close = [ends[end] for end in difflib.get_close_matches(plain, ends, n=4)]
    if close:
        return f"the closest names are {', '.join(map(repr, close))}"
    more = ", ..." * (len(known) > _SHOWN)
    return f"there are {', '.join(map(repr, known[:_SHOWN]))}{more}" if known else "there are none"
