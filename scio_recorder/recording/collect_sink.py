"""The sink of a pass that is collected: what stores or reduces the outputs of each layer."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.filesize import decimal
from torch import Tensor

from scio_recorder.errors import CollectError, raise_of_caller
from scio_recorder.layer import Layer, Operation, RowIdx, TensorSpec, text_of
from scio_recorder.nets.attention import Attention
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.recording.options import LayerOptions, Transform
from scio_recorder.recording.row_kinds import ContinuedPass
from scio_recorder.recording.rows import BatchRows
from scio_recorder.reductions import Reduction
from scio_recorder.reductions.base import SampleReduction, several, states_of
from scio_recorder.stores import Column, State, StoreWriter
from scio_recorder.stores.disk_format.reader import Ids
from scio_recorder.stores.disk_format.tensor_file import expect
from scio_recorder.stores.kept_inputs import KeptCall, KeptCalls
from scio_recorder.stores.store import NoRoomError
from scio_recorder.tensors.copies import gathered, refuse_lost
from scio_recorder.tensors.digests import WeightDigests, digest_of
from scio_recorder.tensors.properties import has_samples, version_of, without_lazy_sign
from scio_recorder.tensors.structures import tensors


@dataclass(slots=True, eq=False)
class Batch:
    """A batch of a collection, from its beginning to its end: what of it counts, and as what.

    Parameters
    ----------
    loaded : any
        The loader's batch, which transforms and reductions receive.
    number : int
        Its number, for messages.
    ids : sequence
        The ids of its samples, without repeats of a sampler.
    rows : BatchRows
        The rows to keep.
    num_rows : int
        The number of rows of these samples, durable or not.
    start : int
        The row of the store at which its rows begin.
    skip : int
        The number of samples at its beginning that are durable already.
    is_part : bool
        Whether samples at one of its ends are not kept: durable ones, or repeats.
    is_taken : bool
        Whether it is one of those to take.
    is_new : bool
        Whether something in it is to be kept.
    continued : ContinuedPass, optional
        The pass, if it may continue samples of an earlier one.
    """

    loaded: Any
    number: int
    ids: Ids
    rows: BatchRows
    num_rows: int
    start: int
    skip: int
    is_part: bool
    is_taken: bool
    is_new: bool
    continued: ContinuedPass | None = None
    # Whether a reduction may have received a part of it.
    is_reduced: bool = field(default=False, init=False)
    # Sums of squares of rounding errors, and of all values, by layer.
    rounding: dict[RowIdx, tuple[float, float]] = field(default_factory=dict, init=False)
    # What `by` of reductions gives, by the id of the function: each layer asks for the same.
    labels: dict[int, Any] = field(default_factory=dict, init=False)
    # What reductions receive once the pass has succeeded.
    waiting: dict[RowIdx, Tensor] = field(default_factory=dict, init=False)


@dataclass
class LayerSink(abc.ABC):
    """Receives the outputs of one layer."""

    options: LayerOptions
    layer: Layer
    transform: Transform | None
    # Whether the lengths of some batch have shown what the layer's dimensions mean.
    is_known: bool = field(default=False, init=False)

    @abc.abstractmethod
    def receive(self, batch: Batch, activation: Any) -> None:
        """Take what the layer returned for a batch."""

    def follow(self, batch: Batch, activation: Any) -> None:
        """Take part in what all processes do with an output that this one does not keep."""
        self._transformed(batch, activation)

    def _check_rows(self, batch: Batch, kept: Tensor) -> None:
        """Refuse a tensor whose leading dimensions are not those of the batch."""
        is_meant = self.transform is not None
        misfit = batch.rows.misfit(
            self.layer, kept, is_transformed=is_meant, is_known=self.is_known
        )
        if misfit:
            raise CollectError(f"{misfit}: {self._rearranged(batch.rows, kept)}")
        self.is_known = True

    def _rearranged(self, rows: BatchRows, kept: Tensor) -> str:
        """Return how a tensor gets the leading dimensions of the batch."""
        selector = self.options.selector_for(self.layer.label)
        if self.transform is not None:
            return (
                f"let it return [{', '.join(rows.dims)}, ...]; to transform only some layers, "
                f'write transform={{"{selector}": lambda activation, batch: ...}}'
            )
        code, condition = "...", ""
        times, rest = divmod(kept.shape[0] if kept.ndim else 0, rows.num_samples or 1)
        if times > 1 and not rest:
            code = f"activation.unflatten(0, (-1, {times}))"
            condition = f", if it has {times} lines of each sample, one sample after the other"
        ids = ", or let sample_ids= give one id for each sample of the batch" * rows.are_samples
        others = self.options.leaving_out(self.layer.label, rows.labelled)
        return (
            f'rearrange it with transform={{"{selector}": lambda activation, batch: {code}}}'
            f"{condition}; or leave the layer out{ids}{others}"
        )

    def _transformed(self, batch: Batch, activation: Any) -> Tensor:
        """Return the tensor to keep: the layer's output, or the result of the transform."""
        refuse_lost(*tensors(activation))
        result = activation
        if self.transform is not None:
            result = self._apply(self.transform, batch, activation)
        if not isinstance(result, Tensor):
            raise CollectError(self._not_a_tensor(batch, activation, result))
        if not has_samples(result):
            raise CollectError(
                f"layer {self.layer} returned a nested, sparse, quantised or masked tensor, which "
                "can't be kept sample by sample: make it a plain one with transform="
            )
        kept = without_lazy_sign(gathered(result))
        # A net may differentiate in its forward: kept tensors are detached there, too.
        return kept.detach() if kept.requires_grad else kept

    def _apply(self, transform: Transform, batch: Batch, activation: Any) -> Any:
        received = tensors(activation)
        before = list(map(version_of, received))
        try:
            result = transform(activation, batch.loaded)
        except Exception as error:
            raise_of_caller(f"the transform of layer {self.layer}", error)
        if list(map(version_of, received)) != before:
            raise CollectError(
                f"the transform of layer {self.layer} changed the activation in place, and so the "
                "input of later layers: let it return a new tensor"
            )
        return result

    def _not_a_tensor(self, batch: Batch, activation: Any, result: Any) -> str:
        if self.transform is not None:
            is_attention = isinstance(result, Attention)
            kind = "an Attention" if is_attention else f"a {type(result).__name__}"
            tensor = "such as attention.weights(queries=[-1])" if is_attention else "[batch, ...]"
            return f"the transform of layer {self.layer} returned {kind}: return a tensor {tensor}"
        selector = self.options.selector_for(self.layer.label)
        value = f"returned a {type(activation).__name__}, not a tensor"
        if not self.options.counts_calls:
            value = 'has a tuple of what its calls returned, since calls="any"'
        return (
            f"layer {self.layer} {value}: choose one "
            f'with transform, such as transform={{"{selector}": lambda activation, batch: '
            f"activation{_first_of(activation)}}}"
            f"{self.options.leaving_out(self.layer.label, batch.rows.labelled)}"
        )


