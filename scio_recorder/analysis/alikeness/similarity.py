"""How alike the layers of two recordings are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scio_recorder.analysis.alikeness.cka import Features, linear_cka
from scio_recorder.display.figure import Matrix, draw_matrix, matrix_html
from scio_recorder.display.outline import Listed, Listing, full_name
from scio_recorder.display.progress import progress_bar
from scio_recorder.errors import ArgumentError, ComparisonError, needing
from scio_recorder.layer import DepthIdx, Layer, counted, label_of
from scio_recorder.recording import Recording
from scio_recorder.recording.loader import rows_of
from scio_recorder.recording.readable import Readable
from scio_recorder.reductions.base import undisturbed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_NAMES = ("recording_a", "recording_b")
# The number of ids that a message names.
_FEW = 5


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
        The samples are not the same, there are fewer than two rows, or layers were reduced.
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
    for name, one in zip(_NAMES, (recording_a, recording_b), strict=True):
        if not isinstance(one, Recording):
            raise ComparisonError(
                f"{name} is of type {type(one).__name__}, but similarity takes recordings: write "
                "rnet.collect(batches) or open_recording(path)"
            )
    # A recording that is given twice is examined once.
    recordings = [recording_a] if recording_a is recording_b else [recording_a, recording_b]
    samples = [
        _samples_of(one, layers, name) for one, name in zip(recordings, _NAMES, strict=False)
    ]
    if recording_a.num_rows < 2:
        raise ComparisonError(
            f"recording_a has {counted(recording_a.num_rows, 'row')}, but similarity needs at "
            "least two"
        )
    orders = [None, *(paired_rows(recording_a, one, _NAMES) for one in recordings[1:])]
    device = _device([values for side in samples for values in side.values()])
    with undisturbed(device.type):
        sides = [_features(*given, device) for given in zip(samples, orders, strict=True)]
        values = _values(sides[0], *sides[1:]).cpu()
    named = [
        tuple(one.architecture[label] for label in side)
        for one, side in zip(recordings, samples, strict=True)
    ]
    notes = [
        f"{layer} of {name} {features.trouble}"
        for layers_of_one, side, name in zip(named, sides, _NAMES, strict=False)
        for layer, features in zip(layers_of_one, side, strict=True)
        if features.trouble
    ]
    is_of_one = len(recordings) == 1
    return Similarity(values, named[0], named[-1], recording_a.num_rows, tuple(notes), is_of_one)


@dataclass(frozen=True, eq=False)
class Similarity(Listed):
    """How alike the layers of two recordings are; made by :func:`~scio_recorder.similarity`.

    For each layer of the first recording, ``print`` shows the layer of the second that is most
    alike; with one recording, the most similar other layer. A notebook shows a heat map.

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
        Why some values are NaN.
    is_of_one : bool
        Whether one recording was given twice.
    """

    values: Tensor
    layers_a: tuple[Layer, ...]
    layers_b: tuple[Layer, ...]
    num_rows: int
    notes: tuple[str, ...] = ()
    is_of_one: bool = False

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
        rows, columns = (pd.Index(own, name=name) for own, name in zip(names, _NAMES, strict=True))
        return pd.DataFrame(self.values.numpy(), rows, columns)

    def plot(self) -> Figure:
        """Draw a heat map with the names of layers on both axes, in the order in which they return.

        The first layers are at the lower left, and the diagonal rises from there. A dot marks, for
        each layer of the first recording, the one of the second that is most alike.

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
        >>> similarity(recording, recording).plot().axes[0].get_title()
        'Linear CKA of 2 x 2 layers over 3 rows'
        """
        return draw_matrix(self._matrix())

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def _repr_html_(self) -> str:
        """Return a heat map for a notebook."""
        return matrix_html(self._matrix())

    def _title(self) -> str:
        sides = f"{len(self.layers_a)} x {len(self.layers_b)} layers"
        return f"Linear CKA of {sides} over {self.num_rows:,} rows"

    def _matrix(self) -> Matrix:
        return Matrix(
            self._title(),
            self.values.numpy(),
            list(map(full_name, self.layers_a)),
            list(map(full_name, self.layers_b)),
            _NAMES,
            self.notes,
            self.is_of_one,
        )

    def _listing(self) -> Listing:
        lines = []
        for layer, row, peak in zip(self.layers_a, self.values, self._matrix().peaks, strict=True):
            alike = ["", "", ""]
            if peak is not None:
                other = self.layers_b[peak]
                alike = [str(other.label), full_name(other), f"{float(row[peak]):.4f}"]
            lines.append([str(layer.label), full_name(layer), layer.type_name, *alike])
        texts = ("Label", "Name", "Type", "Label", "Most alike")
        return Listing(self._title(), texts, ("CKA",), lines, notes=self.notes)


def _samples_of(recording: Recording, layers: object, name: str) -> dict[DepthIdx, Tensor]:
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
    found = {values.device for values in samples}
    is_one = len(found) == 1 and next(iter(found)).type == "cuda"
    return found.pop() if is_one else torch.device("cpu")


def _features(
    samples: Mapping[DepthIdx, Tensor], order: Tensor | None, device: torch.device
) -> list[Features]:
    found = []
    with progress_bar("reading layers", len(samples)) as advance:
        for values in samples.values():
            found.append(Features(values, order, device))
            advance(0, values.nbytes)
    return found


def _values(first: Sequence[Features], second: Sequence[Features] | None = None) -> Tensor:
    sides = [first] if second is None else [first, second]
    usable = [[place for place, one in enumerate(side) if not one.trouble] for side in sides]
    shape = len(sides[0]), len(sides[-1])
    found = torch.full(shape, torch.nan, dtype=torch.float64, device=first[0].device)
    if all(usable):
        chosen = [[side[place] for place in own] for side, own in zip(sides, usable, strict=True)]
        rows, columns = (torch.tensor(own, device=found.device) for own in (usable[0], usable[-1]))
        found[rows[:, None], columns] = linear_cka(chosen[0], *chosen[1:])
    return found


def paired_rows(first: Readable, second: Readable, names: tuple[str, str]) -> Tensor | None:
    """Return, for each row of a recording, the matching row of another one.

    Parameters
    ----------
    first, second : Readable
        The recordings, of the same samples in any order.
    names : (str, str)
        Their names in messages.

    Returns
    -------
    Tensor or None
        The indices of rows of the second, [rows]; None if both have the same rows in the same
        order.

    Raises
    ------
    ComparisonError
        A sample or a row of one is missing from the other, or only one of them has rows.
    """
    if first.has_rows != second.has_rows:
        kinds = ["parts of samples" if one.has_rows else "samples" for one in (first, second)]
        raise ComparisonError(
            f"the rows of {names[0]} are {kinds[0]}, those of {names[1]} are {kinds[1]}: collect "
            "both with the same rows="
        )
    places = paired_ids(first.sample_ids, second.sample_ids, names)
    if not first.has_rows:
        return places
    samples, positions = (first.rows[name][:].cpu() for name in ("sample", "position"))
    others, other_positions = (second.rows[name][:].cpu() for name in ("sample", "position"))
    if places is not None:
        samples = places[samples]
    # One number for each pair of a sample and a position.
    span = 1 + max((int(one.max()) for one in (positions, other_positions) if len(one)), default=0)
    keys, other_keys = samples * span + positions, others * span + other_positions
    if keys.equal(other_keys):
        return None
    _expect_rows(first, keys, other_keys, names)
    _expect_rows(second, other_keys, keys, names[::-1])
    order = torch.empty_like(keys)
    order[keys.argsort()] = other_keys.argsort()
    return order


def paired_ids(
    ids: Sequence[int | str], others: Sequence[int | str], names: tuple[str, str]
) -> Tensor | None:
    """Return the place of each id among the others; None if both are in the same order.

    Raises
    ------
    ComparisonError
        An id is missing on one side.
    """
    ids, others = list(ids), list(others)
    if ids == others:
        return None
    places = {one: place for place, one in enumerate(others)}
    _expect("samples", [one for one in ids if one not in places], len(ids), names)
    known = set(ids)
    _expect("samples", [one for one in others if one not in known], len(others), names[::-1])
    return torch.tensor([places[one] for one in ids], device="cpu")


def _expect_rows(own: Readable, keys: Tensor, others: Tensor, names: tuple[str, str]) -> None:
    lost = torch.isin(keys, others, invert=True).nonzero().squeeze(1).tolist()
    samples, positions = own.rows["sample"], own.rows["position"]
    pairs = [(own.sample_ids[int(samples[row])], int(positions[row])) for row in lost[:_FEW]]
    _expect("rows", pairs + [()] * (len(lost) - len(pairs)), len(keys), names)


def _expect(kind: str, lost: Sequence[object], total: int, names: tuple[str, str]) -> None:
    """Raise an error that counts and shows the ids of the first that the second lacks."""
    if not lost:
        return
    shown = ", ".join(map(repr, lost[:_FEW])) + ", ..." * (len(lost) > _FEW)
    how_many = f"none of the {total:,}" if len(lost) == total else f"{len(lost):,} of {total:,}"
    verb = "is" if len(lost) == total else "are not"
    raise ComparisonError(
        f"{how_many} {kind} of {names[0]} {verb} in {names[1]}, by id: {shown}. Collect both from "
        "the same data, with the same sample_ids= if you gave any"
    )
