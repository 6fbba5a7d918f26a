"""Calls that can be run again, on their way to disk and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from scio_recorder.errors import CollectError
from scio_recorder.nets.state.moment import Moment
from scio_recorder.recompute.calls import KeptCall, KeptTensor
from scio_recorder.stores.disk_format import JSON, KeptBatches, RunReader
from scio_recorder.stores.disk_format.faults import parsing
from scio_recorder.stores.disk_format.jsons import dump, expect
from scio_recorder.stores.nodes import Leaf, UnkeepableError, decode, encode
from scio_recorder.tensors.digests import content_key

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx
    from scio_recorder.nets.architecture import Architecture


# What a tensor costs besides its data: entries in two tables, and a checksum.
_TENSOR_BYTES = 512
# States of generators come again and again; what is larger is known by being the same object.
_COMPARED_BYTES = 1 << 16


class CallsToDisk:
    """Collects the calls of the batches of one chunk.

    Parameters
    ----------
    architecture : Architecture
        Names the layers, in messages too.
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._rows: list[int] = []
        self._values: list[JSON] = []
        self._tensors: list[Tensor] = []
        self._numbers: dict[Hashable, int] = {}
        self.num_bytes = 0

    def add(self, rows: int, calls: Mapping[DepthIdx, KeptCall]) -> None:
        """Take the calls of a batch.

        Raises
        ------
        CollectError
            A module received something that can't be kept on disk.
        """
        value: dict[str, JSON] = {}
        for label, call in calls.items():
            layer = self._architecture[label]
            try:
                value[str(layer.label)] = self._encoded(call)
            except UnkeepableError as error:
                raise CollectError(
                    f"layer {layer} received a {error}, which can't be kept on disk: only tensors, "
                    "numbers, strings, None, dtypes and devices can be, in tuples, lists and "
                    f"dicts. {_way_out(str(error))}, record another layer, or write "
                    'store="host"'
                ) from None
        self.num_bytes += len(dump(value))
        self._rows.append(rows)
        self._values.append(value)

    def take(self) -> KeptBatches | None:
        """Return all that was added since the last time; None for nothing."""
        if not self._rows:
            return None
        taken = KeptBatches(self._rows, self._values, self._tensors)
        self._rows, self._values, self._tensors, self._numbers = [], [], [], {}
        self.num_bytes = 0
        return taken

    def _encoded(self, call: KeptCall) -> JSON:
        leaves: list[JSON] = []
        for leaf in call.leaves:
            if not isinstance(leaf, KeptTensor):
                raise UnkeepableError(f"{type(leaf).__name__} that is no plain array in memory")
            leaves.append([self._number(leaf.dense), list(leaf.shape), list(leaf.strides)])
        structure = call.rebuild([Leaf(number) for number in range(len(leaves))])
        return {
            "leaves": leaves,
            "inputs": encode(structure, self._number),
            "moment": encode(call.moment.to_tree(), self._number),
            "weights": call.weights,
            "output": call.output,
        }

    def _number(self, tensor: Tensor) -> int:
        is_small = tensor.nbytes <= _COMPARED_BYTES
        key = content_key(tensor) if is_small else id(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor)
            self.num_bytes += tensor.nbytes + _TENSOR_BYTES
        return self._numbers[key]


class CallsOnDisk:
    """The calls of a recording on disk, read one at a time.

    Parameters
    ----------
    reader : RunReader
        The open recording.
    names : mapping of (int, int) to str
        The layers whose calls are kept, as they are called there.
    """

    def __init__(self, reader: RunReader, names: Mapping[DepthIdx, str]) -> None:
        self._reader = reader
        self._names = names

    @property
    def labels(self) -> Sequence[DepthIdx]:
        """The layers whose calls are kept."""
        return tuple(self._names) if self._reader.kept.rows else ()

    @property
    def rows(self) -> Sequence[int]:
        """How many samples each batch has."""
        return self._reader.kept.rows

    @property
    def num_bytes(self) -> int:
        """What all calls take together."""
        return self._reader.kept.num_bytes

    def call(self, number: int, label: DepthIdx) -> KeptCall:
        """Return the call of a layer in a batch.

        Raises
        ------
        RecordingError
            It is damaged.
        """
        value, tensor = self._reader.kept.read(number)
        with parsing(f"{self._reader.path}, batch {number}, layer {self._names[label]}"):
            return _decoded(value, self._names[label], tensor)


def _way_out(name: str) -> str:
    if "cache" not in name.lower():
        return "Call the net without it"
    return (
        "Call the net without it, by use_cache=False in net.config or in what to_inputs= returns "
        'as keywords, such as {"input_ids": batch, "use_cache": False}'
    )


def _decoded(value: Any, name: str, tensor: Callable[[int], Tensor]) -> KeptCall:
    call = value[name]
    # However often a file refers to a tensor, it is read once.
    read = cache(tensor)
    try:
        leaves = [
            KeptTensor.checked(read(expect(number, int)), shape, strides)
            for number, shape, strides in expect(call["leaves"], list)
        ]
        moment = Moment.from_tree(decode(call["moment"], lambda number: read(expect(number, int))))

        def rebuild(given: Sequence[Any]) -> Any:
            return decode(call["inputs"], _no_tensor, given)

        args, kwargs = rebuild(leaves)
        if not (isinstance(args, tuple) and isinstance(kwargs, dict)):
            raise ValueError("inputs are no tuple and dict")
    except (AttributeError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    digests = expect(call["weights"], str), expect(call["output"], str)
    return KeptCall(leaves, rebuild, moment, *digests)


def _no_tensor(number: int) -> Tensor:
    raise ValueError(f"tensor {number} among inputs is no leaf")
