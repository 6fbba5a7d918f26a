"""What the own codes of two layers do, and where they part.

NOTE [Where codes part]

Steps are paired in order, by function and shapes: equal ones from the start, and then those that
`difflib` pairs. In the first pair whose outputs differ, the outputs of all pairs before are equal.
So if its inputs are equal, it has made the difference. If they differ, either a step without a
partner has made one of them, and the codes have parted there; or the pair was given other operands,
and has made the difference itself. For a module that is called, a value that is returned, or one
that was made by no step, there is no operation to name. If the layers have received other inputs,
only the first case is certain.

Where called modules are forced to return the same, no steps are paired but calls, by what they
return. From what such a call is given, or what is returned, the codes are followed backwards up to
values that both make; the first operations behind these are named. Without forced modules steps
have to be paired: codes may do more in one line, swap operands, or call modules that differ.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile, zip_longest
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from scio_recorder.analysis.comparing.measures import Tolerance, differ
from scio_recorder.analysis.comparing.pairing import comparable
from scio_recorder.analysis.guarding.finite import is_unset
from scio_recorder.layer import Layer, Operation, describe
from scio_recorder.lowlevel import (
    CallWrapper,
    ObservingMode,
    OwnCodeHook,
    RunningCode,
    reached,
    run_in_mode,
    takes_hooks,
)
from scio_recorder.tensors import Copies, memories_of, tensors

_CALL, _RETURN = "call of a module", "return"
# Functions that write to all of a tensor, and read nothing of it.
_FILLING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"}


# The producer of what was there before the call.
OUTSIDE = -1


# -- what own code does ----------------------------------------------------------------------------


class StepInput(NamedTuple):
    """A tensor that a step receives, and the number of the step that produced it, if seen."""

    tensor: Tensor
    producer: int | None


@dataclass(frozen=True, eq=False)
class Step:
    """What own code does: an operation, the call of another module, or the return at the end.

    Parameters
    ----------
    row : Operation or None
        The operation.
    key : tuple
        What it has in common with its partner: the function, and the shapes that it returns.
    inputs : sequence of StepInput
        What it receives, without parameters and buffers.
    made : sequence of Tensor
        What it returned, but for memory without values.
    """

    row: Operation | None
    key: tuple[Any, ...]
    inputs: Sequence[StepInput]
    made: Sequence[Tensor]


class _TracingMode(ObservingMode):
    """Keeps the steps of one call, with copies of all tensors."""

    def __init__(
        self, layer: Layer, weights: set[int], outside: Iterable[int], steps: list[Step]
    ) -> None:
        super().__init__()
        self.steps = steps
        self._layer = layer
        # The ids of parameters and buffers.
        self._weights = weights
        self._copies = Copies()
        self._producers = dict.fromkeys(outside, OUTSIDE)
        # By memory: the number of the step that has written there last, perhaps through a view.
        self._writers: dict[int, int] = {}
        # What functions such as ``empty`` have returned, by its memories.
        self._unset: dict[int, Tensor] = {}

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[StepInput]:
        """Copy the inputs."""
        found = (one for one in tensors((args, kwargs)) if id(one) not in self._weights)
        return [StepInput(self._copies.of(one), self._producer_of(one)) for one in self._set(found)]

    def written(self, given: Any) -> list[Tensor]:
        """Return the inputs that have been written to since they were copied."""
        return [*filter(self._copies.is_written, tensors(given))]

    def _producer_of(self, tensor: Tensor) -> int | None:
        """Return the number of the step that has made a tensor, or written to it since."""
        producer, memories = self._producers.get(id(tensor)), memories_of(tensor)
        writers = [self._writers.get(at, OUTSIDE) for at in memories]
        return None if producer is None else max([producer, *writers])

    def after(self, function: str, index: int, given: Any, output: Any) -> None:
        """Keep an operation."""
        if is_unset(function):
            self._unset |= {at: one for one in tensors(output) for at in memories_of(one)}
        elif function in _FILLING:
            for at in memories_of(output) & self._unset.keys():
                # Not if it is only a view of a part.
                if output.untyped_storage().nbytes() == output.nbytes:
                    self._unset.pop(at)
        row = Operation(self._layer, function, index, describe(output), self.line())
        self.add(row, function, given, output)

    def add(self, row: Operation | None, what: str, given: list[StepInput], output: Any) -> None:
        """Keep a step."""
        made = tensors(output)
        written = filter(self._copies.is_written, made)
        self._writers |= {at: len(self.steps) for one in written for at in memories_of(one)}
        kept = [self._copies.of(one) for one in self._set(made)]
        self._producers.update((id(one), len(self.steps)) for one in made)
        key = (what, *(tuple(one.shape) for one in made))
        self.steps.append(Step(row, key, given, kept))

    def _set(self, found: Any) -> Iterator[Tensor]:
        return (one for one in found if memories_of(one).isdisjoint(self._unset))


class _TracedCalls:
    """The calls of the layer's module, each with steps of its own, or all of one."""

    def __init__(self, net: nn.Module, layer: Layer, local: RunningCode, *, is_one: bool) -> None:
        self._layer = layer
        self._local = local
        self._is_one = is_one
        self._weights = {*map(id, net.parameters()), *map(id, net.buffers())}
        # What the network holds, and what the module receives.
        self._outside = reached([net])
        self._received: list[Tensor] = []
        self.calls: list[_TracingMode] = []

    def _mode(self) -> _TracingMode:
        """Return the mode for a call, in the order in which calls start."""
        steps = self.calls[0].steps if self._is_one and self.calls else []
        outside = (*self._outside, *map(id, self._received))
        self.calls.append(_TracingMode(self._layer, self._weights, outside, steps))
        return self.calls[-1]

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the module, and keep what it returns."""
        number, self._received = len(self.calls), tensors((args, kwargs))
        output = run_in_mode(self._local, self._mode(), call, args, kwargs)
        own = self.calls[number]
        own.add(None, _RETURN, own.before((output,), {}), None)
        return output


def _run_other(local: RunningCode, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call another module, outside of the mode: such calls are steps of the own code around them.

    They run under a mode as well, one that sees nothing. So the whole network leaves PyTorch's fast
    paths, as it does when it is recorded: an encoder on one would give nested tensors to attention
    that is not.
    """
    outer = local.own_code
    if not isinstance(outer, _TracingMode) or outer.is_paused:
        return run_in_mode(local, ObservingMode(), call, args, kwargs)
    with _paused(outer):
        given = outer.before(args, kwargs)
    output = run_in_mode(local, ObservingMode(), call, args, kwargs)
    with _paused(outer):
        # A module makes what it writes to as well.
        outer.add(None, _CALL, given, (output, outer.written((args, kwargs))))
    return output


