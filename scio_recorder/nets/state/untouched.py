"""Running a network, or a copy, without a trace: all state that it reaches is put back.

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
import copy
import inspect
import io
import itertools
import operator
import random
import sys
import threading
import types
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from operator import attrgetter, is_, itemgetter, setitem
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.random import RandomState
from torch import Tensor, nn

from scio_recorder.errors import warn
from scio_recorder.interpreter import cached_by_class
from scio_recorder.layer import few
from scio_recorder.nets.hookable import LIBRARIES, hooked, own_hooks
from scio_recorder.nets.sharded import is_sharded
from scio_recorder.nets.state.moment import (
    joined,
    random_state,
    restore_random,
    same_samples,
    sampled,
)
from scio_recorder.tensors import private
from scio_recorder.tensors.copies import is_out_of_memory
from scio_recorder.tensors.properties import (
    Version,
    has_memory,
    is_dense,
    is_plain,
    regain_memory,
    version_of,
)
from scio_recorder.tensors.structures import COLLECTIONS, MAPPINGS, map_tensors, refill, slots

# Objects of these packages are not a network's own, and may belong to other threads.
_MACHINERY = (
    *("scio_recorder", "torch._", "torch.distributed", "torch.utils.tensorboard"),
    *("torch.utils.data", "triton", "pybind11_builtins", "tokenizers", "lightning"),
    *("pytorch_lightning", "wandb", "tensorboard", "mlflow", "threading", "_thread", "queue"),
    *("_queue", "logging", "asyncio", "multiprocessing", "concurrent", "socket", "subprocess"),
    *("ctypes", "selectors"),
)
_T = TypeVar("_T")
_OURS = "scio_recorder."
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
# A generator in between may have gone round in a loop.
_AT_AN_END = (inspect.GEN_CREATED, inspect.GEN_CLOSED)
_EMPTY = object()
# Names that say nothing to a user.
_UNNAMED = {"_modules", "_parameters", "_buffers", "cell_contents", ""}
_SHOWN = 5
# Up to this many bytes of tensors of one kind are cloned, so that no pass leaves a trace in them.
CLONED_BYTES = 1 << 30


class Reached(NamedTuple):
    """An object that was reached, and the way to it, as a user would write it."""

    value: Any
    path: str


def reached(roots: Iterable[Any]) -> dict[int, Reached]:
    """Return everything that a network can write to, by ``id``.

    Parameters
    ----------
    roots : iterable
        The network, and what else it receives.

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
    everything: dict[int, Reached] = {}
    waiting = [Reached(root, "net") for root in roots]
    hooks = private.HOOK_DICTIONARIES
    while waiting:
        value, path = current = waiting.pop()
        if id(value) in everything:
            continue
        everything[id(value)] = current
        kind = _kind(type(value))
        if kind.has_attributes and type(value.__dict__) is dict:
            waiting.append(Reached(value.__dict__, path))
        for parts_of in kind.parts:
            for name, part in parts_of(value):
                is_name = type(name) in _NAMES
                if not is_name and not _is_value(type(name)):
                    waiting.append(Reached(name, path))
                # Modules have very many empty dictionaries of hooks, which are noted apart.
                if not _is_value(type(part)) and (name not in hooks or part):
                    is_shown = is_name and name not in _UNNAMED
                    waiting.append(Reached(part, f"{path}.{name}" if is_shown else path))
    return everything


@cached_by_class
def _is_value(kind: type) -> bool:
    return issubclass(kind, _VALUES)


# -- what is known of all objects of a class -------------------------------------------------------


def _of_function(value: Any) -> Iterable[tuple[Any, Any]]:
    # Not its `__module__`, which decorators make that of another function.
    if str(value.__globals__.get("__name__")).startswith(_MACHINERY):
        return ()
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    return [*cells, ("", value.__defaults__), ("", value.__kwdefaults__)]


