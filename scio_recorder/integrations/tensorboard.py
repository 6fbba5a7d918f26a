"""Activations and gradients as TensorBoard's histograms and scalars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from scio_recorder import Architecture, Recording
from scio_recorder.errors import ArgumentError, LayerNotFoundError
from scio_recorder.layer import RowIdx, text_of
from scio_recorder.lowlevel import LayerMapping, RunningStatistics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["add_activations"]


def add_activations(
    writer: SummaryWriter,
    activations: LayerMapping[Any],
    global_step: int | None = None,
    *,
    tag: str = "activations",
    statistics: Collection[str] = ("mean", "std", "norm", "zeros", "nonfinite"),
    histograms: bool = True,
    walltime: float | None = None,
) -> None:
    """Write a histogram and statistics of each layer for TensorBoard.

    Histograms are tagged ``activations/NAME`` and scalars ``activations_mean/NAME`` and so on,
    where NAME is the layer's qualified name, or the class name for the whole net. If a module has
    several calls, the label follows the name.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        The writer; in Lightning, ``TensorBoardLogger.experiment``.
    activations : mapping
        ``rnet.activations``, ``rnet.gradients`` or a :class:`~scio_recorder.Recording`, whose
        layers with samples are read one after the other.
    global_step : int, optional
        The step that they belong to.
    tag : str, default "activations"
        The beginning of all tags, such as "gradients".
    statistics : collection of str
        Some of "mean", "std", "norm" (all three over finite values), "zeros" (the share of values
        that are exactly zero) and "nonfinite" (the number of values that are NaN or infinite); an
        empty one for none.
    histograms : bool, default True
        Write histograms, over finite values, in the bins of ``SummaryWriter.add_histogram``.
    walltime : float, optional
        Seconds since the epoch, in place of the current time.

    Raises
    ------
    ArgumentError
        There is no such statistic, or ``activations`` are not of this package.
    LayerNotFoundError
        There is nothing to write: no pass has run, or no layer has samples.

    Notes
    -----
    Statistics are over all values of a layer, in all tensors of a structure. NaNs and infinities
    are counted and left out, since ``add_histogram`` fails on them.

    Examples
    --------
    >>> import tempfile, torch
    >>> from torch import nn
    >>> from torch.utils.tensorboard import SummaryWriter
    >>> from scio_recorder import Recorder
    >>> rnet = Recorder(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), input_size=(1, 2))
    >>> rnet.record("*", gradients=True)
    >>> rnet(torch.ones(4, 2)).sum().backward()
    >>> with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
    ...     add_activations(writer, rnet.activations, global_step=0)
    ...     add_activations(writer, rnet.gradients, global_step=0, tag="gradients")
    """
    chosen = check_names(statistics) if statistics else ()
    if not isinstance(activations, LayerMapping):
        raise ArgumentError(
            f"activations are a {type(activations).__name__}, which has no layers: give "
            "rnet.activations, rnet.gradients or a Recording"
        )
    labels = list(activations.stored if isinstance(activations, Recording) else activations)
    if not labels:
        raise LayerNotFoundError(
            "there is nothing to write: first record layers and run a pass (for gradients a "
            "backward pass too), or collect samples and not only reductions"
        )
    for label, name in _names(activations.architecture, labels).items():
        value, running = activations[label], RunningStatistics()
        # Of a recording, only this layer is in memory.
        value = value[:] if isinstance(activations, Recording) else value
        running.update(value)
        for statistic, number in running.scalars().items():
            if statistic in chosen:
                writer.add_scalar(f"{tag}_{statistic}/{name}", number, global_step, walltime)
        if histograms and running.num_finite:
            finite = running.finite_values(value)
            writer.add_histogram(f"{tag}/{name}", finite, global_step, walltime=walltime)


def _names(architecture: Architecture, labels: list[RowIdx]) -> dict[RowIdx, str]:
    rows = *architecture.values(), *architecture.operations.values()
    calls = Counter(row.name or row.type_name for row in rows)
    names = {row.label: row.name or row.type_name for row in map(architecture.__getitem__, labels)}
    return {
        label: name if calls[name] == 1 else f"{name}_{text_of(label)}"
        for label, name in names.items()
    }


def check_names(
    names: Collection[str], known: Collection[str] = RunningStatistics.OF_VALUES
) -> tuple[str, ...]:
    """Return names of scalars; raise if there are none, or one is unknown."""
    is_one = isinstance(names, str) or not isinstance(names, Collection)
    wanted: tuple[Any, ...] = (names,) if is_one else tuple(names)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        wrong = unknown[0] if unknown else wanted
        raise ArgumentError(f"statistics={wrong!r}: choose among {', '.join(map(repr, known))}")
    return wanted