@contextlib.contextmanager
def _paused(mode: _TracingMode) -> Iterator[None]:
    mode.is_paused = True
    try:
        yield
    finally:
        mode.is_paused = False


@contextlib.contextmanager
def traced(
    net: nn.Module, layer: Layer, module: nn.Module, *, all_calls: bool
) -> Iterator[list[Step]]:
    """Trace the own code of a layer inside the block, and have its steps at the end.

    Parameters
    ----------
    net : torch.nn.Module
        The network, which is called once in the block.
    layer : Layer
        The layer.
    module : torch.nn.Module
        Its module, which is that of a copy if the network is.
    all_calls : bool
        Trace all calls of its module, one after the other, and not only the layer's.
    """
    local, steps = RunningCode(), list[Step]()
    traced_calls = _TracedCalls(net, layer, local, is_one=all_calls)
    others = [one for one in net.modules() if one is not module and takes_hooks(one)]
    hook = OwnCodeHook(local)
    wrappers = [CallWrapper(one, partial(_run_other, local)) for one in others]
    with contextlib.ExitStack() as stack:
        for wrapper in [CallWrapper(module, traced_calls.run), *wrappers]:
            wrapper.put_around()
            stack.callback(wrapper.remove)
        stack.callback(module.register_forward_pre_hook(hook.resume).remove)
        stack.callback(module.register_forward_hook(hook.pause, prepend=True).remove)
        yield steps
        number = 0 if all_calls else layer.call
        for call in traced_calls.calls[number : number + 1]:
            steps += call.steps


