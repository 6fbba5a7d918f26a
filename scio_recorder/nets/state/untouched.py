"""Running a network without a trace: all state that it reaches is noted, and put back.

NOTE [What is put back]

A pass can write to everything that the network reaches: attributes of modules and other objects,
slots, containers, variables of closures, tensors, arrays and generators of random numbers. All of
these are found by one walk from the network, which stops at code (classes, Python modules, globals
of functions) and at the machinery of libraries. What a pass has changed is put back: containers by
the identity of their items, tensors and arrays by value, since torch does not count every write.

Parameters, and tensors that are neither parameters nor buffers, are noted without their values if
all of one kind take more than 1 GiB; a warning says if such a tensor was written to. An object that
can't be seen into (an iterator, a file, an object of another language) stays as the pass leaves it;
a warning names it if it may have changed.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import operator
import random
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.errors import warn
from scio_recorder.layer import few
from scio_recorder.nets.hookable import LIBRARIES, leave_own_hooks
from scio_recorder.nets.sharded import is_sharded
from scio_recorder.nets.state.copying import OriginalCalledError, are_large
from scio_recorder.nets.state.moment import (
    joined,
    random_state,
    restore_random,
    same_samples,
    sampled,
)
from scio_recorder.tensors import private, private_distributed
from scio_recorder.tensors.copies import is_dense, is_plain, version_of
from scio_recorder.tensors.private_distributed import fsdp_modules

# Objects of these packages are not a network's own, and may belong to other threads.
_MACHINERY = (
    *("scio_recorder", "torch._", "torch.distributed", "torch.utils.tensorboard"),
    *("torch.utils.data", "triton", "pybind11_builtins", "tokenizers", "lightning"),
    *("pytorch_lightning", "wandb", "tensorboard", "mlflow", "threading", "_thread", "queue"),
    *("_queue", "logging", "asyncio", "multiprocessing", "concurrent", "socket", "subprocess"),
    *("ctypes", "selectors"),
)
_OURS = "scio_recorder."
# A recorder is a module, but no part of a network.
_RECORDER = "scio_recorder.recorder"
# Types of values that never change, or are code.
_VALUES = (
    *(bool, int, float, complex, str, bytes, range, slice, type, types.NoneType, types.ModuleType),
    *(types.EllipsisType, types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(np.dtype, np.generic, np.ufunc, property, staticmethod, classmethod),
)
# Types of keys of dictionaries that never change, and are names.
_NAMES = frozenset((str, int))
_GENERATORS: tuple[Any, ...] = (
    *(torch.Generator, random.Random),
    *(np.random.RandomState, np.random.Generator, np.random.BitGenerator),
)
_MAPPINGS = (OrderedDict, dict)
_SEEN_INTO = (*_GENERATORS, Tensor, bytearray, array)
# A generator in between may have gone round in a loop.
_AT_AN_END = (inspect.GEN_CREATED, inspect.GEN_CLOSED)
_EMPTY = object()
# A class is hashable, which checkers of types don't know.
_type: Any = type
# Names that say nothing to a user.
_UNNAMED = {"_modules", "_parameters", "_buffers", ""}
_SHOWN = 5

_PutBack: TypeAlias = Callable[[], object]


class Found(NamedTuple):
    """An object that was reached, its name in what holds it, and the way to that."""

    value: Any
    name: object
    holder: Found | None

    @property
    def path(self) -> str:
        """The way to it, as a user would write it."""
        names: list[str] = []
        at: Found | None = self
        while at is not None:
            names.append(str(at.name))
            at = at.holder
        return ".".join(name for name in reversed(names) if name not in _UNNAMED)


def reached(roots: Iterable[Any]) -> dict[int, Found]:
    """Return everything that a network can write to, by ``id``.

    Parameters
    ----------
    roots : iterable
        The network, and what else it is given.

    Returns
    -------
    dict
        The objects in the order in which they are found, each with the way to it.

    Examples
    --------
    >>> net = nn.ReLU()
    >>> net.seen = {"counts": [1]}
    >>> reached([net])[id(net.seen["counts"])].path
    'net.seen.counts'
    """
    found: dict[int, Found] = {}
    waiting = [Found(root, "net", None) for root in roots]
    while waiting:
        one = waiting.pop()
        if id(one.value) in found:
            continue
        found[id(one.value)] = one
        kind: Any = type(one.value)
        for parts_of in _kind(kind).parts:
            parts = parts_of(one.value)
            waiting += [
                Found(part, name, one) for name, part in parts if not _is_value(_type(part))
            ]
    return found


@lru_cache(4096)
def _is_value(kind: type) -> bool:
    return issubclass(kind, _VALUES)


# -- the parts of an object, with names ------------------------------------------------------------


def _of_dict(value: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    if "_forward_hooks" in value:
        # Modules have very many empty dictionaries of hooks, which are noted apart.
        hooks = private.HOOK_DICTIONARIES
        return [(name, part) for name, part in value.items() if name not in hooks or part]
    if _NAMES.issuperset(map(type, value)):
        return dict.items(value)
    return [*dict.items(value), *zip(itertools.repeat(""), dict.keys(value), strict=False)]


def _of_array(value: Any) -> Iterable[tuple[Any, Any]]:
    return enumerate(value.flat) if value.dtype.hasobject else ()


def _of_function(value: Any) -> Iterable[tuple[Any, Any]]:
    # Not its `__module__`, which decorators make that of another function.
    if str(value.__globals__.get("__name__")).startswith(_MACHINERY):
        return ()
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    return [*cells, ("", value.__defaults__), ("", value.__kwdefaults__)]


def _of_cell(value: types.CellType) -> Iterable[tuple[Any, Any]]:
    return [("", _content(value))]


def _of_partial(value: Any) -> Iterable[tuple[Any, Any]]:
    return [("", value.func), ("", value.args), ("", value.keywords)]


def _of_method(value: Any) -> Iterable[tuple[Any, Any]]:
    # A method of a class is code, but any function can be made one.
    function = getattr(value, "__func__", None)
    is_own = getattr(type(value.__self__), value.__name__, None) is function
    return [("", value.__self__), ("", None if is_own else function)]


def _of_reference(value: Any) -> Iterable[tuple[Any, Any]]:
    return [("", value())]


def _of_script(value: Any) -> Iterable[tuple[Any, Any]]:
    # All else is out of sight.
    return [*value.named_parameters(), *value.named_buffers()]


def _attributes(value: Any) -> Iterable[tuple[Any, Any]]:
    found = getattr(value, "__dict__", None)
    return [("", found)] if type(found) is dict else ()


def _slots_of(value: Any) -> Iterable[tuple[Any, Any]]:
    kind: Any = type(value)
    return [(name, getattr(value, name, None)) for name in _kind(kind).slots]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


_PartsOf: TypeAlias = Callable[[Any], Iterable[tuple[Any, Any]]]
_PARTS: tuple[tuple[Any, _PartsOf], ...] = (
    (dict, _of_dict),
    (types.MappingProxyType, types.MappingProxyType.items),
    ((list, tuple, set, frozenset, deque), enumerate),
    (np.ndarray, _of_array),
    (types.FunctionType, _of_function),
    (types.CellType, _of_cell),
    (partial, _of_partial),
    ((types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType), _of_method),
    (weakref.ref, _of_reference),
)


class _Kind(NamedTuple):
    """What is known of all objects of a class."""

    parts: tuple[_PartsOf, ...]
    # The names of slots of a class that is written in Python.
    slots: tuple[str, ...]
    is_machinery: bool
    is_opaque: bool


@lru_cache(4096)
def _kind(kind: type) -> _Kind:
    is_module = issubclass(kind, nn.Module)
    is_machinery = str(kind.__module__).startswith(_RECORDER if is_module else _MACHINERY)
    parts = [parts_of for base, parts_of in _PARTS if issubclass(kind, base)]
    slots = () if is_machinery else _slots(kind)
    has_attributes = hasattr(kind, "__dict__") and bool(kind.__dictoffset__)
    is_seen = bool(parts) or has_attributes or bool(slots) or issubclass(kind, _SEEN_INTO)
    is_opaque = _is_opaque(kind, is_machinery, is_seen)
    if is_machinery:
        parts = []
    elif issubclass(kind, torch.jit.ScriptModule):
        parts = [_of_script]
    else:
        parts += [_attributes] * has_attributes + [_slots_of] * bool(slots)
    return _Kind(tuple(parts), slots, is_machinery, is_opaque)


def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def _is_opaque(kind: type, is_machinery: bool, is_seen: bool) -> bool:
    """Whether passes may change objects of a class of which nothing can be seen."""
    if issubclass(kind, io.IOBase):
        return True
    if is_machinery:
        return hasattr(kind, "__next__") or hasattr(kind, "qsize")
    package = kind.__module__.partition(".")[0]
    is_known = package in sys.stdlib_module_names or package in ("torch", "numpy")
    return not is_seen and (hasattr(kind, "__next__") or not is_known)


# -- former states, and functions that put them back -----------------------------------------------


def _refill(value: Any, base: Any, items: Iterable[Any]) -> None:
    """Give a container its items again, whatever a class derived from it makes of that."""
    base.clear(value)
    for item in items:
        if base in _MAPPINGS:
            base.__setitem__(value, *item)
        else:
            (base.add if base is set else base.append)(value, item)


def _note_bytes(value: bytearray | array[Any]) -> _PutBack:
    return partial(operator.setitem, value, slice(None), value[:])


def _note_cell(cell: types.CellType) -> _PutBack:
    before = _content(cell)

    def put_back() -> None:
        now = _content(cell)
        if before is _EMPTY and now is not _EMPTY:
            del cell.cell_contents
        elif before is not now:
            cell.cell_contents = before

    return put_back


def _note_array(value: np.ndarray[Any, Any]) -> _PutBack:
    before = value.copy()

    def put_back() -> None:
        if value.flags.writeable and value.shape == before.shape:
            np.copyto(value, before)

    return put_back


def _note_slots(value: Any) -> _PutBack:
    kind: Any = type(value)
    before = [(name, getattr(value, name, _EMPTY)) for name in _kind(kind).slots]

    def put_back() -> None:
        for name, then in before:
            now = getattr(value, name, _EMPTY)
            if then is _EMPTY and now is not _EMPTY:
                object.__delattr__(value, name)
            elif then is not now:
                object.__setattr__(value, name, then)

    return put_back


def _note_generator(value: Any) -> _PutBack:
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    source: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
    return partial(setattr, source, "state", source.state)


_NOTES: tuple[tuple[Any, Callable[[Any], _PutBack]], ...] = (
    ((bytearray, array), _note_bytes),
    (types.CellType, _note_cell),
    (np.ndarray, _note_array),
    (_GENERATORS, _note_generator),
)


@lru_cache(4096)
def _notes(kind: type) -> list[Callable[[Any], _PutBack]]:
    # The system's own generator has no state.
    bases = () if issubclass(kind, random.SystemRandom) else _NOTES
    found = [note for base, note in bases if issubclass(kind, base)]
    return [*found, *([_note_slots] * bool(_kind(kind).slots))]


@lru_cache(4096)
def _container(kind: type) -> Any:
    """Return the built-in container that a class is, or is derived from; None for others."""
    bases = () if _kind(kind).is_machinery else (*_MAPPINGS, list, deque, set)
    return next((base for base in bases if issubclass(kind, base)), None)


def _put_back_hooks(hooks: dict[str, Any], before: dict[str, Any]) -> None:
    """Put back a module's hooks but for ours, which come and go meanwhile."""
    former, ours = _numbers_of_ours(before), _numbers_of_ours(hooks)
    for name, own in hooks.items():
        kept = {key: hook for key, hook in before[name].items() if key not in former}
        kept |= {key: hook for key, hook in own.items() if key in ours}
        own.clear()
        own.update(kept)


