"""An architecture as plain values that JSON can hold, and back, trusting nothing that is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import torch

from scio_recorder.errors import RecordingError
from scio_recorder.layer import DepthIdx, Label, Layer, TensorSpec, shapes_of
from scio_recorder.tensors.dtypes import DTYPES

_FORMAT = 1
# Beyond this, torch can't address a tensor, and products of lengths would grow without bound.
_LARGEST = 2**63 - 1
_DEEPEST = 64

# Fields of a layer that are written as they are.
_PLAIN: dict[str, type[Any]] = {
    "name": str,
    "type_name": str,
    "call": int,
    "executed": bool,
    "num_params": int,
}

_Kind = TypeVar("_Kind")
_Names = dict[str, tuple[DepthIdx, ...]]


def encode(layers: Iterable[Layer], names: Mapping[str, Iterable[DepthIdx]]) -> dict[str, Any]:
    """Return layers and names as dictionaries, lists, strings and numbers."""
    return {
        "format": _FORMAT,
        "layers": [_encode_layer(layer) for layer in layers],
        "names": {name: [list(label) for label in labels] for name, labels in names.items()},
    }


def decode(data: object) -> tuple[list[Layer], _Names]:
    """Read what :func:`encode` wrote; :class:`RecordingError` for anything that it can't be."""
    entries = _checked(data, dict, "it")
    if _entry(entries, "format", int, "") != _FORMAT:
        _refuse(f"format {entries['format']!r} is unknown; this version reads format {_FORMAT}")
    rows = _entry(entries, "layers", list, "")
    layers = [_decode_layer(row, f"layers[{i}]") for i, row in enumerate(rows)]
    _check_rows(layers)
    known = {layer.label for layer in layers}
    names = _entry(entries, "names", dict, "")
    return layers, {
        _checked(name, str, "a name"): _decode_labels(labels, f"names[{name!r}]", known)
        for name, labels in names.items()
    }


def _encode_layer(layer: Layer) -> dict[str, Any]:
    return {
        "label": list(layer.label),
        **{name: getattr(layer, name) for name in _PLAIN},
        "completion": layer.completion,
        "input_shape": _encode_shapes(layer.input_shape),
        "output_spec": _encode_spec(layer.output_spec),
    }


def _decode_layer(row: object, where: str) -> Layer:
    entries = _checked(row, dict, where)
    plain = {name: _entry(entries, name, kind, where) for name, kind in _PLAIN.items()}
    if not plain["executed"] and entries.get("completion") is not None:
        _refuse(f"{where} did not run and yet has a completion")
    return Layer(
        label=_decode_label(_entry(entries, "label", list, where), where),
        module=None,
        input_shape=shapes_of(_decode_tree(entries.get("input_shape"), where)),
        completion=_entry(entries, "completion", int, where) if plain["executed"] else None,
        output_spec=_decode_tree(entries.get("output_spec"), where),
        **plain,
    )


def _check_rows(layers: list[Layer]) -> None:
    if len({layer.label for layer in layers}) != len(layers):
        _refuse("two layers have the same label")
    ranks = sorted(layer.completion for layer in layers if layer.completion is not None)
    if ranks != list(range(len(ranks))):
        _refuse("the order in which layers returned is not an order")


def _encode_spec(spec: Any) -> Any:
    if isinstance(spec, TensorSpec):
        return {"shape": list(spec.shape), "dtype": str(spec.dtype)[6:]}
    return _encode_container(spec, _encode_spec)


def _encode_shapes(shapes: Any) -> Any:
    if isinstance(shapes, tuple) and all(isinstance(length, int) for length in shapes):
        return {"shape": list(shapes), "dtype": None}
    return _encode_container(shapes, _encode_shapes)


def _encode_container(value: Any, encode_item: Any) -> Any:
    if isinstance(value, tuple):
        return {"tuple": [encode_item(item) for item in value]}
    if isinstance(value, list):
        return {"list": [encode_item(item) for item in value]}
    if isinstance(value, dict):
        # JSON has string keys only, and a key that is no string must not collide with one that is.
        keys = (key if isinstance(key, str | int) else repr(key) for key in value)
        items = (encode_item(item) for item in value.values())
        return {"dict": [list(pair) for pair in zip(keys, items, strict=True)]}
    return None


def _decode_tree(value: object, where: str, depth: int = 0) -> Any:
    if value is None:
        return None
    if depth > _DEEPEST:
        _refuse(f"{where} is nested more than {_DEEPEST} deep")
    entries = _checked(value, dict, where)
    if "shape" in entries:
        return _decode_spec(entries, where)
    if len(entries) != 1 or not entries.keys() <= {"tuple", "list", "dict"}:
        _refuse(f"{where} holds a structure of unknown kind")
    ((kind, raw),) = entries.items()
    items = _checked(raw, list, where)
    if kind == "dict":
        pairs = [_decode_pair(item, where) for item in items]
        return {key: _decode_tree(item, where, depth + 1) for key, item in pairs}
    decoded = [_decode_tree(item, where, depth + 1) for item in items]
    return tuple(decoded) if kind == "tuple" else decoded


def _decode_pair(item: object, where: str) -> tuple[str | int, object]:
    pair = _checked(item, list, where)
    if len(pair) != 2 or not isinstance(pair[0], str | int):
        _refuse(f"{where} holds a dictionary entry that is no pair of a key and a value")
    return pair[0], pair[1]


def _decode_spec(entries: dict[Any, Any], where: str) -> TensorSpec:
    shape = tuple(
        _checked(length, int, where, -1) for length in _entry(entries, "shape", list, where)
    )
    name = entries.get("dtype")
    if name is None:
        # Shapes of inputs carry no type; the specification only lives until it is read off.
        return TensorSpec(shape, torch.float32)
    if _checked(name, str, where) not in DTYPES:
        _refuse(f"{where} has the unknown dtype {name!r}")
    return TensorSpec(shape, DTYPES[name])


def _decode_label(value: object, where: str) -> Label:
    pair = _checked(value, list, where)
    if len(pair) != 2:
        _refuse(f"{where} has a label of {len(pair)} numbers instead of two")
    return Label((_checked(pair[0], int, where), _checked(pair[1], int, where, 1)))


def _decode_labels(value: object, where: str, known: set[Label]) -> tuple[DepthIdx, ...]:
    labels = tuple(_decode_label(item, where) for item in _checked(value, list, where))
    for label in labels:
        if label not in known:
            _refuse(f"{where} refers to the label {label}, which no layer has")
    return labels


def _entry(entries: dict[Any, Any], key: str, kind: type[_Kind], where: str) -> _Kind:
    if key not in entries:
        _refuse(f"{where}{' ' if where else ''}entry {key!r} is missing")
    return _checked(entries[key], kind, f"{where}.{key}".lstrip("."))


def _checked(value: object, kind: type[_Kind], where: str, least: int = 0) -> _Kind:
    # True is an int to isinstance, and no number here.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        _refuse(f"{where} must be of type {kind.__name__}, not {type(value).__name__}")
    if isinstance(value, int) and not least <= value <= _LARGEST:
        _refuse(f"{where} holds the number {value}, which is out of range")
    return value


def _refuse(problem: str) -> NoReturn:
    raise RecordingError(f"architecture: {problem}")