# -- where two codes part --------------------------------------------------------------------------


Steps: TypeAlias = Sequence[Step]
Differ: TypeAlias = Callable[[Tensor | None, Tensor | None], bool]
_Inputs: TypeAlias = tuple[StepInput | None, StepInput | None]


class OperationPair(NamedTuple):
    """An operation of each code, or why there is none."""

    own: Operation | None = None
    other: Operation | None = None
    why_none: str = ""


_STRANGERS = OperationPair(None, None, "the two codes have no operation in common")
_UNSEEN = OperationPair(
    None, None, "no operation that is seen in the layer's own code makes the difference"
)


def first_operations(
    own: Steps, other: Steps, differ: Differ, *, received_same: bool
) -> OperationPair:
    """Return the operations of two codes at which a difference begins, see NOTE.

    Parameters
    ----------
    own, other : sequence of Step
        The reference's code and the candidate's.
    differ : callable
        Whether two tensors differ, of which one may be None.
    received_same : bool
        Whether the inputs of the layers are equal.
    """
    pairs = _aligned([step.key for step in own], [step.key for step in other])
    # Both codes end with a return, which alone is nothing in common.
    if len(pairs) < 2 and not _are_alike(own, other):
        return _STRANGERS
    for at, to in pairs:
        outputs = zip_longest(own[at].made, other[to].made)
        is_end = at == len(own) - 1
        if not is_end and not any(differ(*one) for one in outputs):
            continue
        unequal = _unequal_inputs(own[at], other[to], differ)
        # At the end, nothing is made of what is given.
        if not unequal and not is_end:
            return _pair(own[at].row, other[to].row)
        if unequal and received_same:
            found = _parting(own, other, pairs, unequal)
            return found or _pair(own[at].row, other[to].row)
    return _UNSEEN


def forced_operations(own: Steps, other: Steps, differ: Differ) -> OperationPair:
    """Return the operations at which codes part whose called modules are forced, see NOTE.

    Parameters
    ----------
    own, other : sequence of Step
        The reference's code and the candidate's.
    differ : callable
        Whether two tensors differ, of which one may be None.
    """
    shares_some = any(_is_made(step, other, differ) for step in own)
    if not shares_some and not _are_alike(own, other):
        return _STRANGERS
    for step, partner in _meetings(own, other, differ):
        unequal = _unequal_inputs(step, partner, differ)
        producers = [x.producer if x else None for x, _ in unequal]
        first = _alone(own, other, producers, differ)
        second = _alone(other, own, [x.producer if x else None for _, x in unequal], differ)
        # What the other code does in addition, it does to what was made last.
        last = (own[at].row for at in producers if at not in (None, OUTSIDE))
        if first or second:
            return OperationPair(first or next(filter(None, last), None), second)
    return _UNSEEN


def _meetings(own: Steps, other: Steps, differ: Differ) -> Iterator[tuple[Step, Step]]:
    """Yield the calls of modules in two codes that return the same, and both ends."""
    rest = [step for step in other if step.key[0] == _CALL]
    for step in (step for step in own if step.key[0] == _CALL):
        alike = (x for x in rest if x.key == step.key and not any(map(differ, step.made, x.made)))
        partner = next(alike, None)
        if partner is not None:
            rest.remove(partner)
            yield step, partner
    yield own[-1], other[-1]


def _unequal_inputs(step: Step, partner: Step, differ: Differ) -> list[_Inputs]:
    inputs = zip_longest(step.inputs, partner.inputs)
    return [(a, b) for a, b in inputs if differ(a and a.tensor, b and b.tensor)]