def _numbers_of_ours(hooks: dict[str, Any]) -> set[int]:
    named = set(private.FORWARD_HOOKS) & hooks.keys()
    return {key for name in named for key, hook in hooks[name].items() if _is_ours(hook)}


def _is_ours(hook: Any) -> bool:
    owner = getattr(hook.func if isinstance(hook, partial) else hook, "__self__", hook)
    is_function = isinstance(owner, types.FunctionType)
    return str(owner.__module__ if is_function else type(owner).__module__).startswith(_OURS)


class _TensorNote:
    """The memory and the values of one tensor."""

    def __init__(self, tensor: Tensor, *, with_values: bool) -> None:
        self.tensor = tensor
        self._data = tensor.data
        self._requires_grad = tensor.requires_grad
        self._values = tensor.detach().clone() if with_values else None
        # Nobody can write to a tensor that has one number at several places.
        self._is_writable = with_values and not _is_expanded(tensor)
        self._is_inference = tensor.is_inference()
        self._version = version_of(tensor)
        self._put_back_version = private.restoring_version(tensor)

    def put_back(self) -> bool:
        """Put back memory and values; say whether that could be done."""
        tensor = self.tensor
        is_counted = not self._is_inference and tensor._version != self._version
        if not self._is_inference:
            # `net.to(device)` swaps the memory under a parameter.
            tensor.data = self._data
        if tensor.requires_grad != self._requires_grad and tensor.is_leaf:
            tensor.requires_grad_(self._requires_grad)
        if self._is_writable:
            with torch.inference_mode(self._is_inference):
                self._data.copy_(self._values)  # type: ignore[arg-type]  # it has values
        if is_counted and self._values is not None:
            # A graph that holds the tensor is as good as before.
            self._put_back_version()
        return self._values is not None or not is_counted