def _of_method(value: Any) -> Iterable[tuple[Any, Any]]:
    # A method of a class is code, but any function can be made one.
    function = getattr(value, "__func__", None)
    name = getattr(value, "__name__", "")  # a partial, made a method, has none
    is_own = getattr(type(value.__self__), name, None) is function
    return [("", value.__self__), ("", None if is_own else function)]


def _of_script(value: Any) -> Iterable[tuple[Any, Any]]:
    # All else is out of sight.
    return [*value.named_parameters(), *value.named_buffers()]


def _of_recorder(value: Any) -> Iterable[tuple[Any, Any]]:
    # Of its own it has only records.
    return [("net", value.net)]


def _member(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, ValueError):
        return _EMPTY


def _set_items_of(
    base: Any, values: list[Any], items: list[list[Any]], mapped: list[list[Any]]
) -> None:
    """Give containers of one kind their items again; mostly all have them, which is seen fast."""
    is_mapping, joined_up = base in MAPPINGS, itertools.chain.from_iterable
    now, before = joined_up(map(base.__iter__, values)), joined_up(items)
    if is_mapping:
        now = itertools.chain(now, joined_up(map(base.values, values)))
        before = itertools.chain(before, joined_up(mapped))
    are_as_long = [*map(base.__len__, values)] == [*map(len, items)]
    if not (are_as_long and all(map(is_, now, before))):
        for value, keys, mapped_to in zip(values, items, mapped, strict=True):
            parts = [*base.__iter__(value), *(base.values(value) if is_mapping else ())]
            if [*map(id, parts)] != [*map(id, (*keys, *mapped_to))]:
                refill(value, base, zip(keys, mapped_to, strict=True) if is_mapping else keys)


def _set_member(value: Any, name: str, member: Any) -> None:
    if _member(value, name) is member:
        return
    if member is _EMPTY:
        object.__delattr__(value, name)
    else:
        object.__setattr__(value, name, member)


