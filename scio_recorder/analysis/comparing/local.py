"""Takes both sides of a comparison through forced passes, and measures what each call makes.

NOTE [Passes of a block]

The reference runs once, as it does in any comparison, and what its calls receive and return is
kept. Then the candidate runs as it is, a copy of the reference in the candidate's dtypes, exact
copies of both, and one of the candidate whose weights have moved: one copy at a time. A recording
takes the place of the first three runs of the reference. What each pass has made is measured
against what the reference made, or against what another pass made.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from scio_recorder.analysis.comparing.faults import (
    Fault,
    Kind,
    LocalErrors,
    LocalFigures,
    SlotFigures,
    judged,
)
from scio_recorder.analysis.comparing.forced import (
    HALF,
    CallLabels,
    Convert,
    ConvertingMode,
    ExactMode,
    ForcedPass,
    Handing,
    NotingPass,
    ReferenceCall,
    Slot,
    convert,
    device_type_of,
    exact_dtype,
    in_dtype,
    like,
    main_dtype,
    moved,
    narrowest,
    partners,
    places,
    rounded,
)
from scio_recorder.analysis.comparing.matching import Pair
from scio_recorder.analysis.comparing.measures import Figures, Tolerance, measure_all
from scio_recorder.analysis.comparing.pairing import comparable
from scio_recorder.analysis.comparing.parting import (
    OperationPair,
    Step,
    Steps,
    forced_operations,
    traced,
)
from scio_recorder.analysis.comparing.sides import (
    NetworkSide,
    RecordingSide,
    SampleBlock,
    Side,
    chosen,
)
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import Layer, Operation, OperationIdx, RowIdx
from scio_recorder.lowlevel import (
    Inputs,
    NetState,
    is_sharded,
    random_state,
    restore_random,
    run_copy,
    untouched,
)
from scio_recorder.tensors import dtype_name, is_out_of_memory, is_plain, map_tensors

# Entries of masks below it mean minus infinity, however that is written.
_MASKED = -1e4
# Operations of exact copies differ beyond it; of so many faults they are looked for.
_EXACT, _TRACED = 1e-4, 8
_UNTRACED = OperationPair(None, None, f"it is looked for in the {_TRACED} surest faults alone")
_ALONE = "it has no partner: the layer around it was judged with it"
_T = TypeVar("_T")
_Made = Mapping[Slot, Tensor]


class LocalComparison:
    """Takes a candidate through forced passes, block by block.

    Parameters
    ----------
    reference : Side
        A network, or a recording with inputs.
    candidate : Side
        A network.
    pairs : sequence of Pair
        Their layers.
    finds_operations : bool
        Whether to find the operations that make faults.
    """

    def __init__(
        self, reference: Side, candidate: Side, pairs: Sequence[Pair], *, finds_operations: bool
    ) -> None:
        self._reference, self._candidate = _checked(reference, candidate)
        self._pairs = [pair for pair in pairs if not isinstance(pair.reference, Operation)]
        recorded = {pair.reference.label for pair in self._pairs}
        if isinstance(reference, NetworkSide) and (0, 1) not in recorded:
            # The root's own code is around the recorded layers, and may be faulty.
            self._pairs.append(Pair(reference.architecture[0, 1], candidate.architecture[0, 1]))
        self._equal = [pair for pair in self._pairs if pair.error is None]
        # The reference's labels, by the candidate's and by themselves.
        self._labels: dict[RowIdx, RowIdx] = {
            pair.partner.label: pair.reference.label for pair in self._equal
        }
        self._own_labels: dict[RowIdx, RowIdx] = {x: x for x in self._labels.values()}
        self._dtype = main_dtype(self._candidate.net)
        self._exact = exact_dtype(self._dtype)
        self._reference_dtype = self._dtype
        if isinstance(reference, NetworkSide):
            self._reference_dtype = main_dtype(reference.net)
        modules = [(pair.reference.module, pair.partner.module) for pair in self._equal]
        both = [(own, other) for own, other in modules if own is not None and other is not None]
        self._of_candidate = partners(both)
        # A recording's weights are not known, even if its modules still are.
        is_known = isinstance(reference, NetworkSide)
        self._of_reference = partners((other, own) for own, other in both) if is_known else {}
        self._calls: Mapping[RowIdx, ReferenceCall] = {}
        self._random = random_state()
        # Where texts are no padding, if a mask among the inputs says so.
        self._is_real: Tensor | None = None
        self._figures: dict[Slot, SlotFigures] = defaultdict(dict)
        # Why calls have failed, and why others are no calls with a partner.
        self._failed: dict[RowIdx, str] = {}
        self._unpaired: dict[RowIdx, str] = {}
        self._handings: set[Handing] = set()
        self._finds_operations = finds_operations
        self._operations: dict[RowIdx, OperationPair] = {}
        # As keys, since each batch has the same.
        self._notes: dict[str, None] = {}

    def load_reference(self, load: Callable[[], _T]) -> _T:
        """Let the reference run, or be read, and keep what its calls receive and return."""
        side = self._reference
        if isinstance(side, RecordingSide):
            result = load()
            self._calls = self._recorded_calls(side)
            return result
        is_random = any(module.training for module in side.net.modules())
        noting = NotingPass(_call_labels(side, self._own_labels), notes_random=is_random)
        with noting.around():
            result = load()
        self._calls = noting.calls
        return result

    def _recorded_calls(self, side: RecordingSide) -> dict[RowIdx, ReferenceCall]:
        calls: dict[RowIdx, ReferenceCall] = {}
        for layer, partner, _ in self._equal:
            inputs = side.received(layer.label)
            if inputs is not None and partner.module is not None:
                value = side.value(layer.label)
                received = places(inputs.named(partner.module))
                calls[layer.label] = ReferenceCall(received, places(value), value)
        return calls

    def add(self, block: SampleBlock, states: Sequence[NetState]) -> None:
        """Judge a block, from the states in which the networks began it."""
        sides = [x for x in (self._reference, self._candidate) if isinstance(x, NetworkSide)]
        with contextlib.ExitStack() as stack:
            for side in sides:
                stack.enter_context(untouched(side.net))
            native = None
            while native is None:
                for state in states:
                    state.put_back()
                native = self._native(block)
            for state in states:
                state.put_back()
            self._judge(block, native)
            if self._finds_operations:
                self._trace(block)
        self._calls = {}

    def _native(self, block: SampleBlock) -> _Made | None:
        """Run the candidate as it is; None if calls turn out to belong to the code around them."""
        # They do in all copies as well.
        self._calls = {at: x for at, x in self._calls.items() if at not in self._unpaired}
        forced = ForcedPass(_call_labels(self._candidate, self._labels), self._calls)
        args, kwargs = self._candidate.inputs_for(block)
        # All passes draw the same random numbers.
        self._random = random_state()
        named = Inputs(args, kwargs).named(self._candidate.net)
        self._is_real = _real_positions(named.get("attention_mask"))
        with forced.around():
            self._candidate.net(*args, **kwargs)
        self._unpaired |= forced.unpaired
        if forced.unpaired:
            return None
        self._failed |= forced.failed
        self._handings |= {*forced.handings}
        values = self._values(forced.made)
        self._measure("error", values, forced.made, block)
        # The reference may keep in a wider dtype what the candidate only hands on.
        held = {at: like(x, values[at]) for at, x in forced.made.items() if not at.is_whole}
        self._measure("held", values, held, block)
        return forced.made

    def _judge(self, block: SampleBlock, native: _Made) -> None:
        """Run copies, and measure what they make."""
        reference: _Made = {}

        def run(side: NetworkSide, new: Convert, dtype: torch.dtype) -> _Made:
            return self._run_copy(block, side, new, dtype)[0]

        side = self._reference
        is_recorded, candidate = isinstance(side, RecordingSide), self._candidate
        # Under autocast a network computes in a narrower dtype than its weights have.
        low = narrowest([*native.values(), *(self._values(native).values() if is_recorded else ())])
        is_low = low.itemsize < self._dtype.itemsize
        low = low if is_low else self._dtype
        if isinstance(side, NetworkSide):
            cast = run(side, partial(in_dtype, dtype=low) if is_low else self._cast, low)
            self._measure("cast", self._values(cast), cast, block)
            reference = run(side, self._exactly_cast, self._exact)
            self._measure("rounding", self._values(reference), reference, block)
        exact = run(candidate, self._exactly, self._exact)
        self._measure("excess", self._values(exact), exact, block)
        self._measure("apart", reference, exact, block)
        self._measure("moved", exact, run(candidate, self._moved, self._exact), block)
        if is_recorded:
            if is_low:
                native = run(candidate, partial(in_dtype, dtype=low), low)
            self._measure("cast", exact, native, block)
            if narrowest(self._values(native).values()) in HALF:
                # What the recording has lost is no error of an exact copy.
                self._measure("low", exact, native, block)

    def _trace(self, block: SampleBlock) -> None:
        """Find the operations that make the surest faults."""
        pairs = {pair.reference.label: pair for pair in self._equal}
        for fault in self._judged()[1][:_TRACED]:
            layer, partner, _ = pairs[fault.layer.label]
            if isinstance(self._reference, NetworkSide) and layer.label not in self._operations:
                run, exact = partial(self._run_copy, block), self._exact
                _, own = run(self._reference, self._exactly_cast, exact, layer)
                _, other = run(self._candidate, self._exactly, exact, partner)
                # Buffers and fused weights may be rounded in ways of their own.
                rounding = torch.finfo(self._dtype).eps / 4
                beyond = max(_EXACT, min(rounding, fault.error / 10))
                first = forced_operations(own, other, partial(_differ_in_norm, beyond))
                self._operations[layer.label] = first._replace(
                    own=first.own or _only_operation(own)
                )

    def _cast(self, tensor: Tensor) -> Tensor:
        return rounded(tensor, self._of_candidate.get(id(tensor)), self._dtype)

    def _exactly_cast(self, tensor: Tensor) -> Tensor:
        return self._cast(tensor).to(self._exact)

    def _exactly(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._exact)

    def _moved(self, tensor: Tensor) -> Tensor:
        partner = self._of_reference.get(id(tensor))
        return moved(tensor, partner, self._exact, self._reference_dtype)

    def _run_copy(
        self,
        block: SampleBlock,
        side: NetworkSide,
        new: Convert,
        dtype: torch.dtype,
        layer: Layer | None = None,
    ) -> tuple[_Made, Steps]:
        """Return what a copy with other tensors makes, and the steps of a layer's own code.

        If there can't be a copy, it makes nothing.
        """

        def run(twin: nn.Module) -> tuple[_Made, Steps]:
            later = convert(side.net, twin, new)
            twins = dict(zip(side.net.modules(), twin.modules(), strict=True))
            labels = self._labels if side is self._candidate else self._own_labels
            calls = {twins[module]: of for module, of in _call_labels(side, labels).items()}
            forced, steps = ForcedPass(calls, self._calls), list[Step]()
            # Inputs such as caches are rounded as weights are.
            given = map_tensors(partial(in_dtype, dtype=self._dtype), side.inputs_for(block))
            args, kwargs = map_tensors(partial(in_dtype, dtype=dtype), given)
            module = None if layer is None or layer.module is None else twins[layer.module]
            with contextlib.ExitStack() as stack:
                # Outside of the other mode, which widens what it sees.
                if later:
                    stack.enter_context(ConvertingMode(later))
                if dtype is self._exact:
                    stack.enter_context(ExactMode(dtype, device_type_of(twin)))
                if layer is not None and module is not None:
                    steps = stack.enter_context(traced(twin, layer, module, all_calls=False))
                stack.enter_context(forced.around(module))
                restore_random(self._random)
                twin(*args, **kwargs)
            return forced.made, steps

        try:
            kept = None if is_sharded(side.net) else run_copy(side.net, run)
        except Exception as error:
            if is_out_of_memory(error):
                raise ComparisonError(_no_room(side, dtype)) from error
            # A device may lack the dtype.
            self._notes[f"the {side.what} can't be computed in {dtype_name(dtype)}: {error}"] = None
            return {}, []
        if kept is None:
            self._notes[f"the {side.what} can't be copied"] = None
        return kept or ({}, [])

    def _values(self, made: _Made) -> _Made:
        """Return what the reference made in the place of what a pass has made."""
        calls = self._calls
        return {
            slot: calls[slot.owner].returned[slot.place]
            if slot.receiver is None
            else calls[slot.receiver].received[slot.place]
            for slot in made
        }

    def _measure(self, kind: Kind, own: _Made, other: _Made, block: SampleBlock) -> None:
        """Add how what one pass has made differs from what another one, or the reference, made."""
        slots = [slot for slot in other if slot in own]
        both = [(self._real(own[x], block), self._real(other[x], block)) for x in slots]
        pairs = [_without_masked(*pair) for pair in both]
        for slot, figures in zip(slots, measure_all(pairs, Tolerance()), strict=True):
            self._figures[slot].setdefault(kind, Figures()).add(figures)

    def _real(self, tensor: Tensor, block: SampleBlock) -> Tensor:
        """Return a tensor without the positions of padding, of which networks make anything."""
        real = self._is_real
        if block.received is None and real is not None and tensor.shape[:2] == real.shape:
            return tensor[real.to(tensor.device)]
        return chosen(tensor, block.received)

    def result(self) -> LocalErrors:
        """Return the local errors of all layers."""
        errors, faults = self._judged()
        reasons: dict[RowIdx, str | None] = {x.reference.label: x.error for x in self._pairs}
        wanted = self._reference.recorded or self._reference.labels
        unjudged: dict[RowIdx, str] = {}
        known = self._failed | self._unpaired
        for label in self._reference.architecture.in_order({*wanted, *reasons}):
            if label not in errors and not isinstance(label, OperationIdx):
                why = reasons.get(label, _ALONE) or known.get(label) or self._nothing
                unjudged[label] = why
        if not errors:
            said = "; ".join(dict.fromkeys(unjudged.values()))
            raise ComparisonError(f"no layer can be judged by its local error: {said}")
        named = tuple(map(self._with_operation, faults))
        return LocalErrors(errors, named, unjudged, [*self._notes])

    def _with_operation(self, fault: Fault) -> Fault:
        """Return a fault with its operation, or with why there is none."""
        if not self._finds_operations:
            return fault
        own, other, why = self._operations.get(fault.layer.label, _UNTRACED)
        if other is not None:
            why = f"the reference has none there; in the candidate, {other.made_at}"
        return replace(fault, operation=own, why_no_operation="" if own else why)

    def _judged(self) -> tuple[dict[RowIdx, LocalFigures], list[Fault]]:
        return judged(self._equal, self._figures, self._handings, self._dtype)

    @property
    def _nothing(self) -> str:
        if isinstance(self._reference, RecordingSide):
            return (
                "the recording has no inputs of it for these batches: record it with inputs=True, "
                "and give the batches that were collected"
            )
        return "it makes no tensor that both networks have, so nothing is to be judged"


def _checked(reference: Side, candidate: Side) -> tuple[NetworkSide | RecordingSide, NetworkSide]:
    """Refuse sides that can't be taken through forced passes."""
    if isinstance(candidate, RecordingSide):
        raise ComparisonError(
            "local=True runs the candidate on what the layers of the reference received, but the "
            "candidate is a recording: give its network"
        )
    for side in (reference, candidate):
        if isinstance(side, NetworkSide) and (side.compiled or side.calls != "labelled"):
            raise ComparisonError(
                f"local=True needs the single calls of the {side.what}'s modules: give a recorder "
                'that is not compiled, without calls="any"'
            )
    if isinstance(reference, RecordingSide) and (
        not reference.knows_inputs or reference.digests or reference.recording.has_rows
    ):
        raise ComparisonError(
            "local=True needs what each layer of the reference received and returned: give its "
            "network, or a recording of whole samples, made by record(..., inputs=True)"
        )
    return reference, candidate


