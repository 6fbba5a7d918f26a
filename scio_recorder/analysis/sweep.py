"""The effect of each recorded layer: corrupted runs in which its output is the clean one; a table.

An estimate of it (attribution patching) is the gradient of the metric with respect to a layer's
output, times the difference between its outputs in both runs (Nanda, "Attribution Patching:
Activation Patching At Industrial Scale", 2023).
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from scio_recorder import Architecture
from scio_recorder.display.figure import draw_effects
from scio_recorder.display.outline import Listed, Listing, full_name, visible
from scio_recorder.errors import (
    ArgumentError,
    ComparisonError,
    FlowError,
    PostprocessorError,
    UnsupportedNetError,
)
from scio_recorder.layer import Layer, RowIdx, counted, text_of
from scio_recorder.layer import describe as spec_of
from scio_recorder.lowlevel import (
    CallHook,
    CallHooks,
    Capture,
    Inputs,
    LayerMapping,
    NetState,
    RecordOptions,
    caught_as,
    describe,
    is_rerun,
    needing,
    raise_of_caller,
    refuse_transforms,
    runs_without_gradients,
    shown_shapes,
    untouched,
    warn_of_other_kernels,
)
from scio_recorder.tensors import (
    booleans,
    flatten,
    is_dense,
    map_tensors,
    names_arguments,
    private,
    tensors,
    twin,
    with_float64,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class _Effect(NamedTuple):
    """The metric of a run in which a layer is patched, there or as a whole."""

    position: int | None
    metric: float
    recovered: float


@dataclass(eq=False, repr=False)
class Effects(Listed):
    """The metric of each run in which a layer's output was replaced by that of another run.

    Parameters
    ----------
    architecture : Architecture
        The labelled net.
    labels : tuple of (int, int)
        The patched layers.
    positions : list of int or None
        The patched positions of dimension 1; None if layers were patched as a whole.
    values : torch.Tensor
        Float64, [layers] or [layers, positions].
    clean, corrupted : float
        The metric of both runs without a patch.
    is_estimate : bool
        Whether the values are first-order estimates.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Sequential(nn.ReLU(), nn.Tanh()), input_size=(1, 2))
    >>> rnet.record("0", "1")
    >>> effects = rnet.sweep(torch.ones(1, 2), torch.zeros(1, 2), lambda output: output[0, 1])
    >>> print(effects)
    Sweep of 2 layers: metric 0.7616 clean, 0 corrupted
    Label  Name  Metric  Recovered
    1-1    0     0.7616      100 %
    1-2    1     0.7616      100 %
    >>> bool(effects["1"] == effects.clean)
    True
    """

    architecture: Architecture
    labels: tuple[RowIdx, ...]
    positions: list[int] | None
    values: Tensor
    clean: float
    corrupted: float
    is_estimate: bool = False

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The patched layers, in the order of `values`."""
        return tuple(self.architecture[label] for label in self.labels)

    @property
    def recovered(self) -> Tensor:
        """`values` as the share of the way from the corrupted metric, 0, to the clean one, 1."""
        change: Tensor = self.values - self.corrupted
        return change / (self.clean - self.corrupted)

    def __getitem__(self, key: RowIdx | str) -> Tensor:
        """Return the values of one layer, by label or name: 0-d, or [positions]."""
        rows = dict(zip(self.labels, self.values, strict=True))
        values: Tensor = LayerMapping(self.architecture, rows, "effect")[key]
        return values

    @names_arguments
    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each value; needs pandas.

        Returns
        -------
        pandas.DataFrame
            By label: ``name``, ``type``, ``position`` (if there are positions), ``metric`` and
            ``recovered``.
        """
        with needing("frame", "a frame"):
            import pandas as pd

        names = ["label", "name", "type", "position", "metric", "recovered"]
        rows = [
            (str(layer.label), layer.name, layer.type_name, *effect)
            for layer, effects in self._by_layer()
            for effect in effects
        ]
        frame = pd.DataFrame(rows, columns=names).set_index("label")
        return frame.drop(columns="position") if self.positions is None else frame

    @names_arguments
    def plot(self, position_names: Sequence[str] | None = None) -> Figure:
        """Draw a bar for each layer, or a map of layers and positions; needs matplotlib.

        Bars begin at the metric of the corrupted run, which is white in a map.

        Parameters
        ----------
        position_names : sequence of str, optional
            The names of positions in a map, such as tokens; by default their numbers.

        Returns
        -------
        matplotlib.figure.Figure
            The figure, which a notebook shows and ``savefig`` writes.

        Raises
        ------
        ArgumentError
            The numbers of names and positions differ.
        """
        positions = [] if self.positions is None else [str(at) for at in self.positions]
        if position_names is not None and len(position_names) != len(positions):
            raise ArgumentError(
                f"there are {len(position_names)} position_names for {len(positions)} positions"
            )
        rows = self._by_layer()
        values = [[effect.metric for effect in effects] for _, effects in rows]
        return draw_effects(
            self._headline(),
            np.array(values).reshape(self.values.shape),
            [visible(f"{text_of(layer.label)} {full_name(layer)}") for layer, _ in rows],
            positions if position_names is None else [*map(str, position_names)],
            self.clean,
            self.corrupted,
        )

    def __repr__(self) -> str:
        return f"<{self._headline()}>"

    def _by_layer(self) -> list[tuple[Layer, list[_Effect]]]:
        """Return the effects of each layer, in the order of execution."""
        positions = [None] if self.positions is None else self.positions
        size = len(self.labels), len(positions)
        values, shares = (tensor.reshape(size).tolist() for tensor in (self.values, self.recovered))
        rows = dict(zip(self.labels, zip(values, shares, strict=True), strict=True))
        return [
            (self.architecture[label], [*map(_Effect, positions, *rows[label])])
            for label in self.architecture.in_order(self.labels)
        ]

    def _headline(self) -> str:
        kind = "Estimated sweep" if self.is_estimate else "Sweep"
        count = counted(len(self.labels), "layer")
        if self.positions is not None:
            count += f" at {counted(len(self.positions), 'position')}"
        return f"{kind} of {count}: metric {self.clean:.4g} clean, {self.corrupted:.4g} corrupted"

    def _listing(self) -> Listing:
        numbers = ("Metric", "Recovered", *(["At position"] * (self.positions is not None)))
        rows = []
        for layer, effects in self._by_layer():
            changes = [np.nan_to_num(abs(effect.metric - self.corrupted)) for effect in effects]
            largest = effects[int(np.argmax(changes))]
            share = f"{100 * largest.recovered:.0f} %" if math.isfinite(largest.recovered) else "-"
            cells = f"{largest.metric:.4g}", share, str(largest.position)
            rows.append([str(layer.label), full_name(layer), *cells[: len(numbers)]])
        return Listing(self._headline(), ("Label", "Name"), numbers, rows)


# -- sweep -----------------------------------------------------------------------------------------

Positions: TypeAlias = Literal["all"] | Iterable[int] | None
# Takes a layer's output, and returns what the network goes on with; None for the same.
_Replace: TypeAlias = Callable[[RowIdx, Any], Any]


def sweep(
    capture: Capture,
    clean: Any,
    corrupted: Any,
    metric: Any,
    positions: Positions,
    *,
    estimate: bool,
) -> Effects:
    """Measure or estimate the effect of each layer that a capture records.

    Parameters
    ----------
    capture : Capture
        Knows the network, and which layers are recorded. It runs nothing.
    clean, corrupted, metric, positions, estimate
        As in ``Recorder.sweep``.
    """
    booleans(ArgumentError, estimate=estimate)
    _check(capture, metric)
    inputs = _inputs("clean", clean), _inputs("corrupted", corrupted)
    with torch.inference_mode(False), torch.set_grad_enabled(estimate):
        # The state that is put back includes the hooks, so that no run finds them changed.
        runs = _Runs(capture, metric, positions)
        try:
            with untouched(capture.net, *inputs[0], *inputs[1]) as runs.state:
                return (_estimated if estimate else _patched)(runs, *inputs)
        except RuntimeError as error:
            reason = "" if estimate else runs_without_gradients(error)
            if not reason:
                raise
            raise caught_as(ComparisonError, error, f"{error}: {reason}") from error
        finally:
            runs.remove()


# -- runs ------------------------------------------------------------------------------------------


class _Runs:
    """Whole runs of a network, all from one state, in which outputs of layers may be replaced."""

    state: NetState

    def __init__(self, capture: Capture, metric: Any, positions: Positions) -> None:
        # A list of numbers, "all" or None.
        self.positions: Any = positions
        if positions is not None and not (isinstance(positions, str) and positions == "all"):
            self.positions = _listed(positions)
        self.architecture, self.labels = capture.architecture, capture.recording
        self._net, self._program = capture.net, capture.program
        self._metric = metric
        # Copies of what the layers return in the clean run, which is the first.
        self.outputs: dict[RowIdx, Any] = {}
        self._counts: Counter[int] = Counter()
        self._has_run = False
        # Whether a weight may have changed uncounted: flags that the device keeps until the end.
        self._doubts: list[Tensor] = []
        self._is_thorough = False
        self._replace: _Replace | None = None
        self._hooks = CallHooks()
        modules = self._program.modules
        warn_of_other_kernels(self.architecture.values(), modules, "patched")
        # With operations, runs are passes of their own, in which post-processors replace outputs.
        self._capture: Capture | None = None
        if self._program.functions:
            self._capture = Capture(self._net, self.architecture, self.labels, RecordOptions())
            return
        named = ((str(index), module) for index, module in enumerate(modules))
        self._hooks.add(*(CallHook(module, name, after=self._after) for name, module in named))

    def remove(self) -> None:
        """Take all hooks from the network."""
        self._hooks.remove()
        if self._capture is not None:
            self._capture.remove()

    def run(self, inputs: Inputs, replace: _Replace) -> Any:
        """Run the network on inputs, and return what the metric makes of its output."""
        if self._has_run:
            self.state.put_back(thorough=self._is_thorough, doubts=self._doubts)
        self._has_run = True
        # A graph can't keep tensors of inference mode, and networks can't write to its leaves.
        args, kwargs = map_tensors(twin, inputs) if torch.is_grad_enabled() else inputs
        self._counts, self._replace = Counter(), replace
        if self._capture is not None:
            return self._measured(self._run_pass(self._capture, args, kwargs, replace))
        output = self._net(*args, **kwargs)
        self._replace = None
        wrong = self._program.wrong_calls(self._counts)
        if wrong:
            raise FlowError(
                "modules with recorded layers ran more or less often in a run of the sweep than "
                f"at labelling: {'; '.join(wrong)}. Label the net as it is used (mode=, "
                "input_data=), or record other layers"
            )
        return self._measured(output)

    def _measured(self, output: Any) -> Any:
        try:
            return self._metric(output)
        except Exception as error:
            what = f"the metric, given the network's output, here {describe(output)},"
            raise_of_caller(what, error, ComparisonError)

    def _run_pass(self, capture: Capture, args: Any, kwargs: Any, replace: _Replace) -> Any:
        posts = [partial(replace, label) for label in self._program.order]
        try:
            return capture.run(self._net, args, kwargs, posts=posts, records_outputs=False)
        except PostprocessorError as error:
            if isinstance(error.__cause__, ComparisonError | UnsupportedNetError):
                raise error.__cause__ from None
            raise

    def _after(self, index: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
        if self._replace is None or (private.backward_pass() != -1 and is_rerun()):
            return None
        positions, count = self._program.positions[int(index)], self._counts[int(index)]
        self._counts[int(index)] += 1
        label = self._program.labels[positions[count]] if count < len(positions) else None
        return None if label is None else self._replace(label, output)

    def keep(self, at: RowIdx, output: Any) -> None:
        """Copy a layer's output in the clean run."""
        refuse_transforms("patched")
        self.outputs[at] = map_tensors(twin, output)

    def check(self, at: RowIdx, output: Any) -> None:
        """Compare a layer's output in the corrupted run with that in the clean run."""
        clean = self.outputs[at]
        if spec_of(output) == spec_of(clean):
            return
        pairs = list(zip(tensors(output), tensors(clean), strict=False))
        if isinstance(self.positions, list) and _have_partners(pairs):
            _refuse_missing(self.architecture[at], pairs[0][0], self.positions)
            return
        raise ComparisonError(
            f"layer {self.architecture[at]} returns {shown_shapes(clean)} in the clean run and "
            f"{shown_shapes(output)} in the corrupted run, but only outputs of equal shapes "
            "can be patched: give both runs inputs of one shape (texts of equally many tokens), "
            "name positions that both have, such as positions=[-1], or record other layers"
        )

    def starts_again(self) -> bool:
        """Whether a run may have written to weights, uncounted: then all weights are put back."""
        doubts = [doubt.to(self._doubts[0].device) for doubt in self._doubts]
        self._is_thorough = bool(doubts) and bool(torch.stack(doubts).any())
        self._doubts = []
        return self._is_thorough


