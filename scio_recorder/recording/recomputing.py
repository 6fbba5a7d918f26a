"""Recompute activations of a dataset from kept inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scio_recorder.errors import ArgumentError, RecomputeError, SelectorTypeError
from scio_recorder.layer import DepthIdx, text_of
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import LayerMapping
from scio_recorder.nets.selection import select
from scio_recorder.postprocessors.assigning import Postprocessor, Postprocessors, assign
from scio_recorder.recording.readable import Readable
from scio_recorder.stores.calls import KeptCall
from scio_recorder.tensors.digests import Weights
from scio_recorder.tensors.structures import map_tensors, tensors


class RecomputingRecording(Readable):
    """The part of a recording that recomputes."""

    def recompute(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> LayerMapping[Any]:
        """Return activations of the whole dataset, recomputed from the inputs that were kept.

        After ``record(..., inputs=True)`` and ``collect``, the nearest module around each layer
        whose inputs were recorded, or the layer itself, runs again batch by batch. Its output is
        compared with a digest of its first output. The net does not change, nor do the generators
        of random numbers.

        Parameters
        ----------
        rnet : Recorder
            A recorder of the same net, with the same weights; its own selection does not matter.
        *selectors
            As for ``Recorder.record``.
        activation_postproc : callable, list or mapping, optional
            The post-processors that ``collect`` was given; they act again.

        Returns
        -------
        LayerMapping
            Tensors [samples, ...] in host memory, equal bit for bit to the layers' outputs: neither
            ``transform`` nor ``dtype`` has acted on them.

        Raises
        ------
        ArgumentError
            The first argument is not a recorder.
        RecomputeError
            No inputs around a layer were recorded. Or the net is another one, or its weights or
            something else have changed, so it returns other values now. Or samples of different
            batches have different shapes.
        LayerNotFoundError
            A selector matches no layer.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Linear(3, 1))
        >>> rnet = Recorder(net, input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> x = torch.randn(6, 2)
        >>> recording = rnet.collect(x.split(3))
        >>> found = recording.recompute(rnet, "0.0")["0.0"]
        >>> torch.equal(found, torch.cat([net[0][0](part) for part in x.split(3)]))
        True
        """
        return _Recomputation(self, rnet, selectors, activation_postproc).whole()

    def recompute_batches(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> Iterator[LayerMapping[Any]]:
        """Recompute as `recompute` does, one batch after the other.

        Use it if the result does not fit into memory, if dimension 0 does not count samples, or if
        samples differ in shape.

        Parameters
        ----------
        rnet : Recorder
            As for `recompute`.
        *selectors
            As for `recompute`.
        activation_postproc : callable, list or mapping, optional
            As for `recompute`.

        Returns
        -------
        iterator of LayerMapping
            For each batch the outputs of the layers, on their device. Between batches the net is
            in its own state.

        Raises
        ------
        ArgumentError, RecomputeError, LayerNotFoundError
            As for `recompute`; errors of a batch are raised when it is requested.

        Examples
        --------
        >>> import torch
        >>> from torch import nn
        >>> from scio_recorder import Recorder
        >>> rnet = Recorder(nn.Sequential(nn.Sequential(nn.ReLU())), input_size=(1, 2))
        >>> rnet.record("0", inputs=True)
        >>> recording = rnet.collect(torch.ones(6, 2).split(4))
        >>> [len(found["0.0"]) for found in recording.recompute_batches(rnet, "0.0")]
        [4, 2]
        """
        return _Recomputation(self, rnet, selectors, activation_postproc).batches()


class _Recomputation:
    """The calls that run again, the layers that need them, and the post-processors."""

    def __init__(
        self,
        recording: RecomputingRecording,
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
        with self._untouched():
            for number, count in enumerate(rows):
                for target, value in self._batch(number).items():
                    if target not in found:
                        found[target] = map_tensors(partial(_room, sum(rows)), value)
                    place = slice(start, start + count)
                    _put(str(self._architecture[target]), value, found[target], place)
                start += count
        return self._mapping(found)

    def batches(self) -> Iterator[LayerMapping[Any]]:
        """Yield the activations of one batch after the other."""
        for number in range(len(self._recording.calls.rows)):
            with self._untouched():
                found = self._batch(number)
            yield self._mapping(found)

    def _mapping(self, found: dict[DepthIdx, Any]) -> LayerMapping[Any]:
        return LayerMapping(self._recording.architecture, found, "activation")

    def _untouched(self) -> AbstractContextManager[None]:
        # Opening and reading a recording does not wait for the import of what runs nets.
        from scio_recorder.recompute.run_again import untouched

        return untouched(self._architecture, self._wanted)

    def _batch(self, number: int) -> dict[DepthIdx, Any]:
        from scio_recorder.recompute.run_again import Call, rerun

        found: dict[DepthIdx, Any] = {}
        for label, targets in self._wanted.items():
            kept = self._recording.calls.call(number, label)
            explain_change = partial(_explain_change, kept, self._weights)
            call = Call(label, kept.inputs, kept.output, kept.moment, explain_change, self._posts)
            found.update(rerun(self._architecture, call, targets))
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


def _room(rows: int, like: Tensor) -> Tensor:
    # Tensors made in inference mode could not be used outside of it.
    with torch.inference_mode(False):
        return like.new_empty((rows, *like.shape[1:]), device="cpu")


def _put(name: str, value: Any, arrays: Any, place: slice) -> None:
    """Copy a layer's output for a batch to its place."""
    found, places = tensors(value), [array[place] for array in tensors(arrays)]
    if len(found) != len(places):
        raise RecomputeError(
            f"layer {name} returned {len(places)} tensors for one batch and {len(found)} for "
            "another: take it batch by batch from recompute_batches(...)"
        )
    for tensor, array in zip(found, places, strict=True):
        if tensor.shape != array.shape or tensor.dtype != array.dtype:
            raise RecomputeError(
                f"layer {name} returned {tensor.dtype} {tuple(tensor.shape)} for a batch of "
                f"{len(array)} samples, which does not fit into one array with {array.dtype} "
                f"{tuple(array.shape)}: take it batch by batch from recompute_batches(...)"
            )
        array.copy_(tensor)


def _explain_change(kept: KeptCall, weights: Weights, module: nn.Module) -> str | None:
    change = kept.moment.explain_change(module)
    # A module with the same output may have worked differently inside.
    if change is None and weights.digest(module) != kept.weights:
        return "its weights have changed since the collection: load the original ones"
    return change


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
