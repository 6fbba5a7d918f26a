"""Activations of a dataset that were not kept, from the inputs that were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from scio_recorder.errors import ArgumentError, RecomputeError, SelectorTypeError
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.records import Inputs, LayerMapping
from scio_recorder.nets.selection import select
from scio_recorder.postprocessors.assigning import Postprocessor, Postprocessors, assign
from scio_recorder.recompute.calls import Batches, KeptCall
from scio_recorder.recompute.run_again import Call, enclosing_layers, rerun, untouched
from scio_recorder.stores import labelled_bytes
from scio_recorder.tensors.digests import Weights, digest_of
from scio_recorder.tensors.structures import Rebuild, flatten

if TYPE_CHECKING:
    from scio_recorder.nets.architecture import DepthIdx

__all__ = ["BatchInputs", "RecomputingRecording"]


class _Plan(NamedTuple):
    """What runs again, with what is the same for all batches."""

    architecture: Architecture
    # The layers that run again, and those inside them whose activations are asked for.
    wanted: dict[DepthIdx, set[DepthIdx]]
    posts: dict[DepthIdx, Postprocessor]
    weights: Weights


class BatchInputs(Sequence[Inputs]):
    """What a layer's forward received, ``(args, kwargs)`` for each batch, read when it is used.

    Parameters
    ----------
    calls : Batches
        The calls that are kept.
    label : (int, int)
        The layer.
    """

    def __init__(self, calls: Batches, label: DepthIdx) -> None:
        self._calls = calls
        self._label = label

    def __len__(self) -> int:
        return len(self._calls.rows)

    @overload
    def __getitem__(self, index: int) -> Inputs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Inputs]: ...
    def __getitem__(self, index: int | slice) -> Inputs | Sequence[Inputs]:
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        return self._calls.call(numbers, self._label).inputs

    def __repr__(self) -> str:
        return f"<inputs of {len(self)} batches>"


class RecomputingRecording(LayerMapping[Any]):
    """The part of a recording that recomputes."""

    if TYPE_CHECKING:

        @property
        def stored(self) -> tuple[DepthIdx, ...]:  # noqa: D102  # the recording's own
            ...

    calls: Batches
    settings: dict[str, Any]

    def recompute(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> LayerMapping[Any]:
        """Return activations of the whole dataset that were not kept, from inputs that were.

        After ``record(..., inputs=True)`` and ``collect``: batch by batch the nearest module around
        each layer whose inputs were recorded, or the layer itself, runs again as it did then. What
        it returns is compared with a digest of what it returned then. Nothing of the net is
        changed, nor are the generators of random numbers.

        Parameters
        ----------
        rnet : Recorder
            A recorder of the same net, with the weights of then; what it records does not matter.
        *selectors
            What ``Recorder.record`` takes.
        activation_postproc : callable, list or mapping, optional
            What ``collect`` was given, which acts again.

        Returns
        -------
        LayerMapping
            Tensors [samples, ...] in host memory, bit for bit what the layers returned: neither
            ``transform`` nor ``dtype`` has acted on them.

        Raises
        ------
        ArgumentError
            The first argument is no recorder.
        RecomputeError
            No inputs around a layer were recorded; the net is another one, its weights or anything
            else have changed, so that it returns something else now; or samples of different
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
        plan = self._plan(rnet, selectors, activation_postproc)
        architecture = plan.architecture
        arrays: dict[DepthIdx, _Array] = {}
        rows, start = self.calls.rows, 0
        with untouched(architecture, plan.wanted):
            for number, count in enumerate(rows):
                for target, value in self._batch(number, plan).items():
                    if target not in arrays:
                        name = str(architecture[target])
                        arrays[target] = _Array(name, value, count, sum(rows))
                    arrays[target].put(value, start, count)
                start += count
        values = {target: array.value for target, array in sorted(arrays.items())}
        return LayerMapping(self.architecture, values, "activation")

    def recompute_batches(
        self, rnet: nn.Module, *selectors: Any, activation_postproc: Postprocessors | None = None
    ) -> Iterator[LayerMapping[Any]]:
        """Return what `recompute` does, one batch after the other.

        For more than fits into memory, and for layers whose dimension 0 does not count samples or
        whose samples differ in shape.

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
            For each batch what the layers returned, on the device where they did. Between batches
            the net is as it was.

        Raises
        ------
        ArgumentError, RecomputeError, LayerNotFoundError
            As `recompute`; what concerns a batch when it is asked for.

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
        return self._batches(self._plan(rnet, selectors, activation_postproc))

    def _batches(self, plan: _Plan) -> Iterator[LayerMapping[Any]]:
        for number in range(len(self.calls.rows)):
            with untouched(plan.architecture, plan.wanted):
                found = self._batch(number, plan)
            yield LayerMapping(self.architecture, dict(sorted(found.items())), "activation")

    def _plan(
        self, rnet: nn.Module, selectors: Sequence[Any], given: Postprocessors | None
    ) -> _Plan:
        architecture = _same_architecture(self.architecture, rnet)
        if not selectors:
            raise SelectorTypeError('no layers are named: write recompute(rnet, "layer3.*")')
        wanted: dict[DepthIdx, set[DepthIdx]] = {}
        for target in select(architecture, selectors):
            wanted.setdefault(self._nearest(architecture, target), set()).add(target)
        return _Plan(architecture, wanted, self._posts(architecture, given), Weights())

    def _posts(
        self, architecture: Architecture, given: Postprocessors | None
    ) -> dict[DepthIdx, Postprocessor]:
        order = sorted(self, key=lambda label: architecture[label].completion or 0)
        posts = {} if given is None else assign(architecture, order, given)
        then = self.settings.get("postprocessors") or []
        now = [str(architecture[label].label) for label in sorted(posts)]
        if now != then:
            raise RecomputeError(
                f"the layers that were post-processed in collect(...) are {', '.join(then) or None}"
                f", and activation_postproc= is for {', '.join(now) or None}: give what collect "
                "was given"
            )
        return posts

    def _batch(self, number: int, plan: _Plan) -> dict[DepthIdx, Any]:
        found: dict[DepthIdx, Any] = {}
        for label, targets in plan.wanted.items():
            kept = self.calls.call(number, label)
            call = Call(
                label,
                kept.inputs,
                partial(_has_digest, kept.output),
                kept.moment,
                partial(_explain_change, kept, plan.weights),
                plan.posts,
            )
            found.update(rerun(plan.architecture, call, targets))
        return found

    @property
    def memory_stored_bytes(self) -> int:
        """What samples, and inputs with the states of their calls, take."""
        samples: list[Tensor] = [self[label] for label in self.stored]
        return sum(tensor.nbytes for tensor in samples) + self.calls.num_bytes

    @property
    def memory_saved_bytes(self) -> int:
        """What the layers that can be recomputed, and are not kept, would take as samples.

        By their shapes at labelling.
        """
        architecture, kept = self.architecture, set(self.calls.labels)
        missing = [
            label
            for label, layer in architecture.items()
            if layer.executed
            and label not in self.stored
            and not kept.isdisjoint([label, *enclosing_layers(architecture, label)])
        ]
        return sum(labelled_bytes(architecture, missing).values()) * sum(self.calls.rows)

    def _nearest(self, architecture: Architecture, target: DepthIdx) -> DepthIdx:
        around = enclosing_layers(architecture, target)
        kept = set(self.calls.labels)
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