def _patched(runs: _Runs, clean: Inputs, corrupted: Inputs) -> Effects:
    """Return the metric of a run for each layer and position."""

    def patch(patched_at: RowIdx, position: int | None) -> _Replace:
        return lambda at, output: (
            patched(output, runs.outputs[at], position) if at == patched_at else None
        )

    first = _number(runs.run(clean, runs.keep))
    chosen = _places(runs)
    before = _number(runs.run(corrupted, runs.check))
    places: Sequence[int | None] = [None] if chosen is None else chosen
    values = [
        [_number(runs.run(corrupted, patch(at, position))) for position in places]
        for at in runs.labels
    ]
    again = _number(runs.run(corrupted, lambda at, output: None))
    if runs.starts_again():
        return _patched(runs, clean, corrupted)
    if before != again and not (math.isnan(before) and math.isnan(again)):
        raise ComparisonError(
            f"the metric of the corrupted run was {before} at first, and {again} when it ran again "
            "at the end: the network, or the metric, keeps state that can't be put back, such as "
            "a global variable or an iterator. Effects of layers can't be told from that: keep "
            "such state in attributes of the network"
        )
    table = torch.tensor(values, dtype=torch.float64, device="cpu")
    table = table[:, 0] if chosen is None else table
    return Effects(runs.architecture, runs.labels, chosen, table, first, before)