def _counts_writes(tensor: Tensor) -> bool:
    """Whether a tensor has memory, and counts most writes to it."""
    return is_plain(tensor) and not tensor.is_inference()


def _marks_of(tensors: Sequence[Tensor]) -> list[tuple[int, int, bool]]:
    """Return what differs once tensors are written to, moved, frozen or thawed."""
    return [(one._version, one.data_ptr(), one.requires_grad) for one in tensors]


def _is_expanded(tensor: Tensor) -> bool:
    shape = zip(tensor.shape, tensor.stride(), strict=True) if is_dense(tensor) else ()
    return any(size > 1 and step == 0 for size, step in shape)


def _position(value: Any) -> Any:
    """Return what shows whether a queue, a file or an iterator has moved; else something new."""
    for ask in ("qsize", "tell"):
        with contextlib.suppress(AttributeError, OSError, ValueError, NotImplementedError):
            return getattr(value, ask)()
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, types.GeneratorType) and inspect.getgeneratorstate(value) in _AT_AN_END:
        return inspect.getgeneratorstate(value)
    length = operator.length_hint(value, -1) if hasattr(value, "__next__") else -1
    return object() if length < 0 else length


def _with_type(found: Found) -> str:
    kind = type(found.value)
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{found.path} ({package}{kind.__qualname__})"


