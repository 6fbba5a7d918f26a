"""Two runs side by side, block by block: where they begin to differ, and what makes the difference.

NOTE [Who makes a difference]

A layer makes a difference in a block of samples if its output differs and none of its inputs do.
An argument that only one side has, such as a mask where the other one has a flag, says nothing.
Layers are examined in the order in which the reference's calls return, so the first that qualifies
is the innermost and earliest. A layer that passes a difference on has received one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from scio_recorder import Recorder, Recording
from scio_recorder.analysis.comparing.difference import (
    Difference,
    FirstDifference,
    LayerDifference,
    SampleId,
    Unmatched,
)
from scio_recorder.analysis.comparing.local import LocalComparison
from scio_recorder.analysis.comparing.matching import Pair, match_sides
from scio_recorder.analysis.comparing.measures import (
    Figures,
    Tolerance,
    dense,
    differ,
    measure_all,
    measure_values,
    unknown,
)
from scio_recorder.analysis.comparing.pairing import (
    InputPairs,
    PartPair,
    paired_inputs,
    paired_outputs,
    tensors_alone,
)
from scio_recorder.analysis.comparing.parting import (
    OperationPair,
    differ_beyond,
    first_operations,
)
from scio_recorder.analysis.comparing.sides import (
    NetworkSide,
    RecordingSide,
    SampleBlock,
    Side,
    sample_blocks,
)
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import ComparisonError
from scio_recorder.layer import Operation
from scio_recorder.lowlevel import (
    CollectOptions,
    Feed,
    InStep,
    NetState,
    RecordOptions,
    Rows,
    is_sharded,
    random_state,
    reached,
    restore_random,
    untouched,
    warn,
)
from scio_recorder.tensors import booleans, names_arguments, private

ToInputs = Callable[[Any], Any]
_T = TypeVar("_T")


@names_arguments
def compare(
    reference: Recorder | Recording,
    candidate: Recorder | Recording,
    batches: Iterable[Any] | None = None,
    match: Mapping[str, str] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    operations: bool = False,
    *,
    local: bool = False,
    max_batches: int | None = None,
    to_inputs: ToInputs | Sequence[ToInputs] | None = None,
    sample_ids: Callable[[Any], Any] | None = None,
    rows: Rows | None = None,
    progress: bool = True,
) -> Difference:
    """Find the layers in which two runs differ, and the one that makes the difference.

    The layers that the reference records are compared, or all layers if it records none. The
    candidate need not record anything. Networks run under ``no_grad`` in their current mode,
    and start each batch from the same state of random numbers. Afterwards their buffers and the
    generators of random numbers are as before.

    Parameters
    ----------
    reference, candidate : Recorder or Recording
        Networks that run on the batches, or recordings of samples or of
        :class:`~scio_recorder.reductions.Digest`.
    batches : iterable, optional
        As for ``collect``; needed if a network runs.
    match : mapping, optional
        Names or globs of the reference -> names of the candidate: ``{"layers.*": "h.*"}``, where
        ``*`` stands for the same text on both sides. Other names match themselves.
    rtol, atol : float, default 0
        Numbers are equal within ``atol + rtol * |reference|``. With both 0 they are equal bit for
        bit; other dtypes are compared as numbers. NaNs in the same places are equal.
    operations : bool, default False
        Find the line of code as well: both networks run once more on the batch in which the first
        layer makes the difference, and all operations of its own code are compared.
        ``first.operation`` is the reference's, ``first.candidate_operation`` the candidate's.
    local : bool, default False
        Find the layers that make an error of their own as well, although everything rounds
        differently, as in a port or another precision: ``difference.faults``. The candidate's
        layers run on what those of the reference received, as they are and as exact copies. This
        takes 5 to 7 passes a batch in place of 2.
    max_batches : int, optional
        Stop after this number of batches.
    to_inputs : callable or sequence of callables, optional
        ``batch ->`` inputs of the net, as for ``collect``. Two functions are for the reference and
        for the candidate, if their inputs differ, for example in the device.
    sample_ids : callable, optional
        ``batch ->`` one integer or string for each sample. Samples of recordings are looked up by
        these ids. By default samples are numbered from 0 on.
    rows : Tokens or Nodes, optional
        Compare tokens or nodes, without padding, if networks run.
    progress : bool, default True
        Show a progress bar, on a terminal.

    Returns
    -------
    Difference
        ``first`` is the layer that makes the difference, None if nothing differs. With
        ``local=True``, ``faults`` are the layers that make an error of their own.

    Raises
    ------
    ComparisonError
        There is no layer in common, samples are missing on one side, operations are wanted of a
        recording or of compiled code, or something else can't be compared as asked.

    Examples
    --------
    >>> import copy
    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> other = copy.deepcopy(net)
    >>> _ = other[2].bias.data.add_(0.01)
    >>> one, two = Recorder(net, input_size=(1, 4)), Recorder(other, input_size=(1, 4))
    >>> difference = compare(one, two, [torch.rand(5, 4)])
    >>> difference.first.layer.name, difference.first.inputs_equal, difference["1"].max_abs
    ('2', True, 0.0)
    """
    rows = Rows.or_none(rows, ComparisonError)
    feeds = _feeds(batches, max_batches, to_inputs, sample_ids, rows)
    reference_side = _side(reference, "reference", feeds[0])
    # Operations that the reference has recorded are compared.
    lists_operations = bool(reference_side.architecture.operations)
    candidate_side = _side(candidate, "candidate", feeds[1], lists_operations=lists_operations)
    sides = reference_side, candidate_side
    _refuse_other_rows(*sides, rows)
    if batches is not None and not any(isinstance(side, NetworkSide) for side in sides):
        warn("batches= is for networks, and both sides are recordings: leave it out")
    pairs, unmatched = match_sides(*sides, match)
    booleans(ComparisonError, operations=operations, local=local)
    locally = LocalComparison(*sides, pairs, finds_operations=operations) if local else None
    comparison = Comparison(*sides, pairs, Tolerance(rtol, atol), operations, locally)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        comparison.open(stack)
        total = feeds[0].num_batches or None
        advance = stack.enter_context(progress_bar("comparing", total, is_wanted=progress))
        for block in sample_blocks(*sides, feeds[0]):
            comparison.add(block)
            advance(len(block.ids), 0)
    return comparison.result(unmatched)


def _feeds(
    batches: Iterable[Any] | None,
    max_batches: int | None,
    to_inputs: ToInputs | Sequence[ToInputs] | None,
    sample_ids: Callable[[Any], Any] | None,
    rows: Rows | None,
) -> tuple[Feed, Feed]:
    """Return the feed of each side; the first one counts the samples."""
    # One feed does for both sides, if their inputs are made in one way.
    makers: list[Any] = [*to_inputs] if isinstance(to_inputs, Sequence) else [to_inputs]
    is_wrong = isinstance(to_inputs, Sequence) and len(to_inputs) != 2
    if is_wrong or not all(maker is None or callable(maker) for maker in makers):
        raise ComparisonError(
            f"to_inputs={to_inputs!r}: give one function of the batch, or two of them, for the "
            "reference and for the candidate"
        )
    samples = () if batches is None else batches
    options = partial(CollectOptions, max_batches=max_batches, sample_ids=sample_ids, rows=rows)
    feeds = [Feed(samples, options(to_inputs=maker)) for maker in makers]
    return feeds[0], feeds[-1]


def _side(source: Any, what: str, feed: Feed, *, lists_operations: bool = False) -> Side:
    if isinstance(source, Recording):
        return RecordingSide(source, what)
    recorder = private.uncompiled(source) if isinstance(source, nn.Module) else source
    if isinstance(recorder, Recorder):
        is_compiled = recorder is not source or private.calls_compiled(recorder)
        if is_compiled and not recorder.recording:
            raise ComparisonError(
                f"the {what} is compiled and records no layer, but only recorded layers of "
                "compiled code can be compared: call record(...) before"
            )
        side = NetworkSide(recorder.capture, source if is_compiled else None, feed, what)
        if lists_operations and not is_compiled:
            side.architecture = recorder.operations().architecture
        return side
    hint = "give a Recorder or a Recording"
    if isinstance(source, nn.Module):
        hint = f"write Recorder(net, input_data=x) around a network for the {what}"
    elif isinstance(source, str) or hasattr(source, "__fspath__"):
        hint = f"write scio_recorder.open_recording({str(source)!r})"
    raise ComparisonError(f"the {what} is a {type(source).__name__}: {hint}")


def _refuse_other_rows(reference: Side, candidate: Side, rows: Rows | None) -> None:
    """Refuse sides of which only one has rows that are no samples."""
    kinds = [
        side.recording.has_rows if isinstance(side, RecordingSide) else rows is not None
        for side in (reference, candidate)
    ]
    if kinds[0] != kinds[1]:
        names = ("reference", "candidate") if kinds[0] else ("candidate", "reference")
        raise ComparisonError(
            f"the {names[0]} has a row for each token or node, and the {names[1]} one for each "
            "sample: collect both with the same rows=, and beside a recording write the same for "
            "a network, such as compare(..., rows=Tokens()), or leave rows= out"
        )


class _MeasuredPart(NamedTuple):
    """A pair of parts of a layer's outputs in one block, and how they differ."""

    number: int
    pair: PartPair
    figures: Figures

    def place(self, block: SampleBlock) -> tuple[int, tuple[int, ...]]:
        """Return the sample of the first element that differs, and the index in it."""
        reference, first = self.pair.reference, self.figures.first or 0
        # A plain value counts as one of the first sample.
        return block.place(reference.shape, first) if isinstance(reference, Tensor) else (0, ())

    def values(self) -> tuple[Any, Any]:
        """Return both values of that element."""
        reference, candidate = self.pair
        if not isinstance(reference, Tensor):
            return reference, candidate
        at = self.figures.first or 0
        return dense(reference).reshape(-1)[at].item(), dense(candidate).reshape(-1)[at].item()


