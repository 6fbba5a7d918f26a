"""Recompute layers of a pass or of a dataset: recorded modules around them run again.

NOTE [Why a recomputed activation is the original one]

The nearest recorded module around the layer runs again on the inputs recorded for it, in the state
noted at that call: random numbers, modes, training flags, buffers. Post-processors of that pass act
again. The module's output must equal its recorded output bit for bit, or nothing is handed out. The
output does not show every change, so the weights are compared too: in a live recorder their version
counters and some values of each, in a collected recording a digest of all.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder import Architecture
from scio_recorder.errors import ArgumentError, RecomputeError, SelectorTypeError
from scio_recorder.layer import Layer, OperationIdx, RowIdx, text_of
from scio_recorder.lowlevel import (
    Assigned,
    CallHook,
    CallHooks,
    Capture,
    Inputs,
    LayerMapping,
    Postprocessors,
    Readable,
    WeightDigests,
    assign,
    digest_of,
    needs_fsdp,
    select_layers,
    untouched,
)
from scio_recorder.stores import KeptCall
from scio_recorder.tensors import StridedCopy, flatten, is_plain, map_tensors, private, tensors

_NOT_KEPT = (
    "attributes of modules that change from pass to pass, buffers of more than 256 KiB that "
    "forward writes in evaluation mode, inputs that share memory with each other or with weights "
    "and are changed in place, or a few numbers of the weights written through .data"
)
_OTHER_KERNELS = (
    "not deterministic (see torch.use_deterministic_algorithms), other ones chosen for attention "
    "or matrix products, other ones where inner modules have hooks, another number of threads or "
    "another version of torch"
)


def recompute_pass(capture: Capture, selectors: Sequence[Any]) -> LayerMapping[Any]:
    """Return outputs of layers in the latest pass; see ``Recorder.recompute``.

    Parameters
    ----------
    capture : Capture
        What the recorder's latest pass left.
    selectors : sequence
        The layers; those that were recorded need not run again.
    """
    if not selectors:
        raise SelectorTypeError('no layers are named: write recompute("layer3.*")')
    architecture, activations, inputs = capture.architecture, capture.activations, capture.inputs
    targets = select_layers(architecture, selectors, "recompute")
    recorded = [target for target in targets if target in activations]
    outputs = {target: map_tensors(_copied, activations.peek(target)) for target in recorded}
    others = [target for target in targets if target not in activations]
    if others and capture.options.calls == "any":
        raise RecomputeError(
            'after record(..., calls="any") it is unknown in which call a layer ran: record '
            "the module around it without calls="
        )
    kept = {label for label in inputs if label in activations}
    wanted = _by_enclosing(architecture, others, kept, "the latest pass left")
    moments, posts = capture.state
    with _untouched(architecture, wanted):
        for label, inside in wanted.items():
            # Its moment knows the weights.
            output = digest_of(activations.peek(label))
            call = KeptCall(inputs.peek(label), moments[label], "", output)
            again = _RepeatedCall(architecture, label, call, inside, posts)
            # A run of the whole network must not count as a pass of a block around it.
            outputs.update(capture.site.local.run_aside(again.run))
    return LayerMapping(architecture, outputs, "activation")


def _by_enclosing(
    architecture: Architecture, targets: Iterable[RowIdx], kept: Container[RowIdx], where: str
) -> dict[RowIdx, set[RowIdx]]:
    """Return the layers that run again, each the nearest kept one around some of the targets."""
    inside: dict[RowIdx, set[RowIdx]] = {}
    for target in targets:
        around = [target, *architecture.enclosing(target)]
        nearest = next((label for label in around if label in kept), None)
        if nearest is None:
            best = architecture[around[:2][-1]].name
            raise RecomputeError(
                f"{where} no inputs of layer {architecture[target]} nor of a module around it: "
                f'write record("{best}", inputs=True), or any module that contains that one, and '
                "run the net again"
            )
        inside.setdefault(nearest, set()).add(target)
    return inside


class Recomputation:
    """The layers of a recording that are wanted, and the calls that run again for them.

    Parameters
    ----------
    recording : Readable
        A recording with inputs.
    rnet : torch.nn.Module
        A recorder of the same net.
    selectors : sequence
        The layers.
    postprocessors : callable, list or mapping, optional
        The post-processors that ``collect`` was given.
    """

    def __init__(
        self,
        recording: Readable,
        rnet: nn.Module,
        selectors: Sequence[Any],
        postprocessors: Postprocessors | None,
    ) -> None:
        self._recording = recording
        self._architecture = _same_architecture(recording.architecture, rnet)
        recorder: Any = rnet
        self._run_aside = recorder.capture.site.local.run_aside
        if not selectors:
            raise SelectorTypeError('no layers are named: write recompute(rnet, "layer3.*")')
        targets = select_layers(self._architecture, selectors, "recompute")
        kept = recording.calls.labels
        self._wanted = _by_enclosing(self._architecture, targets, kept, "the recording has")
        self._posts = self._assigned(postprocessors)
        self._digest = WeightDigests().digest

    def whole(self) -> LayerMapping[Any]:
        """Return the activations of all batches together."""
        rows, start = self._recording.calls.rows, 0
        arrays: dict[RowIdx, Any] = {}
        with _untouched(self._architecture, self._wanted):
            for number, count in enumerate(rows):
                for target, value in self._batch(number).items():
                    if target not in arrays:
                        arrays[target] = map_tensors(partial(_empty_array, sum(rows)), value)
                    place = slice(start, start + count)
                    _put(self._architecture[target], value, arrays[target], place)
                start += count
        return self._mapping(arrays)

    def batches(self) -> Iterator[LayerMapping[Any]]:
        """Yield the activations of one batch after the other."""
        for number in range(len(self._recording.calls.rows)):
            with _untouched(self._architecture, self._wanted):
                outputs = self._batch(number)
            yield self._mapping(outputs)

    def _mapping(self, outputs: dict[RowIdx, Any]) -> LayerMapping[Any]:
        return LayerMapping(self._recording.architecture, outputs, "activation")

    def _batch(self, number: int) -> dict[RowIdx, Any]:
        outputs: dict[RowIdx, Any] = {}
        for label, targets in self._wanted.items():
            call = self._recording.calls.call(number, label)
            settings = targets, self._posts, self._digest
            again = _RepeatedCall(self._architecture, label, call, *settings)
            outputs |= self._run_aside(again.run)
        return outputs

    def _assigned(
        self, postprocessors: Postprocessors | None
    ) -> dict[RowIdx, Callable[[Any], Any]]:
        architecture = self._architecture
        posts: dict[RowIdx, Callable[[Any], Any]] = {}
        if postprocessors is not None:
            posts = assign(architecture, list(self._recording), postprocessors)
        then = self._recording.settings.get("postprocessors") or []
        now = [text_of(label) for label in sorted(posts)]
        if now != then:
            raise RecomputeError(
                f"collect(...) post-processed the layers {', '.join(then) or None}, but "
                f"activation_postproc= is for {', '.join(now) or None}: give the post-processors "
                "that collect was given"
            )
        return posts


def _empty_array(rows: int, like: Tensor) -> Tensor:
    # Tensors made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return like.new_empty((rows, *like.shape[1:]), device="cpu")


def _put(layer: Layer, value: Any, arrays: Any, place: slice) -> None:
    """Copy a layer's output for a batch to its place in the arrays of all batches."""
    leaves, places = tensors(value), [array[place] for array in tensors(arrays)]
    if _kinds(leaves) != _kinds(places):
        raise RecomputeError(
            f"layer {layer} returned {_kinds(leaves)} for a batch of {place.stop - place.start} "
            f"samples, which does not fit into one array with {_kinds(places)}: take it batch by "
            "batch from recompute_batches(...)"
        )
    for tensor, array in zip(leaves, places, strict=True):
        array.copy_(tensor)


