"""Passes in which calls receive the reference's inputs, and networks that compute exactly.

NOTE [Whose error it is]

In a forced pass, all that the own code of a call works on is the reference's: what the call
receives, and what the paired calls inside it hand back. So whatever differs in what it returns, and
in what it hands to paired calls inside, is an error of its own, and shows in no other call. A
module without a partner, such as a fused projection, belongs to the own code around it, and so does
one that is handed its rows in another order, as experts that sort their tokens.

Tensors are paired by their places among the arguments or in the output, and those that only one
side has at a place in order, by shape. What has no partner, such as a mask where the other side
has None, stays the network's own; so do objects such as key-value caches.

NOTE [What exact means]

A copy computes in a wider dtype than the candidate: float32 for half precisions, float64 for
float32. Its tensors are converted, and while it runs, functions that are told to return a narrower
dtype return the wide one. The reference's tensors are rounded first to the dtype that the
candidate's tensor of that name has, so that both copies have equal weights unless these differ.

Parameters that are too large to be cloned share the memory of the network. They are converted
whenever a function receives them, so that one at a time takes the memory.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder.analysis.comparing.pairing import joined_places
from scio_recorder.layer import RowIdx
from scio_recorder.lowlevel import (
    CallWrapper,
    Inputs,
    random_state,
    reached,
    restore_random,
    takes_hooks,
)
from scio_recorder.tensors import (
    Copies,
    fold,
    has_memory,
    is_out_of_memory,
    is_plain,
    memories_of,
    version_of,
)

Place: TypeAlias = tuple[Any, ...]
# The relative distance from which rows may be others.
_UNLIKE = 0.2
_REORDERED = "the candidate hands it rows in another order: the layer around it was judged with it"
# The labels of each paired module's calls, in their order; None for a call without a partner.
CallLabels: TypeAlias = Mapping[nn.Module, Sequence[RowIdx | None]]


class ReferenceCall(NamedTuple):
    """What a call of the reference received and returned.

    Parameters
    ----------
    received, returned : mapping
        Tensors and other values by their places.
    output : any
        What it returned, as a structure.
    random : mapping or None
        The state of the generators of random numbers after the call, if known.
    """

    received: Mapping[Place, Any]
    returned: Mapping[Place, Any]
    output: Any
    random: dict[str, Any] | None = None


class Slot(NamedTuple):
    """A tensor that a call makes: it returns it, or hands it to a call inside.

    Parameters
    ----------
    owner : RowIdx
        The call.
    receiver : RowIdx or None
        The call that is handed the tensor; None if it is returned.
    place : tuple
        The place among the arguments, or in the output, of the reference.
    is_whole : bool
        Whether it holds whole numbers.
    """

    owner: RowIdx
    receiver: RowIdx | None
    place: Place
    is_whole: bool


def places(value: Any) -> dict[Place, Any]:
    """Return the tensors and other values in plain containers, by their places.

    Examples
    --------
    >>> places({"a": (1, None)})
    {('a', 0): 1, ('a', 1): None}
    """
    parts: dict[Place, Any] = fold(value, lambda leaf: {(): leaf}, joined_places)
    return parts


def paired_places(own: Mapping[Place, Any], others: Mapping[Place, Any]) -> dict[Place, Place]:
    """Return the place of each tensor's partner, by the tensor's own place.

    Examples
    --------
    >>> own, others = {("x",): torch.ones(2), ("mask",): torch.ones(3)}, {("y",): torch.ones(2)}
    >>> paired_places(own, others | {("mask",): None})
    {('x',): ('y',)}
    """
    pairs = {at: at for at in own if at in others and are_alike(own[at], others[at])}
    rest = [at for at in others if at not in own]
    for at in own:
        if at not in others:
            to = next((to for to in rest if are_alike(own[at], others[to])), None)
            if to is not None:
                pairs[at] = to
                rest.remove(to)
    return pairs


def are_alike(tensor: Any, other: Any) -> bool:
    """Whether two values are tensors of one shape and one kind of numbers."""
    if not (isinstance(tensor, Tensor) and isinstance(other, Tensor)):
        return False
    if not (is_plain(tensor) and is_plain(other)) or tensor.shape != other.shape:
        return False
    return _kind(tensor.dtype) == _kind(other.dtype)


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype is torch.bool


def replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    """Return a structure with other tensors, given by the ``id`` of each.

    Objects such as caches stay the same, and so do containers without such tensors.

    Examples
    --------
    >>> x = torch.ones(1)
    >>> replaced([x, {"a": x}], {id(x): torch.zeros(1)})
    [tensor([0.]), {'a': tensor([0.])}]
    """
    return fold(value, lambda leaf: new.get(id(leaf), leaf), _rebuilt)


def _rebuilt(container: Any, parts: list[tuple[Any, Any]]) -> Any:
    kind, has_items = type(container), isinstance(container, tuple | list | Mapping)
    old = [container[key] if has_items else getattr(container, key) for key, _ in parts]
    items = [part for _, part in parts]
    if all(map(is_, old, items)):
        return container
    if isinstance(container, tuple):
        is_plain_tuple = kind is tuple or hasattr(kind, "n_sequence_fields")
        return kind(items) if is_plain_tuple else tuple.__new__(kind, items)
    rebuilt = copy.copy(container)
    for key, part in parts:
        (operator.setitem if has_items else object.__setattr__)(rebuilt, key, part)
    return rebuilt


class PairedCalls:
    """Stands around the paired calls of a network.

    Parameters
    ----------
    labels : mapping
        The labels of the calls of each paired module.
    """

    def __init__(self, labels: CallLabels) -> None:
        self._labels = labels
        self._counts: Counter[nn.Module] = Counter()

    @contextlib.contextmanager
    def around(self, traced: nn.Module | None = None) -> Iterator[None]:
        """Stand around the calls inside the block.

        Parameters
        ----------
        traced : torch.nn.Module, optional
            The module whose own code is traced, and sees what it gives to others, not what they
            receive.
        """
        with contextlib.ExitStack() as stack:
            for module in filter(takes_hooks, self._labels):
                wrapper = CallWrapper(module, partial(self._run, module))
                if traced is None or module is traced:
                    wrapper.put_around()
                else:
                    wrapper.put_inside()
                stack.callback(wrapper.remove)
            yield

    def _run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number, labels = self._counts[module], self._labels[module]
        self._counts[module] += 1
        label = labels[number] if number < len(labels) else None
        if label is None:
            return call(*args, **kwargs)
        return self.take(label, module, call, args, kwargs)

    def take(
        self, label: RowIdx, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Stand for a paired call."""
        raise NotImplementedError


