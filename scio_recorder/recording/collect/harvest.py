"""The sink of ``collect``: hands what layers return to stores and reductions as it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.filesize import decimal
from torch import Tensor, nn

from scio_recorder.errors import CollectError
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.nets.state.random import RandomState
from scio_recorder.recompute.calls import KeptCall, Pool, Weights, digest_of
from scio_recorder.reductions import Reduction
from scio_recorder.stores.buffers import NoRoomError
from scio_recorder.stores.disk_format import TensorSpec
from scio_recorder.tensors.structures import flatten

if TYPE_CHECKING:
    from scio_recorder.nets.architecture import DepthIdx, Layer
    from scio_recorder.recording.collect.options import Transform
    from scio_recorder.stores import Column, StoreWriter

__all__ = ["Harvest", "Lane", "ReducingLane", "StoringLane"]


class Current:
    """The batch that is under way."""

    __slots__ = ("batch", "is_reduced", "rows", "skip", "start")

    def __init__(self) -> None:
        self.batch: Any = None
        self.rows = 0
        # Samples at its beginning that are durable already.
        self.skip = 0
        # The row of the store where its samples begin.
        self.start = 0
        # Whether a reduction may have seen a part of it.
        self.is_reduced = False


class Lane:
    """What becomes of one layer's activations."""

    def __init__(self, layer: Layer, transform: Transform | None, current: Current) -> None:
        self.layer = layer
        self.transform = transform
        self.current = current

    def take(self, activation: Any) -> None:
        """Take in an activation before the net goes on."""
        raise NotImplementedError

    def _transformed(self, activation: Any) -> Tensor:
        """Return the tensor to keep: what was returned, or what the transform makes of it."""
        result = activation
        if self.transform is not None:
            result = self._apply(self.transform, activation)
        if not isinstance(result, Tensor):
            raise CollectError(self._not_a_tensor(activation, result))
        if result.layout != torch.strided or result.is_nested or result.is_quantized:
            raise CollectError(
                f"layer {self.layer} returned a nested, sparse or quantised tensor, which can't "
                "be kept sample by sample: make it dense with transform="
            )
        return result

    def _apply(self, transform: Transform, activation: Any) -> Any:
        is_counted = isinstance(activation, Tensor) and not activation.is_inference()
        before = activation._version if is_counted else 0
        result = transform(activation, self.current.batch)
        if is_counted and activation._version != before:
            raise CollectError(
                f"the transform of layer {self.layer} changed the activation in place, and with it "
                "what the net goes on with: let it return a new tensor"
            )
        return result

    def _not_a_tensor(self, activation: Any, result: Any) -> str:
        if self.transform is not None:
            return (
                f"the transform of layer {self.layer} returned a {type(result).__name__}: return a "
                "tensor [batch, ...]"
            )
        return (
            f"layer {self.layer} returned a {type(activation).__name__}, not a tensor: choose one "
            "with transform, such as transform={"
            f'"{self.layer.label}": lambda activation, batch: activation[0]}}'
        )

    def _check_rows(self, kept: Tensor) -> None:
        rows = self.current.rows
        if kept.ndim == 0 or kept.shape[0] != rows:
            raise CollectError(
                f"layer {self.layer} gave a tensor of shape {tuple(kept.shape)} for a batch of "
                f"{rows} samples, and dimension 0 must count the samples, as in "
                f"{(rows, *kept.shape[1:])}: rearrange it with transform=, or say with sample_ids= "
                "how many samples a batch has"
            )


