"""The names that are like one that does not exist."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from scio_recorder.layer import few

_OFFERED, _LISTED = 4, 12
_TRANSFORMERLENS = "docs/how-to/coming-from-transformerlens.md"
# How alike an attribute must be to be offered, from 0 to 1.
_ALIKE = 0.7
# A number that is a whole component of a name, such as that of a block.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^./])")


def offer(wanted: str, names: Iterable[str], types: Mapping[str, str] | None = None) -> str:
    """Offer names in place of one, or of a glob or a pattern, that matches nothing.

    Parameters
    ----------
    wanted : str
        What matches nothing.
    names : iterable of str
        The names that there are.
    types : mapping of str to str, optional
        The names of their types, in which the word may be as well.

    Examples
    --------
    >>> offer("layer4.*", ["", "layer1", "layer2", "head"])
    "the closest names are 'layer2', 'layer1'"
    >>> offer("*.attn", ["h.0.self_attn", "h.1.self_attn", "norm"])
    "the closest name is 'h.*.self_attn'"
    """
    known = list(filter(None, names))
    if "hook_" in wanted and not any("hook_" in name for name in known):
        return f"names of TransformerLens stand beside those here in {_TRANSFORMERLENS}"
    close = fnmatch.filter(known, f"*.{wanted}") or _close(wanted, known)
    close = close or _of_types(wanted, types or {})
    if close:
        return _closest_are(_joined(close)[:_OFFERED])
    return f"there are {few(_overview(known), _LISTED, repr) or 'none'}"


def _close(wanted: str, known: list[str]) -> list[str]:
    """Return names that are like a name, or end in a word like its last one."""
    plain = re.sub(r"[^\w.]+", "", wanted).strip(".")
    whole = difflib.get_close_matches(plain, known, _OFFERED, 0.5)
    by_end: dict[str, list[str]] = {}
    for name in known:
        by_end.setdefault(name.rpartition(".")[2], []).append(name)
    near = difflib.get_close_matches(_last_word(plain), by_end, _OFFERED)
    ending = [name for end in near for name in by_end[end]]
    # A user may know only the end of a name.
    return ending or whole if wanted.startswith("*.") else whole or ending


def _of_types(wanted: str, types: Mapping[str, str]) -> list[str]:
    # Names are often shorter than those of types.
    word = re.sub("attn$", "attention", _last_word(wanted).lower())
    return [name for name, kind in types.items() if name and word and word in kind.lower()]


def _last_word(text: str) -> str:
    return next(iter(re.findall(r"[^\W\d]\w*", text)[::-1]), "")


def glob_of(name: str) -> str:
    """Return a glob for a name and for those that differ only in the numbers of blocks.

    Examples
    --------
    >>> glob_of("layer4.1.conv2"), glob_of("h.3/add:1")
    ('layer4.*.conv2', 'h.*/add:1')
    """
    return _NUMBER.sub("*", name)


def _joined(names: list[str]) -> list[str]:
    """Return names with one glob in place of those that differ only in the numbers of blocks."""
    counts = Counter(map(glob_of, names))
    # A glob of the blocks themselves would match all that is in them, too.
    globs = {glob for glob, count in counts.items() if count > 1 and not glob.endswith("*")}
    return list(dict.fromkeys(glob_of(name) if glob_of(name) in globs else name for name in names))


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Return the names closest to one that does not exist, as the end of a sentence.

    Examples
    --------
    >>> nearest("rleu", ["linear", "relu"]), nearest("rleu", ["linear"])
    ("; the closest name is 'relu'", '')
    """
    public = [name for name in names if not name.startswith("_")]
    close = difflib.get_close_matches(wanted, public, _OFFERED, _ALIKE)
    return f"; {_closest_are(close)}" if close else ""


def _overview(names: list[str]) -> list[str]:
    """Return outer names first, and of blocks the first one."""
    shown: dict[str, str] = {}
    for name in _joined(names):
        shown.setdefault(glob_of(name) if "." in name else name, name)
    return sorted(shown.values(), key=lambda name: name.count("."))


def _closest_are(names: list[str]) -> str:
    return (
        f"the closest {'name is' if len(names) == 1 else 'names are'} {few(names, _OFFERED, repr)}"
    )
