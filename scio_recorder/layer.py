"""A layer: one call of a module, with its label and the shapes of its input and output."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from scio_recorder.tensors.structures import fold

__all__ = [
    "DepthIdx",
    "Label",
    "Layer",
    "Operation",
    "OperationIdx",
    "RowIdx",
    "Shard",
    "TensorSpec",
    "counted",
    "describe",
    "few",
    "label_of",
    "text_of",
]

DepthIdx: TypeAlias = tuple[int, int]
_T = TypeVar("_T")

# What nested tensors raise, which have dimensions without a single length.
_WITHOUT_LENGTH = (RuntimeError, ValueError, TypeError, AttributeError)
_PRINTED_LABEL = re.compile(r"\s*([0-9]{1,18})\s*-\s*([0-9]{1,18})\s*")


class OperationIdx(NamedTuple):
    """The key of an operation: a call of a torch function by the own code of a layer.

    Parameters
    ----------
    depth, idx : int
        The label of the layer.
    function : str
        The name of the function, without double underscores.
    index : int
        Which call of that function it is, in this call of the layer's module, from 0.

    Examples
    --------
    >>> key = OperationIdx(3, 2, "softmax", 0)
    >>> str(key), key == (3, 2, "softmax", 0), sorted([key, (3, 3), (3, 2)])[0]
    ('3-2/softmax:0', True, (3, 2))
    """

    depth: int
    idx: int
    function: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name

    def __str__(self) -> str:
        return text_of(self)


# The key of what can be recorded.
RowIdx: TypeAlias = DepthIdx | OperationIdx


class Label(tuple[int, int]):
    """The key of a layer, ``(depth, index)``, printed ``depth-index``.

    It behaves as the tuple does (order, hash, repr), and also equals its printed form.

    Examples
    --------
    >>> label = Label((1, 3))
    >>> label == (1, 3), label == "1-3", str(label), {(1, 3): "found"}[label]
    (True, True, '1-3', 'found')
    """

    __slots__ = ()

    def __str__(self) -> str:
        return text_of(self)

    def __eq__(self, other: object) -> bool:
        return str(self) == other if isinstance(other, str) else tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    # Labels are looked up in dictionaries by the bare tuple.
    __hash__ = tuple.__hash__


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of a tensor.

    Parameters
    ----------
    shape : tuple of int
        Its shape; a dimension of varying length, as in nested tensors, is -1.
    dtype : torch.dtype
        Type of its elements.

    Examples
    --------
    >>> TensorSpec((2, 3), torch.float32).nbytes
    24
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"shape {self.shape} and {self.dtype}"

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; zero if a dimension varies."""
        varies = min(self.shape, default=0) < 0
        return 0 if varies else math.prod(self.shape) * self.dtype.itemsize

    def of(self, rows: int) -> TensorSpec:
        """Return the specification of this many such tensors, stacked.

        Parameters
        ----------
        rows : int
            Length of the new first dimension.

        Returns
        -------
        TensorSpec
            Of shape [rows, ...].
        """
        return TensorSpec((rows, *self.shape), self.dtype)


@dataclass(frozen=True)
class Shard:
    """The part of an activation that one process has, if several share the activation.

    Parameters
    ----------
    dim : int or None
        The dimension along which the shards lie; None if it can't be known.
    index : int or None
        Which of the shards this is; None in a recording from disk, which may hold all shards.
    count : int
        The number of shards; 0 if it can't be known.

    Examples
    --------
    >>> print(Shard(2, 0, 4))
    shard 0 of 4 along dimension 2
    """

    dim: int | None
    index: int | None
    count: int

    def __str__(self) -> str:
        if self.dim is None:
            return "a part that only this process has, along a dimension that can't be known"
        number = "a shard, one" if self.index is None else f"shard {self.index}"
        return f"{number} of {self.count} along dimension {self.dim}"


