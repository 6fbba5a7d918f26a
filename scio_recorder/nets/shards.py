"""Finding the layers of a tensor-parallel network that return a shard, by following one pass.

NOTE [How it is seen that a tensor is a shard]

The placements of a ``DTensor`` say what it is a shard of. Its ``to_local()`` gives a plain tensor,
which says nothing. So these calls are observed during a pass, and each operation on their results
is followed. An operation on elements keeps the sharded dimension, and so does the product of a
whole matrix and one whose columns are sharded: libraries take the local part of a weight, and not
of an output. The result of a collective operation is not a shard. For all other results the sharded
dimension is unknown. Tensors are identified by their place in memory, since autograd replaces views
by others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scio_recorder.errors import ShardWarning, warn
from scio_recorder.layer import DepthIdx, Shard
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import hooked
from scio_recorder.nets.state.sharded import dtensor_type, is_dtensor, is_sharded
from scio_recorder.tensors import private
from scio_recorder.tensors.structures import tensors

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")
# Operations, besides those on elements, that return all of a tensor.
_SAME = ("clone", "detach", "alias", "_to_copy", "copy_", "native_dropout")
_VIEWS = ("view", "_unsafe_view")
# Their last two arguments are matrices.
_PRODUCTS = ("mm", "addmm")
# The key of a tensor in a storage: where it begins, its lengths, and its strides.
_Place = tuple[int, tuple[int, ...], tuple[int, ...]]
_UNKNOWN = Shard(None, None, 0)


class Following:
    """Follows shards through one pass of a network, on one thread.

    Parameters
    ----------
    net : torch.nn.Module
        The network.

    Attributes
    ----------
    returned : dict
        The output of each module, call by call: a shard, counted from the last dimension, or None.
    num_sharing : int
        The number of processes over which a ``DTensor`` was spread: all see the same samples.

    Examples
    --------
    >>> net = nn.ReLU()
    >>> following = Following(net)
    >>> with following.followed():
    ...     _ = net(torch.ones(1))
    >>> following.returned[net]
    [None]
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self.returned: dict[nn.Module, list[Shard | None]] = {}
        self.num_sharing = 1
        self._known: dict[int, dict[_Place, Shard]] = {}
        # Results that wait for a collective are identified by id, so they must stay alive
        # meanwhile.
        self._waiting: list[Tensor] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the operations of this thread inside the block."""
        kind: Any = next(iter(dtensor_type()), None)
        with contextlib.ExitStack() as stack:
            if kind is not None:
                given = kind.to_local
                stack.callback(setattr, kind, "to_local", given)
                kind.to_local = lambda tensor, **how: self._taken(tensor, given(tensor, **how))
            stack.enter_context(hooked(self._net, after=self._end))
            stack.enter_context(private.operations_made_by(self._operate))
            yield

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        shards = [self._find(tensor) for tensor in tensors(output)]
        found = [shard for shard in shards if shard is not None]
        known = found[0] if isinstance(output, Tensor) and found else None
        self.returned.setdefault(module, []).append(known or (_UNKNOWN if found else None))

    def _taken(self, whole: Any, local: Tensor) -> Tensor:
        self._count([whole])
        self._note(local, _shard_of(whole))
        if private.memory_of(local) < 0:
            self._waiting.append(local)
        return local

    def _operate(self, operation: Any, args: Any, kwargs: Any) -> Any:
        result = operation(*args, **kwargs)
        given = list(tensors((args, kwargs)))
        if any(map(is_dtensor, given)):
            self._count(given)
            return result
        name = operation.overloadpacket.__name__
        # The target of a copy says nothing.
        found = [shard for shard in map(self._find, given[name == "copy_" :]) if shard is not None]
        is_collective = operation.namespace in _COLLECTIVES and "wait" not in name
        if is_collective or name.startswith("new_") or name.endswith("_like"):
            found = []
        if name in _PRODUCTS and self._find(args[-2]) is not None:
            # The summed dimension is sharded, or there are shards of rows.
            found = [_UNKNOWN]
        for tensor in tensors(result):
            self._note(tensor, _shard_of_result(operation, args, found, tensor) if found else None)
        return result

    def _count(self, given: list[Any]) -> None:
        sizes = (tensor.device_mesh.size() for tensor in given if is_dtensor(tensor))
        self.num_sharing = max(self.num_sharing, *sizes)

    def _find(self, tensor: Tensor) -> Shard | None:
        if is_dtensor(tensor):
            return None
        places = self._known.get(private.memory_of(tensor))
        return places.get(_place(tensor), _UNKNOWN) if places else None

    def _note(self, tensor: Tensor, shard: Shard | None) -> None:
        memory = private.memory_of(tensor)
        if shard is None:
            # Earlier knowledge about this memory was about a tensor that is gone.
            self._known.pop(memory, None)
        else:
            self._known.setdefault(memory, {})[_place(tensor)] = shard


def _place(tensor: Tensor) -> _Place:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0, (), ()
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def _shard_of(tensor: Any) -> Shard | None:
    """Return the local shard of a ``DTensor``; None if all of it is local."""
    mesh = tensor.device_mesh
    spread = [at for at, how in enumerate(tensor.placements) if not how.is_replicate()]
    spread = [at for at in spread if mesh.size(at) > 1]
    if not spread:
        return None
    at, how = spread[0], tensor.placements[spread[0]]
    if len(spread) > 1 or not how.is_shard() or tensor.shape[how.dim] % mesh.size(at):
        return _UNKNOWN
    return Shard(how.dim % tensor.ndim - tensor.ndim, mesh.get_local_rank(at), mesh.size(at))


def _shard_of_result(operation: Any, args: Any, found: list[Shard], result: Tensor) -> Shard:
    """Return the shard that a result is, from the shards among the arguments."""
    shard, name = found[0], operation.overloadpacket.__name__
    if len(set(found)) > 1 or shard.dim is None:
        return _UNKNOWN
    if name == "t" and result.ndim == 2:
        return dataclasses.replace(shard, dim=-3 - shard.dim)
    return shard if _keeps_dimension(operation, args, -shard.dim, result) else _UNKNOWN


def _keeps_dimension(operation: Any, args: Any, at: int, result: Tensor) -> bool:
    """Whether a result is sharded where its argument is, in a dimension counted from the last."""
    name = operation.overloadpacket.__name__
    if name in _SAME:
        return bool(result.shape == args[0].shape)
    if name in _VIEWS:
        return bool(result.shape[-at:] == args[0].shape[-at:])
    if name in _PRODUCTS:
        return at == 1
    if name == "native_layer_norm":
        return at > len(args[1]) and result.shape == args[0].shape
    # Lengths are matched from the last dimension backwards.
    return torch.Tag.pointwise in operation.tags and at <= result.ndim


class Shards:
    """Marks the layers of an architecture that return shards, in the first pass that has some.

    Parameters
    ----------
    architecture : Architecture
        The labelled network.
    recording : tuple of (int, int)
        The layers that warnings name.
    """

    def __init__(self, architecture: Architecture, recording: tuple[DepthIdx, ...]) -> None:
        self._architecture = architecture
        self._net = architecture[0, 1].module
        self._recording = recording
        self._checked_at = -1
        self._is_known = False
        # Whether any recorded layer is marked.
        self.are_recorded = False
        # Weak: an object that is gone gives its id to a later one.
        self._warned: WeakValueDictionary[int, object] = WeakValueDictionary()

    @property
    def can_stop(self) -> bool:
        """Whether a pass may be stopped: FSDP waits for the end of a pass that it has begun."""
        return self._net is None or not is_sharded(self._net)

    @property
    def are_to_be_found(self) -> bool:
        """Whether the next pass should be followed: its network may be spread over processes."""
        if self._is_known or not dtensor_type() or self._checked_at == RemovableHandle.next_id:
            return False
        self._checked_at = RemovableHandle.next_id
        return self._net is not None and any(map(is_dtensor, self._net.parameters()))

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Follow the pass that runs in the block."""
        following = Following(self._net or nn.Identity())
        with following.followed():
            yield
        self._is_known = True
        mark(self._architecture, following)
        rows = (self._architecture[label] for label in self._recording)
        self.are_recorded = any(row.shard is not None for row in rows)

    def warn(self, occasion: object = None) -> None:
        """Warn of the recorded layers that are shards, once for each occasion."""
        occasion = self if occasion is None else occasion
        if id(occasion) in self._warned:
            return
        self._warned[id(occasion)] = occasion
        layers: dict[Shard, list[str]] = {}
        for layer in map(self._architecture.__getitem__, self._recording):
            if layer.shard is not None:
                layers.setdefault(layer.shard, []).append(str(layer))
        for shard, names in layers.items():
            warn(f"{', '.join(names)}: the record is {shard}", ShardWarning)


def mark(architecture: Architecture, following: Following) -> None:
    """Mark the layers of an architecture that returned shards in a pass that was followed."""
    marks: dict[DepthIdx, Shard | None] = {}
    for module, shards in following.returned.items():
        for label, shard in zip(architecture.calls(module), shards, strict=False):
            if shard is not None and shard.dim is not None:
                shapes = architecture[label].output_shape
                shard = dataclasses.replace(shard, dim=shard.dim % len(shapes))
            marks[label] = shard
    architecture.mark(marks, following.num_sharing)
