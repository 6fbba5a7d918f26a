"""Whether tensors are finite, at the cost of a sum; exact findings if they are not."""

from __future__ import annotations

import cmath
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from scio_recorder.tensors.copies import is_dense, version_of
from scio_recorder.tensors.structures import tensors

KINDS = ("nan", "inf")
_PLAIN = (Tensor, torch.nn.Parameter)
_WITHOUT_TENSORS = (str, int, float)
# Their sums don't overflow soon.
_SUMMED = {torch.float32, torch.float64, torch.bfloat16}


class NonFinite(NamedTuple):
    """The NaNs and infinities of a tensor that has any.

    Parameters
    ----------
    nan, inf : int
        Their numbers.
    first_nan, first_inf : int
        The flat index of the first; the number of elements if there is none.
    shape : tuple of int
        The shape of the tensor.
    """

    nan: int
    inf: int
    first_nan: int
    first_inf: int
    shape: tuple[int, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """Those of `KINDS` that occur."""
        return frozenset(kind for kind in KINDS if getattr(self, kind))


class Unread(NamedTuple):
    """The same, on a device for which nothing has waited yet.

    Parameters
    ----------
    counts : torch.Tensor
        The first four members of a `NonFinite`, on the device.
    shape : tuple of int
        The shape of the examined tensor.
    """

    counts: Tensor
    shape: tuple[int, ...]


Found: TypeAlias = NonFinite | Unread | None


def examine(tensor: Tensor) -> Found:
    """Return the NaNs and infinities of a tensor; None if all is finite.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any kind. Integers are finite, and so are tensors without values.

    Returns
    -------
    NonFinite, Unread or None
        On a device other than the CPU, the findings must still be `read`.

    Examples
    --------
    >>> examine(torch.tensor([3e38, 3e38])) is None
    True
    >>> examine(torch.tensor([1.0, torch.inf, torch.nan]))
    NonFinite(nan=1, inf=1, first_nan=2, first_inf=1, shape=(3,))
    """
    if type(tensor) not in _PLAIN or not is_dense(tensor):
        inner = _values_of(tensor.detach())
        return None if inner is None else examine(inner)
    dtype = tensor.dtype
    if not (dtype in _SUMMED or dtype.is_floating_point or dtype.is_complex):
        return None
    values = tensor.detach() if tensor.requires_grad else tensor
    if not values.is_cpu:
        return None if values.is_meta else Unread(_counts(values), tuple(values.shape))
    # A sum is finite only if everything is. One that is not may have overflowed, as sums in half
    # precision soon do. Float8 has no sum.
    if dtype in _SUMMED:
        total = values.sum()
    else:
        values = values.float() if dtype.itemsize == 1 else values
        total = values.sum(dtype=torch.float32) if dtype is torch.half else values.sum()
    if cmath.isfinite(total.item()):
        return None
    return read([Unread(_counts(values), tuple(values.shape))])[0]


def read(found: Sequence[Found]) -> list[NonFinite | None]:
    """Wait for devices, once for each, and return the findings.

    Parameters
    ----------
    found : sequence of NonFinite, Unread or None
        The results of `examine`.

    Returns
    -------
    list of NonFinite or None
        The findings for each tensor; None if it is finite.

    Examples
    --------
    >>> read([None])
    [None]
    """
    unread = [one for one in found if isinstance(one, Unread)]
    numbers: dict[int, NonFinite | None] = {}
    for device in {one.counts.device for one in unread}:
        there = [one for one in unread if one.counts.device == device]
        rows: list[list[int]] = torch.stack([one.counts for one in there]).tolist()
        for one, row in zip(there, rows, strict=True):
            numbers[id(one)] = _found(row, one.shape)
    return [numbers[id(one)] if isinstance(one, Unread) else one for one in found]


def _found(row: list[int], shape: tuple[int, ...]) -> NonFinite | None:
    nan, inf, first_nan, first_inf = row
    return NonFinite(nan, inf, first_nan, first_inf, shape) if nan or inf else None


def _counts(values: Tensor) -> Tensor:
    """Return the numbers of NaNs and infinities and the indices of the first, without waiting."""
    wide = values.float() if values.dtype.itemsize == 1 else values
    masks = [mask.flatten() for mask in (wide.isnan(), wide.isinf())]
    if not wide.numel():
        return torch.zeros(4, dtype=torch.long, device=values.device)
    counts = [mask.sum() for mask in masks]
    firsts = [
        torch.where(count > 0, mask.byte().argmax(), mask.numel())
        for mask, count in zip(masks, counts, strict=True)
    ]
    return torch.stack([*counts, *firsts])


def _values_of(tensor: Any) -> Tensor | None:
    """Return the values of another kind of tensor as a plain one; None if it has none."""
    found: Any = None
    if hasattr(tensor, "to_local"):
        # The shard of this process: gathering the others would need all processes.
        found = tensor.to_local()
    elif hasattr(tensor, "trigger_wait"):
        # The result of an operation with other processes, which may not have ended.
        found = tensor.wait()
    elif tensor.layout == torch.sparse_coo:
        found = tensor.coalesce().values()
    elif tensor.is_nested or tensor.layout != torch.strided:
        found = tensor.values()
    elif is_dense(tensor):
        found = tensor.as_subclass(Tensor)
    return found if type(found) is Tensor else None


class Known:
    """Findings about tensors: each is examined once, until it is written to.

    A tensor made in inference mode has no version that shows writes, and is examined each time.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, Found]] = {}

    def examine(self, tensor: Tensor) -> Found:
        """Return the result of the function `examine`.

        Parameters
        ----------
        tensor : torch.Tensor
            Of any kind.
        """
        version, known = version_of(tensor), self._found.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version != -1:
            return known[2]
        found = examine(tensor)
        self._found[id(tensor)] = weakref.ref(tensor), version, found
        return found

    def examine_all(self, values: Iterable[Any]) -> list[Found]:
        """Return the findings about those tensors in some values that may not be finite.

        Parameters
        ----------
        values : iterable
            Tensors, structures that hold some, or anything else.
        """
        found: list[Found] = []
        for value in values:
            # Taking structures apart takes longer than examining most tensors.
            if not (value is None or isinstance(value, _WITHOUT_TENSORS)):
                for tensor in (value,) if isinstance(value, Tensor) else tensors(value):
                    one = self.examine(tensor)
                    if one is not None:
                        found.append(one)
        return found
