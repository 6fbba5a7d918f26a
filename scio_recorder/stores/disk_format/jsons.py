"""Checksums, and JSON that is bounded and strict."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import xxhash

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

DIGITS = 16
MAX_FILE_BYTES = 64 << 20
MAX_DEPTH = 64
# Products of sizes below this stay exact in every program that reads them as doubles.
MAX_SIZE = 1 << 48

_T = TypeVar("_T")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def checksum(data: bytes | memoryview) -> str:
    """Return XXH3 of 64 bits, which runs at the speed of memory, in hexadecimal digits.

    Examples
    --------
    >>> checksum(b"")
    '2d06800538d394c2'
    """
    return xxhash.xxh3_64_hexdigest(data)


def dump(value: object) -> bytes:
    """Return the canonical form: ASCII, no spaces, keys in the order given.

    Raises
    ------
    ValueError, TypeError
        If ``value`` is not JSON; infinities and NaN are not.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def parse(data: bytes) -> Any:
    """Return the value of a JSON text; `ValueError` for any text that `dump` would not write.

    Constants outside the standard, repeated keys and deep nesting are refused: the first two are
    read differently by different programs, the last exhausts the stack.
    """
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return json.loads(
        data.decode("ascii"), object_pairs_hook=_unique, parse_constant=_refuse_constant
    )


def expect(value: Any, kind: type[_T]) -> _T:
    """Return ``value`` if it is of just this type (a bool is no int); `ValueError` if not."""
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def differences(stored: Any, given: Any, path: str = "") -> list[str]:
    """Say where two JSON values differ, one line for each place."""
    if isinstance(stored, dict) and isinstance(given, dict):
        lines = []
        for key in stored | given:
            where = f"{path}.{key}" if path else key
            if key not in stored:
                lines.append(f"{where} is not stored")
            elif key not in given:
                lines.append(f"{where} is stored and was not given")
            else:
                lines += differences(stored[key], given[key], where)
        return lines
    if type(stored) is type(given) and stored == given:
        return []
    return [f"{path} is {_short(stored)} there and {_short(given)} here"]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _depth(data: bytes) -> int:
    tokens = (match[0] for match in _TOKEN.finditer(data))
    return max(accumulate((token in b"[{") - (token in b"]}") for token in tokens))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key is repeated")
    return mapping


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