# -- the state of a network ------------------------------------------------------------------------


class NetState:
    """The state of a network at one moment, to which it can be put back again and again.

    Parameters
    ----------
    found : dict
        The objects whose state is noted, see `reached`.
    keep_random : bool, default False
        Leave global generators of random numbers as passes leave them.
    only_buffers : bool, default False
        Note no other tensors.

    Attributes
    ----------
    leaves : list of torch.Tensor
        The tensors in which gradients are accumulated.

    Examples
    --------
    >>> net = nn.BatchNorm1d(2)
    >>> net.seen = {"counts": [1]}
    >>> state = NetState(reached([net]))
    >>> _ = net(torch.randn(8, 2)), net.seen["counts"].append(2)
    >>> state.put_back()
    >>> int(net.num_batches_tracked), net.seen
    (0, {'counts': [1]})
    """

    def __init__(
        self, found: dict[int, Found], *, keep_random: bool = False, only_buffers: bool = False
    ) -> None:
        self._random = None if keep_random else random_state()
        self._found = found
        self._lost: list[str] = []
        values = [one.value for one in found.values()]
        modules = [one for one in values if issubclass(type(one), nn.Module)]
        hooks = [
            {name: vars(one)[name] for name in private.HOOK_DICTIONARIES if name in vars(one)}
            for one in modules
        ]
        self._hooks = [(one, {name: dict(own) for name, own in one.items()}) for one in hooks]
        noted_apart = {id(own) for one in hooks for own in one.values()}
        containers = [(one, _container(_type(one))) for one in values if id(one) not in noted_apart]
        # The items, or the keys, of each, and the values.
        self._containers = [
            (one, base, [*base.__iter__(one)], [*(base.values(one) if base in _MAPPINGS else ())])
            for one, base in containers
            if base is not None
        ]
        self._put_backs = [note(one) for one in values for note in _notes(_type(one))]
        opaque = [one for one in found.values() if _kind(_type(one.value)).is_opaque]
        self._opaque = [(one, _position(one.value)) for one in opaque]
        self._note_tensors(values, modules, only_buffers)

    def _note_tensors(self, values: list[Any], modules: list[Any], only_buffers: bool) -> None:
        tensors = [one for one in values if issubclass(type(one), Tensor)]
        parameters = [one for one in tensors if isinstance(one, nn.Parameter)]
        buffers = {id(one) for module in modules for one in module.buffers()}
        if only_buffers:
            tensors = [one for one in tensors if id(one) in buffers]
        self.leaves = [*parameters, *(one for one in tensors if one.is_leaf and one.requires_grad)]
        known = buffers | _small(tensors, buffers)
        notes = {id(one): _TensorNote(one, with_values=id(one) in known) for one in tensors}
        # Passes write to few of these, and most passes to none.
        self._weights = [one for one in parameters if id(one) in notes and _counts_writes(one)]
        self._marks, self._sampled = _marks_of(self._weights), sampled(self._weights)
        self._samples = joined(self._sampled)
        self._weight_notes = [notes.pop(id(one)) for one in self._weights]
        self._tensor_notes = [*notes.values()]

    def put_back(self, *, thorough: bool = False) -> None:
        """Put back everything that has changed.

        Parameters
        ----------
        thorough : bool, default False
            Write the values of all parameters, also if none counts as written, and a few of the
            values of each are as before.
        """
        for hooks, before in self._hooks:
            if hooks != before:
                _put_back_hooks(hooks, before)
        for value, base, items, mapped in self._containers:
            if (
                base.__len__(value) != len(items)
                or not all(map(is_, base.__iter__(value), items))
                or (mapped and not all(map(is_, base.values(value), mapped)))
            ):
                _refill(value, base, zip(items, mapped, strict=True) if mapped else items)
        for put_back in self._put_backs:
            put_back()
        is_same = not thorough and self._marks == _marks_of(self._weights)
        is_same = is_same and same_samples(self._samples, joined(self._sampled))
        notes = [*self._tensor_notes, *(() if is_same else self._weight_notes)]
        with torch.no_grad():
            lost = [one for one in notes if not one.put_back()]
        self._lost = [self._found[id(one.tensor)].path for one in lost]
        if self._random is not None:
            restore_random(self._random)

    def warn_of_traces(self) -> None:
        """Warn of what may have changed and can't be put back."""
        opaque = [_with_type(one) for one, at in self._opaque if _position(one.value) != at]
        if opaque:
            warn(
                "the network ran on the side, which may have changed what can't be put back: "
                f"{few(opaque, _SHOWN)}. Keep such state in tensors, numbers or containers"
            )
        if self._lost:
            warn(
                "the network ran on the side and wrote to tensors that take too much memory to be "
                f"copied, and stay changed: {few(self._lost, _SHOWN)}"
            )


