"""The intake of activations: a sink that stores or reduces those of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.filesize import decimal
from torch import Tensor

from scio_recorder.errors import CollectError, raised_by
from scio_recorder.layer import Layer, Operation, RowIdx, TensorSpec, text_of
from scio_recorder.nets.attention import Attention
from scio_recorder.nets.records import Inputs
from scio_recorder.nets.state.moment import Moment
from scio_recorder.recording.options import LayerOptions, Transform
from scio_recorder.recording.recipes import restore, states_of
from scio_recorder.recording.rows import BatchRows
from scio_recorder.reductions import Reduction
from scio_recorder.reductions.base import SampleReduction, several
from scio_recorder.stores import Column, State, StoreWriter
from scio_recorder.stores.buffers import NoRoomError
from scio_recorder.stores.disk_format.ids import Ids
from scio_recorder.stores.disk_format.medium import parsing
from scio_recorder.stores.disk_format.tensor_file import expect
from scio_recorder.stores.kept_inputs import KeptCall
from scio_recorder.tensors.copies import gathered, has_samples, version_of, without_lazy_sign
from scio_recorder.tensors.digests import WeightDigests, digest_of
from scio_recorder.tensors.structures import tensors

_NO_ROWS = BatchRows.of_samples(0)


@dataclass(slots=True)
class CurrentBatch:
    """The batch whose pass is running: its rows and ids, and what of it is kept."""

    batch: Any = None
    number: int = 0
    # The ids of its samples, without repeats.
    ids: Ids = ()
    # The rows to keep.
    rows: BatchRows = _NO_ROWS
    # The number of samples at its beginning that are durable already.
    skip: int = 0
    # Whether samples at one of its ends are not kept: durable ones, or repeats of a sampler.
    is_part: bool = False
    # The row of the store at which its rows begin.
    start: int = 0
    # Whether a reduction may have received a part of it.
    is_reduced: bool = False


@dataclass
class LayerIntake:
    """The intake of one layer's activations."""

    options: LayerOptions
    layer: Layer
    transform: Transform | None
    current: CurrentBatch = field(default_factory=CurrentBatch, init=False)
    # Whether the lengths of some batch have shown what the layer's dimensions mean.
    is_known: bool = field(default=False, init=False)

    def _check_rows(self, kept: Tensor) -> None:
        """Refuse a tensor whose leading dimensions are not those of the batch."""
        is_meant, rows = self.transform is not None, self.current.rows
        misfit = rows.misfit(self.layer, kept, is_transformed=is_meant, is_known=self.is_known)
        if misfit:
            raise CollectError(f"{misfit}: {self._rearranged(kept)}")
        self.is_known = True

    def _rearranged(self, kept: Tensor) -> str:
        """Return how a tensor gets the leading dimensions of the batch."""
        rows, selector = self.current.rows, self.options.selector_for(self.layer.label)
        if self.transform is not None:
            return (
                f"let it return [{', '.join(rows.dims)}, ...]; to transform only some layers, "
                f'write transform={{"{selector}": lambda activation, batch: ...}}'
            )
        code, condition = "...", ""
        if times := rows.lines_of_each(kept.shape):
            code = f"activation.unflatten(0, (-1, {times}))"
            condition = f", if it has {times} lines of each sample, one sample after the other"
        ids = ", or let sample_ids= give one id for each sample of the batch" * rows.are_samples
        others = self.options.leaving_out(self.layer.label, rows.labelled)
        return (
            f'rearrange it with transform={{"{selector}": lambda activation, batch: {code}}}'
            f"{condition}; or leave the layer out{ids}{others}"
        )

    def _transformed(self, activation: Any) -> Tensor:
        """Return the tensor to keep: the layer's output, or the result of the transform."""
        result = activation
        if self.transform is not None:
            result = self._apply(self.transform, activation)
        if not isinstance(result, Tensor):
            raise CollectError(self._not_a_tensor(activation, result))
        if not has_samples(result):
            raise CollectError(
                f"layer {self.layer} returned a nested, sparse, quantised or masked tensor, which "
                "can't be kept sample by sample: make it a plain one with transform="
            )
        kept = without_lazy_sign(gathered(result))
        # A net may differentiate in its forward: kept tensors are detached there, too.
        return kept.detach() if kept.requires_grad else kept

    def _apply(self, transform: Transform, activation: Any) -> Any:
        received = tensors(activation)
        before = list(map(version_of, received))
        try:
            result = transform(activation, self.current.batch)
        except Exception as error:
            raise raised_by(f"the transform of layer {self.layer}", error) from error
        if list(map(version_of, received)) != before:
            raise CollectError(
                f"the transform of layer {self.layer} changed the activation in place, and so the "
                "input of later layers: let it return a new tensor"
            )
        return result

    def _not_a_tensor(self, activation: Any, result: Any) -> str:
        if self.transform is not None:
            is_attention = isinstance(result, Attention)
            kind = "an Attention" if is_attention else f"a {type(result).__name__}"
            tensor = "such as attention.weights(queries=[-1])" if is_attention else "[batch, ...]"
            return f"the transform of layer {self.layer} returned {kind}: return a tensor {tensor}"
        selector = self.options.selector_for(self.layer.label)
        found = f"returned a {type(activation).__name__}, not a tensor"
        if not self.options.counts_calls:
            found = 'has a tuple of what its calls returned, since calls="any"'
        return (
            f"layer {self.layer} {found}: choose one "
            f'with transform, such as transform={{"{selector}": lambda activation, batch: '
            f"activation{_first_of(activation)}}}"
            f"{self.options.leaving_out(self.layer.label, self.current.rows.labelled)}"
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
class StoringIntake(LayerIntake):
    """Keeps every sample.

    Most batches are alike. Once an output was checked and kept unchanged, the next one with its
    shape and dtype goes straight to its place, since every layer of every batch pays for all work
    between the hook and the copy.
    """

    writer: StoreWriter
    wanted_dtype: torch.dtype | None
    rounds: bool = False
    # Sums of squares, in float64: of the rounding errors, and of all values.
    lost: float = 0.0
    total: float = 0.0
    # The sums of the current batch, which may fail.
    _measured: tuple[float, float] = (0.0, 0.0)
    _column: Column | None = None
    # The shape of a row of activations that need no check; that of no row if each needs one.
    _row_shape: tuple[int, ...] = (-1,)
    _dtype: torch.dtype | None = None

    def receive(self, activation: Any) -> None:
        """Copy an activation into the store."""
        if (
            type(activation) is Tensor
            and activation.dtype is self._dtype
            and activation.shape == self.current.rows.shape + self._row_shape
        ):
            self._put(activation.detach() if activation.requires_grad else activation)
        else:
            self._receive_checked(activation)

    @torch.no_grad()
    def _receive_checked(self, activation: Any) -> None:
        kept, rows = self._transformed(activation), self.current.rows
        self._check(kept)
        place = self._put(kept)
        if self.rounds:
            self._measured = _rounding(rows.choose(kept), place)
        elif self.transform is None:
            self._row_shape = tuple(place.shape[1:])

    def _put(self, kept: Tensor) -> Tensor:
        """Write the rows to keep to their place."""
        current, rows = self.current, self.current.rows
        try:
            column = self._column or self._open(rows.choose(kept))
            place = column.place(current.start, rows.num_rows)
        except NoRoomError as error:
            raise CollectError(self._no_room(error)) from error
        rows.choose_into(place, kept)
        return place

    def count_pass(self) -> None:
        """Count the batch, which has succeeded."""
        lost, total = self._measured
        self.lost += lost
        self.total += total

    @property
    def relative_error(self) -> float:
        """Norm of the rounding errors over the norm of all values."""
        return (self.lost / self.total) ** 0.5 if self.total else 0.0

    def _check(self, kept: Tensor) -> None:
        rows, column = self.current.rows, self._column
        unit = "sample" if rows.are_samples else "row"
        self._check_rows(kept)
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
        wanted = self.wanted_dtype if kept.is_floating_point() else None
        spec = TensorSpec(tuple(kept.shape[1:]), wanted or kept.dtype)
        self.rounds = not _holds_exactly(spec.dtype, kept.dtype)
        self._column = self.writer.column(self.layer.label, spec, kept)
        return self._column

    def _no_room(self, error: NoRoomError) -> str:
        return (
            f"there is no room for layer {self.layer}: {decimal(error.num_bytes)} can't be "
            'allocated in one piece; write store="disk:PATH", record fewer layers, or reduce '
            "them (reduce=, every=, dtype=, transform=)"
        )


@dataclass
class ReducingIntake(LayerIntake):
    """Keeps a running summary, or several."""

    reductions: list[Reduction]
    # Whether they receive a pass only once it has succeeded.
    waits: bool = False
    _waiting: Tensor | None = None

    @torch.no_grad()
    def receive(self, activation: Any) -> None:
        """Hand an activation to the reductions, or a copy of it later."""
        kept, is_whole = self._transformed(activation), self.current.rows.are_whole_batch
        # What a transform gives of whole batches may count as it likes: it is meant.
        if self.transform is None or not is_whole:
            self._check_rows(kept)
        if self.current.is_part:
            self._check_part()
        if not is_whole:
            kept = self.current.rows.choose(kept)
        if self.waits:
            self._waiting = kept.clone()
        else:
            self._reduce(kept)

    def count_pass(self) -> None:
        """Reduce the outputs that wait for the end of the pass."""
        kept, self._waiting = self._waiting, None
        if kept is not None:
            self._reduce(kept)

    def drop(self) -> None:
        """Drop the waiting outputs: the pass has failed."""
        self._waiting = None

    def _reduce(self, kept: Tensor) -> None:
        current = self.current
        for reduction in self.reductions:
            is_ours = isinstance(reduction, SampleReduction)
            is_in_part = is_ours and not current.rows.are_whole_batch
            options = {"to_rows": current.rows.labels} if is_in_part else {}
            was_reduced, current.is_reduced = current.is_reduced, True
            try:
                self.options.run_aside(reduction.update, kept, current.batch, **options)
            except CollectError as error:
                # Reductions of this library check all values before they change anything.
                current.is_reduced = was_reduced or not is_ours
                error.add_note(f"raised while reducing layer {self.layer}")
                raise
            except Exception as error:
                raise raised_by(f"{reduction!r} of layer {self.layer}", error) from error

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


class Intakes:
    """The sink of all passes: gives the output of each layer to what stores or reduces it.

    Parameters
    ----------
    layers : LayerOptions
        The options of each layer.
    writer : StoreWriter
        Where samples are kept.
    waits : bool
        Whether reductions receive copies of a pass when it has ended, since more passes may follow
        one that fails.
    """

    def __init__(self, layers: LayerOptions, writer: StoreWriter, *, waits: bool) -> None:
        self._layers, self._writer = layers, writer
        # What is kept about each row, if a row is not a sample; the first batch has all names.
        self._column_names: list[str] = []
        self.storing: dict[RowIdx, StoringIntake] = {}
        self._reducing: dict[RowIdx, ReducingIntake] = {}
        for label in layers.recording:
            shared = layers, layers.architecture[label], layers.transforms.get(label)
            if label in layers.reductions:
                reductions = several(layers.reductions[label])
                self._reducing[label] = ReducingIntake(*shared, reductions, waits)
            else:
                self.storing[label] = StoringIntake(*shared, writer, layers.asked.dtype)
        self._intakes = [*self.storing.values(), *self._reducing.values()]
        self.receivers = {label: storing.receive for label, storing in self.storing.items()}
        self.receivers |= {label: one.receive for label, one in self._reducing.items()}
        # Kept calls of the current pass, if inputs are kept, and digests of weights.
        self._calls: dict[RowIdx, dict[str, Any]] = {}
        if layers.with_inputs:
            self._weights = WeightDigests()
            self.receivers = {
                label: partial(self._receive_with_call, label, receive)
                for label, receive in self.receivers.items()
            }
        # Whether reductions hold a part of a pass that failed, so that commits don't count.
        self.holds_failed_pass = False
        if writer.state is not None:
            with parsing("the state of the recording to go on with"):
                self._restore(writer.state)

    def _begin(self, current: CurrentBatch) -> None:
        """Go on to a batch."""
        for intake in self._intakes:
            intake.current = current

    def keep_inputs(self, row: Layer, inputs: Inputs) -> dict[str, Any]:
        """Copy what a module is about to receive, and the state in which it will run."""
        module, call = row.module, KeptCall(inputs)
        if module is not None and not isinstance(row, Operation):
            call = KeptCall(inputs, Moment.of(module, inputs), self._weights.digest(module))
        return self._writer.calls.keep(row, call)

    def receive_inputs(self, label: RowIdx, kept: dict[str, Any]) -> None:
        """Take the result of `keep_inputs` for a layer."""
        self._calls[label] = kept

    def _receive_with_call(
        self, label: RowIdx, receive: Callable[[Any], None], activation: Any
    ) -> None:
        call = self._calls.get(label)
        if call is not None:
            call["output"] = digest_of(activation)
        receive(activation)

    def take(
        self, current: CurrentBatch, run: Callable[[Intakes], Any], state: Callable[[], State]
    ) -> Any:
        """Run the pass of a batch, and commit it.

        Parameters
        ----------
        current : CurrentBatch
            The batch.
        run : callable
            Runs a pass with this sink, and returns the network's output.
        state : callable
            Returns the state to commit.
        """
        self._begin(current)
        self._calls = {}
        # Before the pass, since one that can't be kept need not run. Rows kept nowhere take no
        # memory.
        if current.rows.columns and self._layers.keeps_rows:
            self._put_columns(current)
        try:
            output = run(self)
            for reducing in self._reducing.values():
                reducing.count_pass()
        except BaseException:
            self.holds_failed_pass = current.is_reduced
            raise
        self._commit(current, state)
        return output

    def _put_columns(self, current: CurrentBatch) -> None:
        """Keep the facts about each row of a batch, beside the layers."""
        given = current.rows.columns
        self._column_names = self._column_names or list(given)
        for name in self._column_names:
            values = given.get(name)
            if values is None:
                raise CollectError(
                    f"batch {current.number} has no field {name!r}, which earlier batches had: "
                    "give it with all batches, or say with fields= what to keep"
                )
            if name == "sample":
                values = values + (len(self._writer.sample_ids) - current.skip)
            spec = TensorSpec((), values.dtype)
            column = self._writer.columns.get(name) or self._writer.column(name, spec, values)
            if values.dtype != column.spec.dtype:
                raise CollectError(
                    f"the field {name!r} is {values.dtype} after {column.spec.dtype}: convert it "
                    "with fields={...: lambda batch: ...}"
                )
            column.place(current.start, len(values)).copy_(values)

    def _commit(self, current: CurrentBatch, state: Callable[[], State]) -> None:
        """Count the pass, which has succeeded."""
        if self._layers.asked.dtype is not None:
            # Otherwise no value is rounded, and there is nothing to count layer by layer.
            for storing in self.storing.values():
                storing.count_pass()
        calls = {text_of(label): call for label, call in sorted(self._calls.items())}
        rows = None if current.rows.are_samples else current.rows.num_rows
        self.holds_failed_pass = True
        try:
            self._writer.commit(current.ids[current.skip :], state, calls, rows=rows)
        except ValueError as error:
            raise CollectError(str(error)) from None
        self.holds_failed_pass = False

    def drop(self) -> None:
        """Drop the batch, which has failed: it may come again."""
        self._begin(CurrentBatch())
        for intake in self._reducing.values():
            intake.drop()

    def state(self) -> State:
        """Return what resuming needs besides the samples, for a commit."""
        rounding = {
            text_of(label): [intake.lost, intake.total]
            for label, intake in self.storing.items()
            if intake.rounds
        }
        reduced = states_of(self._layers.reductions)
        return {"reductions": reduced, "rounding": rounding, "columns": self._column_names}

    def _restore(self, state: State) -> None:
        # Recordings of versions without rows have none.
        columns = expect(state, dict).get("columns", [])
        self._column_names = [expect(name, str) for name in expect(columns, list)]
        restore(self._layers.reductions, expect(state["reductions"], dict))
        for label, intake in self.storing.items():
            sums = expect(state["rounding"], dict).get(text_of(label))
            if sums is not None:
                intake.rounds = True
                intake.lost, intake.total = map(float, sums)


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
        torch.nan_to_num(one.double(), nan=0.0, posinf=0.0, neginf=0.0) for one in (exact, rounded)
    )
    return _squares(exact - rounded), _squares(exact)


def _squares(values: Tensor) -> float:
    return float(values.square().sum())