def _first_of(activation: Any) -> str:
    """Return the code that takes the first tensor out of a structure."""
    if isinstance(activation, tuple | list):
        return "[0]"
    if isinstance(activation, Mapping):
        return f"[{next(iter(activation.keys()), 0)!r}]"
    attributes = getattr(activation, "__dict__", {}).items()
    return "." + next((name for name, value in attributes if isinstance(value, Tensor)), "name")


@dataclass
class StoreSink(LayerSink):
    """Keeps every row.

    Most batches are alike. Once an output was checked and kept unchanged, the next one with its
    shape and dtype goes straight to its place, since every layer of every batch pays for all work
    between the hook and the copy.
    """

    writer: StoreWriter
    # Sums of squares of the rounding errors, and of all values; None if nothing is rounded.
    sums: tuple[float, float] | None = None
    _column: Column | None = None
    # The shape of a row of activations that need no check; that of no row if each needs one.
    _row_shape: tuple[int, ...] = (-1,)
    _dtype: torch.dtype | None = None

    def receive(self, batch: Batch, activation: Any) -> None:
        """Copy an activation into the store."""
        if (
            type(activation) is Tensor
            and activation.dtype is self._dtype
            and activation.shape == batch.rows.shape + self._row_shape
        ):
            self._put(batch, activation.detach() if activation.requires_grad else activation)
        else:
            self._receive_checked(batch, activation)

    @torch.no_grad()
    def _receive_checked(self, batch: Batch, activation: Any) -> None:
        kept = self._transformed(batch, activation)
        self._check(batch, kept)
        place = self._put(batch, kept)
        if self.sums is not None:
            batch.rounding[self.layer.label] = _rounding(batch.rows.choose(kept), place)
        elif self.transform is None:
            self._row_shape = tuple(place.shape[1:])

    def _put(self, batch: Batch, kept: Tensor) -> Tensor:
        """Write the rows to keep to their place."""
        rows = batch.rows
        try:
            column = self._column or self._open(rows.choose(kept))
            place = column.place(batch.start, rows.num_rows)
        except NoRoomError as error:
            raise CollectError(
                f"there is no room for layer {self.layer}: {decimal(error.num_bytes)} can't be "
                'allocated in one piece; write store="disk:PATH", record fewer layers, or reduce '
                "them (reduce=, every=, dtype=, transform=)"
            ) from error
        rows.choose_into(place, kept)
        return place

    def _check(self, batch: Batch, kept: Tensor) -> None:
        self._check_rows(batch, kept)
        rows, column = batch.rows, self._column
        unit = "sample" if rows.are_samples else "row"
        shape = tuple(kept.shape[len(rows.shape) :])
        if column is not None and shape != column.spec.shape:
            of_texts = ", or write rows=Tokens() for texts that differ in length"
            raise CollectError(
                f"layer {self.layer} gave {unit}s of shape {shape} after {unit}s of "
                f"shape {column.spec.shape}: bring them to one shape with transform=, by padding "
                f"or pooling, or reduce the layer{of_texts if unit == 'sample' else ''}"
            )
        if self._dtype not in (None, kept.dtype):
            raise CollectError(
                f"layer {self.layer} gave {kept.dtype} after {self._dtype}: give dtype= and "
                "convert in transform=, or run all batches under the same autocast"
            )
        self._dtype = kept.dtype

    def _open(self, kept: Tensor) -> Column:
        dtype = self.options.asked.dtype if kept.is_floating_point() else None
        spec = TensorSpec(tuple(kept.shape[1:]), dtype or kept.dtype)
        if self.sums is None and not _holds_exactly(spec.dtype, kept.dtype):
            self.sums = 0.0, 0.0
        self._column = self.writer.column(self.layer.label, spec, kept)
        return self._column


