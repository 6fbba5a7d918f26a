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
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from operator import is_
from typing import Any, NamedTuple, Optional, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from scio_recorder.errors import warn
from scio_recorder.layer import few
from scio_recorder.nets.state.copying import OriginalCalledError, are_large
from scio_recorder.nets.state.own_hooks import LIBRARIES, leave_own_hooks
from scio_recorder.nets.state.random_numbers import random_state, restore_random
from scio_recorder.nets.state.sharded import is_sharded
from scio_recorder.tensors import private, private_distributed
from scio_recorder.tensors.copies import is_dense, same_bits, version_of
from scio_recorder.tensors.private_distributed import fsdp_modules

# Objects of these packages are not a network's own, and may belong to other threads.
_MACHINERY = (
    *("scio_recorder", "torch._", "torch.distributed", "torch.utils.tensorboard"),
    *("torch.utils.data", "triton", "pybind11_builtins", "tokenizers", "lightning"),
    *("pytorch_lightning", "wandb", "tensorboard", "mlflow", "threading", "_thread", "queue"),
    *("_queue", "logging", "asyncio", "multiprocessing", "concurrent", "socket", "subprocess"),
    *("ctypes", "selectors"),
)
# A recorder is a module, but no part of a network.
_RECORDER = "scio_recorder.recorder"
# Types of values that never change, or are code.
_VALUES = (
    *(bool, int, float, complex, str, bytes, range, slice, type, types.NoneType, types.ModuleType),
    *(types.EllipsisType, types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(np.dtype, np.generic, np.ufunc, property, staticmethod, classmethod),
)
_CONTAINERS: tuple[Any, ...] = (
    *(dict, types.MappingProxyType, list, tuple, set, frozenset, deque),
)
_GENERATORS: tuple[Any, ...] = (
    *(torch.Generator, random.Random),
    *(np.random.RandomState, np.random.Generator, np.random.BitGenerator),
)
# A generator in between may have gone round in a loop.
_AT_AN_END = (inspect.GEN_CREATED, inspect.GEN_CLOSED)
_EMPTY = object()
# Names that say nothing to a user.
_UNNAMED = {"_modules", "_parameters", "_buffers", ""}
_SHOWN = 5

_PutBack: TypeAlias = Callable[[], object]
# A name, and the way to what holds the object of that name.
_Way: TypeAlias = tuple[str, Optional["_Way"]]


class Found(NamedTuple):
    """An object that was reached, and the way to it."""

    value: Any
    way: _Way

    @property
    def name(self) -> str:
        """The way to it, as a user would write it."""
        names: list[str] = []
        way: _Way | None = self.way
        while way is not None:
            names.append(way[0])
            way = way[1]
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
    >>> reached([net])[id(net.seen["counts"])].name
    'net.seen.counts'
    """
    found: dict[int, Found] = {}
    waiting = [Found(root, ("net", None)) for root in roots]
    while waiting:
        one = waiting.pop()
        if id(one.value) not in found:
            found[id(one.value)] = one
            if not is_machinery(one.value):
                parts = _parts(one.value)
                waiting += [Found(part, (name, one.way)) for name, part in parts if _changes(part)]
    return found


def _changes(value: Any) -> bool:
    kind: Any = type(value)
    return not _is_value(kind)


@lru_cache(4096)
def _is_value(kind: type) -> bool:
    return issubclass(kind, _VALUES)


def is_machinery(value: Any) -> bool:
    """Whether an object belongs to the works of a library, ours among them."""
    kind: Any = type(value)
    if kind is partial:
        return is_machinery(value.func)
    if kind is types.MethodType:
        return is_machinery(value.__self__)
    if kind is types.FunctionType:
        # Not its `__module__`, which decorators make that of another function.
        return str(value.__globals__.get("__name__")).startswith(_MACHINERY)
    return _is_machinery_type(kind)


@lru_cache(4096)
def _is_machinery_type(kind: type) -> bool:
    return str(kind.__module__).startswith(_RECORDER if issubclass(kind, nn.Module) else _MACHINERY)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with names."""
    kind: Any = type(value)
    if issubclass(kind, torch.jit.ScriptModule):
        # All else is out of sight.
        yield from value.named_parameters()
        yield from value.named_buffers()
        return
    if issubclass(kind, _CONTAINERS):
        yield from _items(value)
    elif issubclass(kind, np.ndarray):
        yield from _named(value.flat if value.dtype.hasobject else ())
    else:
        yield from _parts_of_code(value)
    attributes = _attributes(value)
    if attributes is not None:
        yield "", attributes
    yield from ((name, getattr(value, name, None)) for name in _slots(kind))


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, whatever a class derived from it makes of that."""
    base = next(base for base in _CONTAINERS if issubclass(type(value), base))
    if base in (dict, types.MappingProxyType):
        for key, item in base.items(value):
            if _changes(key):
                yield "", key
            # Modules have very many empty dictionaries of hooks, which are noted apart.
            if type(key) is not str or key not in private.HOOK_DICTIONARIES or item:
                yield str(key), item
    else:
        yield from _named(base.__iter__(value))


def _named(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(number), item) for number, item in enumerate(items))


def _parts_of_code(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what functions and methods hold, and what references refer to."""
    kind: Any = type(value)
    if issubclass(kind, types.FunctionType):
        yield from zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from (("", one) for one in (value.__defaults__, value.__kwdefaults__))
    elif issubclass(kind, types.CellType):
        yield "", _content(value)
    elif issubclass(kind, partial):
        yield from (("", one) for one in (value.func, value.args, value.keywords))
    elif issubclass(kind, types.MethodType):
        yield "", value.__self__
        # A method of a class is code, but any function can be made one.
        if getattr(type(value.__self__), value.__name__, None) is not value.__func__:
            yield "", value.__func__
    elif issubclass(kind, types.BuiltinFunctionType | types.MethodWrapperType):
        yield "", value.__self__
    elif issubclass(kind, weakref.ref):
        yield "", value()


def _attributes(value: Any) -> dict[str, Any] | None:
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else None


@lru_cache(4096)
def _slots(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class that is written in Python."""
    return tuple(
        name
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


# -- notes of former states, each a function that puts it back -------------------------------------


def _notes_of(value: Any) -> Iterator[_PutBack]:
    """Yield functions that put back what an object itself holds."""
    kind: Any = type(value)
    if issubclass(kind, _GENERATORS):
        yield from _note_generator(value)
    elif not is_machinery(value):
        yield from (note(value) for note in _notes_for(kind))


@lru_cache(4096)
def _notes_for(kind: type) -> list[Callable[[Any], _PutBack]]:
    notes = [note for base, note in _NOTES if issubclass(kind, base)]
    return [*notes, *([_note_slots] if _slots(kind) else [])]


def _note_dict(value: dict[Any, Any]) -> _PutBack:
    base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    keys, items = [*base.keys(value)], [*base.values(value)]

    def put_back() -> None:
        is_same = len(keys) == base.__len__(value) and all(map(is_, base.values(value), items))
        if not (is_same and all(map(is_, base.keys(value), keys))):
            base.clear(value)
            for key, item in zip(keys, items, strict=True):
                base.__setitem__(value, key, item)

    return put_back


def _note_sequence(value: Any) -> _PutBack:
    base: Any = next(base for base in (list, deque, set) if isinstance(value, base))
    items = [*base.__iter__(value)]

    def put_back() -> None:
        if len(items) != base.__len__(value) or not all(map(is_, base.__iter__(value), items)):
            base.clear(value)
            (base.update if base is set else base.extend)(value, items)

    return put_back


def _note_bytes(value: bytearray | array[Any]) -> _PutBack:
    before: Any = value[:]

    def put_back() -> None:
        if value != before:
            value[:] = before

    return put_back


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
    names = _slots(kind)
    before = [getattr(value, name, _EMPTY) for name in names]

    def put_back() -> None:
        for name, then in zip(names, before, strict=True):
            now = getattr(value, name, _EMPTY)
            if then is _EMPTY and now is not _EMPTY:
                object.__delattr__(value, name)
            elif then is not now:
                object.__setattr__(value, name, then)

    return put_back


def _note_generator(value: Any) -> Iterator[_PutBack]:
    if isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.RandomState):
        yield partial(value.set_state, value.get_state(legacy=False))
    elif isinstance(value, np.random.Generator | np.random.BitGenerator):
        source: Any = value.bit_generator if isinstance(value, np.random.Generator) else value
        yield partial(setattr, source, "state", source.state)
    elif not isinstance(value, random.SystemRandom):
        yield partial(value.setstate, value.getstate())


_NOTES: tuple[tuple[Any, Callable[[Any], _PutBack]], ...] = (
    (dict, _note_dict),
    ((list, deque, set), _note_sequence),
    ((bytearray, array), _note_bytes),
    (types.CellType, _note_cell),
    (np.ndarray, _note_array),
)


class _HooksNote:
    """The hooks on one module. Ours come and go meanwhile, and are left as they are."""

    def __init__(self, module: nn.Module) -> None:
        own = vars(module)
        self._hooks = {name: own[name] for name in private.HOOK_DICTIONARIES if name in own}
        self._before = {name: dict(hooks) for name, hooks in self._hooks.items()}

    @property
    def dictionaries(self) -> Iterable[dict[int, Any]]:
        """The dictionaries that hold them."""
        return self._hooks.values()

    def put_back(self) -> None:
        """Put back the hooks of others."""
        if any(hooks != self._before[name] for name, hooks in self._hooks.items()):
            former, ours = _numbers_of_ours(self._before), _numbers_of_ours(self._hooks)
            for name, hooks in self._hooks.items():
                kept = {key: hook for key, hook in self._before[name].items() if key not in former}
                kept |= {key: hook for key, hook in hooks.items() if key in ours}
                hooks.clear()
                hooks.update(kept)


def _numbers_of_ours(hooks: dict[str, Any]) -> set[int]:
    named = set(private.FORWARD_HOOKS) & hooks.keys()
    return {key for name in named for key, hook in hooks[name].items() if is_machinery(hook)}


class _TensorNote:
    """The memory and the values of one tensor."""

    def __init__(self, tensor: Tensor, *, with_values: bool) -> None:
        self.tensor = tensor
        self._data = tensor.data
        self._requires_grad = tensor.requires_grad
        self._values = tensor.detach().clone() if with_values else None
        self._version = version_of(tensor)
        self._put_back_version = private.restoring_version(tensor)
        # Whether passes write to it without being counted; None while that is unknown.
        self._is_written_unseen: bool | None = None

    def put_back(self, *, thorough: bool) -> bool:
        """Put back memory and values; say whether that could be done."""
        tensor, is_counted = self.tensor, version_of(self.tensor) != self._version
        if not tensor.is_inference():
            # `net.to(device)` swaps the memory under a parameter.
            tensor.data = self._data
        if tensor.is_leaf and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        if self._values is None:
            return not is_counted
        if is_counted or thorough or not isinstance(tensor, nn.Parameter) or self._is_unseen():
            self._write(self._values)
        if is_counted:
            # A graph that holds the tensor is as good as before.
            self._put_back_version()
        return True

    def _is_unseen(self) -> bool:
        """Whether passes write to a parameter uncounted: the later ones do as the first did."""
        if self._is_written_unseen is None:
            assert self._values is not None
            self._is_written_unseen = not same_bits(self._data, self._values)
        return self._is_written_unseen

    def _write(self, values: Tensor) -> None:
        # Nobody can write to a tensor that has one number at several places.
        if not _is_expanded(self._data):
            with torch.no_grad(), torch.inference_mode(self._data.is_inference()):
                self._data.copy_(values)


def _is_expanded(tensor: Tensor) -> bool:
    shape = zip(tensor.shape, tensor.stride(), strict=True) if is_dense(tensor) else ()
    return any(size > 1 and step == 0 for size, step in shape)


class _OpaqueNote:
    """An object that can't be seen into."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._position = _position(found.value)

    @property
    def name(self) -> str:
        """The way to it, and its type."""
        kind = type(self._found.value)
        package = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return f"{self._found.name} ({package}{kind.__qualname__})"

    @property
    def may_have_changed(self) -> bool:
        """Whether nothing shows that it is as it was."""
        return bool(_position(self._found.value) != self._position)


def _is_opaque(value: Any) -> bool:
    """Whether passes may change an object of which nothing can be seen."""
    kind: Any = type(value)
    if issubclass(kind, io.IOBase):
        return True
    if is_machinery(value):
        return hasattr(kind, "__next__") or hasattr(kind, "qsize")
    seen_into = (*_CONTAINERS, *_GENERATORS, Tensor, np.ndarray)
    if issubclass(kind, seen_into) or _attributes(value) is not None or _slots(kind):
        return False
    package = kind.__module__.partition(".")[0]
    is_known = package in sys.stdlib_module_names or package in ("torch", "numpy")
    return hasattr(kind, "__next__") or not is_known


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
        Note the values of no other tensors.

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
        self._hooks = [_HooksNote(module) for module in modules]
        hooks = {id(one) for note in self._hooks for one in note.dictionaries}
        own = [one for one in values if id(one) not in hooks]
        self._notes = [note for one in own for note in _notes_of(one)]
        self._opaque = [_OpaqueNote(one) for one in found.values() if _is_opaque(one.value)]
        buffers = {id(one) for module in modules for one in module.buffers()}
        tensors = [one for one in values if issubclass(type(one), Tensor)]
        parameters = [one for one in tensors if isinstance(one, nn.Parameter)]
        if only_buffers:
            tensors = [one for one in tensors if id(one) in buffers]
        self.leaves = [*parameters, *(one for one in tensors if one.is_leaf and one.requires_grad)]
        known = buffers | _small(tensors, buffers)
        self._tensors = [_TensorNote(one, with_values=id(one) in known) for one in tensors]

    def put_back(self, *, thorough: bool = False) -> None:
        """Put back everything that has changed.

        Parameters
        ----------
        thorough : bool, default False
            Write the values of all parameters, not only of those that count as written, or to
            which the first pass has written without being counted.
        """
        for note in self._hooks:
            note.put_back()
        for put_back in self._notes:
            put_back()
        lost = [one for one in self._tensors if not one.put_back(thorough=thorough)]
        self._lost = [self._found[id(one.tensor)].name for one in lost]
        if self._random is not None:
            restore_random(self._random)

    def warn_of_traces(self) -> None:
        """Warn of what may have changed and can't be put back."""
        opaque = [note.name for note in self._opaque if note.may_have_changed]
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
    fsdp = fsdp_modules(net) if is_sharded(net) else []
    for module in fsdp:
        private_distributed.take_whole_parameters(module)
    # State in which FSDP notes passes, and flat parameters, to which FSDP1 moves gradients.
    notes = [note for module in fsdp for note in private_distributed.fsdp_notes(module)]
    end_passes = private_distributed.ending(notes)
    flat = [one for module in fsdp for one in private_distributed.flat_parameters(module)]
    roots = (net, *others, *map(vars, notes))
    state = NetState(reached(roots), keep_random=keep_random, only_buffers=is_sharded(net))
    with without_hooks_on_all_modules(), _gradients_aside([*flat, *state.leaves]):
        try:
            if not keep_hooks:
                of_torch = ("torch.distributed",) if is_sharded(net) else ()
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
