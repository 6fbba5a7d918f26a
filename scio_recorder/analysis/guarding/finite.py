"""What is not finite: flags of tensors, read together, and which operations made them so.

NOTE [When flags are read]

To ask a device for a value is to wait until it has done all that was asked of it before. So the
largest magnitude of a tensor, its flag, stays on the device, and all flags of a pass are read
together when it ends. A sum can't be the flag: finite values may overflow in it, and infinities of
both signs make a NaN. A NaN hides the infinities of its tensor.

A CPU has nothing to wait for. There the sum of a large tensor is read at once, since it is finite
only if all values are: it is far quicker than extrema, and a tensor that is known to be finite need
not be kept. A pass that can't use its memory again and again takes twice the time.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scio_recorder.layer import Layer, Operation, describe
from scio_recorder.lowlevel import ObservingMode, plain_parts
from scio_recorder.tensors import has_memory, is_dense, private, tensors, version_of

KINDS = ("nan", "inf")
_FINITE: frozenset[str] = frozenset()
_PLAIN = (Tensor, torch.nn.Parameter)
_USUAL = frozenset([torch.float32, torch.bfloat16, torch.float16, torch.float64])
_WITHOUT_TENSORS = (str, int, float, type(None))
# How much memory of what calls return is kept until a pass ends, so that it can be counted.
_KEPT_BYTES = 64 << 20
# From how many elements on a CPU extrema are computed more quickly than the largest magnitude, and
# from how many a sum comes first.
_SOME, _MANY = 1 << 9, 1 << 12


class Flag(weakref.ref[Tensor]):
    """A weak reference to a tensor, with whether that is finite.

    Attributes
    ----------
    version
        The version of the tensor; -1 if it has none.
    kinds : frozenset of str
        Those of `KINDS` that were found, once the flag is read.
    num_values : int
        The number of elements; 0 if none of them can be but finite.
    kept : Tensor or None
        What keeps the values.
    taken : callable or None
        Returns the tensor that has taken the values of one that is gone.
    """

    __slots__ = ("kept", "kinds", "num_values", "taken", "version")

    kept: Tensor | None
    kinds: frozenset[str]
    num_values: int
    taken: Callable[[], Tensor | None] | None
    version: Any

    def counted(self) -> NonFinite | None:
        """Count what is not finite; None if the tensor is gone or was written to."""
        tensor = self() if self.kept is None else self.kept
        if tensor is None and self.taken is not None:
            tensor = self.taken()
        if tensor is None or (self.version == -1 and self.kept is None):
            return None
        return count(tensor) if self.version in (-1, version_of(tensor)) else None


class NonFinite(NamedTuple):
    """The NaNs and infinities of a tensor.

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


def kinds_of(flags: Iterable[Flag | NonFinite]) -> frozenset[str]:
    """Return those of `KINDS` that occur in some flags that were read."""
    return _FINITE.union(*[flag.kinds for flag in flags])


def kinds_made(given: frozenset[str], returned: frozenset[str]) -> frozenset[str]:
    """Return the kinds that were returned and not given.

    Examples
    --------
    >>> made = kinds_made(frozenset({"inf"}), frozenset({"inf", "nan"}))
    >>> sorted(made), sorted(kinds_made(frozenset({"nan"}), frozenset({"inf"})))
    (['nan'], [])
    """
    return (returned & {"nan"} if given else returned) - given


