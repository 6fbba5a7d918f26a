"""Values that are kept beside rows: recorded calls, which can run again, and states of reductions.

In a file they are JSON that names no class, and reading gives only values of Python's and torch's
own types, so reading runs no foreign code. ``docs/disk-format.md`` specifies the form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scio_recorder.errors import CollectError, RecordingError
from scio_recorder.layer import Layer, OperationIdx, RowIdx
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.stores.disk_format.reader import KeptBatches, KeptReader, Packed
from scio_recorder.stores.disk_format.tensor_file import JSON, entries, expect
from scio_recorder.stores.files import RunReader, parsing
from scio_recorder.tensors.copies import refuse_lost
from scio_recorder.tensors.digests import digest_of
from scio_recorder.tensors.properties import DTYPES, dtype_name, is_plain
from scio_recorder.tensors.structures import flatten, fold

# The most bytes between elements of a view that are allocated to restore its strides.
_MAX_EXTENT_BYTES = 1 << 32
# The kinds of containers that are kept, those derived from them not.
_CONTAINERS = (dict, list, tuple, torch.Size)


@dataclass
class KeptCall:
    """One call of a recorded module, or of a function by one.

    Parameters
    ----------
    inputs : Inputs
        The inputs of forward, or of the function.
    moment : Moment or None
        The state in which the module ran; None for a function, whose calls don't run again.
    weights, output : str
        Digests of the module's parameters and of its output, see `digest_of`.
    """

    inputs: Inputs
    moment: Moment | None = None
    weights: str = ""
    output: str = ""


class UnkeepableError(TypeError):
    """A value of a type that can't be kept on disk."""


class KeptCalls:
    """Keeps calls as values that refer to tensors by number: in memory, or for a file.

    Many inputs repeat: masks, position embeddings, tensors that two modules receive, states of
    generators. Tensors of the same content are kept once.

    Parameters
    ----------
    for_file : bool, default False
        Whether values are JSON. In memory any object can be among inputs.
    """

    path = "memory"

    def __init__(self, *, for_file: bool = False) -> None:
        self._for_file = for_file
        self._start()

    def _start(self) -> None:
        self.rows: list[int] = []
        self._values: list[Any] = []
        self._tensors: list[Tensor] = []
        self._numbers: dict[str, int] = {}
        # Those of committed calls: a batch that fails leaves none.
        self._count = 0
        self.num_bytes = 0

    def keep(self, layer: Layer, call: KeptCall) -> dict[str, Any]:
        """Copy the tensors of a call, and return its value for `commit`.

        Parameters
        ----------
        layer : Layer
            The layer, for messages.
        call : KeptCall
            Its inputs and their moment.

        Raises
        ------
        CollectError
            The module received a value that can't be kept on disk.
        """
        inputs, moment = call.inputs, None if call.moment is None else vars(call.moment)
        tree = {"args": inputs.args, "kwargs": inputs.kwargs, "moment": moment}
        leaves, rebuild = flatten(tree)
        try:
            if self._for_file:
                numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
                node: Any = encode(tree, lambda leaf: numbers[id(leaf)])
            else:
                node = _Structure(rebuild([torch.empty(0) for _ in leaves]))
            kept = [self._kept(leaf.detach()) for leaf in leaves]
        except UnkeepableError as error:
            raise CollectError(
                f"layer {layer} received a {error}, which can't be kept on disk: only tensors, "
                "numbers, strings, None, slices, dtypes and devices can be, in tuples, lists and "
                "dicts. "
                "Call the net without it (a cache, by use_cache=False in net.config or among the "
                'keywords of to_inputs=), record another layer, or write store="host"'
            ) from None
        return {"leaves": kept, "call": node, "weights": call.weights, "output": call.output}

    def commit(self, rows: int, values: Mapping[str, Any]) -> None:
        """Count a batch of this many samples, with the results of `keep` by layer.

        Parameters
        ----------
        rows : int
            The number of its samples.
        values : mapping
            What `keep` returned, by the name of the layer.
        """
        self.rows.append(rows)
        self._values.append(values)
        self._count = len(self._tensors)

    def take(self) -> KeptBatches | None:
        """Return everything that was committed since the last time; None for nothing."""
        if not self.rows:
            return None
        taken = KeptBatches(self.rows, self._values, self._tensors[: self._count])
        self._start()
        return taken

    def read(self, number: int) -> tuple[Any, Callable[[int], Tensor]]:
        """Return the values of a batch, and a function that returns their tensors.

        Parameters
        ----------
        number : int
            The batch.
        """
        return self._values[number], self._tensors.__getitem__

    def _kept(self, tensor: Tensor) -> Any:
        """Return the number, shape and strides of a tensor; a copy of one that is not plain.

        Strides decide which kernel runs, and so the last bits of its result. For expanded
        dimensions one element is kept.
        """
        refuse_lost(tensor)
        if not is_plain(tensor):
            if self._for_file:
                raise UnkeepableError(
                    f"{type(tensor).__name__} that is not a plain array in memory"
                )
            return tensor.clone() if tensor.device.type in ("cpu", "meta") else tensor.cpu()
        small = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
        if not _is_regular(small.shape, small.stride(), small.itemsize):
            tensor = small = tensor.contiguous()
        return [self._number(small), list(tensor.shape), list(tensor.stride())]

    def _number(self, tensor: Tensor) -> int:
        # Tensors made in inference mode could not be used outside it.
        with torch.inference_mode(False), torch.no_grad():
            there = tensor.cpu().contiguous()
            key = digest_of(there)
            if key not in self._numbers:
                is_own = there.data_ptr() != tensor.data_ptr() and not there.is_inference()
                self._numbers[key] = len(self._tensors)
                self._tensors.append(there if is_own else there.clone())
                self.num_bytes += there.nbytes
        return self._numbers[key]