def _pair(own: Operation | None, other: Operation | None) -> OperationPair:
    return OperationPair(own, other) if own or other else _UNSEEN


def _aligned(own: list[Any], other: list[Any]) -> list[tuple[int, int]]:
    """Pair the numbers of steps, by their keys; both codes end with a return."""
    keys, others = own[:-1], other[:-1]
    start = len([*takewhile(lambda pair: pair[0] == pair[1], zip(keys, others, strict=False))])
    matcher = difflib.SequenceMatcher(None, keys[start:], others[start:], autojunk=False)
    pairs = [(at, at) for at in range(start)]
    for a, b, length in matcher.get_matching_blocks():
        pairs += [(start + a + at, start + b + at) for at in range(length)]
    return [*pairs, (len(own) - 1, len(other) - 1)]


def _are_alike(own: Steps, other: Steps) -> bool:
    """Whether two codes without a function in common do the same number of things."""
    return [one.key[1:] for one in own] == [one.key[1:] for one in other]


def _parting(
    own: Steps,
    other: Steps,
    pairs: list[tuple[int, int]],
    unequal: Sequence[_Inputs],
) -> OperationPair | None:
    """Return the operations at which codes part, if steps without partners made the inputs.

    None stands for none of these. If nobody has seen what made an input, there is none to name.
    """
    producers = {one.producer for one, _ in unequal if one is not None}
    other_producers = {one.producer for _, one in unequal if one is not None}
    for (a, b), (c, d) in pairwise([(-1, -1), *pairs]):
        if producers.isdisjoint(range(a + 1, c)) and other_producers.isdisjoint(range(b + 1, d)):
            continue
        # Codes that part where modules are called have no line to be named.
        if not _rows(own[a + 1 : c]) + _rows(other[b + 1 : d]):
            return _UNSEEN
        return OperationPair(
            _row_at(own, a + 1, c, other, b + 1), _row_at(other, b + 1, d, own, a + 1)
        )
    return _UNSEEN if None in producers | other_producers else None


def _alone(
    code: Steps, other: Steps, producers: Sequence[int | None], differ: Differ
) -> Operation | None:
    """Return the first operation whose value the other code doesn't make.

    It is looked for backwards from some steps, as far as values that both codes make.
    """
    todo, alone = [*producers], set[int]()
    while todo:
        at = todo.pop()
        is_seen = at is not None and at != OUTSIDE and at not in alone
        if at is not None and is_seen and not _is_made(code[at], other, differ):
            alone.add(at)
            todo += [x.producer for x in code[at].inputs]
    return next((row for at in sorted(alone) if (row := code[at].row) is not None), None)


def _is_made(step: Step, code: Steps, differ: Differ) -> bool:
    """Whether a code makes all that a step makes."""
    made = [tensor for other in code for tensor in other.made]
    return bool(step.made) and all(
        any(x.shape == y.shape and not differ(x, y) for y in made) for x in step.made
    )


def _rows(code: Steps) -> list[Operation]:
    return [one.row for one in code if one.row is not None]


def _row_at(code: Steps, start: int, end: int, other: Steps, there: int) -> Operation | None:
    """Return the first operation of a code where it parts from another, or the nearest to it."""
    inside = _rows(code[start:end])
    if inside:
        return inside[0]
    # What the other code has in addition may stand in the line of what comes before it.
    before, beside, added = code[start - 1].row, other[there - 1].row, _rows(other[there:])[0]
    if before and beside and (beside.file, beside.line) == (added.file, added.line):
        return before
    near = code[end].row or before
    return near or next(iter(_rows(code[end:]) or _rows(code)[::-1]), None)


def differ_beyond(tolerance: Tolerance, own: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors differ beyond a tolerance; one without a partner does."""
    pairs = comparable(own, other)
    return pairs is None or any(differ(pairs, tolerance))
