"""The options of a collection, by layer, and as settings that must agree on resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from scio_recorder.capture.engine import Capture
from scio_recorder.errors import CollectError
from scio_recorder.layer import DepthIdx, text_of
from scio_recorder.nets.selection import by_selector
from scio_recorder.recording.recipes import recipes_of
from scio_recorder.recording.rows import Rows, rows_or_none
from scio_recorder.reductions import Reduction
from scio_recorder.reductions.base import Reductions, several
from scio_recorder.tensors.dtypes import dtype_name

Transform: TypeAlias = Callable[[Any, Any], Tensor]
Transforms: TypeAlias = Transform | Mapping[Any, Transform]
Reduce: TypeAlias = (
    Reduction | Sequence[Reduction] | Mapping[Any, "Reduction | Sequence[Reduction]"]
)


class Options:
    """The options of each recorded layer: stored or reduced, transformed or not.

    Parameters
    ----------
    capture : Capture
        Knows the recorded layers.
    reduce, transform, dtype, rows
        As in ``collect``.

    Raises
    ------
    CollectError
        They can't be satisfied, or there is nothing to do.
    """

    def __init__(
        self,
        capture: Capture,
        reduce: Reduce | None,
        transform: Transforms | None,
        dtype: torch.dtype | None,
        rows: Rows | None = None,
    ) -> None:
        program = capture.program
        self.architecture, self.recording = program.architecture, program.recording
        self.with_inputs = program.options.inputs
        if not self.recording:
            raise CollectError("nothing is selected: choose layers with record(...) first")
        if self.with_inputs and not program.counts_calls:
            raise CollectError('inputs=True can\'t be collected with calls="any": leave out one')
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise CollectError(
                f"dtype={dtype!r}: give a floating-point dtype such as torch.bfloat16; other "
                "activations keep their dtype, which transform= can change"
            )
        self.dtype = dtype
        self.rows = _checked(rows, self.with_inputs)
        # All are fresh: the user's reductions are patterns.
        self.reductions: dict[DepthIdx, Reductions] = {
            label: _fresh(given) for label, given in self._by_layer(reduce, "reduce").items()
        }
        self.transforms: dict[DepthIdx, Transform] = self._by_layer(transform, "transform")
        for label, function in self.transforms.items():
            if not callable(function):
                raise CollectError(
                    f"the transform of layer {self.architecture[label]} is {function!r}: it must "
                    "be callable, transform(activation, batch) -> Tensor [batch, ...]"
                )
        self.stored = tuple(label for label in self.recording if label not in self.reductions)
        # Whether a result has an entry for each row, which says nothing without the row's sample.
        every = map(several, self.reductions.values())
        self.keeps_rows = any(one.keeps_rows for each in every for one in each)

    def check_mergeable(self) -> None:
        """Refuse reductions whose states for different parts of the data can't be merged."""
        for label, given in self.reductions.items():
            for one in several(given):
                if one.why_not_merged is not None:
                    raise CollectError(
                        f"layer {self.architecture[label]} can't be reduced in parts: "
                        f"{one.why_not_merged}"
                    )

    @property
    def has_shards(self) -> bool:
        """Whether processes see the same samples, as far as is known, and layers return shards."""
        return any(self.architecture[label].shard is not None for label in self.recording)

    def settings(
        self, net: nn.Module, every: int, posts: Iterable[DepthIdx], **has: bool
    ) -> dict[str, Any]:
        """Return, as JSON, all that decides the values besides the data and the architecture.

        Functions count only by whether they are given, since they can't be compared. The weights of
        the net are missing, since reading all of them takes time: see `weights_digest`.
        """
        reductions = {text_of(label): recipes_of(each) for label, each in self.reductions.items()}
        return {
            "layers": list(map(text_of, self.recording)),
            "reductions": reductions,
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "every": every,
            "inputs": self.with_inputs,
            "transforms": list(map(text_of, sorted(self.transforms))),
            "postprocessors": list(map(text_of, sorted(posts))),
            **({} if self.rows is None else {"rows": self.rows.settings}),
            **has,
            "mode": _mode_of(net),
            "autocast": {
                kind: dtype_name(torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
                if torch.is_autocast_enabled(kind)
            },
        }

    def _by_layer(self, given: Any, what: str) -> dict[DepthIdx, Any]:
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            return dict.fromkeys(self.recording, given)
        return by_selector(self.architecture, self.recording, given, what, CollectError)


def _mode_of(net: nn.Module) -> str:
    """Return words on the modules that are in training mode."""
    base = "train mode" if net.training else "eval mode"
    others = [repr(name) for name, inner in net.named_modules() if inner.training != net.training]
    return f"{base}, but for {', '.join(others)}" if others else base


def _checked(rows: Any, with_inputs: bool) -> Rows | None:
    found = rows_or_none(rows, CollectError)
    if found is not None and with_inputs:
        raise CollectError(
            "inputs=True can't be collected with rows=, since inputs are kept by whole "
            "batches: leave one of them out"
        )
    return found


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
