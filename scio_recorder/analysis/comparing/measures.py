"""How two tensors differ: how many numbers do, and by how much.

NOTE [What is equal]

Without a tolerance, two tensors of one dtype are compared bit for bit, so that -0.0 is not 0.0.
NaNs are equal whatever their bits, since these differ from machine to machine. Tensors of two
dtypes are compared as numbers. With tolerances, numbers are equal as for `numpy.isclose` with
``equal_nan=True``, and the reference gives the scale.

NOTE [Many tensors at once]

Tensors of one shape and dtype are measured together, as the lines of a matrix, and large ones in
pieces that stay in the cache. All figures stay on the device until they are read, once in each
stage. The first stage shows what is equal bit for bit, at little cost. The second takes the sums of
equal pieces, and all figures of the others. It is right if these sums are finite, which proves that
all numbers are. The third is always right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from scio_recorder.errors import ComparisonError
from scio_recorder.tensors import is_dense, is_plain, with_float64

# Elements measured together: in the cache of a core, or many at a time on a device.
_PIECE = {"cpu": 1 << 17}
_OTHER_PIECE = 1 << 22
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Figures between the number of differences and the first.
_SUMS = ("max_abs", "max_rel", "squares", "own", "others", "product")
# Figures of the lines of two matrices: of each figure, a value for each line.
_Stage: TypeAlias = Callable[[Tensor, Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Tolerance:
    """The difference up to which two numbers count as equal: ``atol + rtol * |reference|``."""

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ComparisonError(f"{name}={value!r}: give a number from 0 on")

    @property
    def is_exact(self) -> bool:
        """Whether both tolerances are zero."""
        return not (self.rtol or self.atol)


@dataclass
class Figures:
    """The sums over all elements of pairs of tensors.

    Parameters
    ----------
    num_elements, num_different : int
        The number of elements, and of those that differ by more than the tolerance.
    max_abs, max_rel : float
        Largest difference, absolute and over the absolute value of the reference.
    squares, own, others, product : float
        Sums of squares of the differences, of the reference and of the candidate, and the sum of
        their products, over elements finite on both sides. The first is infinite if an element is a
        number on one side only.
    first : int or None
        The first element that differs, as a flat index into the first pair.
    """

    num_elements: int = 0
    num_different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    own: float = 0.0
    others: float = 0.0
    product: float = 0.0
    first: int | None = field(default=None, compare=False)

    @property
    def relative_error(self) -> float:
        """Norm of the difference over the norm of the reference."""
        if not self.squares or math.isnan(self.squares):
            return self.squares
        return math.sqrt(self.squares / self.own) if self.own else math.inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 if they are equal."""
        if not self.squares or math.isnan(self.squares):
            return 1.0 - self.squares
        norms = math.sqrt(self.own) * math.sqrt(self.others)
        # A NaN, where sums are too large for float64, stays one.
        return float(np.clip(self.product / norms, -1.0, 1.0)) if norms else 0.0

    def add(self, other: Figures, offset: int = 0) -> None:
        """Add the figures of further elements, which begin at an offset."""
        self.num_elements += other.num_elements
        self.num_different += other.num_different
        if self.first is None and other.first is not None:
            self.first = offset + other.first
        # A NaN means that a figure is not known, and stays.
        self.max_abs = float(np.maximum(self.max_abs, other.max_abs))
        self.max_rel = float(np.maximum(self.max_rel, other.max_rel))
        self.squares += other.squares
        self.own += other.own
        self.others += other.others
        self.product += other.product


def unknown(figures: Figures) -> Figures:
    """Return figures of which the counts alone are known."""
    counts, nan = (figures.num_elements, figures.num_different), math.nan
    return Figures(*counts, nan, nan, nan, nan, nan, nan)


def measure(reference: Tensor, candidate: Tensor, tolerance: Tolerance) -> Figures:
    """Return how two tensors of one shape differ.

    Parameters
    ----------
    reference, candidate : torch.Tensor
        Of any dtypes and devices; measured on the reference's device.
    tolerance : Tolerance
        What counts as equal.

    Examples
    --------
    >>> figures = measure(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]), Tolerance())
    >>> figures.max_abs, figures.max_rel, figures.relative_error, figures.num_different
    (1.0, 0.25, 0.2, 1)
    """
    return measure_all([(reference, candidate)], tolerance)[0]