@dataclass(eq=False)
class _Noted:
    """A first difference, and the part whose values are not yet read, if it has any."""

    difference: FirstDifference
    part: _MeasuredPart | None = None

    def read(self) -> None:
        """Read both values, for which a device is waited for."""
        if self.part is not None:
            own, other = self.part.values()
            self.difference = replace(self.difference, reference=own, candidate=other)


class _Received(NamedTuple):
    """Whether a layer's inputs are equal in a block, None if that is not known.

    If they are but for arguments that only one side has, these are named.
    """

    same: bool | None
    one_sided: tuple[str, ...] = ()


@dataclass
class _ComparedLayer:
    """The findings about a pair of layers in all blocks so far."""

    pair: Pair
    is_digest: bool
    error: str | None = field(init=False)
    figures: Figures = field(default_factory=Figures)
    # The first place of a difference, and the first one although the inputs are equal.
    first: _Noted | None = None
    maker: _Noted | None = None
    # Whether its inputs were equal in all blocks so far; None once they were not known.
    received_same: bool | None = True

    def __post_init__(self) -> None:
        self.error = self.pair.error
        if self.error is not None:
            self.received_same = None
            self.fail(self.error, None, _Received(None))

    def receive(self, same: bool | None) -> None:
        """Take whether the inputs in a block are equal; None if that is not known."""
        before = self.received_same
        self.received_same = None if None in (same, before) else same and before

    def fail(self, error: str, sample_id: SampleId | None, received: _Received) -> None:
        """Take the reason why the outputs in a block can't be compared."""
        self.error = self.error or error
        self.figures = unknown(self.figures)
        self._note(_Noted(self._difference(sample_id, None, received, error=error)))

    def add(self, block: SampleBlock, parts: Sequence[_MeasuredPart], received: _Received) -> None:
        """Take how the parts of the outputs in a block differ."""
        for part in parts:
            self.figures.add(unknown(part.figures) if self.is_digest else part.figures)
        differing = [part for part in parts if part.figures.num_different]
        makes_it = any(received) and self.maker is None
        if differing and (self.first is None or makes_it):
            part = min(differing, key=lambda part: part.place(block)[0])
            sample, index = part.place(block)
            spot = None if self.is_digest else index
            difference = self._difference(block.ids[sample], spot, received, part=part.number)
            self._note(_Noted(difference, None if self.is_digest else part))

    def _difference(
        self,
        sample_id: SampleId | None,
        index: tuple[int, ...] | None,
        received: _Received,
        **others: Any,
    ) -> FirstDifference:
        same, one_sided = received
        layer, values = self.pair.reference, (None, None)
        return FirstDifference(
            layer, sample_id, index, *values, same, one_sided=one_sided, **others
        )

    def _note(self, noted: _Noted) -> None:
        self.first = self.first or noted
        if noted.difference.inputs_equal or noted.difference.one_sided:
            self.maker = self.maker or noted

    def result(self) -> LayerDifference:
        """Return the findings about the layer."""
        (layer, partner, _), figures, noted = self.pair, self.figures, self.maker or self.first
        return LayerDifference(
            *(layer.label, layer.name, partner.label, partner.name),
            *(figures.max_abs, figures.max_rel, figures.relative_error, figures.cosine),
            *(figures.num_different, figures.num_elements),
            None if self.first is None else self.first.difference.sample_id,
            self.received_same if noted is None else noted.difference.inputs_equal,
            noted is not None,
            self.error,
        )