@dataclass
class ReduceSink(LayerSink):
    """Keeps a running summary, or several."""

    reductions: list[Reduction]
    # Whether they receive a pass only once it has succeeded.
    waits: bool

    @torch.no_grad()
    def receive(self, batch: Batch, activation: Any) -> None:
        """Hand an activation to the reductions, or a copy of it later."""
        kept, is_whole = self._transformed(batch, activation), batch.rows.are_whole_batch
        # What a transform gives of whole batches may count as it likes: it is meant.
        if self.transform is None or not is_whole:
            self._check_rows(batch, kept)
        if batch.is_part:
            self._check_part()
        if not is_whole:
            kept = batch.rows.choose(kept)
        if self.waits:
            batch.waiting[self.layer.label] = kept.clone()
        else:
            self.reduce(batch, kept)

    def reduce(self, batch: Batch, kept: Tensor) -> None:
        """Hand rows of the layer to the reductions."""
        for reduction in self.reductions:
            is_ours = isinstance(reduction, SampleReduction)
            options: dict[str, Any] = {"known": batch.labels} if is_ours else {}
            if is_ours and not batch.rows.are_whole_batch:
                options["to_rows"] = batch.rows.labels
            was_reduced, batch.is_reduced = batch.is_reduced, True
            try:
                self.options.run_aside(reduction.update, kept, batch.loaded, **options)
            except CollectError as error:
                # Reductions of this library check all values before they change anything.
                batch.is_reduced = was_reduced or not is_ours
                error.add_note(f"raised while reducing layer {self.layer}")
                raise
            except Exception as error:
                raise_of_caller(f"{reduction!r} of layer {self.layer}", error)

    def _check_part(self) -> None:
        """Refuse a batch that counts in part, if a reduction would read all of it."""
        for reduction in self.reductions:
            # Reductions of this library can leave rows out.
            if not isinstance(reduction, SampleReduction):
                raise CollectError(
                    f"{reduction!r} of layer {self.layer} may read the batch, and some samples of "
                    "it don't count: they are durable already (give the earlier batch size, or one "
                    "that divides it), or a sampler has repeated them (give it drop_last=True)"
                )


