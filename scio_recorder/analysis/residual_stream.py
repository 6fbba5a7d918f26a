"""The residual stream of a network of blocks, by the names that the field has for its parts.

NOTE [How a stream is proved]

Nothing is known of families of networks. A run of the labelled example notes what layers and
operations receive and return, each tensor by a digest of its numbers, and the operations that
return the sum of two tensors that they receive. From the first tensor that a block receives, sums
must lead to what it returns: these are the states of the stream, and the other operands are what
branches add. Each block must begin with the last state of the one before.

Two more runs replace all states, and give some of them other numbers at every other position. If
all but the last state are changed, a branch that changes at the positions between mixes positions,
and the output must stay, since it may depend on the last state only. If the first state inside each
block is changed, and the last one of all, it shows which branches read the former, and the output
must change at the positions of the latter, and nowhere else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scio_recorder import Architecture
from scio_recorder.display.outline import Listed, Listing
from scio_recorder.errors import LayerNotFoundError
from scio_recorder.layer import Layer, OperationIdx, RowIdx, TensorSpec, counted, few, text_of
from scio_recorder.lowlevel import Capture, Inputs, RecordOptions, digest_of, nearest, untouched
from scio_recorder.postprocessors import OnInput
from scio_recorder.tensors import tensors, with_float64

_OF_BLOCKS = ("resid_pre", "attn_out", "mixer_out", "resid_mid", "mlp_out", "resid_post")
_BRANCHES = {
    "attn_out": "mixes positions and computes attention",
    "mixer_out": "mixes positions without attention",
    "mlp_out": "leaves positions apart",
}
# A change is more than this share of the largest number, and than roundings of the dtype: experts
# multiply other numbers of rows at once.
_ROUNDINGS, _LEAST_CHANGE = 4, 1e-4
# A norm returns hardly more if it receives much more.
_LARGER, _MOST_OF_NORMS = 64.0, 8.0


@dataclass(eq=False, repr=False)
class ResidualStream(Listed, Mapping[str, RowIdx]):
    """The rows of a residual stream by name: ``blocks.3.resid_mid``, ``final_norm``, ``logits``.

    It is printed as a table, with the reasons where names are missing.

    Parameters
    ----------
    architecture : Architecture
        The layers and the operations of the net.
    entries : mapping of str to RowIdx or str
        By name the row, or the reason why there is none.

    Examples
    --------
    See :meth:`scio_recorder.Recorder.residual_stream`.
    """

    architecture: Architecture
    entries: Mapping[str, RowIdx | str]

    def __getitem__(self, name: str) -> RowIdx:
        entry = self.entries.get(name)
        if isinstance(entry, tuple):
            return entry
        close, names = nearest(str(name), self.entries), few([*self], 8)
        why = entry or f"this is no name of a part{close}. There are {names}"
        raise LayerNotFoundError(f"the residual stream has no {name!r}: {why}")

    def __iter__(self) -> Iterator[str]:
        return (name for name, entry in self.entries.items() if not isinstance(entry, str))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    __repr__ = Listed.__str__

    def _listing(self) -> Listing:
        rows = [
            [name, text_of(at), self.architecture[at].name or "(root)"] for name, at in self.items()
        ]
        missing: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in self.entries.keys() - {*self}:
            missing[re.sub(r"\d+", "*", name), str(self.entries[name])].append(name)
        for (pattern, reason), names in sorted(missing.items()):
            rows.append([pattern if len(names) > 1 else names[0], "-", reason])
        title = f"Residual stream: {counted(len(self), 'name')}"
        return Listing(title, ("Name", "Label", "Row"), (), rows, widest=100)


def find_stream(
    capture: Capture, architecture: Architecture, example: Inputs, *, is_training: bool
) -> ResidualStream:
    """Find the residual stream of a network, and prove it on an example, see NOTE.

    Parameters
    ----------
    capture : Capture
        Knows the network. It runs nothing.
    architecture : Architecture
        Its layers, with all operations.
    example : Inputs
        What the network is run on.
    is_training : bool
        Whether it runs in training mode.

    Raises
    ------
    LayerNotFoundError
        There is no stream, or it can't be proved.
    """
    capture.refuse_side_runs("the search for the residual stream")
    net, refusals = capture.net, list[str]()

    def run(labels: Iterable[RowIdx], sink: Any = None, posts: Any = None) -> tuple[Any, Any]:
        state.put_back()
        net.train(is_training)
        options = RecordOptions(inputs=sink is not None, copy="always")
        runner = Capture(net, architecture, tuple(sorted({*labels})), options)
        try:
            keeps = {"records_outputs": sink is None, "sink": sink, "posts": posts}
            return runner.run(net, *example, **keeps), runner.activations
        finally:
            runner.remove()

    roots = net, *example.args, *example.kwargs.values()
    modes = torch.inference_mode(False), torch.no_grad(), capture.without_hooks()
    with modes[0], modes[1], modes[2], untouched(*roots) as state:
        for layers in _sequences(architecture):
            try:
                return _Proof(run, architecture, layers).stream()
            except LayerNotFoundError as error:
                refusals.append(str(error))
    none = "no numbered modules, as h.0, that run once return [batch, positions, features]"
    raise LayerNotFoundError(f"no residual stream was found: {[*refusals, none][0]}")


def _sequences(architecture: Architecture) -> list[list[Layer]]:
    """Return layers that may be the blocks of a stream, those that are least deep first."""
    sequences: dict[tuple[int, str], list[Layer]] = defaultdict(list)
    for row in architecture.values():
        prefix, _, number = row.name.rpartition(".")
        parts, calls = getattr(row.module, "_modules", None), architecture.labels_of(row.name)
        # A module without others in it is no block.
        if number.isdecimal() and parts and len(calls) == 1 and _shapes(row.output_spec):
            sequences[row.depth, prefix].append(row)
    return sorted(sequences.values(), key=lambda rows: (rows[0].depth, -len(rows)))


def _shapes(value: Any) -> list[tuple[int, ...]]:
    """Return the floating shapes [batch, positions, features] in the structure of an output."""
    if isinstance(value, TensorSpec):
        return [value.shape] if value.dtype.is_floating_point and len(value.shape) == 3 else []
    parts = value.values() if isinstance(value, dict) else value
    is_structure = isinstance(value, dict | list | tuple)
    return [shape for part in parts for shape in _shapes(part)] if is_structure else []


# -- what a run shows ------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """An operation that returned the sum of two values, at a time."""

    label: RowIdx
    time: int
    operands: tuple[str, str]
    result: str


class _Call(NamedTuple):
    """A call of a row: what it received first, if that is one state, and what it returned."""

    label: RowIdx
    start: int
    received: str | None
    time: int
    returned: list[str]
    is_tensor: bool


class _Notes:
    """Notes what rows receive and return, as the sink of a pass.

    Values are digests of tensors, and times are numbers of rows that had returned before.
    """

    def __init__(self, labels: Iterable[RowIdx], shape: tuple[int, ...]) -> None:
        self.receivers = {label: partial(self._take, label) for label in labels}
        # In the order in which they returned.
        self.calls: dict[RowIdx, _Call] = {}
        self.sums: list[_Sum] = []
        # The operands and results of sums.
        self.tensors: dict[str, Tensor] = {}
        self._shape = torch.Size(shape)
        self._kept: Any = None

    def _values(self, structure: Any) -> list[Tensor]:
        leaves, batch = (x for x in tensors(structure) if x.is_floating_point()), self._shape[:2]
        size = self._shape.numel()
        return [x for x in leaves if x.numel() == size or (x.dim() > 2 and x.shape[:2] == batch)]

    def keep_inputs(self, row: Layer, inputs: Inputs) -> Any:
        """Copy the operands of an operation, or name the first tensor that a layer receives."""
        if isinstance(row.label, OperationIdx):
            operands = [(_digest(x), x.clone()) for x in self._values(inputs)]
            return len(self.calls), operands[0][0] if operands else None, operands
        first = next((x for x in (*inputs.args, *inputs.kwargs.values()) if tensors(x)), None)
        is_state = isinstance(first, Tensor) and first.shape == self._shape
        return len(self.calls), _digest(first) if is_state else None, ()

    def receive_inputs(self, label: RowIdx, kept: Any) -> None:
        """Take what `keep_inputs` has returned, just before the output."""
        self._kept = kept

    def _take(self, label: RowIdx, output: Any) -> None:
        (start, received, operands), is_tensor = self._kept, isinstance(output, Tensor)
        time, values = len(self.calls), [*map(_digest, self._values(output))]
        self.calls[label] = _Call(label, start, received, time, values, is_tensor)
        for (first, x), (second, y) in combinations(operands, 2) if is_tensor and values else ():
            # What adds zeros can't be told from what it receives.
            if values[0] not in (first, second) and _is_sum(output, x, y):
                self.sums.append(_Sum(label, time, (first, second), values[0]))
                self.tensors |= {first: x, second: y, values[0]: output.clone()}
                break

    def source_of(self, value: str | None, end: int, *, of: int = 4) -> _Call | None:
        """Return the last call that returned a value before some time, best alone.

        With ``of=2`` it is best one of a layer, whose label has two parts.
        """
        calls = [x for x in self.calls.values() if x.time < end and x.returned[:1] == [value]]
        return max(calls, key=lambda x: (x.is_tensor, len(x.label) <= of, x.time), default=None)

    def paths(self, state: str, start: int, end: int) -> Iterator[list[_Sum]]:
        """Yield the sequences of sums from a state on; second operands are what they add."""
        for added in self.sums:
            if start <= added.time < end and state in added.operands:
                first, second = added.operands
                step = added._replace(operands=(state, second if first == state else first))
                for further in self.paths(added.result, added.time + 1, end):
                    yield [step, *further]
        yield []


def _digest(tensor: Any) -> str:
    """Return a digest of the numbers of a tensor, whatever its shape and its precision."""
    return digest_of(with_float64(tensor.detach()).double().flatten())


def _is_sum(*values: Tensor) -> bool:
    """Whether a tensor is the sum of two others, to rounding."""
    result, first, second = (with_float64(x).double().flatten() for x in values)
    largest = max(float(x.abs().max()) for x in (result, first, second))
    least = _ROUNDINGS * max(torch.finfo(x.dtype).eps for x in values) * largest
    is_alike = result.shape == first.shape == second.shape
    return is_alike and float((result - first - second).abs().max()) <= least


# -- the proof -------------------------------------------------------------------------------------


class _Proof:
    """The proof that layers are the blocks of a stream; LayerNotFoundError if they are not."""

    def __init__(self, run: Any, architecture: Architecture, layers: list[Layer]) -> None:
        self._run, self._architecture = run, architecture
        self._shape = _shapes(layers[0].output_spec)[0]
        every = (*architecture.values(), *architecture.operations.values())
        labels = [row.label for row in every if row.executed]
        self._notes = notes = _Notes(labels, self._shape)
        self._output = self._output_of(run(labels, notes)[0])
        # The calls that returned what was added.
        sources = {
            x: notes.source_of(x, added.time) for added in notes.sums for x in added.operands
        }
        self._sources = {value: call for value, call in sources.items() if call is not None}
        calls = [notes.calls[row.label] for row in layers]
        self._calls = sorted(calls, key=lambda call: call.start)
        self._blocks = [*map(self._block, self._calls)]
        for block, call in zip(self._blocks, self._calls[1:], strict=False):
            if call.received != block[-1].result:
                layer = architecture[call.label]
                raise LayerNotFoundError(f"layer {layer} does not receive the last sum before it")
        self._states = {x for block in self._blocks for added in block for x in added.operands[:1]}
        self._post = self._blocks[-1][-1].result
        # Where values change if states do, all of them or those inside blocks, see NOTE.
        self._changes, self._changes_inside = self._proved()

    def _output_of(self, output: Any) -> Tensor:
        # A loss may come before it, which has no positions.
        leaves = (x for x in tensors(output) if x.is_floating_point() and x.dim() == 3)
        chosen = next(leaves, None)
        if chosen is None or chosen.shape[:2] != self._shape[:2]:
            raise LayerNotFoundError(
                "what the network returns is not [{}, {}, ...], as the stream is: record it "
                "without its head, or label it as it returns all positions".format(*self._shape)
            )
        return chosen

    def _block(self, call: _Call) -> list[_Sum]:
        """Find the sums that lead through a block."""
        layer, last, time = self._architecture[call.label], call.received, call.start - 1
        if last is None:
            raise LayerNotFoundError(f"layer {layer} does not receive {self._shape} first")
        paths = [*self._notes.paths(last, call.start, call.time)]
        whole = [path for path in paths if path and path[-1].result in call.returned]
        sums, what = max(whole or paths, key=len), "what it receives"
        if whole and self._sources.keys() >= {added.operands[1] for added in sums}:
            return sums
        if sums:
            last, time = sums[-1].result, sums[-1].time
            what = f"its last sum, {self._architecture[sums[-1].label]},"
        calls = sorted(self._notes.calls.values(), key=lambda x: (x.start, len(x.label)))
        takers = [x.label for x in calls if x.received == last and x.start > time and x != call]
        taken = [f", but {self._architecture[label]} takes it" for label in takers[:1]]
        raise LayerNotFoundError(
            f"no sums lead through layer {layer}: {what} is added to nothing{''.join(taken)}"
        )

    def _proved(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        stream = f"the stream of {self._architecture[self._calls[0].label]} and the other blocks"
        output, changes = self._replaced(self._states)
        if output.any():
            raise LayerNotFoundError(f"the output depends on more than the last state of {stream}")
        inside = {block[0].result for block in self._blocks if block[1:]}
        output, changes_inside = self._replaced(inside | {self._post})
        if output[:, 1::2].any() or not output[:, ::2].any():
            raise LayerNotFoundError(f"the output does not follow, by position, from {stream}")
        return changes, changes_inside

    def _replaced(self, changed: set[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Run with all states replaced, some by others; return where output and values change."""
        sums = [added for block in self._blocks for added in block]
        posts: dict[RowIdx, Any] = {x.label: self._replacing(x.result, changed) for x in sums}
        posts[self._calls[0].label] = OnInput(self._replacing(sums[0].operands[0], changed))
        labels = {value: call.label for value, call in self._sources.items()}
        output, records = self._run([*posts, *labels.values()], posts=posts)
        pairs = {x: (tensors(records[at])[0], self._notes.tensors[x]) for x, at in labels.items()}
        changes = {value: self._changed(*pair) for value, pair in pairs.items()}
        return self._changed(self._output_of(output), self._output), changes

    def _replacing(self, value: str, changed: set[str]) -> Any:
        state = self._notes.tensors[value].reshape(self._shape)
        if value in changed:
            state = state.clone()
            state[:, ::2] = state.abs().mean() - state[:, ::2].roll(1, -1)
        return lambda output: state.to(output.dtype).reshape(output.shape).clone()

    def _changed(self, now: Tensor, before: Tensor) -> Tensor:
        """Return a mask [batch, positions] of what differs by more than rounding."""
        least = max(_LEAST_CHANGE, _ROUNDINGS * torch.finfo(before.dtype).eps)
        now, before = (x.reshape(*self._shape[:2], -1).float() for x in (now, before))
        return (now - before).abs().amax(-1) > least * before.abs().max()

    # -- names -------------------------------------------------------------------------------------

    def stream(self) -> ResidualStream:
        """Return the rows of the stream by name."""
        first, entries = self._calls[0], dict[str, RowIdx | str]()
        pre = self._row(self._notes.source_of(first.received, first.start)) or (
            f"it is only what a layer receives: record it, rnet.record({text_of(first.label)!r}, "
            f"inputs=True), and read rnet.inputs[{text_of(first.label)!r}]"
        )
        for number, (call, block) in enumerate(zip(self._calls, self._blocks, strict=True)):
            rows = {"resid_pre": pre, **self._names(call, block)}
            entries |= {f"blocks.{number}.{name}": rows[name] for name in _OF_BLOCKS}
            pre = rows["resid_post"]
        return ResidualStream(self._architecture, {**entries, **self._head()})

    def _row(self, call: _Call | None) -> RowIdx | str:
        """Return the row of a call, or that it returned more than one tensor."""
        if call is None or call.is_tensor:
            return call.label if call else ""
        return f"{self._architecture[call.label]} returns it first in a structure: record that"

    def _names(self, call: _Call, block: list[_Sum]) -> dict[str, RowIdx | str]:
        """Return the rows of a block, or why there is none."""
        first, *others = [added.operands[1] for added in block]
        parts = [self._parts(first), others]
        kinds = [(self._kind(value), value) for values in parts for value in values]
        names: dict[str, RowIdx | str] = {}
        for kind, what in _BRANCHES.items():
            rows = [self._row(self._sources[value]) for of, value in kinds if of == kind]
            several = f"there are several branches of this kind: {few(rows, 4)}"
            none = f"no branch {what}"
            names[kind] = rows[0] if len(rows) == 1 else several if rows else none
        is_layer = call.is_tensor and call.returned == [block[-1].result]
        names["resid_post"] = call.label if is_layer else block[-1].label
        names["resid_mid"] = block[0].label
        if len(block) < 2:
            names["resid_mid"] = "the block adds all at once"
        elif any(self._kind(value) == "mlp_out" for value in parts[0]):
            names["resid_mid"] = "what the block adds first does not only mix positions"
        elif not self._changes_inside[others[0]].any():
            names["resid_mid"] = "the branches of the block read what it receives, side by side"
        return names

    def _parts(self, value: str) -> list[str]:
        """Return a branch, or its halves if it is the sum of two kinds."""
        for added in self._notes.sums:
            if added.result == value and self._sources.keys() >= {*added.operands}:
                # A bias depends on no state.
                kinds = [self._kind(half) for half in added.operands]
                if all(kinds) and kinds[0] != kinds[1]:
                    return [part for half in added.operands for part in self._parts(half)]
        return [value]

    def _kind(self, value: str) -> str:
        """Return what a branch does; attention in it was computed after the last use of a state."""
        changed = self._changes[value]
        if not changed[:, 1::2].any():
            return "mlp_out" if changed.any() else ""
        end = self._sources[value].time
        sums = (x.time for x in self._notes.sums if self._states & {*x.operands} and x.time < end)
        calls, last = [*self._notes.calls.values()], max(sums, default=0)
        functions = " ".join(getattr(call.label, "function", "") for call in calls[last:end])
        return "attn_out" if re.search("softmax|attention", functions) else "mixer_out"

    def _head(self) -> dict[str, RowIdx | str]:
        """Return the rows behind the blocks."""
        stream, calls, end = {self._post}, self._notes.calls.values(), self._calls[-1].time
        norm: RowIdx | str = "no layer takes the last resid_post and norms it"
        for call in calls:
            if call.received == self._post and call.start > end and self._is_norm(call.label):
                norm, stream = call.label, {self._post, *call.returned}
                break
        value, why = _digest(self._output), "the network returns the stream itself, without a head"
        # In the network, whose own row says nothing of the head.
        row = self._row(self._notes.source_of(value, len(calls) - 1, of=2))
        return {"final_norm": norm, "logits": row if row and value not in stream else why}

    def _is_norm(self, label: RowIdx) -> bool:
        module: Any = self._architecture[label].module
        state = self._notes.tensors[self._post].reshape(self._shape)
        try:
            before, after = (tensors(module(x))[0].norm() for x in (state, _LARGER * state))
        except (TypeError, ValueError, RuntimeError):
            return False
        return not isinstance(label, OperationIdx) and bool(after < _MOST_OF_NORMS * before)
