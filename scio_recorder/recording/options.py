"""The options of ``collect``: as they are given, and as they apply to each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.capture.engine import Capture
from scio_recorder.errors import CollectError
from scio_recorder.layer import Layer, RowIdx, TensorSpec, few, text_of
from scio_recorder.nets.selection import by_selector, selector_for
from scio_recorder.postprocessors.assigning import Postprocessors, assign
from scio_recorder.recording.recipes import recipes_of
from scio_recorder.recording.rows import Rows, rows_or_none
from scio_recorder.reductions import Reduction
from scio_recorder.reductions.base import Reductions, several
from scio_recorder.stores import Store
from scio_recorder.tensors.arguments import floating_or_none, takes, whole
from scio_recorder.tensors.copies import dtype_name

Transform: TypeAlias = Callable[[Any, Any], Tensor]
Transforms: TypeAlias = Transform | Mapping[Any, Transform]
Reduce: TypeAlias = (
    Reduction | Sequence[Reduction] | Mapping[Any, "Reduction | Sequence[Reduction]"]
)


@dataclass
class CollectOptions:
    """The options of ``collect``, which all functions that collect share, checked.

    Parameters
    ----------
    store, reduce, transform, every, max_batches, to_inputs, sample_ids : optional
        As :meth:`scio_recorder.Recorder.collect` takes them.
    dtype, rows, activation_postproc, stop_early, resume : optional
        As :meth:`scio_recorder.Recorder.collect` takes them.

    Raises
    ------
    CollectError
        An option has a value that can't work, whatever the layers are.

    Examples
    --------
    >>> CollectOptions(every=2).every
    2
    """

    store: str | Store | None = "auto"
    reduce: Reduce | None = None
    transform: Transforms | None = None
    every: int = 1
    max_batches: int | None = None
    to_inputs: Callable[[Any], Any] | None = None
    sample_ids: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None
    rows: Rows | None = None
    activation_postproc: Postprocessors | None = None
    stop_early: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        self.every = whole("every", self.every, 1)
        if self.max_batches is not None:
            self.max_batches = whole("max_batches", self.max_batches, 1)
        for name in ("to_inputs", "sample_ids"):
            given = getattr(self, name)
            if given is not None and not takes(given, 1):
                raise CollectError(
                    f"{name} must be a function that is called with a batch alone: write "
                    f"{name}=lambda batch: ..."
                )
        floating_or_none(self.dtype, CollectError)
        rows_or_none(self.rows, CollectError)

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Self:
        """Return the options among the arguments of a function, which have the names of options."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: given[name] for name in names if name in given})