def _number(value: Any) -> float:
    try:
        if isinstance(value, str) or getattr(value, "shape", ()) != ():
            raise TypeError
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise ComparisonError(
            f"the metric returned {describe(value)}: it must return one real number, a float "
            "or a tensor of shape (), such as output.mean()"
        ) from None


def _check(capture: Capture, metric: Any) -> None:
    """Refuse a sweep that can't work, before anything runs."""
    if not capture.recording:
        raise ComparisonError("nothing to sweep over: choose layers with record(...) first")
    if not capture.program.counts_calls:
        raise ComparisonError(
            'after record(..., calls="any") a layer stands for any number of calls: record '
            "without calls= to sweep over single calls"
        )
    capture.refuse_side_runs("a sweep")
    if not callable(metric):
        raise ComparisonError(
            f"metric={metric!r}: give a function of the network's output that returns a number, "
            "such as lambda output: output.mean()"
        )


def _inputs(name: str, value: Any) -> Inputs:
    inputs = Inputs.of(value)
    if inputs is not None:
        return inputs
    raise ComparisonError(
        f"{name} is {describe(value)}: give a tensor, a tuple of positional inputs, a dict of "
        "keyword inputs, or both as a pair (tuple, dict)"
    )


# -- patches ---------------------------------------------------------------------------------------


