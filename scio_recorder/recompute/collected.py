"""Running the recorded calls of a collected recording again, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from scio_recorder.errors import ArgumentError, RecomputeError, SelectorTypeError
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import LayerMapping
from scio_recorder.nets.selection import select
from scio_recorder.postprocessors.assigning import Postprocessor, Postprocessors, assign
from scio_recorder.recompute.calls import Batches, KeptCall, enclosing_layers
from scio_recorder.recompute.run_again import Call, rerun, untouched
from scio_recorder.tensors.digests import Weights, digest_of
from scio_recorder.tensors.structures import Rebuild, flatten

if TYPE_CHECKING:
    from scio_recorder.layer import DepthIdx


class Collected(Protocol):
    """What is needed of a recording to run its calls again."""

    calls: Batches
    settings: dict[str, Any]

    @property
    def architecture(self) -> Architecture:
        """The labelled net."""

    def __iter__(self) -> Iterator[DepthIdx]: ...


class Recomputation:
    """What runs again, for which layers, with which post-processors.

    Parameters
    ----------
    recording : Collected
        The calls.
    rnet : Recorder
        Has the net of then.
    selectors : sequence
        Name the layers.
    given : callable, sequence or mapping, optional
        The post-processors of then.
    """

    def __init__(
        self,
        recording: Collected,
        rnet: nn.Module,
        selectors: Sequence[Any],
        given: Postprocessors | None,
    ) -> None:
        self._recording = recording
        self._architecture = _same_architecture(recording.architecture, rnet)
        if not selectors:
            raise SelectorTypeError('no layers are named: write recompute(rnet, "layer3.*")')
        # The layers that run again, and those inside them whose activations are asked for.
        self._wanted: dict[DepthIdx, set[DepthIdx]] = {}
        for target in select(self._architecture, selectors):
            self._wanted.setdefault(self._nearest(target), set()).add(target)
        self._posts = self._assigned(given)
        self._weights = Weights()

    def whole(self) -> LayerMapping[Any]:
        """Return the activations of all batches together."""
        arrays: dict[DepthIdx, _Array] = {}
        rows, start = self._recording.calls.rows, 0
        with untouched(self._architecture, self._wanted):
            for number, count in enumerate(rows):
                for target, value in self._batch(number).items():
                    if target not in arrays:
                        name = str(self._architecture[target])
                        arrays[target] = _Array(name, value, count, sum(rows))
                    arrays[target].put(value, start, count)
                start += count
        return self._mapping({target: array.value for target, array in arrays.items()})

    def batches(self) -> Iterator[LayerMapping[Any]]:
        """Yield the activations of one batch after the other."""
        for number in range(len(self._recording.calls.rows)):
            with untouched(self._architecture, self._wanted):
                found = self._batch(number)
            yield self._mapping(found)

    def _mapping(self, found: dict[DepthIdx, Any]) -> LayerMapping[Any]:
        return LayerMapping(self._recording.architecture, dict(sorted(found.items())), "activation")

    def _assigned(self, given: Postprocessors | None) -> dict[DepthIdx, Postprocessor]:
        architecture = self._architecture
        order = sorted(self._recording, key=lambda label: architecture[label].completion or 0)
        posts = {} if given is None else assign(architecture, order, given)
        then = self._recording.settings.get("postprocessors") or []
        now = [str(architecture[label].label) for label in sorted(posts)]
        if now != then:
            raise RecomputeError(
                f"the layers that were post-processed in collect(...) are {', '.join(then) or None}"
                f", and activation_postproc= is for {', '.join(now) or None}: give what collect "
                "was given"
            )
        return posts

    def _batch(self, number: int) -> dict[DepthIdx, Any]:
        found: dict[DepthIdx, Any] = {}
        for label, targets in self._wanted.items():
            kept = self._recording.calls.call(number, label)
            call = Call(
                label,
                kept.inputs,
                partial(_has_digest, kept.output),
                kept.moment,
                partial(_explain_change, kept, self._weights),
                self._posts,
            )
            found.update(rerun(self._architecture, call, targets))
        return found

    def _nearest(self, target: DepthIdx) -> DepthIdx:
        architecture = self._architecture
        around = enclosing_layers(architecture, target)
        kept = set(self._recording.calls.labels)
        nearest = next((label for label in (target, *around) if label in kept), None)
        if nearest is None:
            best = architecture[around[0] if around else target].name
            raise RecomputeError(
                f"the recording has no inputs of layer {architecture[target]} nor of a module "
                f'around it: write record("{best}", inputs=True) before collect(...), or any '
                "module that contains that one"
            )
        return nearest


class _Array:
    """A layer's activations, batch after batch, in memory that was made for all of them."""

    def __init__(self, name: str, first: Any, rows: int, all_rows: int) -> None:
        leaves, self._rebuild = flatten(first)
        self._name = name
        # Tensors made in inference mode could not be used outside it.
        with torch.inference_mode(False):
            for leaf in leaves:
                self._check(leaf, leaf, rows)
            self._arrays = [
                leaf.new_empty((all_rows, *leaf.shape[1:]), device="cpu") for leaf in leaves
            ]

    _rebuild: Rebuild

    @property
    def value(self) -> Any:
        """All of it, in the structure of the first batch."""
        return self._rebuild(self._arrays)

    def put(self, value: Any, start: int, rows: int) -> None:
        """Copy the activations of a batch to where they belong."""
        leaves, _ = flatten(value)
        if len(leaves) != len(self._arrays):
            raise RecomputeError(
                f"layer {self._name} returned {len(self._arrays)} tensors for one batch and "
                f"{len(leaves)} for another: take it batch by batch from recompute_batches(...)"
            )
        for leaf, array in zip(leaves, self._arrays, strict=True):
            self._check(leaf, array, rows)
            array[start : start + rows].copy_(leaf)

    def _check(self, leaf: Tensor, like: Tensor, rows: int) -> None:
        if leaf.ndim and leaf.shape == (rows, *like.shape[1:]) and leaf.dtype == like.dtype:
            return
        raise RecomputeError(
            f"layer {self._name} returned {leaf.dtype} {tuple(leaf.shape)} for a batch of {rows} "
            f"samples, which does not fit with {like.dtype} {(rows, *like.shape[1:])} into one "
            "array: take it batch by batch from recompute_batches(...)"
        )


def _has_digest(digest: str, output: Any) -> bool:
    return digest_of(output) == digest


def _explain_change(kept: KeptCall, weights: Weights, module: nn.Module) -> str | None:
    change = kept.moment.explain_change(module)
    # What returns the same may have done something else inside.
    if change is None and weights.digest(module) != kept.weights:
        return "its weights have changed since they were collected with: load those of then"
    return change


def _same_architecture(ours: Architecture, rnet: nn.Module) -> Architecture:
    theirs = getattr(rnet, "architecture", None)
    if not (isinstance(rnet, nn.Module) and isinstance(theirs, Architecture)):
        raise ArgumentError(
            f"the first argument is {rnet!r}: give a recorder of the net, and layers behind it, as "
            'in recompute(rnet, "layer3.*")'
        )
    if theirs.fingerprint != ours.fingerprint:
        raise RecomputeError(
            f"the recording was made from another architecture: its fingerprint is "
            f"{ours.fingerprint} and this net's is {theirs.fingerprint}"
        )
    return theirs