@dataclass(frozen=True, eq=False)
class Layer:
    """A row of the architecture: one call of a module.

    Parameters
    ----------
    label : Label
        Its key, ``(depth, index)``.
    name : str
        Qualified name of the module, ``""`` for the net itself. If the net holds the module under
        several names, this is the first of them, and each of them selects it.
    module : torch.nn.Module or None
        The module; None in an architecture that was read from disk.
    type_name : str
        Name of the module's class.
    call : int
        0 for the module's first call, in the order in which calls start.
    input_shape : Any
        Shape of the input: a tuple of ints, or a structure of these if the input is a structure.
        None if it did not run.
    num_params : int
        Number of parameters, those of submodules included.
    executed : bool
        Whether it ran at labelling. Only such layers can be recorded.
    completion : float or None
        Its rank among all executed calls in the order in which they returned.
    output_spec : Any
        The output's structure with a ``TensorSpec`` for every tensor.
    shard : Shard or None
        Which shard its output is, if tensor parallelism gives each process a shard of its own.
    called_as : CallingName or None
        If the net holds the module under several names: by which module and name it was called.

    Examples
    --------
    >>> from scio_recorder.nets.labelling.label import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.Linear(4, 2)), input_size=(1, 4))
    >>> layer = architecture[1, 1]
    >>> layer.name, layer.type_name, layer.output_shape
    ('0', 'Linear', (1, 2))
    """

    label: Label
    name: str
    module: nn.Module | None
    type_name: str
    call: int
    input_shape: Any
    num_params: int
    executed: bool
    completion: float | None
    output_spec: Any
    shard: Shard | None = None
    called_as: Any = None

    @property
    def depth(self) -> int:
        """The number of modules around it, which is the first half of the label."""
        return self.label[0]

    @property
    def index(self) -> int:
        """Its place among the layers of its depth, which is the second half of the label."""
        return self.label[1]

    @property
    def output_shape(self) -> Any:
        """Shape of the output, or a structure of shapes; None if it did not run."""
        return shapes_of(self.output_spec)

    def __str__(self) -> str:
        return f"{self.label} {self.name or '(root)'} ({self.type_name})"

    def __repr__(self) -> str:
        return f"<Layer {self}>"


class Operation(Layer):
    """A call of a torch function by the own code of a layer, which returned tensors.

    It is a row as a layer is, and stands wherever one does.

    Attributes
    ----------
    label : OperationIdx
        Its key.
    name : str
        ``NAME/FUNCTION:K``, where NAME is that of the layer: ``"h.3/add:1"``.
    module : torch.nn.Module or None
        The one whose own code made the call; None if it was read from disk.
    type_name : str
        The name of the function.
    call : int
        That of the layer.
    input_shape : None
        Not known.
    num_params : int
        0.
    executed : bool
        Whether it can be recorded. Inside a ``torch.func`` transform it can't.
    completion : float or None
        Its rank between those of the layers that returned before and after, if it is known.
    output_spec : Any
        The output's structure with a ``TensorSpec`` for every tensor.
    shard, called_as : None
        Not known.
    layer : Layer
        The call of the module whose own code made it.
    function, index : str, int
        The name of the function, and which call of it this is, as in `label`.
    file : str
        The file of the line that made it: of the innermost frame outside of torch between the
        operation and the module's ``forward``, or of that ``forward`` if all is torch's own.
    line : int
        The number of that line.
    source : str
        The line.
    attention : Any
        What is known of the attention that it completes; None if it completes none.

    Examples
    --------
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Linear(4, 2), input_size=(1, 4))
    >>> [operation] = rnet.operations().values()
    >>> operation.name, operation.function, operation.index, operation.output_shape
    ('/linear:0', 'linear', 0, (1, 2))
    >>> operation.source
    'return F.linear(input, self.weight, self.bias)'
    """

    label: OperationIdx  # type: ignore[assignment]  # a key of its own kind
    layer: Layer
    file: str
    line: int
    source: str
    attention: Any = None

    def __init__(
        self,
        layer: Layer,
        function: str,
        index: int,
        output_spec: Any,
        line: tuple[str, int, str],
        completion: float | None = None,
        executed: bool = True,
        attention: Any = None,
    ) -> None:
        label: Any = OperationIdx(*layer.label, function, index)
        name = f"{layer.name}/{function}:{index}"
        ran = executed, completion, output_spec
        super().__init__(label, name, layer.module, function, layer.call, None, 0, *ran)
        # Rows are frozen.
        file, number, source = line
        attributes = {"layer": layer, "file": file, "line": number, "source": source}
        vars(self).update(attributes, attention=attention)

    @property
    def depth(self) -> int:
        """The number of modules around it, the one that made it included."""
        return self.layer.depth + 1

    @property
    def function(self) -> str:
        """Name of the function, without double underscores."""
        return self.label.function

    @property
    def index(self) -> int:
        """Which call of the function it is, in this call of the module, from 0."""
        return self.label.index

    @property
    def made_at(self) -> str:
        """A clause that names it as the one that made something, with its line."""
        where = f"{self.file}:{self.line}: {self.source}"
        return f"the operation {self.function}:{self.index} made it at {where}"

    @property
    def place(self) -> str:
        """The line that made it, as ``file:line`` without the folder."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        where = f" ({self.place})" if self.file else ""
        return f"{text_of(self.label)} {self.name}{where}"

    def __repr__(self) -> str:
        return f"<Operation {self}>"


def not_its_label(layer: Layer) -> str:
    """Say that a layer was given where its label is wanted."""
    return f"{layer} is a Layer: give its label, layer.label, which is {tuple(layer.label)}"


def describe(value: Any) -> Any:
    """Return the structure of a value with a ``TensorSpec`` for every tensor.

    Parameters
    ----------
    value : Any
        A tensor or any nesting of tuples, lists, mappings and dataclasses.

    Returns
    -------
    Any
        Mappings and dataclasses become dictionaries. A value that is not a tensor and holds none
        becomes None, so a description keeps nothing alive.

    Examples
    --------
    >>> describe((torch.ones(2, 3), {"scale": 4}))
    (TensorSpec(shape=(2, 3), dtype=torch.float32), {'scale': None})
    """
    return map_leaves(_spec, value)


def shapes_of(value: Any) -> Any:
    """Return a structure of tensors or of their specifications with the bare shape for each.

    Parameters
    ----------
    value : Any
        A structure, or the result of :func:`describe`.

    Returns
    -------
    Any
        The same structure, as :func:`describe` gives it, with tuples of ints.

    Examples
    --------
    >>> shapes_of([TensorSpec((2, 3), torch.float32)])
    [(2, 3)]
    """
    return map_leaves(_shape, value)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun.

    Examples
    --------
    >>> counted(1, "layer"), counted(1200, "pass")
    ('1 layer', '1,200 passes')
    """
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


