"""Conversion of an architecture to plain JSON values, and of untrusted JSON back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from scio_recorder.errors import RecordingError
from scio_recorder.layer import DepthIdx, Label, Layer, Shard, TensorSpec, shapes_of
from scio_recorder.tensors.copies import DTYPES, dtype_name

_FORMAT = 1
# Beyond this, torch can't address a tensor, and products of lengths would grow without bound.
_LARGEST = 2**63 - 1
_DEEPEST = 64

# Fields of a layer that are written unchanged.
_PLAIN = {"name": str, "type_name": str, "call": int, "executed": bool, "num_params": int}

_Kind = TypeVar("_Kind")
_Names = dict[str, tuple[Label, ...]]


def encode(layers: Iterable[Layer], names: Mapping[str, Iterable[DepthIdx]]) -> dict[str, Any]:
    """Return layers and names as dictionaries, lists, strings and numbers."""
    return {
        "format": _FORMAT,
        "layers": [
            {
                "label": list(layer.label),
                **{name: getattr(layer, name) for name in _PLAIN},
                "completion": layer.completion,
                "input_shape": _encode_tree(layer.input_shape, of_shapes=True),
                "output_spec": _encode_tree(layer.output_spec),
                **({} if layer.shard is None else {"shard": [layer.shard.dim, layer.shard.count]}),
            }
            for layer in layers
        ],
        "names": {name: [list(label) for label in labels] for name, labels in names.items()},
    }


def decode(data: Any) -> tuple[list[Layer], _Names]:
    """Read the result of :func:`encode`; raise :class:`RecordingError` for anything else."""
    layers: list[Layer] = []
    where = ""
    try:
        if data["format"] != _FORMAT:
            raise ValueError(
                f"format {data['format']!r} is unknown; this version reads format {_FORMAT}"
            )
        for number, row in enumerate(_checked(data["layers"], list)):
            where = f"layers[{number}]: "
            layers.append(_decode_layer(row))
        where = "names: "
        names = {
            name: tuple(map(_decode_label, _checked(labels, list)))
            for name, labels in _checked(data["names"], dict).items()
        }
        where = ""
        _check(layers, names)
    # Any value may be anywhere, so reading it can fail in any of these ways.
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"entry {error} is missing" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"architecture: {where}{problem}") from error
    return layers, names


def _decode_layer(row: Any) -> Layer:
    plain: dict[str, Any] = {name: _checked(row[name], kind) for name, kind in _PLAIN.items()}
    completion = row["completion"]
    if not plain["executed"] and completion is not None:
        raise ValueError("it did not run but has a completion")
    return Layer(
        label=_decode_label(row["label"]),
        module=None,
        input_shape=shapes_of(_decode_tree(row["input_shape"])),
        completion=_checked(completion, int) if plain["executed"] else None,
        output_spec=_decode_tree(row["output_spec"]),
        shard=_decode_shard(row.get("shard")),
        **plain,
    )


def _check(layers: list[Layer], names: _Names) -> None:
    known = {layer.label for layer in layers}
    if len(known) != len(layers):
        raise ValueError("two layers have the same label")
    ranks = sorted(layer.completion for layer in layers if layer.completion is not None)
    if ranks != list(range(len(ranks))):
        raise ValueError("the order in which layers returned is not an order")
    for name, labels in names.items():
        for label in labels:
            if label not in known:
                raise ValueError(f"{name!r} refers to the label {label}, which no layer has")


def _encode_tree(value: Any, *, of_shapes: bool = False) -> Any:
    if isinstance(value, TensorSpec):
        return {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
    if of_shapes and isinstance(value, tuple) and all(isinstance(length, int) for length in value):
        return {"shape": list(value), "dtype": None}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode_tree(item, of_shapes=of_shapes) for item in value]}
    if isinstance(value, dict):
        # JSON has string keys only, and a key that is no string must not collide with one that is.
        keys = (key if isinstance(key, str | int) else repr(key) for key in value)
        items = (_encode_tree(item, of_shapes=of_shapes) for item in value.values())
        return {"dict": [list(pair) for pair in zip(keys, items, strict=True)]}
    return None


def _decode_tree(value: Any, depth: int = 0) -> Any:
    if value is None:
        return None
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if "shape" in _checked(value, dict):
        shape = tuple(_checked(length, int, -1) for length in _checked(value["shape"], list))
        # Shapes of inputs carry no dtype, and only the shape of this specification is used.
        name = "float32" if value["dtype"] is None else value["dtype"]
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}")
        return TensorSpec(shape, DTYPES[name])
    ((kind, raw),) = value.items()
    if kind not in ("tuple", "list", "dict"):
        raise ValueError(f"a structure of unknown kind {kind!r}")
    if kind == "dict":
        return {key: _decode_tree(item, depth + 1) for key, item in _checked(raw, list)}
    items = [_decode_tree(item, depth + 1) for item in _checked(raw, list)]
    return tuple(items) if kind == "tuple" else items


def _decode_label(value: Any) -> Label:
    if len(_checked(value, list)) != 2:
        raise ValueError(f"a label of {len(value)} numbers instead of two")
    return Label((_checked(value[0], int), _checked(value[1], int, 1)))


def _decode_shard(value: Any) -> Shard | None:
    if value is None:
        return None
    dim, count = _checked(value, list)
    return Shard(None if dim is None else _checked(dim, int), None, _checked(count, int))


def _checked(value: Any, kind: type[_Kind], least: int = 0) -> _Kind:
    # True is an int to isinstance, but not a number here.
    if type(value) is not kind:
        raise TypeError(f"a value must be of type {kind.__name__}, not {type(value).__name__}")
    if isinstance(value, int) and not least <= value <= _LARGEST:
        raise ValueError(f"the number {value} is out of range")
    return value
