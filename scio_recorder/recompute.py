"""Activations that were not recorded, from those that were: the module around them runs again.

NOTE [How it is made sure that a recomputed activation is the one of then]

The nearest recorded module around the layer runs again on the inputs recorded for it, in the state
noted at that call: random numbers, modes, training flags, buffers. Post-processors of that pass act
again. What the module returns must be bit for bit what was recorded of it, or nothing is handed
out. Version counters of the weights are compared too, for what does not show in the output.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scio_recorder.capture.hooks import follow
from scio_recorder.capture.moment import Moment
from scio_recorder.errors import RecomputeError, SelectorTypeError
from scio_recorder.postprocessing import Postprocessor, apply
from scio_recorder.records import Inputs, LayerMapping, Records
from scio_recorder.restoring import preserved_rng, restored
from scio_recorder.selection import select
from scio_recorder.tensors import StridedCopy, is_plain, same_bits
from scio_recorder.tree import flatten, map_tensors, tensors

if TYPE_CHECKING:
    from scio_recorder.architecture import Architecture, DepthIdx
    from scio_recorder.capture import Capture
    from scio_recorder.layer import Layer

__all__ = ["Call", "Recomputing", "enclosing_layers", "rerun"]


@dataclass(frozen=True)
class Call:
    """A recorded call of a module that can be run again.

    Parameters
    ----------
    label : (int, int)
        The layer.
    inputs : Inputs
        What its forward received.
    output : Any
        What it returned.
    moment : Moment
        The state at that call.
    posts : mapping
        The post-processors of that pass, by label.
    """

    label: DepthIdx
    inputs: Inputs
    output: Any
    moment: Moment
    posts: Mapping[DepthIdx, Postprocessor]


class Recomputing:
    """The part of a recorder that recomputes."""

    architecture: Architecture
    _capture: Capture

    @property
    def activations(self) -> Records:
        """The activations of the latest pass."""
        raise NotImplementedError

    @property
    def inputs(self) -> Records:
        """The inputs of the latest pass."""
        raise NotImplementedError

    def recompute(self, *selectors: Any) -> LayerMapping[Any]:
        """Return activations of the latest pass that were not recorded.

        After ``record(..., inputs=True)``: the nearest recorded module around each layer runs again
        as it did then, and its output is compared with the record. Nothing of the net is changed.
        Hooks of the user's on inner modules are called again.

        Parameters
        ----------
        *selectors
            What :meth:`record` takes; recorded layers are given as they were recorded.

        Returns
        -------
        LayerMapping
            Copies, off the graph, bit for bit what the layers returned; keys as in
            :attr:`activations`.

        Raises
        ------
        RecomputeError
            No module around a layer was recorded with its inputs in the latest pass; or weights or
            anything else have changed since, so that it returns something else now.
        LayerNotFoundError
            A selector matches no layer.

        Examples
        --------
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> x = torch.ones(4, 2)
        >>> _ = rnet(x)
        >>> torch.equal(rnet.recompute("0.0")["0.0"], net[0][0](x))
        True
        """
        if not selectors:
            raise SelectorTypeError('no layers are named: write recompute("layer3.*")')
        found: dict[DepthIdx, Any] = {}
        wanted: dict[DepthIdx, set[DepthIdx]] = {}
        activations = self.activations
        for target in select(self.architecture, selectors):
            if target in activations:
                found[target] = map_tensors(_copy, activations[target])
            else:
                wanted.setdefault(self._enclosing(target), set()).add(target)
        for label, targets in wanted.items():
            found.update(rerun(self.architecture, self._recorded_call(label), targets))
        return LayerMapping(self.architecture, dict(sorted(found.items())), "activation")

    def _enclosing(self, target: DepthIdx) -> DepthIdx:
        around = enclosing_layers(self.architecture, target)
        recorded = self._capture.program.recording
        nearest = next((label for label in around if label in recorded), None)
        if nearest is None:
            best = f'"{self.architecture[around[0]].name}"' if around else "around it"
            raise RecomputeError(
                f"no module around layer {self.architecture[target]} is recorded: write "
                f"record({best}, inputs=True) before the pass, or any module that contains that one"
            )
        if not self._capture.program.options.inputs:
            raise RecomputeError(
                f"layer {self.architecture[nearest]} is recorded without its inputs: write "
                "record(..., inputs=True) before the pass"
            )
        if nearest not in self.activations or nearest not in self.inputs:
            raise RecomputeError(
                f"the latest pass has left no record of layer {self.architecture[nearest]}: run "
                "the recorder first, without dont_record"
            )
        return nearest

    def _recorded_call(self, label: DepthIdx) -> Call:
        moments, posts = self._capture.scene
        inputs, output = self.inputs[label], self.activations[label]
        return Call(label, inputs, output, moments[label], posts)


def enclosing_layers(architecture: Architecture, target: DepthIdx) -> list[DepthIdx]:
    """Return the calls inside which a layer ran, the nearest first.

    Parameters
    ----------
    architecture : Architecture
        The layers.
    target : (int, int)
        The layer.

    Returns
    -------
    list of (int, int)
        Without the layer itself.

    Examples
    --------
    >>> from scio_recorder.labelling import label_net
    >>> _, architecture = label_net(nn.Sequential(nn.Sequential(nn.ReLU())), input_size=(1, 2))
    >>> enclosing_layers(architecture, (2, 1))
    [(1, 1), (0, 1)]
    """
    # Rows stand in the order in which calls started.
    rows = list(architecture.values())
    own = next(at for at, row in enumerate(rows) if row.label == target)
    ended = rows[own].completion
    return [row.label for row in rows[own::-1] if _ended_later(row, ended)]


def rerun(architecture: Architecture, call: Call, targets: set[DepthIdx]) -> dict[DepthIdx, Any]:
    """Run a recorded call again, and return what layers inside it return.

    Parameters
    ----------
    architecture : Architecture
        The layers, with their modules.
    call : Call
        What to run.
    targets : set of (int, int)
        Layers inside it.

    Returns
    -------
    dict
        Label -> activation, copied and off the graph.

    Raises
    ------
    RecomputeError
        The call returns something else now.
    """
    layer = architecture[call.label]
    module = layer.module
    if module is None:
        raise RecomputeError(f"layer {layer} has no module: this architecture was read from disk")
    change = call.moment.explain_change(module)
    if change is not None:
        raise RecomputeError(
            f"layer {layer} can't be run again: {change}. Recompute right after the pass"
        )
    again = _Again(architecture, call, targets)
    with preserved_rng(), restored(module, keep_hooks=True), again.watching(module):
        _run(call, module, layer)
    again.check()
    return again.found


def _run(call: Call, module: nn.Module, layer: Layer) -> None:
    with call.moment.entered(module):
        args, kwargs = _inputs_again(call)
        try:
            module(*args, **kwargs)
        except RecomputeError:
            raise
        except Exception as error:
            raise RecomputeError(
                f"layer {layer} failed when it was run again: {type(error).__name__}: {error}"
            ) from error


class _Again:
    """One re-run: what layers inside return, and whether the call itself returns what it did."""

    def __init__(self, architecture: Architecture, call: Call, targets: set[DepthIdx]) -> None:
        self._architecture = architecture
        self._call = call
        self._targets = targets
        self._counts: Counter[nn.Module] = Counter()
        self._is_same = False
        self.found: dict[DepthIdx, Any] = {}
        wanted = targets | set(call.posts) | {call.label}
        modules = {architecture[label].module for label in wanted}
        numbered = enumerate(architecture.items())
        rows = {label: (at, row.completion or 0) for at, (label, row) in numbered}
        start, end = rows[call.label]
        # The calls of these modules inside the call, in the order in which they return.
        self._order = {
            module: [
                label
                for label in architecture.calls(module)
                if rows[label][0] >= start and rows[label][1] <= end
            ]
            for module in modules
            if module is not None
        }

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Take what modules return, for the length of the block."""
        handles = [
            follow(watched, self._receive) for watched, calls in self._order.items() if calls
        ]
        # The recorded inputs are what forward received: these hooks have acted on them already.
        # Whoever restores the module brings them back.
        module._forward_pre_hooks = OrderedDict()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _receive(self, module: nn.Module, args: Any, output: Any) -> Any:
        calls, count = self._order[module], self._counts[module]
        self._counts[module] += 1
        if count >= len(calls):
            return None
        label = calls[count]
        handed = output
        if label in self._call.posts:
            handed = apply(self._call.posts[label], output, self._architecture[label])
        if label in self._targets:
            self.found[label] = map_tensors(_copy, output)
        if label == self._call.label:
            self._is_same = _equal(output, self._call.output)
        return None if handed is output else handed

    def check(self) -> None:
        """Raise where the re-run was another one than the recorded call."""
        layer = self._architecture[self._call.label]
        runs = [self._counts[module] == len(calls) for module, calls in self._order.items()]
        if not self._is_same or not all(runs):
            raise RecomputeError(
                f"layer {layer} returns something else than was recorded when it is run again: "
                "weights have changed since that pass (fused optimisers don't count versions), or "
                "something else has that it depends on; or its kernels are not deterministic, or "
                "others where inner modules have hooks. Recompute right after the pass, and see "
                "torch.use_deterministic_algorithms"
            )


