"""What is not finite: tensors, found at the cost of a sum, and which operations made them so."""

from __future__ import annotations

import cmath
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.layer import Layer, Operation, describe
from scio_recorder.lowlevel import ObservingMode, plain_parts
from scio_recorder.tensors import is_dense, private, tensors, version_of

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


def kinds_of(found: Iterable[NonFinite]) -> frozenset[str]:
    """Return those of `KINDS` that occur in some findings."""
    return frozenset[str]().union(*(one.kinds for one in found))


def kinds_made(given: frozenset[str], returned: frozenset[str]) -> frozenset[str]:
    """Return the kinds that were returned and not given.

    Examples
    --------
    >>> made = kinds_made(frozenset({"inf"}), frozenset({"inf", "nan"}))
    >>> sorted(made), sorted(kinds_made(frozenset({"nan"}), frozenset({"inf"})))
    (['nan'], [])
    """
    return (returned & {"nan"} if given else returned) - given


def examine(tensor: Tensor) -> NonFinite | None:
    """Return the NaNs and infinities of a tensor; None if all is finite.

    Parameters
    ----------
    tensor : torch.Tensor
        Of any kind. Integers are finite, and so are tensors without values. Inside ``vmap``, the
        mapped dimension counts as the last.

    Examples
    --------
    >>> examine(torch.tensor([3e38, 3e38])) is None
    True
    >>> examine(torch.tensor([1.0, torch.inf, torch.nan]))
    NonFinite(nan=1, inf=1, first_nan=2, first_inf=1, shape=(3,))
    """
    tensor = private.unmapped(tensor, -1)
    if type(tensor) not in _PLAIN or not is_dense(tensor):
        parts_of = () if private.is_traced(tensor) else plain_parts(tensor.detach())
        plain = [one for one in parts_of if type(one) in _PLAIN]
        parts = [one for one in map(examine, plain) if one is not None]
        totals = {kind: sum(getattr(one, kind) for one in parts) for kind in KINDS}
        return parts[0]._replace(**totals) if parts else None
    dtype = tensor.dtype
    if tensor.is_meta or not (dtype.is_floating_point or dtype.is_complex):
        return None
    values = tensor.detach() if tensor.requires_grad else tensor
    # Float8 has no sum.
    values = values.float() if dtype.itemsize == 1 else values
    # A sum is finite only if everything is. One that is not may have overflowed, as sums in half
    # precision soon do.
    wider = torch.float32 if dtype is torch.half else None
    return None if cmath.isfinite(values.sum(dtype=wider).item()) else _counted(values)


def _counted(values: Tensor) -> NonFinite | None:
    masks = values.isnan().flatten(), values.isinf().flatten()
    nan, inf = (int(mask.sum()) for mask in masks)
    first_nan, first_inf = (
        int(mask.byte().argmax()) if mask.any() else mask.numel() for mask in masks
    )
    found = NonFinite(nan, inf, first_nan, first_inf, tuple(values.shape))
    return found if nan or inf else None


class Known:
    """Findings about tensors: each is examined once, until it is written to.

    A tensor made in inference mode has no version that shows writes, and is examined each time.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, NonFinite | None]] = {}

    def examine(self, tensor: Tensor) -> NonFinite | None:
        """Return the result of the function `examine`.

        Parameters
        ----------
        tensor : torch.Tensor
            Of any kind.
        """
        # Most tensors are plain: what is asked here spares them a call.
        is_counted = type(tensor) in _PLAIN and not tensor.is_inference()
        version = tensor._version if is_counted else version_of(tensor)
        known = self._found.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version != -1:
            return known[2]
        found = examine(tensor)
        self._found[id(tensor)] = weakref.ref(tensor), version, found
        return found

    def examine_all(self, values: Iterable[Any]) -> list[NonFinite]:
        """Return the findings about those tensors in some values that may not be finite.

        Parameters
        ----------
        values : iterable
            Tensors, structures that hold some, or anything else.
        """
        found = []
        for value in values:
            if isinstance(value, Tensor):
                parts = [value]
            elif value is None or isinstance(value, _WITHOUT_TENSORS):
                # Taking a structure apart takes longer than examining most tensors.
                continue
            else:
                parts = tensors(value)
            for tensor in parts:
                one = self.examine(tensor)
                if one is not None:
                    found.append(one)
        return found

    def nodes(self) -> set[Any]:
        """Return the nodes of the graph that have made the tensors examined so far."""
        known = self._found.values()
        return {one.grad_fn for reference, *_ in known if (one := reference()) is not None}


# -- operations ------------------------------------------------------------------------------------


def is_unset(function: str) -> bool:
    """Whether what a function returns has no values yet.

    Examples
    --------
    >>> is_unset("new_empty"), is_unset("zeros")
    (True, False)
    """
    return function.removeprefix("new_").startswith("empty")


class _Fault(NamedTuple):
    """An operation that gave kinds which it was not given."""

    function: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name
    output_spec: Any
    line: tuple[str, int, str]
    given: frozenset[str]
    made: frozenset[str]


class GuardedCode(ObservingMode):
    """Finds the operations that make NaNs or infinities in one call of a module.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    local : object
        The state of the pass, with the findings about its tensors.
    """

    def __init__(self, module: nn.Module, local: Any) -> None:
        super().__init__()
        self.module = module
        self._local = local
        self._faults: list[_Fault] = []

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[str]:
        """Return the kinds among the inputs, numbers included."""
        # What stands in the place of a result is none of them.
        values = *args, *(value for name, value in kwargs.items() if name != "out")
        return kinds_of(self._local.known.examine_all(values)) | frozenset(_numbers(values))

    def after(self, function: str, index: int, given: Any, output: Any) -> None:
        """Note an operation that has made something."""
        if is_unset(function):
            return
        made = kinds_made(given, kinds_of(self._local.known.examine_all((output,))))
        if made:
            line = self.line()
            self._faults.append(_Fault(function, index, describe(output), line, given, made))

    def operation(self, layer: Layer, kinds: Collection[str]) -> Operation | None:
        """Return the operation with which some kinds that a layer has made began.

        It is the first that made one of them, or an infinity which that one was given.
        """
        fault = next((one for one in self._faults if one.made & set(kinds)), None)
        if fault is not None and "inf" in fault.given:
            fault = next(one for one in self._faults if one is fault or "inf" in one.made)
        if fault is None:
            return None
        return Operation(layer, fault.function, fault.index, fault.output_spec, fault.line)


def _numbers(values: Any) -> Iterator[str]:
    """Yield the kinds of the numbers among some values and in lists of them."""
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            yield "nan" if math.isnan(value) else "inf"
        elif isinstance(value, tuple | list):
            yield from _numbers(value)
