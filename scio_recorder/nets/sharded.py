"""Networks that are spread over processes: passes in step, without a trace, and layers of shards.

NOTE [A sharded network runs itself]

A sharded network can't be copied: its parameters come and go with each pass, by hooks that
communicate with the other processes. So it runs itself, with these hooks and without the user's,
and all processes of its mesh take part. FSDP puts whole parameters in place for the pass and may
leave them there. They are removed before the pass and after it, so that modules hold the same
tensors both times, which can be restored by reference. No value of a parameter changes.

State that FSDP sets up in its first pass, such as the root module, is restored as well, since more
of the network may be sharded later.

NOTE [Passes in step]

Processes that share the parameters, or the work, of a network must all run each of its passes. If
one leaves out a pass, the others wait, or go on with tensors of another pass. So leaving out a pass
is either decided by all of them, or not done.

NOTE [How it is seen that a tensor is a shard]

The placements of a ``DTensor`` say what it is a shard of. Its ``to_local()`` gives a plain tensor,
which says nothing. So these calls are observed during a pass, and each operation on their results
is followed. An operation on elements keeps the sharded dimension, and so does the product of a
whole matrix and one whose columns are sharded: libraries take the local part of a weight, and not
of an output. The result of a collective operation is not a shard. For all other results the sharded
dimension is unknown. Tensors are identified by their layout in memory, since autograd replaces
views by others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scio_recorder.errors import ShardWarning, UnsupportedNetError, warn
from scio_recorder.interpreter import cached_by_class
from scio_recorder.layer import DepthIdx, RowIdx, Shard
from scio_recorder.nets.architecture import Architecture
from scio_recorder.nets.hookable import hooked
from scio_recorder.tensors import private
from scio_recorder.tensors.private import FSDP, fsdp_modules, loaded
from scio_recorder.tensors.properties import is_dense
from scio_recorder.tensors.structures import tensors

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "c10d")
# Operations, besides those on elements, that return all of a tensor.
_SAME = ("clone", "detach", "alias", "_to_copy", "copy_", "native_dropout")
_VIEWS = ("view", "_unsafe_view")
# Their last two arguments are matrices.
_PRODUCTS = ("mm", "addmm")
_UNKNOWN = Shard(None, None, 0)


class _Layout(NamedTuple):
    """Which numbers of a storage a tensor has."""

    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


def is_sharded(net: nn.Module) -> bool:
    """Whether parameters or buffers of a network are spread over processes, within the module.

    Parameters
    ----------
    net : torch.nn.Module
        Any network. In DistributedDataParallel, all processes have whole parameters: not sharded.

    Examples
    --------
    >>> is_sharded(nn.Linear(2, 1))
    False
    """
    spread = dtensor_type()
    state = [*net.parameters(), *net.buffers()] if spread else []
    return bool(fsdp_modules(net) or [tensor for tensor in state if isinstance(tensor, spread)])


def dtensor_type() -> tuple[type, ...]:
    """Return the class of tensors that know how they are spread; nothing if nobody uses it."""
    return loaded("torch.distributed.tensor", "DTensor")


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor that knows how it is spread over processes."""
    return isinstance(value, dtensor_type())


@cached_by_class
def plain_type(kind: type) -> type:
    """Return the class of modules of which ``fully_shard`` has made another one, or the class.

    Examples
    --------
    >>> plain_type(nn.ReLU)
    <class 'torch.nn.modules.activation.ReLU'>
    """
    kinds = kind.__mro__
    made = [kinds.index(kind) for kind in loaded(FSDP, "FSDPModule") if kind in kinds]
    return kinds[made[0] + 1] if made else kinds[0]


class InStep:
    """The processes that run each pass of a network together; see NOTE [Passes in step].

    Parameters
    ----------
    net : torch.nn.Module
        Any network. Most run in this process alone.

    Attributes
    ----------
    is_alone : bool
        Whether no other process takes part in a pass.

    Examples
    --------
    >>> together = InStep(nn.Linear(2, 1))
    >>> together.is_alone, together.all(False)
    (True, False)
    """

    def __init__(self, net: nn.Module) -> None:
        groups: list[Any] = []
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for module in fsdp_modules(net):
                # Whole parameters that were left in place don't know their mesh.
                private.take_whole_parameters(module)
            groups = [group for module in net.modules() for group in _groups_of(module)]
        self._groups = {
            id(group): group for group in groups if torch.distributed.get_world_size(group) > 1
        }
        self.is_alone = not self._groups

    def all(self, holds: bool) -> bool:
        """Whether a condition holds in all processes, which must all ask."""
        for group in self._groups.values():
            device = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
            least = torch.tensor(int(holds), device=device)
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group)
            holds = bool(least.item())
        return holds


def _groups_of(module: nn.Module) -> Iterator[Any]:
    """Yield the groups of processes that take part in each call of a module."""
    state: list[Any] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in state:
        if is_dtensor(tensor):
            yield from map(tensor.device_mesh.get_group, range(tensor.device_mesh.ndim))
    owner: Any = module
    if isinstance(module, loaded(FSDP, "FullyShardedDataParallel")):
        yield owner.process_group
    is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
    if is_ddp and owner.broadcast_buffers and [*owner.buffers()]:
        # One process sends its buffers to the others ahead of each call.
        yield owner.process_group


def needs_fsdp(module: nn.Module) -> bool:
    """Whether FSDP gives a module, or a part of it, parameters only for a pass."""
    return private.is_inside_fsdp(module) or bool(fsdp_modules(module))


