"""The distance of two tensors: figures in float64, and whether they are equal.

NOTE [What is equal]

Without a tolerance, two tensors of one dtype are compared bit for bit, so that -0.0 is not 0.0.
NaNs are equal whatever their bits, since these differ from machine to machine. Tensors of two
dtypes are compared as numbers. With tolerances, numbers are equal as for `numpy.isclose` with
``equal_nan=True``, and the reference gives the scale.

NOTE [In pieces]

Tensors are measured in pieces that stay in the cache while they are widened and subtracted. A
finite piece, as nearly all are, takes one multiplication for each sum and no mask: a finite sum of
squares proves that all numbers are finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scio_recorder.errors import ComparisonError
from scio_recorder.tensors.copies import gathered, is_dense, with_float64

# Elements measured together: in the cache of a core, or many at a time on a device.
_PIECE = {"cpu": 1 << 17}
_OTHER_PIECE = 1 << 22
# Elements searched together for the first that differ, which usually come soon.
_SEARCHED = {"cpu": 1 << 12}
# Replaces a zero in a quotient, and changes no other number. No quotient of numbers of up to 32
# bits comes near the limit.
_TINY, _LIMIT = 1e-300, 1e200
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    farthest : int or None
        Where the largest difference is, as a flat index into the first pair.
    """

    num_elements: int = 0
    num_different: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    squares: float = 0.0
    own: float = 0.0
    others: float = 0.0
    product: float = 0.0
    farthest: int | None = field(default=None, compare=False)

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
        if other.max_abs > self.max_abs and other.farthest is not None:
            self.farthest = offset + other.farthest
        # A NaN means that a figure is not known, and stays.
        self.max_abs = _larger(self.max_abs, other.max_abs)
        self.max_rel = _larger(self.max_rel, other.max_rel)
        self.squares += other.squares
        self.own += other.own
        self.others += other.others
        self.product += other.product


def unknown(num_elements: int, num_different: int) -> Figures:
    """Return figures whose counts alone are known."""
    nan = math.nan
    return Figures(num_elements, num_different, nan, nan, nan, nan, nan, nan)


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
    total, room = Figures(), None
    for offset, own, other in _pieces(reference, candidate, _PIECE):
        if own.is_complex() or other.is_complex():
            piece = _measure_carefully(own, other, tolerance)
        else:
            # Fresh memory for each piece would cost as much as the work on it.
            room = own.new_empty(3, len(own), dtype=torch.float64) if room is None else room
            piece = _measure_piece(own, other, tolerance, total, room[:, : len(own)])
        total.add(piece, offset)
    return total


def first_different(reference: Tensor, candidate: Tensor, tolerance: Tolerance) -> int | None:
    """Return the flat index of the first element that differs."""
    for offset, own, other in _pieces(reference, candidate, _SEARCHED):
        if not _same_bits(own, other):
            mask = _different(own, other, tolerance)
            if bool(mask.any()):
                return offset + int(mask.to(torch.int8).argmax())
    return None


def dense(tensor: Tensor) -> Tensor:
    """Return a detached dense tensor of the same numbers."""
    whole = gathered(tensor.detach())
    if not is_dense(whole):
        if whole.is_nested:
            whole = torch.nested.to_padded_tensor(whole.contiguous(), 0.0)
        whole = whole.dequantize() if whole.is_quantized else whole.to_dense()
    return whole.as_subclass(Tensor).resolve_conj().resolve_neg()