def _small(tensors: list[Tensor], buffers: set[int]) -> set[int]:
    """Return the ids of parameters and of other tensors, if each kind takes little memory."""
    parameters = [one for one in tensors if isinstance(one, nn.Parameter)]
    known = buffers | {id(one) for one in parameters}
    others = [one for one in tensors if id(one) not in known]
    return {id(one) for kind in (parameters, others) if not are_large(kind) for one in kind}


@contextlib.contextmanager
def untouched(
    net: nn.Module, *others: Any, keep_hooks: bool = True, keep_random: bool = False
) -> Iterator[NetState]:
    """Run a network without a trace inside the block, which ends with its state put back.

    Hooks on all modules of the process do not run for this thread. Gradients are set aside. A
    sharded network must run in all processes of its mesh.

    Parameters
    ----------
    net : torch.nn.Module
        The network, or a part of one.
    *others : Any
        What else passes may write to, such as their inputs.
    keep_hooks : bool, default True
        Whether the user's hooks stay inside the block. The network's own always do.
    keep_random : bool, default False
        Leave global generators of random numbers as the block leaves them.

    Yields
    ------
    NetState
        The state at the start, to which several passes can be put back one after the other.

    Examples
    --------
    >>> net = nn.BatchNorm1d(2)
    >>> with untouched(net) as state:
    ...     first = net(x := torch.randn(8, 2))
    ...     state.put_back()
    ...     again = net(x)
    >>> int(net.num_batches_tracked)
    0
    """
    is_spread = is_sharded(net)
    fsdp = fsdp_modules(net) if is_spread else []
    for module in fsdp:
        private_distributed.take_whole_parameters(module)
    # State in which FSDP notes passes, and flat parameters, to which FSDP1 moves gradients.
    notes = [note for module in fsdp for note in private_distributed.fsdp_notes(module)]
    end_passes = private_distributed.ending(notes)
    flat = [one for module in fsdp for one in private_distributed.flat_parameters(module)]
    roots = (net, *others, *map(vars, notes))
    state = NetState(reached(roots), keep_random=keep_random, only_buffers=is_spread)
    with without_hooks_on_all_modules(), _gradients_aside([*flat, *state.leaves]):
        try:
            if not keep_hooks:
                of_torch = ("torch.distributed",) if is_spread else ()
                leave_own_hooks(net, (*LIBRARIES, *of_torch))
            yield state
        finally:
            end_passes()
            for module in fsdp:
                private_distributed.take_whole_parameters(module)
            state.put_back(thorough=True)
    state.warn_of_traces()