def patched(corrupted: Any, clean: Any, position: int | None) -> Any:
    """Return the structure that goes on in place of a layer's output.

    Parameters
    ----------
    corrupted : Any
        The layer's output, which does not change.
    clean : Any
        Its output in another run, of the same structure.
    position : int or None
        The position of dimension 1 that is taken from there; None for all.

    Returns
    -------
    Any
        The structure with copies of the clean tensors. With a position, tensors whose first two
        dimensions are not those of the first tensor stay the corrupted ones.

    Examples
    --------
    >>> import torch
    >>> patched(torch.zeros(1, 3), torch.ones(1, 3), 1)
    tensor([[0., 1., 0.]])
    """
    leaves, rebuild = flatten(corrupted)
    others = tensors(clean)

    def patch(own: Tensor, other: Tensor) -> Tensor:
        if position is None:
            return twin(other)
        if not (_has_positions(own, leaves[0]) and _has_positions(other, others[0])):
            return own
        mixed = own.detach().clone()
        mixed[:, position] = other[:, position]
        return mixed

    return rebuild([patch(*pair) for pair in zip(leaves, others, strict=True)])


def _has_positions(tensor: Tensor, first: Tensor | None = None) -> bool:
    """Whether a tensor has positions, and the same as the first one of its structure."""
    if not is_dense(tensor) or tensor.dim() < 2:
        return False
    return first is None or tensor.shape[:2] == first.shape[:2]