def measure_all(pairs: Sequence[tuple[Tensor, Tensor]], tolerance: Tolerance) -> list[Figures]:
    """Return how the tensors of each pair differ, see NOTE [Many tensors at once].

    Parameters
    ----------
    pairs : sequence of (Tensor, Tensor)
        As for :func:`measure`.
    tolerance : Tolerance
        What counts as equal.

    Examples
    --------
    >>> pairs = [(torch.ones(2), torch.ones(2)), (torch.zeros(3), torch.ones(3))]
    >>> [figures.num_different for figures in measure_all(pairs, Tolerance())]
    [0, 3]
    """
    pieces, unequal = _pieces_and_unequal(pairs)
    equal = set(range(len(pieces))).difference(unequal)
    squares = _read(_squares, pieces, equal)
    known = {at: [*4 * [0.0], *3 * sums, 0.0] for at, sums in squares.items()}
    known |= _read(partial(_figures, tolerance), pieces, unequal)
    # The sums of squares of both.
    others = [at for at, line in known.items() if not math.isfinite(line[4] + line[5])]
    known |= _read(partial(_figures, tolerance, has_others=True), pieces, others)
    totals = [Figures() for _ in pairs]
    for at, piece in enumerate(pieces):
        number, *sums, first = known[at]
        place = int(first) if number else None
        named = dict(zip(_SUMS, sums, strict=True))
        figures = Figures(piece.own.numel(), int(number), first=place, **named)
        totals[piece.number].add(figures, piece.start)
    return totals


def differ(pairs: Sequence[tuple[Tensor, Tensor]], tolerance: Tolerance) -> list[bool]:
    """Return whether the tensors of each pair differ, in less time than their figures take.

    Examples
    --------
    >>> differ([(torch.ones(2), torch.ones(2)), (torch.zeros(3), torch.ones(3))], Tolerance())
    [False, True]
    """
    pieces, unequal = _pieces_and_unequal(pairs)
    differing = set[int]()
    if tolerance.is_exact:
        # Two NaNs may have other bits, and two dtypes the same numbers. Float8 has no largest one.
        one_dtype = [at for at in unequal if pieces[at].own.dtype is pieces[at].other.dtype]
        alike = [at for at in one_dtype if pieces[at].own.itemsize > 1]
        differing = {at for at, nans in _read(_has_nan, pieces, alike).items() if nans == [0.0]}
    rest = [at for at in unequal if at not in differing]
    figures = _read(partial(_figures, tolerance, has_others=True), pieces, rest)
    differing |= {at for at, (number, *_) in figures.items() if number}
    numbers = {pieces[at].number for at in differing}
    return [number in numbers for number in range(len(pairs))]


class _Piece(NamedTuple):
    """A pair of tensors, or of pieces of them: which pair, and the flat index of its first."""

    number: int
    start: int
    own: Tensor
    other: Tensor


def _pieces(number: int, reference: Tensor, candidate: Tensor) -> Iterator[_Piece]:
    own, other = with_float64(dense(reference)), dense(candidate)
    if other.device != own.device:
        other = other.to(own.device)
    step = _step(own)
    if 0 < own.numel() <= step:
        yield _Piece(number, 0, own, other)
    elif own.numel():
        parts = zip(*(torch.split(x.reshape(-1), step) for x in (own, other)), strict=True)
        for place, pair in enumerate(parts):
            yield _Piece(number, place * step, *pair)


def _pieces_and_unequal(
    pairs: Sequence[tuple[Tensor, Tensor]],
) -> tuple[list[_Piece], list[int]]:
    """Return the pieces of pairs, and the numbers of those that are not equal bit for bit."""
    pieces = [piece for number, pair in enumerate(pairs) for piece in _pieces(number, *pair)]
    # Those of two dtypes are not.
    alike = [at for at, piece in enumerate(pieces) if piece.own.dtype is piece.other.dtype]
    unequal = _read(_are_unequal, pieces, alike)
    return pieces, [at for at in range(len(pieces)) if unequal.get(at) != [0.0]]