def _kinds(leaves: list[Tensor]) -> str:
    return " and ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in leaves)


def _same_architecture(ours: Architecture, rnet: nn.Module) -> Architecture:
    theirs = getattr(rnet, "architecture", None)
    if not (isinstance(rnet, nn.Module) and isinstance(theirs, Architecture)):
        raise ArgumentError(
            f"the first argument is {rnet!r}: give a recorder of the net, and then layers, as in "
            'recompute(rnet, "layer3.*")'
        )
    if theirs.fingerprint != ours.fingerprint:
        raise RecomputeError(
            "the recording was made from another architecture: its fingerprint is "
            f"{ours.fingerprint}, but this net's is {theirs.fingerprint}"
        )
    return theirs


def _untouched(
    architecture: Architecture, labels: Iterable[RowIdx]
) -> contextlib.AbstractContextManager[Any]:
    """Return a block at whose end all that re-runs of these layers change is put back."""
    modules = nn.ModuleList()
    for layer in (architecture[label] for label in labels):
        assert layer.module is not None, "the architecture of a recorder has modules"
        if needs_fsdp(layer.module):
            raise RecomputeError(
                f"layer {layer} can't be run again: FSDP provides parameters only to passes of the "
                "whole net. Record the layer itself, or recompute with a net that is not sharded"
            )
        modules.append(layer.module)
    return untouched(modules)