class LayerOptions:
    """The options of each recorded layer: stored or reduced, transformed or not.

    Parameters
    ----------
    capture : Capture
        Knows the recorded layers.
    asked : CollectOptions
        The options that were given.

    Raises
    ------
    CollectError
        They can't be satisfied, or there is nothing to do.
    """

    def __init__(self, capture: Capture, asked: CollectOptions) -> None:
        program = capture.program
        self.architecture, self.recording = program.architecture, program.recording
        self.with_inputs, self.counts_calls = program.options.inputs, program.counts_calls
        self.asked = asked
        self._check()
        given = asked.activation_postproc
        # Post-processors by layer.
        self.posts = None if given is None else assign(program.architecture, program.order, given)
        # All are fresh: the user's reductions are patterns.
        self.reductions: dict[RowIdx, Reductions] = {
            label: _fresh(given) for label, given in self._by_layer(asked.reduce, "reduce").items()
        }
        # Calls of the network in a user's function are no part of the pass.
        self.run_aside = capture.site.local.run_aside
        self.transforms: dict[RowIdx, Transform] = {}
        for label, function in self._by_layer(asked.transform, "transform").items():
            self.transforms[label] = partial(self.run_aside, function)
            if not takes(function, 2):
                raise CollectError(
                    f"the transform of layer {self.architecture[label]} is {function!r}: it must "
                    "be callable, transform(activation, batch) -> Tensor [batch, ...]"
                )
        # The layers of which transforms are given the attention.
        self.attention = tuple(program.attention)
        self._check_attention()
        self.stored = tuple(label for label in self.recording if label not in self.reductions)

    def _check(self) -> None:
        if not self.recording:
            raise CollectError("nothing is selected: choose layers with record(...) first")
        if self.with_inputs and not self.counts_calls:
            raise CollectError('inputs=True can\'t be collected with calls="any": leave out one')
        if self.with_inputs and self.asked.rows is not None:
            raise CollectError(
                "inputs=True can't be collected with rows=, since inputs are kept by whole "
                "batches: leave one of them out"
            )

    def _check_attention(self) -> None:
        if self.attention and self.with_inputs:
            raise CollectError(
                "inputs=True can't be collected with attention=: calls that run again are checked "
                "by what a layer returned, in whose place its attention is received: leave one out"
            )
        for label in self.attention:
            layer = self.architecture[label]
            if label not in self.recording:
                raise CollectError(f"the attention of layer {layer} is recorded: record it too")
            if label not in self.transforms:
                raise CollectError(
                    f"the attention of layer {layer} is not one tensor: say what to keep of it, "
                    f'such as transform={{"{self.selector_for(label)}": lambda attention, batch: '
                    "attention.weights(queries=[-1])}"
                )

    def selector_for(self, label: RowIdx) -> str:
        """Return a selector of a recorded layer, and of those at its place in other blocks."""
        return selector_for(self.architecture, label, self.recording)

    def leaving_out(self, label: RowIdx, labelled: tuple[int, ...] | None) -> str:
        """Return how to leave out all layers that can't be kept; empty if it is one, or all are.

        Parameters
        ----------
        label : (int, int)
            A layer that can't be kept as it is.
        labelled : tuple of int or None
            The lengths of the leading dimensions at labelling, if known.
        """
        rows = [self.architecture[at] for at in self.recording if at not in self.transforms]
        unfit = [row for row in rows if row.label == label or not _fits(row, labelled or ())]
        if len(unfit) in (1, len(self.recording)):
            return ""
        labels = ", ".join(str(tuple(row.label)) for row in unfit)
        return (
            f". To leave out all layers that can't be kept ({few(unfit, 4)}), write "
            f"rnet.record(*set(rnet.recording) - {{{labels}}})"
        )

    @property
    def keeps_rows(self) -> bool:
        """Whether what is kept has an entry for each row, which needs the row's sample."""
        every = map(several, self.reductions.values())
        reduced = any(one.keeps_rows for each in every for one in each)
        return self.asked.store is not None or reduced

    @property
    def has_shards(self) -> bool:
        """Whether processes see the same samples, as far as is known, and layers return shards."""
        return any(self.architecture[label].shard is not None for label in self.recording)

    def settings(self, net: nn.Module) -> dict[str, Any]:
        """Return, as JSON, all that decides the values besides the data and the architecture.

        Functions count only by whether they are given, since they can't be compared. The weights of
        the net are missing, since reading all of them takes time: see `weights_digest`.
        """
        asked = self.asked
        reductions = {text_of(label): recipes_of(each) for label, each in self.reductions.items()}
        return {
            "layers": list(map(text_of, self.recording)),
            "reductions": reductions,
            **({"attention": list(map(text_of, self.attention))} if self.attention else {}),
            "dtype": None if asked.dtype is None else dtype_name(asked.dtype),
            "every": asked.every,
            "inputs": self.with_inputs,
            "transforms": list(map(text_of, sorted(self.transforms))),
            "postprocessors": list(map(text_of, sorted(self.posts or ()))),
            **({} if asked.rows is None else {"rows": asked.rows.settings}),
            "to_inputs": asked.to_inputs is not None,
            "sample_ids": asked.sample_ids is not None,
            "mode": _mode_of(net),
            "autocast": {
                kind: dtype_name(torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            },
        }

    def _by_layer(self, given: Any, what: str) -> dict[RowIdx, Any]:
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            return dict.fromkeys(self.recording, given)
        return by_selector(self.architecture, self.recording, given, what, CollectError)


def _fits(row: Layer, leading: tuple[int, ...]) -> bool:
    spec = row.output_spec
    return isinstance(spec, TensorSpec) and spec.shape[: len(leading)] == leading


def _mode_of(net: nn.Module) -> str:
    """Return words on the modules that are in training mode."""
    base = "train mode" if net.training else "eval mode"
    others = [repr(name) for name, inner in net.named_modules() if inner.training != net.training]
    return f"{base}, but for {', '.join(others)}" if others else base


def _fresh(given: Any) -> Reductions:
    if isinstance(given, Reduction):
        return given.fresh()
    if isinstance(given, list | tuple) and given and all(isinstance(r, Reduction) for r in given):
        return [reduction.fresh() for reduction in given]
    shown = given.__name__ if isinstance(given, type) else repr(given)
    hint = f": write {shown}()" if isinstance(given, type) else ""
    raise CollectError(
        f"reduce has {shown} where a reduction is expected{hint}; give objects such as "
        "scio_recorder.reductions.Mean(), a list of them, or a mapping by selector"
    )