class LayerSinks:
    """What stores or reduces the outputs of each layer, from the first pass to the last.

    Parameters
    ----------
    layers : LayerOptions
        The options of each layer.
    writer : StoreWriter
        Where rows are kept.
    waits : bool
        Whether reductions receive copies of a pass when it has ended, since more passes may follow
        one that fails.
    """

    def __init__(self, layers: LayerOptions, writer: StoreWriter, *, waits: bool) -> None:
        self._reductions = layers.reductions
        self.stores: dict[RowIdx, StoreSink] = {}
        self.reduces: dict[RowIdx, ReduceSink] = {}
        for label, layer in layers.recorded.items():
            shared = layers, layer, layers.transforms.get(label)
            if label in layers.reductions:
                reductions = several(layers.reductions[label])
                self.reduces[label] = ReduceSink(*shared, reductions, waits)
            else:
                self.stores[label] = StoreSink(*shared, writer)
        self.by_label: dict[RowIdx, LayerSink] = {**self.stores, **self.reduces}

    def _sums(self) -> dict[RowIdx, tuple[float, float]]:
        stores = self.stores.items()
        return {label: store.sums for label, store in stores if store.sums is not None}

    @property
    def relative_errors(self) -> dict[RowIdx, float]:
        """The norm of rounding errors over that of all values, of layers that are rounded."""
        sums = self._sums().items()
        return {label: (lost / total) ** 0.5 if total else 0.0 for label, (lost, total) in sums}

    def count(self, batch: Batch) -> None:
        """Count the rounding errors of a pass, which has succeeded."""
        for label, (more_lost, more_total) in batch.rounding.items():
            lost, total = self.stores[label].sums or (0.0, 0.0)
            self.stores[label].sums = lost + more_lost, total + more_total

    def state(self) -> State:
        """Return the state of reductions, and the rounding errors so far, for a commit."""
        rounding = {text_of(label): list(sums) for label, sums in self._sums().items()}
        return {"reductions": states_of(self._reductions), "rounding": rounding}

    def restore(self, state: State) -> None:
        """Go on after a state that was committed."""
        states = expect(state["reductions"], dict)
        for label, each in self._reductions.items():
            pairs = zip(several(each), several(states[text_of(label)]), strict=True)
            for reduction, its_state in pairs:
                reduction.load_state_dict(its_state)
        rounding = expect(state["rounding"], dict)
        for label, store in self.stores.items():
            if text_of(label) in rounding:
                lost, total = map(float, rounding[text_of(label)])
                store.sums = lost, total


class CollectSink:
    """The sink of one pass: gives the output of each layer to what stores or reduces it.

    Parameters
    ----------
    layers : LayerSinks
        What stores or reduces them.
    batch : Batch
        The batch of the pass.
    kept_calls : KeptCalls
        Keeps calls so that they can run again.
    weights : WeightDigests, optional
        Digests of modules' weights, if inputs are kept.
    """

    def __init__(
        self,
        layers: LayerSinks,
        batch: Batch,
        kept_calls: KeptCalls,
        weights: WeightDigests | None = None,
    ) -> None:
        # The kept calls of the pass.
        self.calls: dict[RowIdx, dict[str, Any]] = {}
        self._kept_calls, self._weights = kept_calls, weights
        self.receivers: dict[RowIdx, Callable[[Any], None]] = {
            label: partial(sink.receive if batch.is_new else sink.follow, batch)
            for label, sink in layers.by_label.items()
        }
        if weights is not None:
            self.receivers = {
                label: partial(_receive_with_call, self.calls, label, receive)
                for label, receive in self.receivers.items()
            }

    def keep_inputs(self, row: Layer, inputs: Inputs) -> dict[str, Any]:
        """Copy what a module is about to receive, and the state in which it will run."""
        module, call = row.module, KeptCall(inputs)
        if self._weights is None:
            # Only other processes keep something of the pass.
            return {}
        if module is not None and not isinstance(row, Operation):
            call = KeptCall(inputs, Moment.of(module, inputs), self._weights.digest(module))
        return self._kept_calls.keep(row, call)

    def receive_inputs(self, label: RowIdx, kept: dict[str, Any]) -> None:
        """Take the result of `keep_inputs` for a layer."""
        self.calls[label] = kept


# No method, since receivers that refer to their sink would keep columns until garbage is collected.
def _receive_with_call(
    calls: Mapping[RowIdx, dict[str, Any]],
    label: RowIdx,
    receive: Callable[[Any], None],
    activation: Any,
) -> None:
    """Note the digest of an output beside the call that has made it."""
    if label in calls:
        calls[label]["output"] = digest_of(activation)
    receive(activation)


def _holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    try:
        return torch.promote_types(wide, narrow) == wide
    except RuntimeError:
        # The smallest floating-point dtypes have no promotion.
        return wide == narrow


def _rounding(exact: Tensor, kept: Tensor) -> tuple[float, float]:
    """Return the sums of squares of rounding errors, and of all finite values.

    The error of a value that became infinite is the value itself.
    """
    rounded = exact.to(kept.dtype) if exact.device != kept.device else kept
    exact, rounded = (
        torch.nan_to_num(x.double(), nan=0.0, posinf=0.0, neginf=0.0) for x in (exact, rounded)
    )
    return float((exact - rounded).square().sum()), float(exact.square().sum())