@contextlib.contextmanager
def shared_untouched(own: dict[int, Found], copy: nn.Module) -> Iterator[None]:
    """Run a copy of a network inside the block, which ends with what they share put back.

    Parameters
    ----------
    own : dict
        What the network reaches. A copy shares functions, and so the variables of closures.
    copy : torch.nn.Module
        The copy.

    Raises
    ------
    OriginalCalledError
        The copy would run modules of the network itself.

    Examples
    --------
    >>> import copy
    >>> net = nn.ReLU()
    >>> net.itself = weakref.ref(net)
    >>> with shared_untouched(reached([net]), copy.deepcopy(net)):
    ...     pass
    Traceback (most recent call last):
    scio_recorder.nets.state.copying.OriginalCalledError
    """
    shared = {key: one for key, one in reached([copy]).items() if key in own}
    if any(issubclass(type(one.value), nn.Module) for one in shared.values()):
        raise OriginalCalledError
    state = NetState(shared, keep_random=True)
    try:
        with without_hooks_on_all_modules():
            yield
    finally:
        state.put_back(thorough=True)
    state.warn_of_traces()


@contextlib.contextmanager
def _gradients_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Set gradients aside inside the block: a forward may differentiate, and add to them."""
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf, _ in gradients:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient


class _Depth(threading.local):
    """The number of blocks around the code of this thread in which no such hooks run."""

    value = 0


class _OutsideBlocks:
    """Stands for a hook on all modules, and runs it only outside of such blocks."""

    lock = threading.RLock()
    depth = _Depth()
    num_blocks = 0

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.depth.value else self.hook(*args, **kwargs)


@contextlib.contextmanager
def without_hooks_on_all_modules() -> Iterator[None]:
    """Let hooks on all modules of the process do nothing for this thread inside the block."""
    kind = _OutsideBlocks
    with kind.lock:
        kind.num_blocks += 1
        for hooks in private.hooks_on_all_modules():
            plain = {key: hook for key, hook in hooks.items() if not isinstance(hook, kind)}
            hooks.update((key, kind(hook)) for key, hook in plain.items())
    kind.depth.value += 1
    try:
        yield
    finally:
        kind.depth.value -= 1
        with kind.lock:
            kind.num_blocks -= 1
            for hooks in private.hooks_on_all_modules() if not kind.num_blocks else ():
                own = {key: hook for key, hook in hooks.items() if isinstance(hook, kind)}
                hooks.update((key, outside.hook) for key, outside in own.items())
