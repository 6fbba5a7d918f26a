"""Messages about a label or a name that no layer has, with those that exist."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable

from scio_recorder.layer import DepthIdx, text_of

_SHOWN, _OFFERED = 6, 4
# The way on if a module did not run at labelling.
LABEL_WITH_IT = "label the net with an input at which it runs (input_data=)"


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
    "no module has the qualified name 'conv'; the closest name is 'conv1'"
    """
    return f"no module has the qualified name {name!r}; {offer(name, names)}"


def offer(wanted: str, names: Iterable[str]) -> str:
    """Offer names in place of one, or of a glob or a pattern, that matches nothing.

    Examples
    --------
    >>> offer("layer4.*", ["", "layer1", "layer2", "head"])
    "the closest names are 'layer1', 'layer2'"
    """
    known = list(filter(None, names))
    plain = re.sub(r"[^\w.]+", "", wanted).strip(".")
    close = fnmatch.filter(known, f"*.{wanted}")[:_OFFERED]
    close = close or closest(plain, known, 0.5)
    if not close:
        # A user may know only the end of a name.
        ends = {name.rpartition(".")[2]: name for name in reversed(known)}
        close = [ends[end] for end in closest(plain.rpartition(".")[2], reversed(ends))]
    if close:
        return closest_are(map(repr, close))
    more = ", ..." * (len(known) > _SHOWN)
    return f"there are {', '.join(map(repr, known[:_SHOWN]))}{more}" if known else "there are none"


def closest_are(shown: Iterable[str]) -> str:
    """Say which names are closest to one that does not exist.

    Examples
    --------
    >>> closest_are(["relu"])
    'the closest name is relu'
    """
    names = list(shown)
    return f"the closest {'name is' if len(names) == 1 else 'names are'} {', '.join(names)}"


def closest(wanted: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return a few names that are alike, the closest first, equally close ones in the given order.

    Parameters
    ----------
    wanted : str
        What was written.
    names : iterable of str
        What there is.
    cutoff : float, default 0.6
        How alike they must be, from 0 to 1.

    Examples
    --------
    >>> closest("layer5", ["layer1", "head", "layer2", "layer5.0"])
    ['layer5.0', 'layer1', 'layer2']
    """
    known = list(names)
    # Among equals, difflib would choose the last ones.
    found = difflib.get_close_matches(wanted, known, n=max(1, len(known)), cutoff=cutoff)
    likeness = {name: difflib.SequenceMatcher(None, name, wanted).ratio() for name in found}
    return sorted(filter(likeness.__contains__, known), key=lambda name: -likeness[name])[:_OFFERED]