def _set_array(value: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    if value.shape != before.shape and value.size == before.size:
        # NumPy 2.5 warns, and offers nothing else that reshapes this array itself.
        with warnings.catch_warnings(action="ignore"):
            value.shape = before.shape
    if value.flags.writeable and value.shape == before.shape:
        np.copyto(value, before)


def _set_view(value: memoryview, before: bytes) -> None:
    if not value.readonly and value.c_contiguous:
        value.cast("B")[:] = before


_PartsOf: TypeAlias = Callable[[Any], Iterable[tuple[Any, Any]]]
_PARTS: tuple[tuple[Any, _PartsOf], ...] = (
    (MAPPINGS, dict.items),
    (types.MappingProxyType, types.MappingProxyType.items),
    ((*COLLECTIONS, tuple, frozenset), enumerate),
    (np.ndarray, lambda value: enumerate(value.flat) if value.dtype.hasobject else ()),
    (types.FunctionType, _of_function),
    ((types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType), _of_method),
    (partial, lambda value: [("", value.func), ("", value.args), ("", value.keywords)]),
    (weakref.ref, lambda value: [("", value())]),
    (np.random.Generator, lambda value: [("bit_generator", value.bit_generator)]),
)
# What has a state of its own: how it is read, and put back.
_STATES: tuple[tuple[Any, Any, Any], ...] = (
    (
        (bytearray, array),
        itemgetter(slice(None)),
        lambda value, was: setitem(value, slice(None), was),
    ),
    (memoryview, bytes, _set_view),
    (BaseException, attrgetter("args"), lambda value, was: setattr(value, "args", was)),
    (np.ndarray, np.ndarray.copy, _set_array),
    (torch.UntypedStorage, torch.UntypedStorage.clone, torch.UntypedStorage.copy_),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (RandomState, partial(RandomState.get_state, legacy=False), RandomState.set_state),
    (np.random.BitGenerator, attrgetter("state"), lambda value, was: setattr(value, "state", was)),
)
# A recorder in a network records what runs on the side.
_RECORDS: Any = (
    lambda recorder: (recorder.capture, recorder.capture.latest),
    lambda recorder, was: setattr(was[0], "latest", was[1]),
)


class _Kind(NamedTuple):
    """What is known of all objects of a class."""

    parts: Sequence[_PartsOf] = ()
    has_attributes: bool = False
    # The names of slots of a class that is written in Python, and the content of a cell.
    members: Sequence[str] = ()
    # The built-in container that the class is, or is derived from.
    base: Any = None
    states: Sequence[tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = ()
    is_opaque: bool = False


@cached_by_class
def _kind(kind: type) -> _Kind:
    members = slots(kind) or (("cell_contents",) if kind is types.CellType else ())
    is_module = issubclass(kind, nn.Module)
    if is_module and any(str(base.__module__).startswith(_RECORDER) for base in kind.__mro__):
        return _Kind([_of_recorder], states=[_RECORDS])
    if issubclass(kind, torch.jit.ScriptModule):
        return _Kind([_of_script])
    # The system's own generator has no state.
    known = () if issubclass(kind, random.SystemRandom) else _STATES
    states = [(read, put_back) for base, read, put_back in known if issubclass(kind, base)]
    is_file, is_local = issubclass(kind, io.IOBase), kind is threading.local
    if not (is_module or is_local) and str(kind.__module__).startswith(_MACHINERY):
        is_moving = hasattr(kind, "__next__") or hasattr(kind, "qsize")
        return _Kind(states=states, is_opaque=is_moving or is_file)
    parts = [parts_of for base, parts_of in _PARTS if issubclass(kind, base)]
    base = next((base for base in (*MAPPINGS, *COLLECTIONS) if issubclass(kind, base)), None)
    if members:
        parts.append(lambda value: [(name, _member(value, name)) for name in members])
    # Each thread has its own attributes of a local.
    has_attributes = is_local or bool(kind.__dictoffset__)
    is_seen = parts or has_attributes or states or issubclass(kind, Tensor)
    is_opaque = is_file or (not is_seen and _may_change(kind))
    return _Kind(parts, has_attributes, members, base, states, is_opaque)


def _may_change(kind: type) -> bool:
    """Whether passes may change objects of a class of which nothing can be seen."""
    package = kind.__module__.partition(".")[0]
    is_known = package in sys.stdlib_module_names or package in ("torch", "numpy")
    return hasattr(kind, "__next__") or not is_known


def _is_ours(hook: Any) -> bool:
    """Whether a hook is the recorder's: these come and go meanwhile."""
    owner = getattr(hook.func if isinstance(hook, partial) else hook, "__self__", hook)
    is_function = isinstance(owner, types.FunctionType)
    return str(owner.__module__ if is_function else type(owner).__module__).startswith(_OURS)


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


def _with_type(reached: Reached) -> str:
    kind = type(reached.value)
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{reached.path} ({package}{kind.__qualname__})"


class _TensorNote(NamedTuple):
    """A tensor, its memory, and the values there, None if they take too much memory."""

    tensor: Tensor
    data: Tensor
    # Without repetitions: nobody can write to a tensor that has one number at several places.
    written: Tensor
    values: Tensor | None
    requires_grad: bool
    # -1 if it was made in inference mode.
    version: Version
    # Whether its memory was there; that of an offloaded weight may be gone between passes.
    is_there: bool


def _noted(tensor: Tensor, *, is_weight: bool, with_values: bool) -> _TensorNote:
    written = data = tensor.data
    if (is_weight or is_dense(data)) and 0 in data.stride():
        written = data[tuple(slice(None if step else 1) for step in data.stride())]
    is_there = has_memory(written)
    values = written.detach().clone() if with_values and is_there else None
    version = tensor._version if is_weight else version_of(tensor)
    return _TensorNote(tensor, data, written, values, tensor.requires_grad, version, is_there)


def _marks_of(notes: Sequence[_TensorNote]) -> list[tuple[int, int, bool]]:
    """Return what differs once tensors are written to, moved, frozen or thawed."""
    return [
        (note.tensor._version, note.tensor.data_ptr(), note.tensor.requires_grad) for note in notes
    ]


def are_large(tensors: Iterable[Tensor]) -> bool:
    """Whether cloning some tensors would take too much memory."""
    strided = [tensor.nbytes for tensor in tensors if tensor.layout is torch.strided]
    return sum(strided) > CLONED_BYTES


# -- the state of a network ------------------------------------------------------------------------


class NetState:
    """The state of a network at one moment, to which it can be put back again and again.

    Parameters
    ----------
    everything : dict
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
        self,
        everything: dict[int, Reached],
        *,
        keep_random: bool = False,
        only_buffers: bool = False,
    ) -> None:
        self._everything = everything
        self._lost: list[str] = []
        values = [value for value, _ in everything.values()]
        modules = [value for value in values if issubclass(type(value), nn.Module)]
        attributes, names = [*map(vars, modules)], private.HOOK_DICTIONARIES
        self._hooks = [known[name] for known in attributes for name in names if name in known]
        self._hooks_before = [*map(dict, self._hooks)]
        noted_apart = {*map(id, self._hooks)}
        # By their kind: those that there are, and their items, or their keys and values.
        containers: dict[Any, tuple[list[Any], list[list[Any]], list[list[Any]]]] = {}
        # These come last, since writing to tensors changes versions.
        self._restore: list[Callable[[], Any]] = []
        if not keep_random:
            self._restore.append(partial(restore_random, random_state()))
        self._opaque: list[tuple[Reached, Any]] = []
        for reachable in everything.values():
            value = reachable.value
            kind = _kind(type(value))
            if kind.base is not None and id(value) not in noted_apart:
                values_of, items_of, mapped_of = containers.setdefault(kind.base, ([], [], []))
                values_of.append(value)
                items_of.append([*kind.base.__iter__(value)])
                mapped_of.append([*kind.base.values(value)] if kind.base in MAPPINGS else [])
            for name in kind.members:
                self._restore.append(partial(_set_member, value, name, _member(value, name)))
            for read, put_back in kind.states:
                self._restore.append(partial(put_back, value, read(value)))
            if kind.is_opaque:
                self._opaque.append((reachable, _position(value)))
        self._restore += [
            partial(_set_items_of, base, *notes) for base, notes in containers.items()
        ]
        self._note_tensors(values, modules, only_buffers)

    def _note_tensors(self, values: list[Any], modules: list[Any], only_buffers: bool) -> None:
        tensors = [value for value in values if issubclass(type(value), Tensor)]
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        # FSDP1 keeps views beside its parameters, which can't be asked after a backward pass.
        asked = [] if only_buffers else tensors
        leaves = parameters + [leaf for leaf in asked if leaf.is_leaf and leaf.requires_grad]
        self.leaves = [*{id(leaf): leaf for leaf in leaves}.values()]
        self._restore.append(private.restoring_hooks([] if only_buffers else self.leaves))
        buffers = {id(buffer) for module in modules for buffer in module.buffers(recurse=False)}
        if only_buffers:
            tensors = [tensor for tensor in tensors if id(tensor) in buffers]
        known = buffers | {*map(id, parameters)}
        others = [tensor for tensor in tensors if id(tensor) not in known]
        large = [tensor for kind in (parameters, others) if are_large(kind) for tensor in kind]
        too_large = {*map(id, large)}
        self._weights: list[_TensorNote] = []
        self._tensors: list[_TensorNote] = []
        for tensor in tensors:
            is_counted = type(tensor) is nn.Parameter and not tensor.is_inference()
            is_weight, with_values = is_counted and is_plain(tensor), id(tensor) not in too_large
            note = _noted(tensor, is_weight=is_weight, with_values=with_values)
            (self._weights if is_weight else self._tensors).append(note)
        # A graph that holds a tensor is then as good as before.
        kept = [tensor for tensor in tensors if id(tensor) not in too_large]
        self._restore.append(private.restoring_versions(kept))
        # Passes write to few weights, and most passes to none.
        self._marks = _marks_of(self._weights)

    def put_back(self, *, thorough: bool = False, doubts: list[Tensor] | None = None) -> None:
        """Put back everything that has changed.

        Parameters
        ----------
        thorough : bool, default False
            Write the values of all parameters, also if none counts as written, and a few of the
            values of each are as before.
        doubts : list of Tensor, optional
            Receives flags, on their devices, whether a few of the values of parameters that don't
            count as written have changed. These parameters stay as they are. By default the devices
            are waited for, and parameters are put back.
        """
        if self._hooks != self._hooks_before:
            self._put_back_hooks()
        is_same = not thorough and self._marks == _marks_of(self._weights)
        if is_same and doubts is None:
            is_same = same_samples(self._samples[1], joined(self._samples[0]))
        elif is_same and doubts is not None:
            now, before = joined(self._samples[0]), self._samples[1]
            bits = (
                (now[kind].view(torch.uint8), x.view(torch.uint8)) for kind, x in before.items()
            )
            doubts += [(mine != others).any() for mine, others in bits]
        self._put_back_tensors([*self._tensors, *(() if is_same else self._weights)])
        for restore in self._restore:
            restore()

    @cached_property
    def _samples(self) -> tuple[dict[Any, list[Tensor]], dict[Any, Tensor]]:
        """Views of a few numbers of each weight, and the numbers that were noted there."""
        noted = [(note.data, note.values) for note in self._weights if note.values is not None]
        views, values = sampled(data for data, _ in noted), sampled(values for _, values in noted)
        return views, joined(values)

    def _put_back_hooks(self) -> None:
        pairs = zip(self._hooks, self._hooks_before, strict=True)
        changed = [(hooks, before) for hooks, before in pairs if hooks != before]
        # Other dictionaries say about hooks of the same numbers how to call them.
        ours = {
            number
            for pair in changed
            for hooks in pair
            for number, hook in hooks.items()
            if _is_ours(hook)
        }
        for hooks, before in changed:
            kept = {number: hook for number, hook in before.items() if number not in ours}
            kept |= {number: hook for number, hook in hooks.items() if number in ours}
            hooks.clear()
            hooks.update(kept)

    @torch.no_grad()
    def _put_back_tensors(self, notes: list[_TensorNote]) -> None:
        self._lost = []
        for tensor, data, written, values, requires_grad, version, is_there in notes:
            is_inference = version == -1
            if values is not None:
                regain_memory(written)
                with torch.inference_mode(is_inference):
                    written.copy_(values)
            elif is_there and version_of(tensor) != version:
                self._lost.append(self._everything[id(tensor)].path)
            if not is_inference:
                # `net.to(device)` swaps the memory under a parameter, and copying to a sparse
                # tensor that of its parts.
                tensor.data = data
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                tensor.requires_grad_(requires_grad)

    def warn_of_traces(self) -> None:
        """Warn of what may have changed and can't be put back."""
        opaque = [_with_type(item) for item, at in self._opaque if _position(item.value) != at]
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
    fsdp = private.fsdp_modules(net) if is_spread else []
    for module in fsdp:
        private.take_whole_parameters(module)
    # State in which FSDP notes passes, and flat parameters, to which FSDP1 moves gradients.
    notes = [private.fsdp_notes(module) for module in fsdp]
    endings = [*map(private.ending, notes)]
    flat = [flat for module in fsdp for flat in private.flat_parameters(module)]
    roots = (net, *others, *map(vars, itertools.chain(*notes)))
    state = NetState(reached(roots), keep_random=keep_random, only_buffers=is_spread)
    with without_hooks_on_all_modules(), _gradients_aside([*flat, *state.leaves]):
        try:
            if not keep_hooks:
                of_torch = ("torch.distributed",) if is_spread else ()
                for module, name, hooks in own_hooks(net, (*LIBRARIES, *of_torch)):
                    vars(module)[name] = hooks
            yield state
        finally:
            for end_passes in endings:
                end_passes()
            for module in fsdp:
                private.take_whole_parameters(module)
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


class _OutsideBlocks:
    """Stands for a hook on all modules, and runs it only in threads without such a block."""

    lock = threading.RLock()
    threads: ClassVar[list[int]] = []

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if threading.get_ident() in self.threads else self.hook(*args, **kwargs)


@contextlib.contextmanager
def without_hooks_on_all_modules() -> Iterator[None]:
    """Let hooks on all modules of the process do nothing for this thread inside the block."""
    kind = _OutsideBlocks
    with kind.lock:
        kind.threads.append(threading.get_ident())
        for hooks in private.hooks_on_all_modules():
            for key, hook in [*hooks.items()]:
                hooks[key] = hook if isinstance(hook, kind) else kind(hook)
    try:
        yield
    finally:
        with kind.lock:
            kind.threads.remove(threading.get_ident())
            for hooks in private.hooks_on_all_modules() if not kind.threads else ():
                for key, hook in [*hooks.items()]:
                    hooks[key] = hook.hook if isinstance(hook, kind) else hook


# -- copies ---------------------------------------------------------------------------------------

# Warning filters are process-wide: two threads would restore each other's.
_QUIET = threading.RLock()


def copy_net(net: nn.Module, *, keep_hooks: bool = False) -> nn.Module:
    """Return a copy of a net that can be run without changing the net.

    Tensors are cloned, except for parameters that together are larger than 1 GiB, which share their
    memory.

    Parameters
    ----------
    net : torch.nn.Module
        The net.
    keep_hooks : bool
        Whether the copy has copies of the user's hooks, or only of the network's own.

    Raises
    ------
    NotSeparateError
        ``deepcopy`` refuses it, for example tensors inside a graph, or returns another one; or
        tensors in it lack their memory.

    Examples
    --------
    >>> net = nn.Linear(2, 1)
    >>> twin = copy_net(net)
    >>> twin.weight is net.weight, bool((twin.weight == net.weight).all())
    (False, True)
    """
    if any(issubclass(type(x), Tensor) and not has_memory(x) for x, _ in reached([net]).values()):
        raise NotSeparateError
    kept = [] if keep_hooks else own_hooks(net)
    memo = {id(vars(module)[name]): hooks for module, name, hooks in kept} | _shared(net)
    try:
        # Python warns of copies of iterators that the network holds.
        with torch.no_grad(), quiet():
            twin = copy.deepcopy(net, memo)
            for *_, hooks in kept:
                # Methods of the net's modules become methods of the copy's.
                hooks.update((key, copy.deepcopy(hook, memo)) for key, hook in hooks.items())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise NotSeparateError from error
    if _kinds_of(twin) != _kinds_of(net):
        raise NotSeparateError
    return twin


def _kinds_of(net: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(part)) for name, part in net.named_modules(remove_duplicate=False)]


def clone(tensor: Tensor) -> Tensor:
    """Return a detached copy that requires a gradient if the tensor is a leaf that does.

    A tensor without its memory is left as it is.
    """
    if not has_memory(tensor):
        return tensor
    clone = tensor.detach().clone()
    return clone.requires_grad_(tensor.requires_grad) if tensor.is_leaf else clone


def copy_inputs(inputs: Any) -> Any:
    """Return a copy of a net's inputs.

    Parameters
    ----------
    inputs : Any
        Any structure. Only the visible part of a tensor is copied: it may be a slice of a dataset.

    Returns
    -------
    Any
        The same structure with other, detached tensors.

    Examples
    --------
    >>> x = torch.ones(2)
    >>> copy_inputs({"x": x})["x"] is x
    False
    """
    return map_tensors(clone, inputs)


def copied_bytes(net: nn.Module) -> int:
    """Return the memory that a copy of a network takes."""
    weights = [] if are_large(net.parameters()) else [*net.parameters()]
    return sum(tensor.nbytes for tensor in (*weights, *net.buffers()))


def _free(copies: list[Tensor]) -> None:
    """Free the memory of copies: if they lead to themselves, they are collected only later."""
    for tensor in copies:
        if is_plain(tensor) and not tensor.is_inference():
            tensor.data = tensor.new_empty(0)


class NotSeparateError(BaseException):
    """There is no copy of a net that runs alone. No ``except Exception`` of a net may catch it."""


def _shared(net: nn.Module) -> dict[int, Any]:
    """Return what stands for parameters too large to be cloned, by the ``id`` of each."""
    if not are_large(net.parameters()):
        return {}
    return {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        for parameter in net.parameters()
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, and run compiled modules as if they were not.

    Compiling a copy takes long, and its result would be thrown away. What a network prints is seen:
    streams belong to the whole process.

    Examples
    --------
    >>> with quiet():
    ...     warnings.warn("not seen")
    """
    # If nothing was compiled, a stance would import the compiler.
    is_loaded = private.DYNAMO in sys.modules
    with (
        _QUIET,
        warnings.catch_warnings(action="ignore"),
        torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def separate_copy(net: nn.Module, *, keep_hooks: bool = False) -> Iterator[nn.Module]:
    """Yield a copy of a network that can be run in the block without a trace in the network.

    What both share ends as it was: a copy has the functions of the network, and so the variables of
    closures.

    Parameters
    ----------
    net : torch.nn.Module
        The network.
    keep_hooks : bool, default False
        Whether the copy has copies of the user's hooks, or only of the network's own.

    Raises
    ------
    NotSeparateError
        The network can't be copied, or the copy calls modules of the network itself.

    Examples
    --------
    >>> import weakref
    >>> net = nn.ReLU()
    >>> net.itself = weakref.ref(net)
    >>> with separate_copy(net):
    ...     pass
    Traceback (most recent call last):
    scio_recorder.nets.state.untouched.NotSeparateError
    """
    twin, of_net = copy_net(net, keep_hooks=keep_hooks), reached([net])
    of_twin = reached([twin])
    shared = {key: item for key, item in of_twin.items() if key in of_net}
    if are_large(net.parameters()):
        # The copy has their memory.
        shared |= {id(weight): of_net[id(weight)] for weight in net.parameters()}
    if any(issubclass(type(value), nn.Module) for value, _ in shared.values()):
        raise NotSeparateError
    thread = threading.get_ident()

    def refuse(*call: Any) -> None:
        # A global variable, which no walk follows, may lead back.
        if threading.get_ident() == thread:
            raise NotSeparateError

    state = NetState(shared, keep_random=True)
    try:
        with hooked(net, before=refuse), without_hooks_on_all_modules():
            yield twin
    finally:
        state.put_back(thorough=True)
        copies = [value for key, (value, _) in of_twin.items() if key not in shared]
        _free([value for value in copies if type(value) in (Tensor, nn.Parameter)])
    state.warn_of_traces()


def run_copy(
    net: nn.Module, run: Callable[[nn.Module], _T], *, keep_hooks: bool = False
) -> _T | None:
    """Let a function run a separate copy of a network; None if there is none.

    Parameters
    ----------
    net : torch.nn.Module
        The network, in which no trace is left.
    run : callable
        Takes the copy, which is gone afterwards.
    keep_hooks : bool, default False
        As for `separate_copy`.

    Examples
    --------
    >>> run_copy(nn.Linear(2, 1), lambda copy: copy(torch.ones(2)).shape)
    torch.Size([1])
    """
    with contextlib.suppress(NotSeparateError), separate_copy(net, keep_hooks=keep_hooks) as twin:
        return run(twin)
    return None
