"""Recompute layers of a pass or of a dataset: recorded modules around them run again.

The nearest module around each layer whose inputs were kept runs again on these inputs; see NOTE
[Why a recomputed activation is the original one] in `run_again`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.capture.engine import Capture
from scio_recorder.errors import ArgumentError, RecomputeError, SelectorTypeError
from scio_recorder.layer import DepthIdx, Layer, text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import LayerMapping
from scio_recorder.nets.selection import select
from scio_recorder.postprocessors.assigning import Postprocessor, Postprocessors, assign
from scio_recorder.recompute.run_again import Rerun, copied, untouched
from scio_recorder.recording.readable import Readable
from scio_recorder.stores.kept_inputs import KeptCall
from scio_recorder.tensors.digests import Weights, digest_of
from scio_recorder.tensors.structures import map_tensors, tensors


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
    architecture, activations = capture.architecture, capture.activations
    found: dict[DepthIdx, Any] = {}
    wanted: dict[DepthIdx, set[DepthIdx]] = {}
    for target in select(architecture, selectors):
        if target in activations:
            found[target] = map_tensors(copied, activations.peek(target))
        else:
            wanted.setdefault(_enclosing(capture, target), set()).add(target)
    moments, posts = capture.state
    with untouched(architecture, wanted):
        for label, targets in wanted.items():
            inputs, output = capture.inputs.peek(label), digest_of(activations.peek(label))
            # Its moment knows the weights.
            call = KeptCall(inputs, moments[label], "", output)
            found.update(Rerun(architecture, label, call, targets, posts).run())
    return LayerMapping(architecture, found, "activation")


def _enclosing(capture: Capture, target: DepthIdx) -> DepthIdx:
    """Return the nearest layer around one that was recorded with its inputs."""
    architecture = capture.architecture
    around = architecture.enclosing(target)
    nearest = next((label for label in around if label in capture.recording), None)
    if capture.options.calls == "any":
        raise RecomputeError(
            'after record(..., calls="any") it is unknown in which call a layer ran: record '
            "the module around it without calls="
        )
    if nearest is None:
        best = f'"{architecture[around[0]].name}"' if around else "around it"
        raise RecomputeError(
            f"no module around layer {architecture[target]} is recorded: write "
            f"record({best}, inputs=True) before the pass, or any module that contains that one"
        )
    if not capture.options.inputs:
        raise RecomputeError(
            f"layer {architecture[nearest]} is recorded without its inputs: write "
            "record(..., inputs=True) before the pass"
        )
    if nearest not in capture.activations or nearest not in capture.inputs:
        raise RecomputeError(
            f"the latest pass left no record of layer {architecture[nearest]}: run the "
            "recorder first, without dont_record"
        )
    return nearest


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
    given : callable, list or mapping, optional
        The post-processors that ``collect`` was given.
    """

    def __init__(
        self,
        recording: Readable,
        rnet: nn.Module,
        selectors: Sequence[Any],
        given: Postprocessors | None,
    ) -> None:
        self._recording = recording
        self._architecture = _same_architecture(recording.architecture, rnet)
        if not selectors:
            raise SelectorTypeError('no layers are named: write recompute(rnet, "layer3.*")')
        # The layers that run again, and the requested layers inside them.
        self._wanted: dict[DepthIdx, set[DepthIdx]] = {}
        for target in select(self._architecture, selectors):
            self._wanted.setdefault(self._nearest(target), set()).add(target)
        self._posts = self._assigned(given)
        self._weights = Weights()

    def whole(self) -> LayerMapping[Any]:
        """Return the activations of all batches together."""
        rows, start = self._recording.calls.rows, 0
        found: dict[DepthIdx, Any] = {}
        with untouched(self._architecture, self._wanted):
            for number, count in enumerate(rows):
                for target, value in self._batch(number).items():
                    if target not in found:
                        found[target] = map_tensors(partial(_empty_array, sum(rows)), value)
                    place = slice(start, start + count)
                    _put(self._architecture[target], value, found[target], place)
                start += count
        return self._mapping(found)

    def batches(self) -> Iterator[LayerMapping[Any]]:
        """Yield the activations of one batch after the other."""
        for number in range(len(self._recording.calls.rows)):
            with untouched(self._architecture, self._wanted):
                found = self._batch(number)
            yield self._mapping(found)

    def _mapping(self, found: dict[DepthIdx, Any]) -> LayerMapping[Any]:
        return LayerMapping(self._recording.architecture, found, "activation")

    def _batch(self, number: int) -> dict[DepthIdx, Any]:
        found: dict[DepthIdx, Any] = {}
        for label, targets in self._wanted.items():
            call = self._recording.calls.call(number, label)
            given = self._architecture, label, call, targets, self._posts, self._weights
            found.update(Rerun(*given).run())
        return found

    def _assigned(self, given: Postprocessors | None) -> dict[DepthIdx, Postprocessor]:
        architecture = self._architecture
        posts = {} if given is None else assign(architecture, list(self._recording), given)
        then = self._recording.settings.get("postprocessors") or []
        now = [text_of(label) for label in sorted(posts)]
        if now != then:
            raise RecomputeError(
                f"collect(...) post-processed the layers {', '.join(then) or None}, but "
                f"activation_postproc= is for {', '.join(now) or None}: give the post-processors "
                "that collect was given"
            )
        return posts

    def _nearest(self, target: DepthIdx) -> DepthIdx:
        architecture, kept = self._architecture, self._recording.calls.labels
        around = architecture.enclosing(target)
        nearest = next((label for label in (target, *around) if label in kept), None)
        if nearest is None:
            best = architecture[around[0] if around else target].name
            raise RecomputeError(
                f"the recording has no inputs of layer {architecture[target]} nor of a module "
                f'around it: write record("{best}", inputs=True) before collect(...), or any '
                "module that contains that one"
            )
        return nearest


def _empty_array(rows: int, like: Tensor) -> Tensor:
    # Tensors made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return like.new_empty((rows, *like.shape[1:]), device="cpu")


def _put(layer: Layer, value: Any, arrays: Any, place: slice) -> None:
    """Copy a layer's output for a batch to its place in the arrays of all batches."""
    found, places = tensors(value), [array[place] for array in tensors(arrays)]
    if _kinds(found) != _kinds(places):
        raise RecomputeError(
            f"layer {layer} returned {_kinds(found)} for a batch of {place.stop - place.start} "
            f"samples, which does not fit into one array with {_kinds(places)}: take it batch by "
            "batch from recompute_batches(...)"
        )
    for tensor, array in zip(found, places, strict=True):
        array.copy_(tensor)


def _kinds(found: list[Tensor]) -> str:
    return " and ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in found)


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
