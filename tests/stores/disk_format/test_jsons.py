"""Texts of JSON are bounded, whatever stands in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scio_recorder.stores.disk_format.tensor_file import MAX_DEPTH, as_read, dump, parse

# Signs that mean something outside a text, and those that hide others inside one.
TEXTS = st.text(alphabet='[]{}"\\,: \n\u00e9', max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.integers(MAX_DEPTH - 6, MAX_DEPTH + 1))
def test_what_is_nested_too_deeply_is_refused_and_nothing_else(value, around):
    # Enough brackets that they are looked at.
    value = [value, ["]"] * 9, {'"': "[{" * MAX_DEPTH}, [[]] * MAX_DEPTH]
    for _ in range(around):
        value = [value]
    if depth(value) > MAX_DEPTH:
        with pytest.raises(ValueError, match="nested deeper"):
            dump(value)
        with pytest.raises(ValueError, match="nested deeper"):
            parse(json.dumps(value, separators=(",", ":")).encode())
    else:
        assert parse(dump(value)) == value


def test_tuples_are_nested_as_lists_are():
    value: Any = ()
    for _ in range(MAX_DEPTH - 1):
        value = (value,)
    assert as_read(value) == json.loads(json.dumps(value))
    with pytest.raises(ValueError, match="nested deeper"):
        dump((value,))
