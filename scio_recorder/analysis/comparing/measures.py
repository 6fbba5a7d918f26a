"""How two tensors differ: how many numbers do, and by how much.

NOTE [What is equal]

Without a tolerance, two tensors of one dtype are compared bit for bit, so that -0.0 is not 0.0.
NaNs are equal whatever their bits, since these differ from machine to machine. Tensors of two
dtypes are compared as numbers. With tolerances, numbers are equal as for `numpy.isclose` with
``equal_nan=True``, and the reference gives the scale.

Tensors are measured in pieces that stay in the cache while they are widened and subtracted. A
finite sum of squares proves that all numbers of a piece are finite, as they nearly always are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scio_recorder.errors import ComparisonError
from scio_recorder.tensors import is_dense, with_float64

# Elements measured together: in the cache of a core, or many at a time on a device.
_PIECE = {"cpu": 1 << 17}
_OTHER_PIECE = 1 << 22
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
    own, other = with_float64(dense(reference)).reshape(-1), dense(candidate).reshape(-1)
    other = other.to(own.device)
    step = _PIECE.get(own.device.type, _OTHER_PIECE)
    total = Figures()
    for start in range(0, len(own), step):
        piece = slice(start, start + step)
        total.add(_measure_piece(own[piece], other[piece], tolerance), start)
    return total


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
    whole = tensor.detach()
    if not is_dense(whole):
        if whole.is_nested:
            whole = torch.nested.to_padded_tensor(whole.contiguous(), 0.0)
        whole = whole.dequantize() if whole.is_quantized else whole.to_dense()
    return whole.as_subclass(Tensor).resolve_conj().resolve_neg()


def _measure_piece(own: Tensor, other: Tensor, tolerance: Tolerance) -> Figures:
    """Measure a piece, see NOTE [What is equal]."""
    is_complex = own.is_complex() or other.is_complex()
    wide = torch.complex128 if is_complex else torch.float64
    one, two = own.to(wide), other.to(wide)
    squares = _product(one, one)
    is_one_dtype = own.dtype is other.dtype
    if is_one_dtype and math.isfinite(squares) and torch.equal(_bits(own), _bits(other)):
        return Figures(len(own), own=squares, others=squares, product=squares)
    apart, differ = (two - one).abs(), None
    if is_one_dtype and tolerance.is_exact:
        # Both parts of a complex number.
        differ = (_bits(own) != _bits(other)).reshape(len(own), -1).any(-1)
    if not math.isfinite(squares + _product(two, two)):
        both_nan = one.isnan() & two.isnan()
        differ = None if differ is None else differ & ~both_nan
        apart = apart.masked_fill((one == two) | both_nan, 0.0)
        apart = apart.nan_to_num_(nan=math.inf, posinf=math.inf)
        odd = ~(one.isfinite() & two.isfinite())
        one, two = one.masked_fill(odd, 0.0), two.masked_fill(odd, 0.0)
    size = one.abs()
    if differ is None:
        near = (apart <= tolerance.atol + tolerance.rtol * size) & apart.isfinite()
        differ = (apart > 0) & ~near
    number, max_abs = int(differ.count_nonzero()), float(apart.amax())
    are_whole = not (is_complex or own.is_floating_point() or other.is_floating_point())
    return Figures(
        len(own),
        number,
        # Integers that differ only beyond float64 differ by one at least.
        max(max_abs, float(are_whole and number > 0)),
        # Equal zeros have no quotient.
        float((apart / size).nan_to_num_(nan=0.0, posinf=math.inf).amax()),
        squares=_product(apart, apart),
        own=_product(one, one),
        others=_product(two, two),
        product=_product(one, two),
        # NumPy takes a fifth of torch's time.
        first=int(differ.cpu().numpy().argmax()) if number else None,
    )


def _product(one: Tensor, two: Tensor) -> float:
    return float(torch.vdot(one, two).real)


def _bits(tensor: Tensor) -> Tensor:
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.view(_BITS[parts.itemsize])
