"""How alike the layers of two recordings are: linear centred kernel alignment (CKA).

NOTE [Two forms of one number]

With the rows of two layers as matrices X [rows, p] and Y [rows, q] whose columns are centred,
linear CKA is |XᵀY|² / (|XᵀX| |YᵀY|), in Frobenius norms (Kornblith et al., "Similarity of neural
network representations revisited", ICML 2019). The same norms are inner products of the matrices of
inner products of rows: |XᵀY|² = <XXᵀ, YYᵀ>. The first form costs rows · p · q for each pair of
layers, the second rows² · p for each layer and rows² for each pair. The second is a sum over blocks
of rows, so no matrix of rows is built as a whole.

The cheaper form is chosen once for all layers, and the second one if a layer is too wide for the
first. A choice for each pair could not save much: a layer that has more features than there are
rows needs the second form for its own norm, and once that is paid for, pairs with other layers are
cheaper in it too.

Columns are centred before anything is multiplied, although that takes a separate reading.
Subtracting products of means afterwards would lose as many digits as the mean exceeds the spread
by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from scio_recorder import Recording
from scio_recorder.analysis.comparing.sides import refuse_missing
from scio_recorder.display.figure import draw_matrix
from scio_recorder.display.outline import full_name, visible
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import ArgumentError, ComparisonError
from scio_recorder.layer import Layer, RowIdx, label_of
from scio_recorder.lowlevel import needing, rows_of
from scio_recorder.stores.files import bytes_of_row
from scio_recorder.tensors import undisturbed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_NAMES = ("recording_a", "recording_b")
# The features of the widest layer whose products with another one fit into memory.
_WIDEST = 1 << 13
# The number of sums of products at a time, and of numbers of each factor, in float64.
_SUMS, _FACTORS = 1 << 25, 1 << 24
# Bytes that are read at once.
_READ_BYTES = 1 << 26
_Pairs: TypeAlias = Sequence[tuple[int, int]]


def similarity(
    recording_a: Recording, recording_b: Recording, *, layers: object = None
) -> Similarity:
    """Return the linear CKA of each layer of a recording with each layer of another one.

    Centred kernel alignment is 1 if the rows of two layers are alike up to a rotation, a shift
    and one scale for all features. It is 0 if no feature of one is correlated with a feature of
    the other. Layers may have any shapes and dtypes; all dimensions but the first are features.
    CKA is computed in float64, part by part, so recordings on disk may be larger than memory.

    Parameters
    ----------
    recording_a, recording_b : Recording
        Two recordings of the same samples, which are paired by id, in any order. Rows of
        ``collect(rows=...)`` are paired by the id of the sample and the position in it. One
        recording given twice is read once.
    layers : selector, or sequence of selectors, optional
        The layers of both, as in ``record``. By default, all that were not reduced.

    Returns
    -------
    Similarity
        ``values`` is [layers of a, layers of b], in the order of the recordings.

    Raises
    ------
    ComparisonError
        The samples are not the same, or layers were reduced.
    LayerNotFoundError
        A selector matches no layer of a recording.

    Notes
    -----
    Source: Kornblith et al., "Similarity of neural network representations revisited", ICML 2019.
    With fewer rows than features, CKA is large whatever the layers do. Take several times as many
    samples as the narrower layer has features before you call two layers alike.

    Examples
    --------
    >>> import torch
    >>> from scio_recorder import Recorder, similarity
    >>> rnet = Recorder(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU()), input_size=(1, 2))
    >>> rnet.record("0", "1")
    >>> recording = rnet.collect([torch.tensor([[-1.0, 2.0], [3.0, -4.0], [-5.0, -6.0]])])
    >>> similarity(recording, recording).values
    tensor([[1.0000, 0.7124],
            [0.7124, 1.0000]], dtype=torch.float64)
    """
    for name, recording in zip(_NAMES, (recording_a, recording_b), strict=True):
        if not isinstance(recording, Recording):
            raise ComparisonError(
                f"{name} is of type {type(recording).__name__}, but similarity takes recordings: "
                "write rnet.collect(batches) or open_recording(path)"
            )
    # A recording that is given twice is examined once.
    recordings = [recording_a] if recording_a is recording_b else [recording_a, recording_b]
    samples = [_samples_of(*side, layers) for side in zip(recordings, _NAMES, strict=False)]
    orders = [None, *(_paired_rows(recording_a, other) for other in recordings[1:])]
    device = _device([values for side in samples for values in side.values()])
    with undisturbed(device.type):
        sides = [_features(*side, device) for side in zip(samples, orders, strict=True)]
        values = _values(sides[0], sides[-1]).cpu()
    named = [
        tuple(recording.architecture[label] for label in side)
        for recording, side in zip(recordings, samples, strict=True)
    ]
    notes = [
        f"{layer} of {name} {features.trouble}"
        for rows, side, name in zip(named, sides, _NAMES, strict=False)
        for layer, features in zip(rows, side, strict=True)
        if features.trouble
    ]
    return Similarity(values, named[0], named[-1], recording_a.num_rows, tuple(notes))


@dataclass(frozen=True, eq=False, repr=False)
class Similarity:
    """How alike the layers of two recordings are; made by :func:`~scio_recorder.similarity`.

    Attributes
    ----------
    values : Tensor
        Linear CKA from 0 to 1, [layers of a, layers of b] in float64, on the CPU. NaN if a layer
        is the same in all rows, or has NaNs or infinities.
    layers_a : tuple of Layer
        The layers of the rows of ``values``, in the order of the first recording.
    layers_b : tuple of Layer
        The layers of the columns, in the order of the second recording.
    num_rows : int
        The number of compared rows of the recordings: samples, tokens or nodes.
    notes : tuple of str
        Why some values are NaN; ``print`` shows them.
    """

    values: Tensor
    layers_a: tuple[Layer, ...]
    layers_b: tuple[Layer, ...]
    num_rows: int
    notes: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """Return the values with the names of layers.

        Returns
        -------
        pandas.DataFrame
            [layers of a, layers of b], indexed by qualified names on both sides. The net itself
            is "(root)", and later calls of a module have their number after the name.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder, similarity
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.Flatten()), input_size=(1, 2))
        >>> rnet.record("0")
        >>> recording = rnet.collect([torch.eye(3, 2)])
        >>> similarity(recording, recording).to_frame().loc["0", "0"].item()
        1.0
        """
        with needing("frame", "a frame"):
            import pandas as pd

        names = ([full_name(layer) for layer in side] for side in (self.layers_a, self.layers_b))
        rows, columns = (pd.Index(s, name=name) for s, name in zip(names, _NAMES, strict=True))
        return pd.DataFrame(self.values.numpy(), rows, columns)

    def plot(self) -> Figure:
        """Draw a heat map with the names of layers on both axes, in the order in which they return.

        The first layers are at the lower left, and the diagonal rises from there.

        Returns
        -------
        matplotlib.figure.Figure
            Made without pyplot, so it need not be closed.

        Examples
        --------
        >>> import torch
        >>> from scio_recorder import Recorder, similarity
        >>> rnet = Recorder(torch.nn.Sequential(torch.nn.Flatten()), input_size=(1, 2))
        >>> rnet.record("*")
        >>> recording = rnet.collect([torch.eye(3, 2)])
        >>> similarity(recording, recording).plot().get_suptitle()
        'Linear CKA of 2 x 2 layers over 3 rows'
        """
        names = [list(map(full_name, side)) for side in (self.layers_a, self.layers_b)]
        return draw_matrix(self._title, self.values.numpy(), (names[0], names[1]), _NAMES)

    def __repr__(self) -> str:
        return f"<{self._title}>"

    def __str__(self) -> str:
        return "\n".join(map(visible, (self._title, *self.notes)))

    @property
    def _title(self) -> str:
        sides = f"{len(self.layers_a)} x {len(self.layers_b)} layers"
        return f"Linear CKA of {sides} over {self.num_rows:,} rows"


def _samples_of(recording: Recording, name: str, layers: object) -> dict[RowIdx, Tensor]:
    """Return the values of the layers to be compared."""
    selectors: Sequence[object] = () if layers is None else (layers,)
    if isinstance(layers, list | tuple) and label_of(layers) is None:
        selectors = layers
    try:
        return rows_of(recording, selectors)
    except ArgumentError as error:
        raise ComparisonError(f"{name}: {error}") from error


def _device(samples: Sequence[Tensor]) -> torch.device:
    """Return the GPU that holds all values, if any; not every device has float64."""
    first, *others = {values.device for values in samples}
    return torch.device("cpu") if others or first.type != "cuda" else first


def _features(
    samples: Mapping[RowIdx, Tensor], order: Tensor | None, device: torch.device
) -> list[_Features]:
    layers = []
    with progress_bar("reading layers", len(samples)) as advance:
        for values in samples.values():
            layers.append(_Features(values, order, device))
            advance(0, values.nbytes)
    return layers


class _Features:
    """The rows of a layer, centred and scaled, [rows, features] in float64, read part by part.

    Parameters
    ----------
    samples : Tensor
        The values of all rows, which may lie on disk.
    order : Tensor or None
        The index in ``samples`` of each row; None if they are in order.
    device : torch.device
        Where to compute.

    Attributes
    ----------
    width : int
        The number of features; a complex number counts as two.
    trouble : str
        Why no similarity can be computed; empty if one can.
    """

    def __init__(self, samples: Tensor, order: Tensor | None, device: torch.device) -> None:
        self._samples = samples
        self._order = order
        self.device = device
        self.num_rows = len(samples)
        self.width = samples.shape[1:].numel() * (1 + samples.dtype.is_complex)
        # The number of rows that may be opened at once.
        self._at_once = max(1, _READ_BYTES // max(1, bytes_of_row(samples)))
        low, high, self._mean = self._range_and_mean()
        spread = float((high - low).amax()) if self.width else 0.0
        self.trouble = "" if spread else "is the same in all rows"
        if not math.isfinite(spread):
            self.trouble = "has values that are not finite, or spread beyond float64"
        # The scale cancels out. It keeps fourth powers of large values from overflowing. The
        # reciprocal of the smallest numbers would overflow itself.
        self._scale = math.nan if self.trouble else spread

    def centred(self, rows: range) -> Tensor:
        """Return some rows, ready to be multiplied."""
        values = [
            self._opened(part).to(self.device, torch.float64)
            for part in _parts(rows, self._at_once)
        ]
        return (torch.cat(values) - self._mean).div_(self._scale)

    def _opened(self, rows: range) -> Tensor:
        """Return the unscaled values of some rows, [rows, features]."""
        chosen: slice | Tensor = slice(rows.start, rows.stop)
        if self._order is not None:
            chosen = self._order[chosen].to(self._samples.device)
        values = self._samples[chosen].detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        return values.reshape(len(values), self.width)

    def _range_and_mean(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the smallest and the largest value and the mean of each feature."""
        total = torch.zeros(self.width, dtype=torch.float64, device=self.device)
        low, high = total + math.inf, total - math.inf
        step = max(1, min(self._at_once, _FACTORS // max(1, self.width)))
        for rows in _parts(range(self.num_rows), step):
            values = self._opened(rows).to(self.device, torch.float64)
            low, high = low.minimum(values.amin(0)), high.maximum(values.amax(0))
            total += values.sum(0)
        # Rounding must not give a constant feature a spread.
        return low, high, torch.where(low == high, low, total / self.num_rows)


def _values(first: Sequence[_Features], second: Sequence[_Features]) -> Tensor:
    """Return linear CKA of each pair of layers; NaN where one has trouble."""
    layers = [*first] if first is second else [*first, *second]
    pairs = [
        (left, right)
        for left, right in combinations_with_replacement(range(len(layers)), 2)
        if left == right or first is second or left < len(first) <= right
    ]
    norms_of = _by_rows if _is_cheaper_by_rows(layers, pairs) else _by_features
    norms = norms_of(layers, pairs).triu()
    norms += norms.triu(1).T
    squares = norms.diagonal().sqrt()
    # Rounding may exceed the range a little.
    values = (norms / (squares[:, None] * squares)).clamp_(max=1.0)
    return values[: len(first), -len(second) :]


def _is_cheaper_by_rows(layers: Sequence[_Features], pairs: _Pairs) -> bool:
    num_rows, widths = layers[0].num_rows, [layer.width for layer in layers]
    products = sum(widths[left] * widths[right] for left, right in pairs)
    is_cheaper = num_rows * (sum(widths) + len(widths) ** 2) < products
    return is_cheaper or max(widths) > _WIDEST


def _by_rows(layers: Sequence[_Features], pairs: _Pairs) -> Tensor:
    """Return the squared norm of each product of two layers, from products of rows."""
    widest = max(1, *(layer.width for layer in layers))
    step = max(1, min(math.isqrt(_SUMS // len(layers)), _FACTORS // widest))
    blocks = list(combinations_with_replacement(_parts(range(layers[0].num_rows), step), 2))
    norms = torch.zeros(len(layers), len(layers), dtype=torch.float64, device=layers[0].device)
    with progress_bar("comparing layers", len(blocks) * len(layers)) as advance:
        for rows, others in blocks:
            products = norms.new_empty(len(layers), len(rows), len(others))
            for sums, layer in zip(products, layers, strict=True):
                left = layer.centred(rows)
                right = left if rows == others else layer.centred(others)
                torch.mm(left, right.T, out=sums)
                advance(0, 0)
            flat = products.flatten(1)
            norms.addmm_(flat, flat.T, alpha=1 if rows == others else 2)
    return norms


def _by_features(layers: Sequence[_Features], pairs: _Pairs) -> Tensor:
    """Return the squared norm of each product of two layers, from products of features."""
    norms = torch.zeros(len(layers), len(layers), dtype=torch.float64, device=layers[0].device)
    with progress_bar("comparing layers", len(pairs)) as advance:
        for left, right in pairs:
            norms[left, right] = _squared_norm(layers[left], layers[right])
            advance(0, 0)
    return norms


def _squared_norm(left: _Features, right: _Features) -> Tensor:
    sums = torch.zeros(left.width, right.width, dtype=torch.float64, device=left.device)
    for rows in _parts(range(left.num_rows), max(1, _FACTORS // max(1, left.width, right.width))):
        sums.addmm_(left.centred(rows).T, right.centred(rows))
    return sums.square_().sum()


def _parts(whole: range, step: int) -> Iterator[range]:
    return (whole[start : start + step] for start in range(0, len(whole), step))


def _paired_rows(first: Recording, second: Recording) -> Tensor | None:
    """Return, for each row of a recording, the matching row of another one.

    None if both have the same rows in the same order.

    Raises
    ------
    ComparisonError
        A row of one is missing from the other, or only one of them has parts of samples.
    """
    if first.has_rows != second.has_rows:
        kinds = ["parts of samples" if r.has_rows else "samples" for r in (first, second)]
        raise ComparisonError(
            f"the rows of {_NAMES[0]} are {kinds[0]}, those of {_NAMES[1]} are {kinds[1]}: collect "
            "both with the same rows="
        )
    keys, others = _keys(first), _keys(second)
    if keys == others:
        return None
    places, known = {key: place for place, key in enumerate(others)}, set(keys)
    refuse_missing([key for key in keys if key not in places], _NAMES[1], f"{_NAMES[0]} has")
    refuse_missing([key for key in others if key not in known], _NAMES[0], f"{_NAMES[1]} has")
    return torch.tensor([places[key] for key in keys], device="cpu")


def _keys(recording: Recording) -> list[object]:
    """Return what identifies each row: the id of its sample, and the position in it."""
    ids = recording.sample_ids
    if not recording.has_rows:
        return list(ids)
    samples, positions = (recording.rows[name][:].tolist() for name in ("sample", "position"))
    return [(ids[sample], at) for sample, at in zip(samples, positions, strict=True)]