def _step(tensor: Tensor) -> int:
    return _PIECE.get(tensor.device.type, _OTHER_PIECE)


def _bundles(pieces: Sequence[_Piece], numbers: Iterable[int]) -> list[list[int]]:
    """Return the numbers of the pieces that are measured together."""
    groups: dict[Any, list[int]] = {}
    for at in numbers:
        _, _, own, other = pieces[at]
        groups.setdefault((own.shape, own.dtype, other.dtype, own.device), []).append(at)
    bundles: list[list[int]] = []
    for group in groups.values():
        own = pieces[group[0]].own
        size = max(1, _step(own) // own.numel())
        bundles += [group[start : start + size] for start in range(0, len(group), size)]
    return bundles


def _stacked(bundle: Sequence[_Piece]) -> tuple[Tensor, Tensor]:
    """Return matrices with a line for each piece."""
    _, _, owns, others = zip(*bundle, strict=True)
    if len(bundle) == 1 and owns[0].numel() > 1:
        # Large ones are not copied. The bits of a single number need a stride of one.
        return owns[0].reshape(1, -1).contiguous(), others[0].reshape(1, -1).contiguous()
    return torch.stack(owns).reshape(len(owns), -1), torch.stack(others).reshape(len(owns), -1)


def _read(
    stage: _Stage, pieces: Sequence[_Piece], numbers: Iterable[int]
) -> dict[int, list[float]]:
    """Return the figures of some pieces, by number: each device is waited for once."""
    by_device: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
    for bundle in _bundles(pieces, numbers):
        columns = stage(*_stacked([pieces[at] for at in bundle]))
        table = torch.stack([column.double() for column in columns], 1)
        by_device.setdefault(table.device, []).append((bundle, table))
    known: dict[int, list[float]] = {}
    for results in by_device.values():
        bundles, tables = zip(*results, strict=True)
        known |= zip(chain(*bundles), torch.cat(tables).tolist(), strict=True)
    return known


def measure_values(reference: Any, candidate: Any, tolerance: Tolerance) -> Figures:
    """Return how two values that are no tensors differ: infinitely, unless both are numbers.

    Examples
    --------
    >>> measure_values(2, 2.5, Tolerance()).max_abs, measure_values("a", "b", Tolerance()).max_abs
    (0.5, inf)
    """
    if reference == candidate or (reference != reference and candidate != candidate):
        return Figures(1)
    are_dtypes = isinstance(reference, torch.dtype) and isinstance(candidate, torch.dtype)
    if are_dtypes and not tolerance.is_exact:
        # Who tolerates differences of numbers compares two precisions.
        return Figures(1)
    try:
        own, other = map(_as_tensor, (reference, candidate))
    except (LookupError, ValueError, RuntimeError):
        return Figures(1, 1, math.inf, math.inf, math.inf, first=0)
    return measure(own, other, tolerance)


def _as_tensor(value: Any) -> Tensor:
    dtypes = {bool: torch.int64, int: torch.int64, float: torch.float64, complex: torch.complex128}
    return torch.tensor([value], dtype=dtypes[type(value)], device="cpu")


def dense(tensor: Tensor) -> Tensor:
    """Return a detached dense tensor of the same numbers, for one that is not spread out."""
    if is_plain(tensor) and not tensor.requires_grad:
        return tensor
    whole = tensor.detach()
    if not is_dense(whole):
        if whole.is_nested:
            whole = torch.nested.to_padded_tensor(whole.contiguous(), 0.0)
        whole = whole.dequantize() if whole.is_quantized else whole.to_dense()
    return whole.as_subclass(Tensor).resolve_conj().resolve_neg()


def _are_unequal(own: Tensor, other: Tensor) -> Sequence[Tensor]:
    # Eight bytes take the time of one.
    number = math.gcd(own.shape[1], own.storage_offset(), other.storage_offset())
    bits = _BITS[math.gcd(8, number * own.itemsize)]
    return [_unequal(own.view(bits), other.view(bits)).view(torch.uint8).amax(1)]


def _squares(own: Tensor, other: Tensor) -> Sequence[Tensor]:
    return [_sum_of_squares(own.to(_wide(own, other)))]


def _has_nan(own: Tensor, other: Tensor) -> Sequence[Tensor]:
    parts = torch.view_as_real(own).flatten(1) if own.is_complex() else own
    # The largest of numbers of which one is a NaN is a NaN; whole numbers have none.
    return [parts.amax(1).isnan() if parts.is_floating_point() else own.new_zeros(len(own))]


def _figures(
    tolerance: Tolerance, own: Tensor, other: Tensor, *, has_others: bool = False
) -> Sequence[Tensor]:
    """Return all figures of each line; ``has_others`` than finite numbers or not."""
    # A copy, since all is computed in place: new memory takes as long as the rest.
    both = own.new_empty((2, *own.shape), dtype=_wide(own, other))
    one, two = both[0].copy_(own), both[1].copy_(other)
    is_exact = own.dtype is other.dtype and tolerance.is_exact
    different = _differing_bits(own, other) if is_exact else None
    if has_others:
        both_nan = one.isnan() & two.isnan()
        same, odd = (one == two) | both_nan, ~(one.isfinite() & two.isfinite())
        different = None if different is None else different & ~both_nan
        both.masked_fill_(odd, 0.0)
    sums = _products(both)
    apart, size = _size(two.sub_(one)), _size(one)
    if has_others:
        apart = apart.masked_fill_(odd, math.inf).masked_fill_(same, 0.0)
    if different is None:
        near = (apart <= tolerance.atol + tolerance.rtol * size) & apart.isfinite()
        different = (apart > 0) & ~near
    number, max_abs = different.view(torch.uint8).sum(1, dtype=torch.int32), apart.amax(1)
    if not any(x.is_complex() or x.is_floating_point() for x in (own, other)):
        # Integers that differ only beyond float64 differ by one at least.
        max_abs = torch.maximum(max_abs, (number > 0).to(max_abs.dtype))
    squares, max_rel = _sum_of_squares(apart), _largest(apart.div_(size))
    figures = [number, max_abs, max_rel, squares, sums[:, 0, 0], sums[:, 1, 1], sums[:, 0, 1]]
    return [*figures, _first(different)]


def _size(numbers: Tensor) -> Tensor:
    return numbers.abs() if numbers.is_complex() else numbers.abs_()


def _wide(own: Tensor, other: Tensor) -> torch.dtype:
    return torch.complex128 if own.is_complex() or other.is_complex() else torch.float64


def _sum_of_squares(lines: Tensor) -> Tensor:
    """Return the sum of the squared magnitudes of each line."""
    if len(lines) == 1:
        return torch.vdot(lines[0], lines[0]).real[None]
    return (torch.view_as_real(lines).flatten(1) if lines.is_complex() else lines).square().sum(1)


def _products(both: Tensor) -> Tensor:
    """Return the real parts of the scalar products of two matrices' lines, [lines, 2, 2]."""
    parts = torch.view_as_real(both).flatten(2) if both.is_complex() else both
    lines = parts.transpose(0, 1)
    return lines @ lines.mT


def _largest(quotients: Tensor) -> Tensor:
    """Return the largest quotient of each line; equal zeros have none."""
    if quotients.device.type == "cpu":
        # NumPy takes a quarter of torch's time.
        quotients = torch.from_numpy(np.fmax.reduce(quotients.numpy(), axis=1, keepdims=True))
    return quotients.nan_to_num_(nan=0.0, posinf=math.inf).amax(1)


def _first(differ: Tensor) -> Tensor:
    """Return the first place of each line that is True."""
    if differ.device.type == "cpu":
        # NumPy takes a fifth of torch's time.
        return torch.from_numpy(differ.numpy().argmax(1))
    return differ.view(torch.uint8).argmax(1)


def _unequal(own: Tensor, other: Tensor) -> Tensor:
    """Return which integers are unequal."""
    if own.device.type == "cpu":
        # NumPy takes a quarter of torch's time.
        return torch.from_numpy(own.numpy() != other.numpy())
    return own != other


def _differing_bits(own: Tensor, other: Tensor) -> Tensor:
    differing = _unequal(_bits(own), _bits(other))
    # Both parts of a complex number.
    return differing.any(-1) if own.is_complex() else differing


def _bits(tensor: Tensor) -> Tensor:
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.view(_BITS[parts.itemsize])