def _inputs_again(call: Call) -> Inputs:
    """Copy the inputs, as like those of then as can be; in the state of then."""
    leaves, rebuild = flatten(call.inputs)
    moment = call.moment
    if len(leaves) != len(moment.devices):
        raise RecomputeError("the recorded inputs have changed since that pass")
    copies = [
        _input_again(leaf.to(device), requires_grad)
        for leaf, device, requires_grad in zip(
            leaves, moment.devices, moment.requires_grad, strict=True
        )
    ]
    again: Inputs = rebuild(copies)
    return again


def _input_again(leaf: Tensor, requires_grad: bool) -> Tensor:
    copy = StridedCopy(leaf) if is_plain(leaf) else None
    memory = leaf.detach().clone() if copy is None else copy.kept
    if requires_grad and not memory.is_inference():
        with torch.enable_grad():
            # No leaf: modules may work in place on what they receive.
            memory = memory.requires_grad_().clone()
    return memory if copy is None else copy.restored(memory)


def _ended_later(row: Layer, completion: int | None) -> bool:
    return row.completion is not None and completion is not None and row.completion > completion


def _equal(output: Any, recorded: Any) -> bool:
    ours, theirs = tensors(output), tensors(recorded)
    return len(ours) == len(theirs) and all(
        same_bits(one.to(other.device), other) for one, other in zip(ours, theirs, strict=True)
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