class StoringLane(Lane):
    """Keeps every sample."""

    def __init__(
        self,
        layer: Layer,
        transform: Transform | None,
        current: Current,
        writer: StoreWriter,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(layer, transform, current)
        self._writer = writer
        self._dtype = dtype
        self._column: Column | None = None
        # Shape and dtype that were checked last: batches are mostly alike.
        self._seen_shape: torch.Size | None = None
        self._seen_rows = -1
        self._seen_dtype: torch.dtype | None = None
        self.rounds = False
        # Sums of squares, in float64: of what rounding took away, and of all.
        self.lost, self.total = 0.0, 0.0
        # Those of the batch that is under way, which may fail.
        self._measured = 0.0, 0.0

    def take(self, activation: Any) -> None:
        """Copy an activation into the store."""
        kept = activation
        if self.transform is not None or type(kept) is not Tensor:
            kept = self._transformed(activation)
        current = self.current
        if (
            kept.shape != self._seen_shape
            or kept.dtype != self._seen_dtype
            or current.rows != self._seen_rows
        ):
            self._check(kept)
        if current.skip:
            kept = kept[current.skip :]
        try:
            column = self._column or self._open(kept)
            column.put(kept, current.start, current.rows - current.skip)
        except NoRoomError as error:
            raise CollectError(self._no_room(error)) from error
        if self.rounds:
            self._measured = _rounding(kept, column.array.narrow(0, current.start, kept.shape[0]))

    def settle(self) -> None:
        """Count the batch, which has ended well."""
        lost, total = self._measured
        self.lost += lost
        self.total += total
        self._measured = 0.0, 0.0

    @property
    def relative_error(self) -> float | None:
        """Norm of what rounding took away over the norm of all; None where nothing is rounded."""
        if not self.rounds:
            return None
        return (self.lost / self.total) ** 0.5 if self.total else 0.0

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample, 0 as long as none was seen."""
        return 0 if self._column is None else self._column.spec.num_bytes

    def _check(self, kept: Tensor) -> None:
        kept = self._transformed(kept) if self.transform is None else kept
        self._check_rows(kept)
        column = self._column
        if column is not None and tuple(kept.shape[1:]) != column.spec.shape:
            raise CollectError(
                f"layer {self.layer} gave samples of shape {tuple(kept.shape[1:])} after samples "
                f"of shape {column.spec.shape}: bring them to one shape with transform=, by "
                "padding or pooling, or reduce the layer"
            )
        if self._seen_dtype not in (None, kept.dtype):
            raise CollectError(
                f"layer {self.layer} gave {kept.dtype} after {self._seen_dtype}: give dtype= and "
                "convert in transform=, or run all batches under the same autocast"
            )
        self._seen_shape, self._seen_dtype = kept.shape, kept.dtype
        self._seen_rows = self.current.rows

    def _open(self, kept: Tensor) -> Column:
        wanted = self._dtype if kept.is_floating_point() else None
        spec = TensorSpec(tuple(kept.shape[1:]), wanted or kept.dtype)
        self.rounds = not _holds_exactly(spec.dtype, kept.dtype)
        self._column = self._writer.column(self.layer.label, spec, kept)
        return self._column

    def _no_room(self, error: NoRoomError) -> str:
        return (
            f"there is no room for layer {self.layer}: {decimal(error.num_bytes)} can't be had in "
            'one piece; write store="disk:PATH", record fewer layers, or reduce them (reduce=, '
            "every=, dtype=, transform=)"
        )


class ReducingLane(Lane):
    """Keeps a running summary, or several."""

    def __init__(
        self,
        layer: Layer,
        transform: Transform | None,
        current: Current,
        reductions: Reduction | list[Reduction],
    ) -> None:
        super().__init__(layer, transform, current)
        self.reductions = reductions
        self._all = reductions if isinstance(reductions, list) else [reductions]

    def take(self, activation: Any) -> None:
        """Hand an activation to the reductions."""
        kept = self._transformed(activation)
        if self.current.skip:
            kept = self._tail(kept)
        self.current.is_reduced = True
        for reduction in self._all:
            try:
                reduction.update(kept, self.current.batch)
            except CollectError as error:
                error.add_note(f"raised while reducing layer {self.layer}")
                raise

    def _tail(self, kept: Tensor) -> Tensor:
        self._check_rows(kept)
        for reduction in self._all:
            if reduction.reads_batch:
                raise CollectError(
                    f"{reduction!r} of layer {self.layer} reads the batch, and the first "
                    f"{self.current.skip} of its {self.current.rows} samples are durable already: "
                    "resume with the batch size of before, or one that divides it"
                )
        return kept[self.current.skip :]


class Harvest:
    """Receives the activations of every pass, and the inputs where those are recorded."""

    def __init__(self, lanes: Mapping[DepthIdx, Lane], current: Current, with_inputs: bool) -> None:
        self.lanes = lanes
        self.current = current
        take = {label: lane.take for label, lane in lanes.items()}
        self.takers = (
            {label: partial(self._take_with_call, label, take[label]) for label in take}
            if with_inputs
            else take
        )
        self._storing = [lane for lane in lanes.values() if isinstance(lane, StoringLane)]
        self._pool = Pool()
        self._calls: dict[DepthIdx, KeptCall] = {}
        self._random: RandomState | None = None
        self._weights = Weights()

    def keep_inputs(self, module: nn.Module, inputs: Inputs) -> KeptCall:
        """Copy what a module's forward is about to receive, and the state in which it will run."""
        leaves, rebuild = flatten(tuple(inputs))
        moment = Moment(module, leaves, self._pool.copy)
        if self._random is not None:
            moment.random.share(self._random)
        self._random = moment.random
        kept = [self._pool.keep(leaf) for leaf in leaves]
        return KeptCall(kept, rebuild, moment, self._weights.digest(module))

    def receive_inputs(self, label: DepthIdx, kept: KeptCall) -> None:
        """Take what `keep_inputs` returned for a layer."""
        self._calls[label] = kept

    def _take_with_call(
        self, label: DepthIdx, take: Callable[[Any], None], activation: Any
    ) -> None:
        call = self._calls.get(label)
        if call is not None:
            call.output = digest_of(activation)
        take(activation)

    def begin(self, batch: Any, rows: int, skip: int, start: int) -> None:
        """Start a batch."""
        current = self.current
        current.batch, current.rows, current.skip, current.start = batch, rows, skip, start
        current.is_reduced = False
        self._calls = {}

    def end(self) -> dict[DepthIdx, KeptCall]:
        """Return the calls of a batch that ended well, to be kept with its samples."""
        self.current.batch = None
        for lane in self._storing:
            lane.settle()
        calls, self._calls = self._calls, {}
        return dict(sorted(calls.items()))


def _holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    try:
        return torch.promote_types(wide, narrow) == wide
    except RuntimeError:
        # The smallest floating-point dtypes take no part in promotion.
        return wide == narrow


def _rounding(exact: Tensor, kept: Tensor) -> tuple[float, float]:
    """Return the sums of squares of what rounding took away, and of all, over finite values.

    What became infinite was taken away whole.
    """
    exact = exact.double()
    rounded = (exact.to(kept.dtype) if exact.device != kept.device else kept).double()
    lost, total = _squares(exact - rounded), _squares(exact)
    if math.isfinite(lost) and math.isfinite(total):
        return lost, total
    exact = torch.where(exact.isfinite(), exact, 0.0)
    rounded = torch.where(rounded.isfinite(), rounded, 0.0)
    return _squares(exact - rounded), _squares(exact)


def _squares(values: Tensor) -> float:
    return float(values.square().sum())