def few(items: Sequence[_T], most: int, show: Callable[[_T], str] = str) -> str:
    """Return the first of some items as text, and the number of the others.

    Examples
    --------
    >>> few(["fc1", "relu", "fc2"], 2), few(["fc1"], 2, repr)
    ('fc1, relu and 1 more', "'fc1'")
    """
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(show, items[:most])) + more


def text_of(label: RowIdx) -> str:
    """Return the printed form of a label.

    Examples
    --------
    >>> text_of((1, 3)), text_of(OperationIdx(1, 3, "add", 0))
    ('1-3', '1-3/add:0')
    """
    layer = f"{label[0]}-{label[1]}"
    return f"{layer}/{label.function}:{label.index}" if isinstance(label, OperationIdx) else layer


def label_of(key: object) -> Label | None:
    """Return the label given by a pair of integers or by its text; None for anything else.

    Examples
    --------
    >>> label_of("1-3") == label_of((1, 3)) == (1, 3), label_of("features.1")
    (True, None)
    """
    if isinstance(key, str):
        match = _PRINTED_LABEL.fullmatch(key)
        return Label((int(match[1]), int(match[2]))) if match else None
    if not isinstance(key, tuple) or len(key) != 2:
        return None
    try:
        return Label((operator.index(key[0]), operator.index(key[1])))
    except TypeError:
        return None


def plain_label(label: RowIdx) -> RowIdx:
    """Return the label of a layer as a bare tuple: dynamo can't follow the hash of a subclass."""
    return label if isinstance(label, OperationIdx) else (int(label[0]), int(label[1]))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a structure in which a function has replaced everything but the containers.

    Mappings and dataclasses become dictionaries.
    """
    return fold(value, function, _rebuilt, lambda part: isinstance(part, TensorSpec))


def _rebuilt(container: Any, parts: list[tuple[Any, Any]]) -> Any:
    if not isinstance(container, list | tuple):
        return dict(parts)
    items = [item for _, item in parts]
    if isinstance(container, list):
        return items
    # PackedSequence and others want tensors, also when they are copied or unpickled.
    with contextlib.suppress(Exception):
        if hasattr(container, "_make"):
            return type(container)(*items)
    return tuple(items)


def _spec(value: Any) -> TensorSpec | None:
    return TensorSpec(_shape(value), value.dtype) if isinstance(value, Tensor) else None


def _shape(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value.shape if isinstance(value, TensorSpec) else None
    try:
        return tuple(map(int, value.shape))
    except _WITHOUT_LENGTH:
        return tuple(_length(value, dim) for dim in range(value.dim()))


def _length(tensor: Tensor, dim: int) -> int:
    try:
        return int(tensor.size(dim))
    except _WITHOUT_LENGTH:
        return -1
