"""The effects that a sweep has measured: their table and their figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from scio_recorder import Architecture
from scio_recorder.display.figure import draw_effects
from scio_recorder.display.outline import Listed, Listing, full_name, visible
from scio_recorder.errors import ArgumentError
from scio_recorder.layer import Layer, RowIdx, counted, text_of
from scio_recorder.lowlevel import LayerMapping, needing
from scio_recorder.tensors import names_arguments

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