class Calls:
    """The calls of a recording.

    Parameters
    ----------
    source : KeptCalls or RunReader
        Their source in memory or on disk.
    architecture : Architecture
        The layers.
    names : iterable of str
        The source's names of layers whose calls are kept.

    Attributes
    ----------
    labels : tuple of (int, int)
        The layers whose calls are kept.
    rows : sequence of int
        The number of samples of each batch.
    """

    def __init__(
        self,
        source: KeptCalls | RunReader,
        architecture: Architecture,
        names: Iterable[Any],
    ) -> None:
        self._source = source
        self._names = {architecture.resolve(name): str(name) for name in names}

        kept = self._kept
        self.rows: Sequence[int] = kept.rows
        self.labels = tuple(self._names) if kept.rows else ()

    @property
    def _kept(self) -> KeptCalls | KeptReader:
        # A reader of a recording can be pickled, but a reader of its calls can't.
        return self._source if isinstance(self._source, KeptCalls) else self._source.kept

    def call(self, number: int, label: RowIdx) -> KeptCall:
        """Return the call of a layer in a batch, in new memory on the CPU.

        Parameters
        ----------
        number : int
            The batch.
        label : (int, int)
            The layer.

        Raises
        ------
        RecordingError
            It is damaged.
        """
        with parsing(f"{self._source.path}, batch {number}, layer {self._names[label]}"):
            read: tuple[Any, Callable[[int], Tensor]] = self._kept.read(number)
            value, tensor = read
            call = _call(value[self._names[label]], tensor)
            if call.moment is None and not isinstance(label, OperationIdx):
                raise ValueError("it does not say in which state the module ran")
            return call


@dataclass
class _Structure:
    """A structure with empty tensors in its places: unlike a function, it can be pickled."""

    value: Any


