"""Whether tensors are finite, at the cost of a sum; exact findings if they are not."""

from __future__ import annotations

import cmath
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scio_recorder.tensors.copies import is_dense, version_of
from scio_recorder.tensors.structures import tensors

KINDS = ("nan", "inf")
_PLAIN = (Tensor, torch.nn.Parameter)
_WITHOUT_TENSORS = (str, int, float)


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


class Counts(NamedTuple):
    """The same, on the device of the tensor, for which nothing has waited yet.

    Parameters
    ----------
    numbers : torch.Tensor
        The first four members of a `NonFinite`.
    shape : tuple of int
        The shape of the tensor.
    """

    numbers: Tensor
    shape: tuple[int, ...]


def examine(tensor: Tensor) -> Counts | None:
    """Return the numbers of NaNs and infinities of a tensor; None if all is finite.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any kind. Integers are finite, and so are tensors without values.

    Returns
    -------
    Counts or None
        On a device other than the CPU, all is perhaps finite.

    Examples
    --------
    >>> examine(torch.tensor([3e38, 3e38])) is None
    True
    >>> examine(torch.tensor([1.0, torch.inf, torch.nan]))
    Counts(numbers=tensor([1, 1, 2, 1]), shape=(3,))
    """
    if type(tensor) not in _PLAIN or not is_dense(tensor):
        inner = _values_of(tensor.detach())
        return None if inner is None else examine(inner)
    dtype = tensor.dtype
    if tensor.is_meta or not (dtype.is_floating_point or dtype.is_complex):
        return None
    values = tensor.detach() if tensor.requires_grad else tensor
    # Float8 has no sum.
    values = values.float() if dtype.itemsize == 1 else values
    # A sum is finite only if everything is. One that is not may have overflowed, as sums in half
    # precision soon do.
    wider = torch.float32 if dtype is torch.half else None
    if values.is_cpu and cmath.isfinite(values.sum(dtype=wider).item()):
        return None
    counts = Counts(_counts(values), tuple(values.shape))
    return counts if not values.is_cpu or counts.numbers[:2].any() else None


def read(found: Iterable[Counts]) -> dict[int, NonFinite]:
    """Wait for devices, once for all, and return the findings by the ``id`` of the counts.

    Parameters
    ----------
    found : iterable of Counts
        Results of `examine`.

    Returns
    -------
    dict
        Without those of tensors in which all is finite.

    Examples
    --------
    >>> counts = examine(torch.tensor([1.0, torch.inf]))
    >>> read([counts])[id(counts)]
    NonFinite(nan=0, inf=1, first_nan=2, first_inf=1, shape=(2,))
    """
    distinct = list({id(one): one for one in found}.values())
    if not distinct:
        return {}
    device = distinct[0].numbers.device
    rows: list[list[int]] = torch.stack([one.numbers.to(device) for one in distinct]).tolist()
    return {
        id(one): NonFinite(*row, shape=one.shape)
        for one, row in zip(distinct, rows, strict=True)
        if row[0] or row[1]
    }


def _counts(values: Tensor) -> Tensor:
    """Return the numbers of NaNs and infinities and the indices of the first, without waiting."""
    masks = [mask.flatten() for mask in (values.isnan(), values.isinf())]
    if not values.numel():
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
        self._found: dict[int, tuple[weakref.ref[Tensor], int, Counts | None]] = {}

    def examine(self, tensor: Tensor) -> Counts | None:
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

    def examine_all(self, values: Iterable[Any]) -> list[Counts]:
        """Return the findings about those tensors in some values that may not be finite.

        Parameters
        ----------
        values : iterable
            Tensors, structures that hold some, or anything else.
        """
        found: list[Counts] = []
        for value in values:
            # Taking structures apart takes longer than examining most tensors.
            if not (value is None or isinstance(value, _WITHOUT_TENSORS)):
                for tensor in (value,) if isinstance(value, Tensor) else tensors(value):
                    one = self.examine(tensor)
                    if one is not None:
                        found.append(one)
        return found