class NotingPass(PairedCalls):
    """Keeps what the paired calls of the reference receive and return, and changes nothing.

    Attributes
    ----------
    calls : dict
        The calls by label.
    """

    def __init__(self, labels: CallLabels, *, notes_random: bool) -> None:
        super().__init__(labels)
        self.calls: dict[RowIdx, ReferenceCall] = {}
        self._notes_random = notes_random
        self._copies = Copies()

    def take(
        self, label: RowIdx, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a call, with copies of what goes in and comes out."""
        received = self._copied(places(Inputs(args, kwargs).named(module)))
        output = call(*args, **kwargs)
        random = random_state() if self._notes_random else None
        original = places(output)
        returned = self._copied(original)
        copies = {id(x): returned[at] for at, x in original.items() if isinstance(x, Tensor)}
        kept = replaced(output, copies)
        self.calls[label] = ReferenceCall(received, returned, kept, random)
        return output

    def _copied(self, parts: dict[Place, Any]) -> dict[Place, Any]:
        return {
            at: self._copies.of(part) if isinstance(part, Tensor) and is_plain(part) else part
            for at, part in parts.items()
        }


class Handing(NamedTuple):
    """That a call hands a tensor, known by a number, to a call whose partner receives none."""

    number: int
    owner: RowIdx
    receiver: RowIdx


class ForcedPass(PairedCalls):
    """Lets the paired calls of a network work on what those of the reference did, see NOTE.

    Parameters
    ----------
    labels : mapping
        The labels, those of the reference, of the calls of each paired module.
    reference : mapping
        The reference's calls.

    Attributes
    ----------
    made : dict
        Copies of what the calls made, as far as it has a partner.
    failed : dict
        The errors of calls that raise on the reference's inputs, and why what others return can't
        be compared.
    unpaired : dict
        Why what calls receive can't be compared either: these belong to the code around them.
    handings : list of Handing
        Who handed on what the reference does not hand on.
    """

    def __init__(self, labels: CallLabels, reference: Mapping[RowIdx, ReferenceCall]) -> None:
        super().__init__(labels)
        self._reference = reference
        self.made: dict[Slot, Tensor] = {}
        self.failed: dict[RowIdx, str] = {}
        self.unpaired: dict[RowIdx, str] = {}
        self.handings: list[Handing] = []
        self._copies = Copies()
        # The calls that run now; memories by number, and tensors that keep these.
        self._around: list[RowIdx] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def take(
        self, label: RowIdx, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a call on the reference's inputs, and return what the reference's call returned."""
        known = self._reference.get(label)
        if known is None:
            return call(*args, **kwargs)
        own = places(Inputs(args, kwargs).named(module))
        if _are_reordered(own, known.received):
            # What the owner returns shows whether that is right.
            self.unpaired[label] = _REORDERED
            return call(*args, **kwargs)
        forced = self._force_inputs(label, known, own)
        # Some may be written to.
        versions = [version_of(value) for _, value in forced]
        new = {id(tensor): value for tensor, value in forced}
        self._around.append(label)
        try:
            output = call(*replaced(args, new), **replaced(kwargs, new))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.failed[label] = f"{type(error).__name__}: {error}"
            return self._instead(known, new.values())
        finally:
            self._around.pop()
        if known.random is not None:
            # A call may draw other numbers than its partner, but those that follow draw the same.
            restore_random(known.random)
        for (tensor, value), version in zip(forced, versions, strict=True):
            if version_of(value) != version:
                tensor.copy_(value)
        return self._force_outputs(label, known, output, {id(value): x for x, value in forced})

    def _force_inputs(
        self, label: RowIdx, known: ReferenceCall, own: Mapping[Place, Any]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the network's own tensors, and what the call receives in place of each."""
        forced: dict[int, tuple[Tensor, Tensor]] = {}
        pairs = paired_places(own, known.received)
        for at, tensor in own.items():
            if at in pairs:
                if self._around:
                    self._make(self._around[-1], label, pairs[at], tensor)
                value = like(tensor, known.received[pairs[at]])
                forced.setdefault(id(tensor), (tensor, value))
            elif isinstance(tensor, Tensor) and self._around:
                self._alive.append(tensor)
                for memory in memories_of(tensor):
                    number = self._numbers.setdefault(memory, len(self._numbers))
                    self.handings.append(Handing(number, self._around[-1], label))
        return [*forced.values()]

    def _force_outputs(
        self, label: RowIdx, known: ReferenceCall, output: Any, own_inputs: Mapping[int, Tensor]
    ) -> Any:
        own = places(output)
        pairs = paired_places(own, known.returned)
        reason = _why_unpaired(own, known.returned, pairs)
        if reason is not None:
            # One that works on what the reference's received still makes what it hands on.
            (self.failed if own_inputs else self.unpaired)[label] = reason
        new: dict[int, Tensor] = {}
        for at, to in pairs.items():
            tensor = own[at]
            self._make(label, None, to, tensor)
            value = like(tensor, known.returned[to])
            # Who works in place returns what it was given.
            given = own_inputs.get(id(tensor))
            new.setdefault(id(tensor), value if given is None else given.copy_(value))
        return replaced(output, new)

    def _make(self, owner: RowIdx, receiver: RowIdx | None, place: Place, tensor: Tensor) -> None:
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        slot = Slot(owner, receiver, place, is_whole and tensor.dtype is not torch.bool)
        self.made[slot] = self._copies.of(tensor)

    def _instead(self, known: ReferenceCall, received: Iterable[Tensor]) -> Any:
        """Return what the reference's call returned, in the dtype of what this one received."""
        like = next((tensor for tensor in received if tensor.is_floating_point()), None)
        new = {}
        for tensor in places(known.output).values():
            if isinstance(tensor, Tensor) and like is not None:
                dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
                new[id(tensor)] = tensor.to(like.device, dtype, copy=True)
        return replaced(known.output, new)


def _are_reordered(own: Mapping[Place, Any], others: Mapping[Place, Any]) -> bool:
    """Whether a tensor has the rows of its partner in another order, as tokens by their experts."""
    pairs = ((own[at], others[to]) for at, to in paired_places(own, others).items())
    return any(_is_reordered(*pair) for pair in pairs)


def _is_reordered(tensor: Tensor, value: Tensor) -> bool:
    if tensor.ndim < 2 or tensor.numel() == 0 or not tensor.is_floating_point():
        return False
    weights = torch.linspace(-1, 1, tensor.shape[-1], device=tensor.device)
    own = tensor.float() @ weights
    other = value.to(tensor.device, torch.float32) @ weights
    apart = torch.linalg.vector_norm(own - other)
    in_order = torch.linalg.vector_norm(own.flatten().sort()[0] - other.flatten().sort()[0])
    return bool(apart > _UNLIKE * torch.linalg.vector_norm(other) and in_order < apart / 10)


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a copy of the reference's value with the dtype and strides of the network's own.

    Numbers that are too large for the dtype become its largest: who made them is to blame.
    """
    forced = torch.empty_like(tensor).copy_(value)
    if tensor.dtype is torch.float16 and value.dtype is not torch.float16:
        largest = torch.finfo(torch.float16).max
        is_lost = forced.isinf() & ~value.isinf().to(forced.device)
        forced = torch.where(is_lost, forced.sign() * largest, forced)
    return forced


def _why_unpaired(
    own: Mapping[Place, Any], others: Mapping[Place, Any], pairs: Mapping[Place, Place]
) -> str | None:
    """Return why no tensor of an output can be compared, if none can."""
    shapes = [
        [tuple(x.shape) for x in side.values() if isinstance(x, Tensor)] for side in (others, own)
    ]
    if pairs or not any(shapes):
        return None
    texts = [", ".join(map(str, side)) or "no tensor" for side in shapes]
    return f"it returns {texts[0]} in the reference and {texts[1]} in the candidate"


# -- exact copies ----------------------------------------------------------------------------------

HALF = frozenset((torch.bfloat16, torch.float16))
_CASTS: Mapping[Any, torch.dtype] = {
    Tensor.bfloat16: torch.bfloat16,
    Tensor.half: torch.float16,
    Tensor.float: torch.float32,
}
_SEED = 0
_NOTHING = contextlib.nullcontext()

# Returns what stands for a tensor of a copy, of which the original is given.
Convert = Callable[[Tensor], Tensor]


def main_dtype(net: nn.Module) -> torch.dtype:
    """Return the floating dtype of most of a network's numbers.

    Examples
    --------
    >>> main_dtype(nn.Linear(2, 2).half())
    torch.float16
    """
    counts = Counter[torch.dtype]()
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            counts[tensor.dtype] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else torch.get_default_dtype()


def narrowest(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the narrowest floating dtype of some tensors; float64 if there is none."""
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float64)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a network of a dtype is computed exactly."""
    return torch.float32 if dtype in HALF else torch.float64


def device_type_of(net: nn.Module) -> str:
    """Return the type of device of a network's first tensor."""
    return next((x.device.type for x in [*net.parameters(), *net.buffers()]), "cpu")


def convert(original: nn.Module, twin: nn.Module, new: Convert) -> dict[int, Callable[[], Tensor]]:
    """Convert the floating-point tensors of a copy of a network.

    Parameters
    ----------
    original, twin : torch.nn.Module
        The network and its copy.
    new : callable
        Returns what stands for a tensor of the network, in another dtype or with other values.

    Returns
    -------
    dict
        What makes the others, for `ConvertingMode`: by ``id``, parameters with shared memory.
    """
    of_net = reached([original])
    tensors = (value for key, (value, _) in reached([twin]).items() if key not in of_net)
    own, others = ([*net.parameters(), *net.buffers()] for net in (twin, original))
    originals = {id(tensor): other for tensor, other in zip(own, others, strict=True)}
    later: dict[int, Callable[[], Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor) and _is_number(tensor):
            source = originals.get(id(tensor), tensor)
            if source is not tensor and source.data_ptr() == tensor.data_ptr():
                later[id(tensor)] = partial(new, source)
            else:
                tensor.data = new(source).detach()
    return later


def _is_number(tensor: Tensor) -> bool:
    is_wide = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return is_wide and is_plain(tensor) and has_memory(tensor)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype if it holds floating-point numbers."""
    return tensor.to(dtype) if _is_number(tensor) else tensor


def partners(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> dict[int, Tensor]:
    """Return the tensors of other modules that have the name of a tensor, by the ``id`` of each.

    Parameters
    ----------
    pairs : iterable of (Module, Module)
        Paired modules, the innermost first.
    """
    known: dict[int, Tensor] = {}
    for module, other in pairs:
        named = dict([*other.named_parameters(), *other.named_buffers()])
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in named:
                known.setdefault(id(tensor), named[name])
    return known


def rounded(tensor: Tensor, partner: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the dtype of its partner, or else in another one."""
    known = partner is not None and _is_number(partner)
    return tensor.to(partner.dtype if known and partner is not None else dtype)


def moved(
    tensor: Tensor, partner: Tensor | None, dtype: torch.dtype, reference_dtype: torch.dtype
) -> Tensor:
    """Return a tensor in a dtype, moved at random within half a unit in its last place.

    The unit is that of the narrower dtype if the reference's tensor of that name has another. One
    that equals that, once rounded, stays as it is, and so does one that is not narrower than the
    dtype. If none has its name, as in a fused projection, the reference's numbers are taken to be
    these, rounded to its dtype.
    """
    exact, dtypes, as_rounded = tensor.to(dtype), [tensor.dtype], None
    if partner is not None and _is_number(partner):
        as_rounded = partner.detach().to(tensor.device, tensor.dtype)
        dtypes.append(partner.dtype)
    elif reference_dtype.itemsize < tensor.itemsize:
        as_rounded = tensor.to(reference_dtype).to(tensor.dtype)
        dtypes.append(reference_dtype)
    if as_rounded is not None and torch.equal(as_rounded, tensor):
        return exact
    epsilon = max(torch.finfo(kind).eps for kind in dtypes)
    if epsilon <= torch.finfo(dtype).eps:
        return exact
    generator = torch.Generator().manual_seed(_SEED + tensor.numel())
    shift = torch.rand(exact.shape, generator=generator, dtype=torch.float32).sub_(0.5)
    if epsilon > torch.finfo(tensor.dtype).eps:
        # The reference's numbers are rounded to it for sure.
        shift = shift.sign_().div_(2)
    # In place, since weights may be large.
    shift = shift.to(exact.device, dtype).mul_(epsilon)
    exponent = torch.frexp(exact).exponent.sub_(1)
    return shift.ldexp_(exponent).add_(exact)


class ConvertingMode(TorchFunctionMode):
    """Lets all functions receive the parameters of a copy converted.

    Parameters
    ----------
    later : mapping
        What makes them, by the ``id`` of each.
    """

    def __init__(self, later: Mapping[int, Callable[[], Tensor]]) -> None:
        self._later = later

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        return func(*map(self._new, args), **{k: self._new(x) for k, x in (kwargs or {}).items()})

    def _new(self, value: Any) -> Any:
        # Recurrent layers give a list of them.
        if type(value) is list:
            return [*map(self._new, value)]
        new = self._later.get(id(value))
        return value if new is None else new()


class ExactMode(TorchFunctionMode):
    """Lets all functions compute in a wide dtype, whatever narrower one they are told.

    Parameters
    ----------
    dtype : torch.dtype
        The wide one.
    device_type : str
        Where the network runs. Autocast is off there.

    Examples
    --------
    >>> with ExactMode(torch.float64, "cpu"):
    ...     torch.ones(1).half().dtype
    torch.float64
    """

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self._dtype, self._device_type = dtype, device_type
        self._narrow = HALF if dtype is torch.float32 else {*HALF, torch.float32}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        if _CASTS.get(func) in self._narrow:
            return args[0].to(self._dtype)
        args = tuple(map(self._wide, args))
        kwargs = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        casts = torch.is_autocast_enabled(self._device_type)
        with torch.autocast(self._device_type, enabled=False) if casts else _NOTHING:
            output = func(*args, **kwargs)
        is_narrow = type(output) is Tensor and output.dtype in self._narrow
        return output.to(self._dtype) if is_narrow else output

    def _wide(self, value: Any) -> Any:
        return self._dtype if isinstance(value, torch.dtype) and value in self._narrow else value