def refuse_part_of_fsdp(net: nn.Module) -> None:
    """Refuse a network that has parameters only during calls of FSDP's wrapper around it.

    Parameters
    ----------
    net : torch.nn.Module
        Any.

    Raises
    ------
    UnsupportedNetError
        It is only a part of an FSDP network.
    """
    if private.is_inside_fsdp(net) and net not in fsdp_modules(net):
        raise UnsupportedNetError(
            f"the net ({type(net).__name__}) is a part of a network that FSDP has sharded, and "
            "has its parameters only while the whole network is called: give the whole network, "
            "and record the layers of this part by their names"
        )


# -- layers that return shards ---------------------------------------------------------------------


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
        self._known: dict[int, dict[_Layout, Shard]] = {}
        # Results that wait for a collective are identified by id, so they must stay alive
        # meanwhile.
        self._waiting: list[Tensor] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the operations of this thread inside the block."""
        kind: Any = next(iter(dtensor_type()), None)
        with contextlib.ExitStack() as stack:
            if kind is not None:
                to_local = kind.to_local
                stack.callback(setattr, kind, "to_local", to_local)
                kind.to_local = lambda tensor, **how: self._taken(tensor, to_local(tensor, **how))
            stack.enter_context(hooked(self._net, after=self._end))
            stack.enter_context(private.operations_made_by(self._operate))
            yield

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        shards = self._shards_of(tensors(output))
        if shards and not isinstance(output, Tensor):
            shards = [_UNKNOWN]
        self.returned.setdefault(module, []).append(shards[0] if shards else None)

    def _taken(self, whole: Any, local: Tensor) -> Tensor:
        self._count([whole])
        self._note(local, _shard_of(whole))
        if private.memory_of(local) < 0:
            self._waiting.append(local)
        return local

    def _operate(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **kwargs or {})
        received = list(tensors((args, kwargs)))
        if any(map(is_dtensor, received)):
            self._count(received)
            return result
        name = operation.overloadpacket.__name__
        # The target of a copy says nothing.
        shards = self._shards_of(received[name == "copy_" :])
        is_collective = operation.namespace in _COLLECTIVES and "wait" not in name
        if is_collective or name.startswith("new_") or name.endswith("_like"):
            shards = []
        if name in _PRODUCTS and self._find(args[-2]) is not None:
            # The summed dimension is sharded, or there are shards of rows.
            shards = [_UNKNOWN]
        for tensor in tensors(result):
            shard = _shard_of_result(operation, args, shards, tensor) if shards else None
            self._note(tensor, shard)
        return result

    def _shards_of(self, values: list[Tensor]) -> list[Shard]:
        """Return what is known of those tensors that are shards."""
        return [shard for shard in map(self._find, values) if shard is not None]

    def _count(self, received: list[Any]) -> None:
        sizes = (tensor.device_mesh.size() for tensor in received if is_dtensor(tensor))
        self.num_sharing = max(self.num_sharing, *sizes)

    def _find(self, tensor: Tensor) -> Shard | None:
        if is_dtensor(tensor):
            return None
        shards = self._known.get(private.memory_of(tensor))
        return shards.get(_layout_of(tensor), _UNKNOWN) if shards else None

    def _note(self, tensor: Tensor, shard: Shard | None) -> None:
        memory = private.memory_of(tensor)
        if shard is None:
            # Earlier knowledge about this memory was about a tensor that is gone.
            self._known.pop(memory, None)
        else:
            self._known.setdefault(memory, {})[_layout_of(tensor)] = shard


def _layout_of(tensor: Tensor) -> _Layout:
    if not is_dense(tensor):
        return _Layout()
    return _Layout(int(tensor.storage_offset()), tensor.shape, tensor.stride())


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


def _shard_of_result(operation: Any, args: Any, shards: list[Shard], result: Tensor) -> Shard:
    """Return the shard that a result is, from the shards among the arguments."""
    shard, name = shards[0], operation.overloadpacket.__name__
    if len(set(shards)) > 1 or shard.dim is None:
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

    def __init__(self, architecture: Architecture, recording: tuple[RowIdx, ...]) -> None:
        self._architecture = architecture
        self._net = architecture[0, 1].module
        self._recording = recording
        self._checked_at = -1
        self._is_known = False

    @property
    def are_to_be_found(self) -> bool:
        """Whether the next pass should be followed: its network may be spread over processes."""
        if self._is_known or not dtensor_type() or self._checked_at == RemovableHandle.next_id:
            return False
        self._checked_at = RemovableHandle.next_id
        return self._net is not None and any(map(is_dtensor, self._net.parameters()))

    @contextlib.contextmanager
    def found(self) -> Iterator[None]:
        """Follow the pass that runs in the block, and warn of recorded layers that are shards."""
        following = Following(self._net or nn.Identity())
        with following.followed():
            yield
        self._is_known = True
        mark_shards(self._architecture, following)
        layers: dict[Shard, list[str]] = {}
        for layer in map(self._architecture.__getitem__, self._recording):
            if layer.shard is not None:
                layers.setdefault(layer.shard, []).append(str(layer))
        for shard, names in layers.items():
            warn(f"{', '.join(names)}: the record is {shard}", ShardWarning)


def mark_shards(architecture: Architecture, following: Following) -> None:
    """Mark the layers of an architecture that returned shards in a pass that was followed."""
    marks: dict[DepthIdx, Shard | None] = {}
    for module, shards in following.returned.items():
        for label, shard in zip(architecture.calls(module), shards, strict=False):
            if shard is not None and shard.dim is not None:
                shapes = architecture[label].output_shape
                shard = dataclasses.replace(shard, dim=shard.dim % len(shapes))
            marks[label] = shard
    architecture.mark(marks, following.num_sharing)