def _have_partners(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether all tensors with positions are of one shape in two runs, but for their lengths."""
    if not (pairs and all(map(_has_positions, pairs[0]))):
        return False
    kinds = [
        [_has_positions(x, first) and (x.dtype, len(x), x.shape[2:]) for x in side]
        for first, side in zip(pairs[0], zip(*pairs, strict=True), strict=True)
    ]
    return kinds[0] == kinds[1]


def _places(runs: _Runs) -> list[int] | None:
    """Return positions as a list; refuse some that not all outputs of the clean run have."""
    firsts = {runs.architecture[at]: tensors(output)[:1] for at, output in runs.outputs.items()}
    for layer, some in firsts.items():
        if not some:
            raise ComparisonError(
                f"layer {layer} returns no tensor, so there is nothing to patch: record "
                "other layers"
            )
    chosen: list[int] | None = runs.positions
    if runs.positions == "all":
        chosen = [*range(max(1, *(_length(first) for (first,) in firsts.values())))]
    for layer, (first,) in firsts.items():
        _refuse_missing(layer, first, chosen or [])
    return chosen


def _length(tensor: Tensor) -> int:
    return tensor.shape[1] if _has_positions(tensor) else 0


def _refuse_missing(layer: Layer, tensor: Tensor, positions: Sequence[int]) -> None:
    """Refuse positions that a layer's output lacks."""
    for position in positions:
        if not -_length(tensor) <= position < _length(tensor):
            raise ComparisonError(
                f"there is no position {position} in layer {layer}, which returns "
                f"{shown_shapes(tensor)}: positions are those of dimension 1. Sweep layers "
                "of different lengths one after the other, or write positions=None"
            )


def _listed(positions: Iterable[int]) -> list[int]:
    try:
        chosen = list(positions)
        if chosen and not any(isinstance(position, bool) for position in chosen):
            return [operator.index(position) for position in chosen]
    except TypeError:
        pass
    raise ComparisonError(
        f'positions={positions!r}: write positions=None, "all" or a list such as [0, -1]'
    )


# -- estimates -------------------------------------------------------------------------------------


class _Shared(torch.autograd.Function):
    """Copies a tensor that a layer returns: others may hold it, and a patch changes only the copy.

    The gradient with respect to the shares, which are zero, is the change of the metric by a patch
    of the whole tensor, or of each of the chosen positions.
    """

    @staticmethod
    def forward(
        context: Any, own: Tensor, shares: Tensor, clean: Tensor, places: list[int] | None
    ) -> Tensor:
        context.places, context.pair = places, _at(places, twin(own), clean)
        return own.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        wide = torch.complex128 if gradient.is_complex() else torch.float64
        both = *context.pair, *_at(context.places, gradient)
        own, clean, slope = (with_float64(one).to(wide) for one in both)
        change = (slope.conj() * torch.where(own != clean, clean - own, 0)).real
        if context.places is None:
            return gradient, change.sum().cpu(), None, None
        return gradient, change.transpose(0, 1).flatten(1).sum(1).cpu(), None, None


def _at(places: list[int] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if places is None else tuple(tensor[:, places] for tensor in tensors)


def _shared(layer: Layer, output: Any, clean: Any, places: list[int] | None) -> tuple[Tensor, Any]:
    """Return the shares of patches in a layer's output, and copies that go on in its place."""
    (leaves, rebuild), others = flatten(output), tensors(clean)
    size = () if places is None else (len(places),)
    shares = torch.zeros(size, dtype=torch.float64, device="cpu", requires_grad=True)
    copies = []
    for own, other in zip(leaves, others, strict=True):
        are_there = _has_positions(own, leaves[0]) and _has_positions(other, others[0])
        is_patched = places is None or are_there
        copies.append(_Shared.apply(own, shares, other, places) if is_patched else own)  # type: ignore[no-untyped-call]
        if is_patched and not copies[-1].requires_grad and torch.ne(*_at(places, own, other)).any():
            raise ComparisonError(
                f"layer {layer} can't be estimated: its output is not on autograd's graph, since "
                f"its dtype is {own.dtype} or it was made without gradients. Sweep without "
                "estimate=, or record the layers around it"
            )
    return shares, rebuild(copies)


def _estimated(runs: _Runs, clean: Inputs, corrupted: Inputs) -> Effects:
    """Return first-order estimates of the same, from one pass forward and backward."""
    shares: dict[RowIdx, Tensor] = {}
    chosen: list[int] | None = None if runs.positions is None else []

    def share(at: RowIdx, output: Any) -> Any:
        (runs.check if at in runs.outputs else runs.keep)(at, output)
        outputs = runs.architecture[at], output, runs.outputs[at]
        shares[at], copies = _shared(*outputs, chosen)
        return copies

    # Kernels may differ where gradients are asked for: both runs use the same.
    first = _number(runs.run(clean, share))
    chosen = _places(runs)
    value = runs.run(corrupted, share)
    before = _number(value)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise ComparisonError(
            "estimate=True needs the gradient of the metric, but the returned value has none: let "
            "the metric return a tensor that differentiable functions compute from the output, "
            "without item(), detach(), argmax() or no_grad(), and let the network compute that so "
            "from recorded layers"
        )
    asked = [shares[at] for at in runs.labels]
    changes = torch.autograd.grad(value, asked, allow_unused=True, materialize_grads=True)
    table = before + torch.stack(changes)
    # Zeros of torch 2.8, where nothing depends on a layer, ask for gradients themselves.
    table = table.detach()
    return Effects(runs.architecture, runs.labels, chosen, table, first, before, is_estimate=True)