@dataclass(eq=False)
class _RepeatedCall:
    """A kept call of a layer that runs again, for its output or for those of layers inside it.

    Parameters
    ----------
    architecture : Architecture
        The layers, with their modules.
    label : (int, int)
        The layer.
    call : KeptCall
        The call to run.
    targets : set of (int, int)
        Layers inside it; the layer itself may be among them.
    posts : mapping
        The post-processors of that pass, by label.
    digest : callable
        Returns the digest of a module's weights, to compare with that of the kept call.
    """

    architecture: Architecture
    label: RowIdx
    call: KeptCall
    targets: set[RowIdx]
    posts: Mapping[RowIdx, Callable[[Any], Any]]
    digest: Callable[[nn.Module], str] = lambda module: ""

    def __post_init__(self) -> None:
        self._layer = layer = self.architecture[self.label]
        assert layer.module is not None, "the architecture of a recorder has modules"
        assert self.call.moment is not None, "calls of modules have one"
        self._module, self._moment = layer.module, self.call.moment
        self._posts = Assigned(self.posts)
        self._refuse_changed_operations()
        self._outputs: dict[RowIdx, Any] = {}
        self._is_other = False
        labels = {*self.targets, *self.posts, self.label}
        modules = {self.architecture[label].module for label in labels}
        # Rows are in the order in which calls start, and a call inside returns before this one.
        rows, last = list(self.architecture.values()), layer.completion or 0
        inside = [
            row
            for row in rows[rows.index(layer) :]
            if row.module in modules and row.completion is not None and row.completion <= last
        ]
        # The calls of each module that are still to come.
        self._starts = _by_module(inside)
        self._returns = _by_module(sorted(inside, key=lambda row: row.completion or 0))

    def _refuse_changed_operations(self) -> None:
        """Refuse a call in whose own code operations were changed, which may not show."""
        for at in self.posts:
            if isinstance(at, OperationIdx) and self.label in self.architecture.enclosing(at):
                raise RecomputeError(
                    f"layer {self._layer} can't be run again: a post-processor of that pass acted "
                    f"on {self.architecture[at]}, and only layers are changed again. Record the "
                    "layer that you want, or a module around it without that operation"
                )

    def run(self) -> dict[RowIdx, Any]:
        """Run the call, inside `_untouched`, and return copies of the targets' outputs.

        Returns
        -------
        dict
            Label -> activation, off the graph.

        Raises
        ------
        RecomputeError
            The call returns something else now.
        """
        layer, module = self._layer, self._module
        try:
            change = self._moment.explain_change(module)
            # A module with the same output may have worked differently inside.
            if change is None and self.digest(module) != self.call.weights:
                change = "its weights have changed since the collection: load the original ones"
            if change is not None:
                raise RecomputeError(f"layer {layer} can't be run again: {change}")
            with self._watching(module), self._moment.entered(module):
                args, kwargs = _inputs_again(self.call)
                module(*args, **kwargs)
        except RecomputeError:
            raise
        except Exception as error:
            raise RecomputeError(
                f"layer {layer} failed when it was run again: {type(error).__name__}: {error}"
            ) from error
        if self._is_other or any(self._returns.values()):
            raise RecomputeError(
                f"layer {layer} did not return the recorded output when it ran again. Either it "
                f"depends on something that is not kept: {_NOT_KEPT}. Or other kernels ran: "
                f"{_OTHER_KERNELS}. Recompute with the same net and the original settings"
            )
        return self._outputs

    @contextlib.contextmanager
    def _watching(self, module: nn.Module) -> Iterator[None]:
        """Take the outputs of modules inside the block."""
        hooks = CallHooks()
        before = self._receive_inputs if self._posts.on_inputs else None
        hooks.add(*(CallHook(inner, "", before, self._receive) for inner in self._returns))
        # Forward received the recorded inputs, so these hooks have acted on them already.
        _, hooks_on_inputs = private.forward_hooks(module)
        kept = dict(hooks_on_inputs)
        hooks_on_inputs.clear()
        try:
            yield
        finally:
            hooks_on_inputs.update(kept)
            hooks.remove()

    def _receive_inputs(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        layer = self._starts[module].popleft() if self._starts[module] else None
        if layer is None or layer is self._layer:
            # The call's own inputs were recorded after the post-processor.
            return None
        return self._posts.before(layer.label, args, kwargs, layer)

    def _receive(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._returns[module]:
            self._is_other = True
            return None
        layer = self._returns[module].popleft()
        handed = self._posts.after(layer.label, output, layer)
        if layer.label in self.targets:
            self._outputs[layer.label] = map_tensors(_copied, output)
        if layer is self._layer:
            self._is_other |= digest_of(output) != self.call.output
        return None if handed is output else handed


def _by_module(rows: Iterable[Layer]) -> dict[nn.Module, deque[Layer]]:
    calls: dict[nn.Module, deque[Layer]] = {}
    for row in rows:
        assert row.module is not None
        calls.setdefault(row.module, deque()).append(row)
    return calls


def _inputs_again(call: KeptCall) -> Inputs:
    """Copy the inputs, as similar to the original ones as possible, in the original state."""
    leaves, rebuild = flatten(call.inputs)
    moment = call.moment
    assert moment is not None, "calls of modules have one"
    if not len(leaves) == len(moment.devices) == len(moment.requires_grad):
        raise RecomputeError("the recorded inputs have changed since that pass")
    noted = zip(leaves, moment.devices, moment.requires_grad, strict=True)
    copies = [_input_again(leaf.to(device), requires) for leaf, device, requires in noted]
    again: Inputs = rebuild(copies)
    return again


def _input_again(leaf: Tensor, requires_grad: bool) -> Tensor:
    copy = StridedCopy(leaf) if is_plain(leaf) else None
    memory = leaf.detach().clone() if copy is None else copy.kept
    if requires_grad and not memory.is_inference():
        with torch.enable_grad():
            # Not a leaf: modules may work in place on their inputs.
            memory = memory.requires_grad_().clone()
    return memory if copy is None else copy.restored(memory)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
