"""Class labels of a batch, as plain Python values that can be keys and can be stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from scio_recorder.errors import CollectError

Label: TypeAlias = int | float | str
By: TypeAlias = Callable[[Any], Any]


def labels_of(by: By, batch: object, count: int) -> list[Label]:
    """Return the labels of a batch of `count` samples, converted to Python values."""
    if batch is None:
        raise CollectError(
            "A reduction with by= needs the batch that the labels are read from; "
            "write update(activation, batch)."
        )
    given = by(batch)
    # Tensors and NumPy arrays convert as a whole much faster than element by element.
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise CollectError(
            f"by= returned {type(given).__name__}, which is no sequence of labels; "
            f"return one label for each of the {count} samples."
        )
    labels = [_plain(value) for value in values]
    if len(labels) != count:
        raise CollectError(
            f"by= returned {len(labels)} labels for an activation of {count} samples; "
            "return one label for each sample (dimension 0)."
        )
    return labels


def _plain(value: Any) -> Label:
    item = value.item() if hasattr(value, "item") else value
    for kind in (bool, int, float, str):
        # Subclasses (numpy.str_, IntEnum) become the plain type; nan, unequal to itself, no key.
        if isinstance(item, kind) and item == item:
            return kind(item)
    raise CollectError(
        f"by= returned the label {value!r}; labels must be numbers (not nan) or strings, "
        "one for each sample."
    )


def in_order(labels: Iterable[Label]) -> list[Label]:
    """Sort labels, numbers before strings: independent of the order in which they were seen."""
    return sorted(labels, key=lambda label: (isinstance(label, str), label))