class Comparison:
    """Takes two sides through one block of samples after another.

    Parameters
    ----------
    reference, candidate : Side
        The reference and the candidate.
    pairs : sequence of Pair
        Their layers, in the order in which those of the reference return.
    tolerance : Tolerance
        What counts as equal.
    finds_operations : bool
        Whether to find the operations that make the first difference as well.
    local : LocalComparison or None
        What finds layers that make an error of their own.
    """

    def __init__(
        self,
        reference: Side,
        candidate: Side,
        pairs: Sequence[Pair],
        tolerance: Tolerance,
        finds_operations: bool,
        local: LocalComparison | None,
    ) -> None:
        self._sides = reference, candidate
        self._local = local
        self._tolerance = tolerance
        self._compared = [pair for pair in pairs if pair.error is None]
        # If one side has only digests of a layer, those of the other side are compared with them.
        digests = reference.digests
        others = {pair.partner.label for pair in self._compared if pair.reference.label in digests}
        candidate.digested = others | {*candidate.digests}
        digested = [pair for pair in self._compared if pair.partner.label in candidate.digested]
        reference.digested = {pair.reference.label for pair in digested}
        self._has_values = len(digested) < len(self._compared)
        self._layers = [
            _ComparedLayer(pair, pair.reference.label in reference.digested) for pair in pairs
        ]
        self._num_samples = 0
        self._networks = [side for side in (reference, candidate) if isinstance(side, NetworkSide)]
        self._nets = [*{id(side.net): side.net for side in self._networks}.values()]
        modules = [{*side.net.modules()} for side in self._networks]
        self._share_modules = len(modules) > 1 and not modules[0].isdisjoint(modules[1])
        self._finds_operations = finds_operations
        # The states of the networks before the first block.
        self._states: list[NetState] = []
        # What was found, and for which difference.
        self._operations = OperationPair()
        self._examined: _Noted | None = None
        if finds_operations and [side.compiled for side in self._networks] != [None, None]:
            raise ComparisonError(
                "operations=True runs both networks again: give two networks that are not "
                "compiled, since recordings and compiled code don't have all operations"
            )

    def open(self, stack: contextlib.ExitStack) -> None:
        """Prepare all networks; when the stack ends, they are as they were before."""
        for net in self._nets:
            # The outermost block puts the random numbers back.
            state = untouched(net, keep_random=net is not self._nets[0])
            self._states.append(stack.enter_context(state))
        reference, candidate = self._sides
        calls: Literal["labelled", "any"] = next((x.calls for x in self._networks), "labelled")
        # Of all calls of a pass, nobody knows which inputs belong to the output that differs.
        has_inputs = reference.knows_inputs and candidate.knows_inputs and calls == "labelled"
        options = RecordOptions(inputs=has_inputs and self._has_values, calls=calls)
        if isinstance(reference, NetworkSide):
            reference.open(stack, [pair.reference.label for pair in self._compared], options)
        if isinstance(candidate, NetworkSide):
            candidate.open(stack, [pair.partner.label for pair in self._compared], options)

    def add(self, block: SampleBlock) -> None:
        """Compare all layers of a block."""
        nets = self._nets if self._finds_operations or self._local else ()
        states = [NetState(reached([net]), only_buffers=is_sharded(net)) for net in nets]
        self._load(block)
        self._num_samples += len(block.ids)
        self._judge(block)
        first = self._first
        if first is not None and first is not self._examined:
            first.read()
        for layer in self._layers:
            for noted in filter(None, (layer.first, layer.maker)):
                noted.part = None
        if self._local is not None:
            self._local.add(block, states)
        if self._finds_operations:
            self._find_operations(block, states)
        self._examined = first

    def _load(self, block: SampleBlock) -> None:
        """Run the networks; once more, if one has written to tensors in ways that are not counted.

        In later blocks, which can't run again, this is hardly ever seen for the first time.
        """
        reference, candidate = self._sides
        load = partial(reference.load, block)
        if self._local is not None:
            load = partial(self._local.load_reference, load)
        run = partial(self._in_turn, load, partial(candidate.load, block))
        run()
        is_first, random = not self._num_samples, random_state()
        sides = [x for x in self._networks if not InStep(x.net).all(x.copies_are_right)]
        for side in sides:
            side.shares_copies = False
            side.forget_inputs()
        if sides and is_first:
            for state in self._states:
                state.put_back()
            restore_random(random)
            run()

    def result(self, unmatched: Unmatched) -> Difference:
        """Return the findings."""
        noted, (reference, candidate) = self._first, self._sides
        own, other, why_none = self._operations
        first = None if noted is None else noted.difference
        if first is not None:
            first = replace(
                first, operation=own, candidate_operation=other, why_no_operation=why_none
            )
        return Difference(
            reference.architecture,
            {layer.pair.reference.label: layer.result() for layer in self._layers},
            first,
            num_samples=self._num_samples,
            rtol=self._tolerance.rtol,
            atol=self._tolerance.atol,
            unmatched=unmatched,
            made_with=(reference.made_with, candidate.made_with),
            local=None if self._local is None else self._local.result(),
        )

    @property
    def _first(self) -> _Noted | None:
        """The first layer that makes a difference so far, or else that differs."""
        noted = [layer.maker for layer in self._layers] + [layer.first for layer in self._layers]
        return next(filter(None, noted), None)

    def _in_turn(self, first: Callable[[], _T], second: Callable[[], _T]) -> tuple[_T, _T]:
        """Let both sides act, networks with the same random numbers and from the same state."""
        random = random_state()
        with untouched(self._nets[0]) if self._share_modules else contextlib.nullcontext():
            mine = first()
        restore_random(random)
        return mine, second()

    def _judge(self, block: SampleBlock) -> None:
        """Compare what the layers returned and received in a block, all of them at once."""
        layers = [layer for layer in self._layers if layer.pair.error is None]
        outputs, inputs = map(self._outputs_of, layers), map(self._inputs_of, layers)
        paired = list(zip(layers, outputs, inputs, strict=True))
        returned = [pair for _, pairs, _ in paired if not isinstance(pairs, str) for pair in pairs]
        received = [pair for _, _, pairs in paired if pairs is not None for pair in pairs.pairs]
        figures = self._measured(returned)
        differing = {key for key, found in figures.items() if found.num_different}
        differing |= self._differing([pair for pair in received if pair.key not in figures])
        for layer, own, others in paired:
            same = _received(others, differing)
            layer.receive(same.same)
            if isinstance(own, str):
                layer.fail(own, block.ids[0], same)
            else:
                parts = [
                    _MeasuredPart(number, pair, figures[pair.key])
                    for number, pair in enumerate(own)
                ]
                layer.add(block, parts, same)

    def _outputs_of(self, layer: _ComparedLayer) -> list[PartPair] | str:
        reference, candidate = self._sides
        mine, theirs = layer.pair.reference.label, layer.pair.partner.label
        return paired_outputs(reference.output(mine), candidate.output(theirs))

    def _inputs_of(self, layer: _ComparedLayer) -> InputPairs | None:
        """Return the inputs of a layer; None if they are not known."""
        (row, partner, _), (reference, candidate) = layer.pair, self._sides
        mine, theirs = reference.inputs(row.label), candidate.inputs(partner.label)
        if mine is None or theirs is None:
            return None
        if not isinstance(row, Operation):
            return paired_inputs(mine, theirs, row.module, partner.module)
        # Numbers are a part of the operation, and arguments have no names.
        return paired_inputs(tensors_alone(mine), tensors_alone(theirs), None, None)

    def _measured(self, pairs: Sequence[PartPair]) -> dict[tuple[int, int], Figures]:
        """Measure parts, each pair once: one layer's output is often another one's."""
        held, values = _distinct(pairs)
        figures = {key: measure_values(*pair, self._tolerance) for key, pair in values.items()}
        figures |= zip(held, measure_all([*held.values()], self._tolerance), strict=True)
        return figures

    def _differing(self, pairs: Sequence[PartPair]) -> set[tuple[int, int]]:
        """Return which parts differ."""
        held, values = _distinct(pairs)
        answers = zip(held, differ([*held.values()], self._tolerance), strict=True)
        tolerance = self._tolerance
        return {
            *(key for key, differs in answers if differs),
            *(key for key, x in values.items() if measure_values(*x, tolerance).num_different),
        }

    def _find_operations(self, block: SampleBlock, states: Sequence[NetState]) -> None:
        """Run a block again, from the same state, if it has shown an earlier first difference."""
        noted, pair = self._first, None
        first = None if noted is None else noted.difference
        if first is not None and noted is not self._examined:
            pair = next(layer.pair for layer in self._layers if layer.pair.reference is first.layer)
        if pair and isinstance(pair.reference, Operation) and isinstance(pair.partner, Operation):
            self._operations, pair = OperationPair(pair.reference, pair.partner), None
        # All processes that run a network in step run it again, or none does.
        are_done = [InStep(side.net).all(pair is None) for side in self._networks]
        if all(are_done):
            return
        for state in states:
            state.put_back()
        reference, candidate = self._networks
        mine, theirs, _ = pair or self._compared[0]
        own, other = self._in_turn(
            partial(reference.trace, block, mine), partial(candidate.trace, block, theirs)
        )
        if first is not None and pair is not None:
            received_same = first.inputs_equal is True or bool(first.one_sided)
            differ = partial(differ_beyond, self._tolerance)
            self._operations = first_operations(own, other, differ, received_same=received_same)


def _distinct(
    pairs: Sequence[PartPair],
) -> tuple[dict[tuple[int, int], PartPair], dict[tuple[int, int], PartPair]]:
    """Return the pairs of tensors that can be measured, and those of plain values."""
    held, values = dict[tuple[int, int], PartPair](), dict[tuple[int, int], PartPair]()
    for pair in pairs:
        if pair.is_of_one_shape:
            (held if isinstance(pair.reference, Tensor) else values)[pair.key] = pair
    return held, values


def _received(inputs: InputPairs | None, differing: Collection[tuple[int, int]]) -> _Received:
    """Return whether all inputs of a layer are equal."""
    if inputs is None:
        return _Received(None)
    if any(not pair.is_of_one_shape or pair.key in differing for pair in inputs.pairs):
        return _Received(False)
    if not inputs.one_sided:
        return _Received(True)
    return _Received(None, inputs.one_sided if inputs.pairs else ())