def _call(kept: Any, tensor: Callable[[int], Tensor]) -> KeptCall:
    try:
        kept_leaves, weights, output = entries(kept, leaves=list, weights=str, output=str)
        leaves = [_restored(leaf, tensor) for leaf in kept_leaves]
        node = kept["call"]
        if isinstance(node, _Structure):
            tree = flatten(node.value)[1](leaves)
        else:
            tree = decode(node, lambda number: leaves[range(len(leaves))[number]])
        inputs, known = Inputs(tree.pop("args"), tree.pop("kwargs")), tree.pop("moment")
        moment = None if known is None else Moment(**known)
    except (AttributeError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(inputs.args, tuple) or not isinstance(inputs.kwargs, dict) or tree:
        raise ValueError("inputs are not a tuple and a dict")
    return KeptCall(inputs, moment, weights, output)


def _restored(leaf: Any, tensor: Callable[[int], Tensor]) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    number, shape, strides = leaf
    dense = tensor(expect(number, int))
    if not _is_regular(dense.shape, strides, dense.itemsize):
        raise ValueError(f"strides {strides} for a tensor {list(dense.shape)}")
    memory = torch.empty_strided(dense.shape, strides, dtype=dense.dtype, device=dense.device)
    return memory.copy_(dense).expand(shape)


def _is_regular(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether no two elements share memory or lie too far apart."""
    extent = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and step < extent:
            return False
        extent += max(0, size - 1) * step
    return extent * itemsize <= _MAX_EXTENT_BYTES


def encode(value: Any, tensor: Callable[[Tensor], int]) -> JSON:
    """Return a node.

    Parameters
    ----------
    value : Any
        Tuples, lists, dicts, numbers, strings, None, slices, dtypes, devices, tensors.
    tensor : callable
        Returns the number that refers to a tensor.

    Raises
    ------
    UnkeepableError
        It holds something else; the message is the name of its type.

    Examples
    --------
    >>> encode((1, [None, math.inf], {"x": torch.float32}, torch.ones(2)), len)
    {'tuple': [1, [None, {'float': 'inf'}], {'dict': [['x', {'dtype': 'float32'}]]}, {'tensor': 2}]}
    """

    def leaf(part: Any) -> JSON:
        kind = type(part)
        if part is None or kind in (bool, int, str):
            return part  # type: ignore[no-any-return]  # its kind was just compared
        if kind is float:
            return part if math.isfinite(part) else {"float": str(part)}
        if isinstance(part, Tensor):
            return {"tensor": tensor(part)}
        if kind is slice:
            return {"slice": [leaf(bound) for bound in (part.start, part.stop, part.step)]}
        if part is ...:
            return {"ellipsis": None}
        if kind is torch.dtype:
            return {"dtype": dtype_name(part)}
        if kind is torch.device:
            return {"device": str(part)}
        raise UnkeepableError(f"{kind.__module__}.{kind.__qualname__}")

    def container(whole: Any, parts: list[tuple[Any, JSON]]) -> JSON:
        kind = type(whole)
        if kind is dict:
            named: JSON = [[k if type(k) is str else encode(k, tensor), node] for k, node in parts]
            return {"dict": named}
        nodes = [node for _, node in parts]
        return nodes if kind is list else {"tuple" if kind is tuple else "size": nodes}

    node: JSON = fold(value, leaf, container, lambda part: type(part) not in _CONTAINERS)
    return node


def decode(node: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Return the value of a node.

    Parameters
    ----------
    node : JSON
        The result of `encode`.
    tensor : callable
        Returns the tensor of a number.

    Raises
    ------
    ValueError, TypeError, LookupError, RuntimeError
        If it is not a node.
    """
    if isinstance(node, list):
        return [decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "dict":
        pairs = [(decode(k, tensor), decode(v, tensor)) for k, v in value]
        return dict(pairs)
    if kind == "tuple":
        return tuple([decode(item, tensor) for item in expect(value, list)])
    if kind == "slice":
        return slice(*[decode(item, tensor) for item in value])
    if kind == "tensor":
        return tensor(expect(value, int))
    return _PLAIN[kind](value)


def pack(state: Any) -> Packed:
    """Return the state of a collection for a commit, with copies of its tensors.

    Examples
    --------
    >>> packed = pack({"sum": torch.ones(2), "limits": [1, math.inf]})
    >>> packed.value
    {'dict': [['sum', {'tensor': 0}], ['limits', [1, {'float': 'inf'}]]]}
    >>> unpack(packed)
    {'sum': tensor([1., 1.]), 'limits': [1, inf]}
    """
    tensors: list[Tensor] = []

    def number(tensor: Tensor) -> int:
        tensors.append(tensor.detach().to("cpu", copy=True))
        return len(tensors) - 1

    try:
        return Packed(encode(state, number), tensors)
    except UnkeepableError as error:
        raise CollectError(
            f"the state of a reduction holds {error}, which can't be kept on disk: use tensors, "
            "numbers, strings, tuples, lists and dicts"
        ) from None


def unpack(packed: Packed) -> Any:
    """Return the value that was packed."""
    numbers = range(len(packed.tensors))
    try:
        return decode(packed.value, lambda number: packed.tensors[numbers[number]])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise RecordingError(f"a recording's state can't be read: {error!r}") from error


_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "ellipsis": lambda _: ...,
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__,
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
    "size": lambda sizes: torch.Size([expect(size, int) for size in sizes]),
}
