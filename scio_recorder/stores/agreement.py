"""Whether a recording that is resumed was begun as it is now asked for, in words."""

from __future__ import annotations

from typing import Any

from scio_recorder.stores.disk_format.jsons import differences


def disagreements(stored: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Say in which settings two collections differ, one line for each.

    Examples
    --------
    >>> disagreements({"mode": "eval mode", "every": 1}, {"mode": "train mode", "every": 2})
    ['the net was in eval mode and is in train mode', 'every is 1 there and 2 here']
    >>> disagreements({"transforms": ["1-1"]}, {"transforms": []})
    ['layers with a transform were 1-1 and are none']
    """
    lines: list[str] = []
    rest = set(stored) | set(given)
    for key, words in _WORDS.items():
        one, other = stored.get(key), given.get(key)
        if one is not None and other is not None and one != other:
            lines.append(words.format(_shown(one), _shown(other)))
            rest.discard(key)
    plain = [{key: side[key] for key in side if key in rest} for side in (stored, given)]
    return lines + differences(plain[0], plain[1])


_WORDS = {
    "mode": "the net was in {} and is in {}",
    "autocast": "autocast was {} and is {}",
    "transforms": "layers with a transform were {} and are {}",
}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{item} on {key}" for key, item in value.items()) or "off"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