def _call_labels(side: NetworkSide, known: Mapping[RowIdx, RowIdx]) -> CallLabels:
    """Return the reference's labels of the calls of each module that has some."""
    layers = map(side.architecture.__getitem__, known)
    modules = {layer.module: None for layer in layers if layer.module is not None}
    return {
        module: [known.get(label) for label in side.architecture.calls(module)]
        for module in modules
    }


def _only_operation(steps: Steps) -> Operation | None:
    """Return the operation of a code that has no other: whatever is wrong is there."""
    rows = [step.row for step in steps if step.row is not None]
    return rows[0] if len(rows) == 1 else None


def _differ_in_norm(beyond: float, own: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors differ by more than a share of their norm."""
    pairs = comparable(own, other)
    if pairs is None:
        return True
    measured = measure_all([_without_masked(*pair) for pair in pairs], Tolerance())
    return any(figures.relative_error > beyond for figures in measured)


def _real_positions(mask: object) -> Tensor | None:
    """Return where a mask of texts is not zero, if it is zero anywhere."""
    is_mask = isinstance(mask, Tensor) and is_plain(mask) and mask.ndim == 2
    if not is_mask or not isinstance(mask, Tensor) or bool((mask < 0).any() | (mask != 0).all()):
        return None
    return mask != 0


def _without_masked(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors in which what masks out on both sides is the same."""
    if not own.is_floating_point():
        return own, other
    other = other.to(own.device)
    is_masked = (own <= _MASKED) & (other <= _MASKED)
    return own.masked_fill(is_masked, 0.0), other.masked_fill(is_masked, 0.0)


def _no_room(side: NetworkSide, dtype: torch.dtype) -> str:
    numbers = [x.numel() for x in {*side.net.parameters(), *side.net.buffers()}]
    needs = [
        f"{number * dtype.itemsize / 2**30:,.2f} GiB" for number in (sum(numbers), max(numbers))
    ]
    return (
        f"memory lacks for an exact copy of the {side.what}: local=True makes one at a time, of "
        f"{needs[0]} in {dtype_name(dtype)}, or, of weights of more than 1 GiB, of one after the "
        f"other, the largest of {needs[1]}. It keeps what all layers receive and return in a "
        "batch: give smaller batches, or compare on another device"
    )
