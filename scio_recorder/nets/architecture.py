"""The labelled architecture: label <-> qualified name <-> call of a module."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, ValuesView
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from torch import nn

from scio_recorder.display.outline import Outline, nested, outline, visible
from scio_recorder.display.page import Outlined
from scio_recorder.errors import LayerNotFoundError, RecordingError
from scio_recorder.layer import (
    DepthIdx,
    Label,
    Layer,
    Operation,
    OperationIdx,
    RowIdx,
    Shard,
    TensorSpec,
    counted,
    few,
    label_of,
    not_its_label,
    shapes_of,
    text_of,
)
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.tensors.properties import DTYPES, dtype_name
from scio_recorder.tensors.structures import fold

_FORMAT = 1
# Beyond this, torch can't address a tensor, and products of lengths would grow without bound.
_LARGEST = 2**63 - 1
_DEEPEST = 64
# What an operation says of the line that made it.
_LINE = {"file": str, "line": int, "source": str}
# Fields of a layer that are written unchanged.
_PLAIN = {"name": str, "type_name": str, "call": int, "executed": bool, "num_params": int}

_SHOWN = 6
_OFFERED, _LISTED = 4, 12
_TRANSFORMERLENS = "docs/how-to/coming-from-transformerlens.md"
# How alike an attribute must be to be offered, from 0 to 1.
_ALIKE = 0.7
# Keys of a residual stream.
_OF_STREAM = re.compile(r"blocks\.\d+\.(resid_\w+|attn_out|mixer_out|mlp_out)")
# A number that is a whole component of a name, such as that of a block.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^./])")
# The way on if a module did not run at labelling.
LABEL_WITH_IT = "label the net with an input at which it runs (input_data=)"


class Architecture(Outlined, Mapping[DepthIdx, Layer]):
    """The layers of a net by label, in the order in which torchinfo lists them.

    Parameters
    ----------
    layers : iterable of Layer
        The rows. torchinfo lists a container twice under one label if its submodules run in
        turn with others; that is one layer.
    names : mapping of str to iterable of (int, int)
        The labels of the rows of each module, for every qualified name that it has in the net: a
        shared module has several.
    operations : iterable of Operation
        Those inside layers that can be looked up as layers are; they are not counted among these.
    num_sharing : int, default 1
        The number of processes that see the same samples, as far as it is known.

    Examples
    --------
    >>> from torch import nn
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> _, architecture = label_net(net, input_size=(1, 4))
    >>> list(architecture)
    [(0, 1), (1, 1), (1, 2)]
    >>> architecture["1-2"] is architecture["1"] is architecture[1, 2]
    True
    >>> print(architecture)
    0-1 Sequential          (1, 3)
      1-1 Linear 0          (1, 3)
      1-2 ReLU 1            (1, 3)
    """

    # The keywords of ``record`` in use, which advice repeats.
    _options: Mapping[str, object] = MappingProxyType({})

    def __init__(
        self,
        layers: Iterable[Layer],
        names: Mapping[str, Iterable[DepthIdx]],
        operations: Iterable[Operation] = (),
        num_sharing: int = 1,
    ) -> None:
        self._names = MappingProxyType({name: tuple(labels) for name, labels in names.items()})
        self.operations: Mapping[OperationIdx, Operation] = MappingProxyType(
            {operation.label: operation for operation in operations}
        )
        self._take({layer.label: layer for layer in layers})
        self.num_sharing = num_sharing

    def _take(self, rows: Mapping[DepthIdx, Layer]) -> None:
        self._rows: Mapping[DepthIdx, Layer] = MappingProxyType(rows)
        self._known: dict[Any, Layer] = {**rows, **self.operations}

    def __getitem__(self, key: RowIdx | str) -> Layer:
        try:
            # Most keys are labels, or tuples that equal one.
            row = self._known.get(key)
        except TypeError:
            row = None
        return row or self._known[self.resolve(key)]

    def __iter__(self) -> Iterator[DepthIdx]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def values(self) -> ValuesView[Layer]:
        """Return the layers, in order."""
        return self._rows.values()

    # A proxy can't be pickled, and the index by module must not survive a copy of the modules.
    def __reduce__(self) -> tuple[Any, ...]:
        operations = tuple(self.operations.values())
        return type(self), (tuple(self._rows.values()), dict(self._names), operations)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Architecture):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"<Architecture of {counted(len(self), 'layer')}, fingerprint {self.fingerprint[:12]}>"
        )

    def __str__(self) -> str:
        rows = nested(self.values())
        titles = [_title(layer) for layer in rows]
        width = max(map(len, titles), default=0) + 8
        shapes = [_shape_text(layer) for layer in rows]
        lines = [f"{title:<{width}}{shape}" for title, shape in zip(titles, shapes, strict=True)]
        return "\n".join(lines)

    def mark(self, shards: Mapping[DepthIdx, Shard | None], num_sharing: int = 1) -> None:
        """Note the shards that layers return in this process.

        Parameters
        ----------
        shards : mapping
            By label; None for layers that return their whole output. Other layers stay as they are.
        num_sharing : int
            The number of processes that see the same samples.
        """
        self.num_sharing = num_sharing
        self._take(
            {
                label: dataclasses.replace(row, shard=shards.get(label, row.shard))
                for label, row in self._rows.items()
            }
        )

    def with_operations(self, operations: Iterable[Operation]) -> Self:
        """Return the same layers with other operations inside them.

        Parameters
        ----------
        operations : iterable of Operation
            Those that can be looked up.
        """
        return type(self)(self._rows.values(), self._names, operations, self.num_sharing)

    def around(
        self, labels: Iterable[RowIdx], options: Mapping[str, object] = MappingProxyType({})
    ) -> Self:
        """Return the same layers, of the operations only all calls of the functions of some.

        Parameters
        ----------
        labels : iterable of (int, int) or OperationIdx
            Those of layers don't matter.
        options : mapping, optional
            The keywords of ``record`` with which they are recorded, for `recording_also`.
        """
        chosen = [self.operations[label] for label in labels if isinstance(label, OperationIdx)]
        if not self.operations and options == self._options:
            return self
        functions = {(id(row.module), row.function) for row in chosen}
        rows = self.operations.values()
        made = self.with_operations(
            row for row in rows if (id(row.module), row.function) in functions
        )
        made._options = options
        return made

    def recording_also(self, key: str, **options: object) -> str:
        """Return the call that records another layer as well, and keeps what is chosen already.

        Parameters
        ----------
        key : str
            The layer, as code.
        **options
            Keywords that it needs.

        Examples
        --------
        >>> Architecture([], {}).recording_also('"1-3"', inputs=True)
        'rnet.record(*rnet.recording, "1-3", inputs=True)'
        """
        keywords = [f", {name}={value!r}" for name, value in {**options, **self._options}.items()]
        return f"rnet.record(*rnet.recording, {key}{''.join(keywords)})".replace("'", '"')

    @property
    def names(self) -> tuple[str, ...]:
        """All qualified names in the net, including aliases of shared modules."""
        return tuple(self._names)

    @cached_property
    def hookable(self) -> Mapping[nn.Module, str]:
        """The modules of the rows that take hooks, with their names."""
        modules = {row.module: row.name for row in self.values() if row.module is not None}
        return {module: name for module, name in modules.items() if takes_hooks(module)}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over everything that gives labels their meaning.

        Shapes are left out: the batch size must not matter.
        """
        rows = [
            [str(row.label), row.name, row.type_name, row.call, row.executed, row.num_params]
            for row in self.values()
        ]
        text = json.dumps(rows, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def resolve(self, key: object) -> RowIdx:
        """Return the label of a key.

        Parameters
        ----------
        key : (int, int), OperationIdx, str or torch.nn.Module
            ``(1, 3)``, ``"1-3"``, a qualified name that stands for one layer only, or a module; or
            ``"1-3/add:0"`` and the like for an operation.

        Returns
        -------
        (int, int) or OperationIdx
            A label of this architecture.

        Raises
        ------
        LayerNotFoundError
            The key names no layer, or a module that ran several times.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> label_net(nn.Sequential(nn.ReLU()), input_size=(1, 4))[1].resolve("0")
        (1, 1)
        """
        rows = self.rows_at(key)
        labels = [label for label in rows if self._known[label].executed] or [*rows]
        if not labels:
            raise LayerNotFoundError(explain_absence(self, key))
        if len(labels) > 1:
            raise LayerNotFoundError(_ambiguous(key, labels))
        return labels[0]

    def rows_at(self, key: object) -> Collection[RowIdx]:
        """Return the labels of all rows that a key stands for, whether they ran or not.

        Parameters
        ----------
        key : object
            As for :meth:`resolve`; a name, a module and the text of operations may have several.

        Returns
        -------
        collection of (int, int) or OperationIdx
            Empty for anything else.
        """
        if self.means_operation(key):
            return self.operations_of(key)
        label = self._label_at(key)
        if label is not None:
            return (label,)
        if isinstance(key, nn.Module):
            return [row.label for row in self.values() if row.module is key]
        return self._names.get(key, ()) if isinstance(key, str) else ()

    def means_operation(self, key: object) -> bool:
        """Whether a key or a selector is one of operations: it has a slash, or four parts.

        Parameters
        ----------
        key : object
            Any. The name of a module that has a slash means this module.
        """
        has_place = "/" in key if isinstance(key, str) else isinstance(key, tuple) and len(key) == 4
        return has_place and key not in self._names

    def labels_of(self, name: str) -> tuple[DepthIdx, ...]:
        """Return the labels of the executed calls of a module.

        Parameters
        ----------
        name : str
            A qualified name. A shared module has several, and any of them works.

        Returns
        -------
        tuple of (int, int)
            Sorted by when the calls started; empty for a name that is not in the net.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> relu = nn.ReLU()
        >>> label_net(nn.Sequential(relu, relu), input_size=(1, 4))[1].labels_of("0")
        ((1, 1), (1, 2))
        """
        rows = self._names.get(name, ())
        return tuple([label for label in rows if self._rows[label].executed])

    def rows_of(self, name: str) -> tuple[DepthIdx, ...]:
        """Return the labels of all rows of a module, including rows that did not run.

        Parameters
        ----------
        name : str
            A qualified name. A shared module has several, and any of them works.

        Returns
        -------
        tuple of (int, int)
            In the order of the architecture.
        """
        return self._names.get(name, ())

    def calls(self, module: nn.Module) -> tuple[DepthIdx, ...]:
        """Return the labels of the executed calls of a module.

        Parameters
        ----------
        module : torch.nn.Module
            A module of the net.

        Returns
        -------
        tuple of (int, int)
            In the order in which the calls returned. It differs from the order in which they
            started if a module calls itself.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> net = nn.Sequential(nn.ReLU())
        >>> label_net(net, input_size=(1, 4))[1].calls(net[0])
        ((1, 1),)
        """
        return self._calls.get(id(module), ())

    def in_order(self, labels: Iterable[RowIdx]) -> list[RowIdx]:
        """Return labels in the order of execution, which is the order in which calls return.

        All lists of layers have this order. Trees don't.

        Parameters
        ----------
        labels : iterable of (int, int)
            Labels of this architecture. Those of layers that did not run come first.

        Returns
        -------
        list of (int, int)
            The same labels.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> _, architecture = label_net(nn.Sequential(nn.ReLU(), nn.Tanh()), input_size=(1, 2))
        >>> architecture.in_order(architecture)
        [(1, 1), (1, 2), (0, 1)]
        """
        # A layer that did not run has none, and comes first.
        return sorted(labels, key=self._rank)

    def _rank(self, label: RowIdx) -> tuple[float, RowIdx]:
        completion = self._known[label].completion
        return -1 if completion is None else completion, label

    def enclosing(self, label: RowIdx) -> list[DepthIdx]:
        """Return the calls inside which a layer ran, the nearest first, without the layer itself.

        Parameters
        ----------
        label : (int, int)
            The layer.

        Returns
        -------
        list of (int, int)
            Layers that started before it and returned after it.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> net = nn.Sequential(nn.Sequential(nn.ReLU()))
        >>> label_net(net, input_size=(1, 2))[1].enclosing((2, 1))
        [(1, 1), (0, 1)]
        """
        if isinstance(label, OperationIdx):
            owner = self.operations[label].layer.label
            return [owner, *self.enclosing(owner)]
        # Rows stand in the order in which calls start.
        ended = self._rows[label].completion
        enclosing: list[DepthIdx] = []
        for row in self._rows.values():
            if row.label == label or ended is None:
                break
            if row.completion is not None and row.completion > ended:
                enclosing.append(row.label)
        return enclosing[::-1]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the modules as plain values that JSON can hold.

        Returns
        -------
        dict
            The argument of :meth:`from_dict`.

        Examples
        --------
        >>> from torch import nn
        >>> from scio_recorder.nets.labelling.label import label_net
        >>> _, architecture = label_net(nn.Sequential(nn.ReLU()), input_size=(1, 4))
        >>> Architecture.from_dict(architecture.to_dict()) == architecture
        True
        """
        layers = [_encode_layer(layer) for layer in self.values()]
        names = {name: list(map(list, labels)) for name, labels in self._names.items()}
        plain: dict[str, Any] = {"format": _FORMAT, "layers": layers, "names": names}
        if self.operations:
            plain["operations"] = [_encode_operation(row) for row in self.operations.values()]
        return {**plain, "fingerprint": self.fingerprint}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read the result of :meth:`to_dict`, without trusting it.

        Parameters
        ----------
        data : dict
            The plain values.

        Returns
        -------
        Architecture
            Without modules.

        Raises
        ------
        RecordingError
            The data are damaged, or were changed after they were written.

        Examples
        --------
        >>> Architecture.from_dict({})
        Traceback (most recent call last):
        scio_recorder.errors.RecordingError: architecture: entry 'format' is missing
        """
        try:
            layers, names, written = _decode(data)
            operations = _decode_operations(data, layers)
        # Any value may be anywhere, so reading it can fail in any of these ways.
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            problem = f"entry {error} is missing" if isinstance(error, KeyError) else str(error)
            raise RecordingError(f"architecture: {problem}") from error
        architecture = cls(layers, names, operations)
        if written != architecture.fingerprint:
            raise RecordingError(
                f"architecture: its fingerprint is {architecture.fingerprint}, but {written!r} is "
                "stored with it: the description was changed after it was written"
            )
        return architecture

    @cached_property
    def _calls(self) -> dict[int, tuple[DepthIdx, ...]]:
        calls: dict[int, list[DepthIdx]] = {}
        for row in map(self._known.__getitem__, self.in_order(self)):
            if row.executed and row.module is not None:
                calls.setdefault(id(row.module), []).append(row.label)
        return {key: tuple(labels) for key, labels in calls.items()}

    def operations_of(self, key: object) -> list[OperationIdx]:
        """Return the operations that an ``OperationIdx`` or a text stands for.

        Parameters
        ----------
        key : OperationIdx or str
            ``LAYER/FUNCTION``, for all calls of the function, or ``LAYER/FUNCTION:K``. Both sides
            may be globs; without anything before the slash it is of the root.
        """
        if not isinstance(key, str):
            operation = self.operations.get(key)  # type: ignore[call-overload]  # any tuple of four
            return [] if operation is None else [operation.label]
        layer, _, function = key.rpartition("/")
        function, _, index = function.partition(":")
        layers = self._layers_at(layer)
        return [
            label
            for label in self.operations
            if (label.depth, label.idx) in layers
            and fnmatch.fnmatchcase(label.function, function)
            and index in ("", str(label.index))
        ]

    def _label_at(self, key: object) -> DepthIdx | None:
        """Return the label that a key is; None if it is none of a row."""
        label = label_of(key)
        if label is None or label not in self._rows:
            return None
        if isinstance(key, str) and self._names.get(key, (label,)) != (label,):
            named = self._names[key]
            raise LayerNotFoundError(
                f"{key!r} is the label of {self._known[label]}, and the name of "
                f"{self._known[named[0]]}: for the label write {tuple(label)}, for the name the "
                f"module, rnet.net.get_submodule({key!r}), or a pattern, '[{key[0]}]{key[1:]}'"
            )
        return label

    def _layers_at(self, text: str) -> set[DepthIdx]:
        label = self._label_at(text)
        if label is not None:
            return {label}
        names = [text] if text in self._names else fnmatch.filter(self._names, text)
        return {label for name in names for label in self._names[name]}

    def _outline(self) -> Outline:
        return outline("Architecture", list(self.values()), None)


def shown(key: object) -> str:
    """Return how a message names a key or a selector."""
    if isinstance(key, nn.Module):
        return f"the {type(key).__name__} that was given"
    return str(getattr(key, "__qualname__", None) or repr(key))


def explain_absence(architecture: Architecture, key: Any) -> str:
    """Return a sentence on a key that stands for no layer that ran."""
    label = label_of(key)
    if architecture.means_operation(key):
        return no_such_operation(key, architecture)
    if isinstance(key, str) and key in architecture.names:
        return f"module {key!r} did not run at labelling, so it has no label: {LABEL_WITH_IT}"
    if label is not None:
        return no_such_label(label, architecture)
    if isinstance(key, str):
        hint = "; a key is one layer, and patterns are for record(...)" * ("*" in key)
        return no_such_name(key, architecture.names) + hint
    return _not_a_key(key, architecture.names)


def _ambiguous(key: object, labels: list[RowIdx]) -> str:
    what = "operations" if isinstance(labels[0], OperationIdx) else "calls of a module"
    return (
        f"{shown(key)} is ambiguous, since it stands for {len(labels)} {what}, "
        f"{few(labels, _SHOWN, text_of)}: write one of these, such as {text_of(labels[0])!r}"
    )


def _not_a_key(key: object, names: Collection[str]) -> str:
    if isinstance(key, Layer):
        return not_its_label(key)
    if isinstance(key, nn.Module):
        return f"{shown(key)} is no module of this network with a layer"
    hint = f', here "{key}"' if str(key) in names else ""
    return f'{key!r} names no layer: write (1, 3), "1-3" or a qualified name{hint}'


def _title(layer: Layer) -> str:
    name = f" {layer.name}" if layer.name else ""
    return visible(f"{'  ' * layer.depth}{layer.label} {layer.type_name}{name}")


def _shape_text(layer: Layer) -> str:
    if not layer.executed:
        return "(did not run)"
    return f"{layer.output_shape}" + (f", {layer.shard}" if layer.shard else "")


# -- plain values that JSON can hold ---------------------------------------------------------------


def _encode_layer(layer: Layer) -> dict[str, Any]:
    return {
        "label": list(layer.label),
        **{name: getattr(layer, name) for name in _PLAIN},
        "completion": layer.completion,
        "input_shape": _encode_tree(layer.input_shape, _is_shape),
        "output_spec": _encode_tree(layer.output_spec, _is_spec),
        **({} if layer.shard is None else {"shard": [layer.shard.dim, layer.shard.count]}),
    }


def _encode_tree(value: Any, is_leaf: Callable[[Any], bool]) -> Any:
    # Most layers receive and return one tensor.
    is_one = value is None or is_leaf(value)
    return _encode_leaf(value) if is_one else fold(value, _encode_leaf, _encode_container, is_leaf)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and {*map(type, value)} <= {int}


def _is_spec(value: Any) -> bool:
    return isinstance(value, TensorSpec)


def _encode_leaf(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
    return {"shape": list(value), "dtype": None} if isinstance(value, tuple) else None


def _encode_container(container: Any, parts: list[tuple[Any, Any]]) -> Any:
    if isinstance(container, tuple | list):
        kind = "tuple" if isinstance(container, tuple) else "list"
        return {kind: [item for _, item in parts]}
    # JSON has string keys only, and a key that is no string must not collide with one that is.
    return {"dict": [[key if isinstance(key, str | int) else repr(key), i] for key, i in parts]}


def _decode(data: Any) -> tuple[list[Layer], dict[str, tuple[Label, ...]], Any]:
    if data["format"] != _FORMAT:
        raise ValueError(
            f"format {data['format']!r} is unknown; this version reads format {_FORMAT}"
        )
    layers = [_decode_layer(row) for row in data["layers"]]
    names = {name: tuple(map(_decode_label, labels)) for name, labels in data["names"].items()}
    known = {layer.label for layer in layers}
    if len(known) != len(layers):
        raise ValueError("two layers have the same label")
    if sum(layer.executed for layer in layers) != len(
        {layer.completion for layer in layers} - {None}
    ):
        raise ValueError("the order in which layers returned is not an order")
    if unknown := [label for labels in names.values() for label in labels if label not in known]:
        raise ValueError(f"a name refers to the label {unknown[0]}, which no layer has")
    return layers, names, data["fingerprint"]


def _decode_layer(row: Any) -> Layer:
    plain: dict[str, Any] = {name: row[name] for name in _PLAIN}
    for name, kind in _PLAIN.items():
        if type(plain[name]) is not kind:
            raise TypeError(f"{name} must be of type {kind.__name__}, not {plain[name]!r}")
    completion, shard = row["completion"], row.get("shard")
    if plain["executed"] == (completion is None):
        raise ValueError("a layer has a completion if, and only if, it ran")
    return Layer(
        label=_decode_label(row["label"]),
        module=None,
        input_shape=shapes_of(_decode_tree(row["input_shape"])),
        completion=None if completion is None else _number(completion),
        output_spec=_decode_tree(row["output_spec"]),
        shard=None if shard is None else _decode_shard(*shard),
        **plain,
    )


def _encode_operation(operation: Operation) -> dict[str, Any]:
    return {
        "label": list(operation.label),
        "completion": operation.completion,
        "output_spec": _encode_tree(operation.output_spec, _is_spec),
        **{name: getattr(operation, name) for name in _LINE},
    }


def _decode_operations(data: Any, layers: Iterable[Layer]) -> list[Operation]:
    around = {layer.label: layer for layer in layers}
    operations = [_decode_operation(row, around) for row in data.get("operations", ())]
    if len({row.label for row in operations}) != len(operations):
        raise ValueError("two operations have the same label")
    return operations


def _decode_operation(row: Any, around: Mapping[Label, Layer]) -> Operation:
    depth, idx, function, index = row["label"]
    completion = row["completion"]
    line = {name: row[name] for name in _LINE}
    if [type(function), *map(type, line.values())] != [str, *_LINE.values()]:
        raise TypeError(f"the operation {row['label']!r} has an entry of another type")
    if type(completion) not in (int, float) or not -1 <= completion <= _LARGEST:
        raise ValueError(f"the number {completion!r} is out of range")
    layer, spec = around[_decode_label((depth, idx))], _decode_tree(row["output_spec"])
    where: Any = tuple(line.values())
    return Operation(layer, function, _number(index), spec, where, completion)


def _decode_tree(value: Any, depth: int = 0) -> Any:
    if value is None:
        return None
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if "shape" in value:
        # Shapes of inputs carry no dtype, and only the shape of this specification is used.
        name = "float32" if value["dtype"] is None else value["dtype"]
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}")
        return TensorSpec(tuple(_number(length, -1) for length in value["shape"]), DTYPES[name])
    ((kind, items),) = value.items()
    if kind == "dict":
        return {key: _decode_tree(item, depth + 1) for key, item in items}
    return {"tuple": tuple, "list": list}[kind](_decode_tree(item, depth + 1) for item in items)


def _decode_label(value: Any) -> Label:
    depth, index = value
    return Label((_number(depth), _number(index, 1)))


def _decode_shard(dim: Any, count: Any) -> Shard:
    return Shard(None if dim is None else _number(dim), None, _number(count))


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise ValueError(f"the number {value!r} is out of range")
    return value


# -- messages about a label or a name that no layer has, and names that are like it ----------------


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


def no_such_operation(key: Any, architecture: Architecture) -> str:
    """Return a sentence: no operation is known by a key, and which ones are near."""
    text = key if isinstance(key, str) else text_of(OperationIdx(*key))
    layer, _, call = text.rpartition("/")
    function = call.partition(":")[0]
    inside = architecture.operations_of(f"{layer}/*")
    calls = architecture.operations_of(f"{layer}/{function}")
    if calls:
        known = dict.fromkeys(f"{label.function}:{label.index}" for label in calls)
        hint = f"there are {few([*known], _SHOWN, repr)}"
    elif inside:
        hint = offer(function, dict.fromkeys(label.function for label in inside))
    elif layer in architecture.names or label_of(layer) in architecture:
        hint = "its own code calls none that is known here"
    else:
        hint = no_such_name(layer, architecture.names)
    return f"no operation is {text!r}: {hint}"


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
    if _OF_STREAM.fullmatch(wanted):
        return f'write rnet.residual_stream()["{wanted}"], which is a label'
    close = fnmatch.filter(known, f"*.{wanted}") or _without_ends(wanted, known)
    close = close or _close(wanted, known)
    close = close or _of_types(wanted, types or {})
    if close:
        return _closest_are(_joined(close)[:_OFFERED])
    return f"there are {few(_overview(known), _LISTED, repr) or 'none'}"


def _without_ends(wanted: str, known: list[str]) -> list[str]:
    """Return the name that one is of which a variable or a parameter is the first or last word."""
    ends = wanted.partition(".")[2], re.sub(r"\.(weight|bias)$", "", wanted)
    return [name for name in known if name in ends]


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