def _parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return the plain tensors with those values of a tensor that may not be finite."""
    if type(tensor) not in _PLAIN or not is_dense(tensor):
        parts = () if private.is_traced(tensor) else plain_parts(tensor.detach())
        return [inner for part in parts if type(part) in _PLAIN for inner in _parts_of(part)]
    is_counted = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if not is_counted or tensor.is_meta or not tensor.numel() or not has_memory(tensor):
        return ()
    # Float8 has no such operations.
    return (tensor.float() if tensor.itemsize == 1 else tensor,)


def _extrema_of(tensor: Tensor) -> list[Tensor]:
    """Return what is finite if the values of a tensor are, as tensors of one element each.

    Examples
    --------
    >>> _extrema_of(torch.tensor([3e38, -3e38])), _extrema_of(torch.tensor([1, 2]))
    ([tensor([3.0000e+38])], [])
    """
    # What most tensors are is asked first, since every call asks.
    is_usual = (
        type(tensor) is Tensor
        and tensor.dtype in _USUAL
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta)
        and tensor.is_contiguous()
        and 0
        < tensor.nbytes
        <= tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
    )
    extrema: list[Tensor] = []
    for part in (tensor,) if is_usual else _parts_of(tensor):
        # No operation, unlike `detach`.
        values = part.data if part.requires_grad else part
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        size = values.numel()
        if size < _SOME or not values.is_cpu:
            extrema.append(torch.linalg.vector_norm(values, math.inf, keepdim=True))
        elif size < _MANY or not math.isfinite(values.sum().item()):
            extrema += torch.aminmax(values, keepdim=True)
    return extrema


def count(tensor: Tensor) -> NonFinite:
    """Return the NaNs and infinities of a tensor of any kind.

    Examples
    --------
    >>> count(torch.tensor([1.0, torch.inf, torch.nan]))
    NonFinite(nan=1, inf=1, first_nan=2, first_inf=1, shape=(3,))
    """
    parts = [_counted(part.detach()) for part in _parts_of(tensor)]
    first = next((part for part in parts if part.kinds), NonFinite(0, 0, 0, 0, ()))
    return first._replace(**{kind: sum(getattr(part, kind) for part in parts) for kind in KINDS})


def _counted(values: Tensor) -> NonFinite:
    masks = values.isnan().flatten(), values.isinf().flatten()
    nan, inf = (int(mask.sum()) for mask in masks)
    first_nan, first_inf = (
        int(mask.byte().argmax()) if number else mask.numel()
        for mask, number in zip(masks, (nan, inf), strict=True)
    )
    return NonFinite(nan, inf, first_nan, first_inf, tuple(values.shape))


class Flags:
    """The flags of a pass: each is made once, until its tensor is written to, and read once.

    A tensor made in inference mode has no version that shows writes, and is examined each time.

    Parameters
    ----------
    pass_number : int, default 0
        The number of the pass; of a backward pass, of the one that is run again in it.
    task : int, default -1
        The number of the backward pass; -1 if it is none.

    Attributes
    ----------
    thread : int
        The thread that has begun it.
    counts : dict
        How many calls of each module have returned.
    waiting : list of tuple
        The functions that wait for these flags, with what they take: see `Checks.settle`.
    received : dict
        The flags of the gradients that have entered each call, once checks are done.
    nodes_of_inputs : set
        The nodes that made inputs of the network. If another thread made them, they may have later
        numbers than its calls.
    end : callable
        A weak reference to what autograd calls at the end of the backward pass.
    versions : dict
        Those of the network's weights when the backward pass began, by their ``id``.
    """

    end: Callable[[], Any]

    def __init__(self, pass_number: int = 0, task: int = -1) -> None:
        self.pass_number = pass_number
        self.task = task
        self.thread = threading.get_ident()
        self.counts = defaultdict[str, int](int)
        self.waiting: list[tuple[Any, ...]] = []
        self.received: dict[Any, list[Flag]] = {}
        self.nodes_of_inputs: Collection[Any] = ()
        self.versions: dict[int, int] = {}
        self._known: dict[int, Flag] = {}
        self._unread: list[tuple[Flag, Tensor]] = []
        self._kept: list[Flag] = []
        self._num_bytes_left = _KEPT_BYTES
        self._are_finite = True

    def of(self, values: Iterable[Any], *, keeps: bool = False) -> list[Flag]:
        """Return the flags of the tensors among some values.

        Parameters
        ----------
        values : iterable
            Tensors, structures that hold some, or anything else.
        keeps : bool, default False
            Keep the values of the tensors until they are forgotten, within limits.
        """
        flags: list[Flag] = []
        for value in values:
            if isinstance(value, Tensor):
                flags.append(self.of_tensor(value, keeps))
            elif type(value) is tuple:
                flags += self.of(value, keeps=keeps)
            elif not isinstance(value, _WITHOUT_TENSORS):
                # Taking a structure apart takes longer than examining most tensors.
                flags += [self.of_tensor(part, keeps) for part in tensors(value)]
        return flags

    def of_tensor(self, tensor: Tensor, keeps: bool = False) -> Flag:
        """Return the flag of a tensor of any kind; the dimension of a ``vmap`` is its last."""
        flag = self._known.get(id(tensor))
        try:
            version = tensor._version if type(tensor) is Tensor else version_of(tensor)
        except RuntimeError:
            # Made in inference mode.
            version = -1
        # What is written to is examined again, and also what would not show that it is.
        if flag is None or flag.version != version or version == -1 or flag() is not tensor:
            flag = self._known[id(tensor)] = Flag(tensor)
            flag.version, flag.kinds, flag.num_values = version, _FINITE, 0
            flag.kept = flag.taken = None
            # Backward passes are also mapped by a `vmap` that is no transform.
            if self.task != -1 or private.transform_around() is not None:
                tensor = private.unmapped(tensor, -1)
            for extremum in _extrema_of(tensor):
                flag.num_values = tensor.numel()
                self._unread.append((flag, extremum))
        if keeps and flag.num_values and flag.kept is None and self._num_bytes_left > 0:
            has_storage = tensor.layout is torch.strided and type(tensor) in _PLAIN
            num_bytes = tensor.numel() * tensor.itemsize
            if has_storage:
                num_bytes = tensor.untyped_storage().nbytes()
            if num_bytes <= self._num_bytes_left:
                self._num_bytes_left -= num_bytes
                self._kept.append(flag)
                # Of one without a version nothing would show that it is written to.
                flag.kept = tensor.clone() if version == -1 else tensor
        return flag

    def read(self) -> bool:
        """Read all flags, one transfer for each device and dtype; return if all were finite."""
        unread, self._unread = self._unread, []
        # Tensors of equal shapes are stacked by one operation.
        alike = defaultdict[Any, list[tuple[Flag, Tensor]]](list)
        for entry in unread:
            extremum = entry[1]
            alike[extremum.dtype, extremum.device, extremum.dim()].append(entry)
        together = defaultdict[Any, tuple[list[Flag], list[Tensor]]](lambda: ([], []))
        for (dtype, device, _), entries in alike.items():
            together[dtype, device][0].extend([flag for flag, _ in entries])
            stacked = torch.stack([extremum for _, extremum in entries])
            together[dtype, device][1].append(stacked.view(-1))
        for flags, extrema in together.values():
            self._are_finite &= _note(flags, torch.cat(extrema))
        return self._are_finite

    def forget(self, _: Any = None) -> None:
        """Let go of the values that were kept."""
        for flag in self._kept:
            flag.kept = None
        self._kept.clear()

    def close(self) -> None:
        """Let go of all but what was read: the graph may hold these flags."""
        self.forget()
        self.waiting.clear()
        self.received.clear()
        self.nodes_of_inputs = ()

    def nodes(self) -> set[Any]:
        """Return the nodes of the graph that have made the tensors examined so far."""
        known = self._known.values()
        return {tensor.grad_fn for flag in known if (tensor := flag()) is not None}


def _note(flags: Sequence[Flag], magnitudes: Tensor) -> bool:
    """Note in flags what was found, and return whether all is finite."""
    values = magnitudes.tolist()
    if all(map(math.isfinite, values)):
        return True
    for flag, value in zip(flags, values, strict=True):
        if not math.isfinite(value):
            flag.kinds |= {"nan" if math.isnan(value) else "inf"}
    return False


def are_finite(values: Iterable[Any]) -> bool:
    """Return whether all tensors among some values are finite."""
    flags = Flags()
    flags.of(values)
    return flags.read()


# -- operations ------------------------------------------------------------------------------------


def is_unset(function: str) -> bool:
    """Whether what a function returns has no values yet.

    Examples
    --------
    >>> is_unset("new_empty"), is_unset("zeros")
    (True, False)
    """
    return function.removeprefix("new_").startswith("empty")


class _Examined(NamedTuple):
    """An operation, with the flags of what it was given, and the kinds of numbers among that."""

    function: str
    index: int  # type: ignore[assignment]  # tuples have a method of this name
    output_spec: Any
    line: tuple[str, int, str]
    received: list[Flag]
    numbers: frozenset[str]
    returned: list[Flag]

    def given(self) -> frozenset[str]:
        return kinds_of(self.received) | self.numbers

    def made(self) -> frozenset[str]:
        return kinds_made(self.given(), kinds_of(self.returned))


class GuardedCode(ObservingMode):
    """Finds the operations that make NaNs or infinities in one call of a module.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    local : object
        The state of the pass, with the flags of its tensors.
    """

    def __init__(self, module: nn.Module, local: Any) -> None:
        super().__init__()
        self.module = module
        self._local = local
        self._examined: list[_Examined] = []

    def before(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Flag], frozenset[str]]:
        """Return the flags of the inputs, and the kinds of numbers among them."""
        # What stands in the place of a result is none of them.
        values = *args, *(value for name, value in kwargs.items() if name != "out")
        return self._local.flags.of(values), frozenset(_numbers(values))

    def after(self, function: str, index: int, given: Any, output: Any) -> None:
        """Note an operation."""
        received, numbers = given
        returned = [] if is_unset(function) else self._local.flags.of((output,))
        if returned:
            line = self.line()
            seen = _Examined(function, index, describe(output), line, received, numbers, returned)
            self._examined.append(seen)

    def operation(self, layer: Layer, kinds: Collection[str]) -> Operation | None:
        """Return the operation with which some kinds that a layer has made began.

        It is the first that made one of them, or an infinity which that one was given.
        """
        faults = [seen for seen in self._examined if seen.made()]
        fault = next((seen for seen in faults if seen.made() & set(kinds)), None)
        if fault is not None and "inf" in fault.given():
            fault = next(seen for seen in faults if seen is fault or "inf" in seen.made())
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