def _pieces(
    reference: Tensor, candidate: Tensor, lengths: Mapping[str, int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    own, other = with_float64(dense(reference)).reshape(-1), dense(candidate).reshape(-1)
    other = other.to(own.device)
    step = lengths.get(own.device.type, _OTHER_PIECE)
    for start in range(0, len(own), step):
        yield start, own[start : start + step], other[start : start + step]


def _measure_piece(
    own: Tensor, other: Tensor, tolerance: Tolerance, before: Figures, room: Tensor
) -> Figures:
    """Measure a piece; a largest difference counts only if it exceeds the earlier ones."""
    count, differing = len(own), _count_different(own, other)
    wide, others, apart = room
    own_sum = float(wide.copy_(own).dot(wide))
    if differing == 0 and math.isfinite(own_sum):
        return Figures(count, own=own_sum, others=own_sum, product=own_sum)
    torch.sub(others.copy_(other), wide, out=apart)
    # One copy from the device for all.
    sums = torch.stack([apart.dot(apart), others.dot(others), wide.dot(others)]).tolist()
    if not all(map(math.isfinite, (own_sum, *sums))):
        return _measure_carefully(own, other, tolerance)
    apart.abs_()
    size = wide.abs_()
    if not tolerance.is_exact:
        differing = int((apart > tolerance.atol + tolerance.rtol * size).count_nonzero())
    elif differing is None:
        differing = int(apart.count_nonzero())
    max_abs = float(apart.amax())
    farthest = _place_of_largest(apart) if max_abs > before.max_abs else None
    return Figures(
        count,
        differing,
        _at_least_one(max_abs, own, other, differing),
        _largest_quotient(apart, size, before.max_rel, others),
        squares=sums[0],
        own=own_sum,
        others=sums[1],
        product=sums[2],
        farthest=farthest,
    )


def _count_different(own: Tensor, other: Tensor) -> int | None:
    """Return how many elements differ in their bits; None for two dtypes."""
    if own.dtype is not other.dtype:
        return None
    if own.is_cpu:
        # NumPy takes half of torch's time.
        return int(np.count_nonzero(_bits(own).numpy() != _bits(other).numpy()))
    return int((_bits(own) != _bits(other)).count_nonzero())


def _place_of_largest(values: Tensor) -> int:
    # NumPy takes a fifth of torch's time.
    return int(values.numpy().argmax() if values.is_cpu else values.argmax())


def _largest_quotient(apart: Tensor, size: Tensor, before: float, room: Tensor) -> float:
    """Return the largest quotient; 0 if none exceeds what was found before.

    Subtracting takes less time than dividing, and usually suffices. A margin covers its rounding.
    """
    known = before * (1 - 1e-12)
    if math.isinf(known):
        return 0.0
    if known and float(torch.sub(apart, size, alpha=known, out=room).amax()) <= 0:
        return 0.0
    largest = float(apart.div_(size.add_(_TINY)).amax())
    return largest if largest < _LIMIT else math.inf


def _measure_carefully(own: Tensor, other: Tensor, tolerance: Tolerance) -> Figures:
    """Measure numbers that may be complex, infinite or NaN."""
    one, two = _widened(own), _widened(other)
    same = _same_numbers(one, two)
    apart = torch.where(same, 0.0, (two - one).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    relative = torch.where(same, 0.0, apart / one.abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    finite = one.isfinite() & two.isfinite()
    zero = torch.zeros((), dtype=one.dtype, device=one.device)
    one, two = torch.where(finite, one, zero), torch.where(finite, two, zero)
    # If the sums of squares overflow, the error is infinite, which is the truth.
    squares = float(apart.square().sum())
    number = int(_different(own, other, tolerance).count_nonzero())
    max_abs, at = apart.max(dim=0)
    return Figures(
        len(own),
        number,
        _at_least_one(float(max_abs), own, other, number),
        float(relative.max()),
        squares,
        float(one.abs().square().sum()),
        float(two.abs().square().sum()),
        float((one.conj() * two).real.sum()),
        farthest=int(at),
    )


def _different(own: Tensor, other: Tensor, tolerance: Tolerance) -> Tensor:
    """Return where two tensors differ, see NOTE [What is equal]."""
    one, two = _widened(own), _widened(other)
    if tolerance.is_exact and own.dtype is other.dtype:
        return _differ_in_bits(own, other) & ~(one.isnan() & two.isnan())
    same = _same_numbers(one, two)
    if tolerance.is_exact:
        return ~same
    near = (two - one).abs() <= tolerance.atol + tolerance.rtol * one.abs()
    return ~(same | (near & one.isfinite() & two.isfinite()))


def _same_numbers(one: Tensor, two: Tensor) -> Tensor:
    return (one == two) | (one.isnan() & two.isnan())


def _same_bits(own: Tensor, other: Tensor) -> bool:
    return own.dtype is other.dtype and torch.equal(_bits(own), _bits(other))


def _differ_in_bits(own: Tensor, other: Tensor) -> Tensor:
    mask = _bits(own) != _bits(other)
    # Both parts of a complex number.
    return mask.any(-1) if mask.ndim > 1 else mask


def _bits(tensor: Tensor) -> Tensor:
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.view(_BITS[parts.itemsize])


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def _at_least_one(apart: float, own: Tensor, other: Tensor, number: int) -> float:
    """Return the largest difference, at least 1 for integers that differ only beyond float64."""
    are_whole = not (own.is_floating_point() or own.is_complex() or other.is_floating_point())
    return max(apart, 1.0) if number and are_whole else apart


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
