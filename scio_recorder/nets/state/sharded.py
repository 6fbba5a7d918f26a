"""Running networks with parameters spread over several processes without leaving a trace.

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
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from scio_recorder.errors import UnsupportedNetError
from scio_recorder.tensors import private_distributed
from scio_recorder.tensors.private_distributed import FSDP, fsdp_modules, loaded


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
    tensors = (*net.parameters(), *net.buffers()) if spread else ()
    return bool(fsdp_modules(net)) or any(isinstance(one, spread) for one in tensors)


def dtensor_type() -> tuple[type, ...]:
    """Return the class of tensors that know how they are spread; nothing if nobody uses it."""
    return loaded("torch.distributed.tensor", "DTensor")


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor that knows how it is spread over processes."""
    return isinstance(value, dtensor_type())


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the original class of a module, not the one that ``fully_shard`` makes of it.

    Examples
    --------
    >>> plain_type(nn.ReLU())
    <class 'torch.nn.modules.activation.ReLU'>
    """
    kinds = type(module).__mro__
    made = [kinds.index(kind) for kind in loaded(FSDP, "FSDPModule") if kind in kinds]
    return kinds[made[0] + 1] if made else kinds[0]


class InStep:
    """The processes that run each pass of a network together; see NOTE [Passes in step].

    Parameters
    ----------
    net : torch.nn.Module
        Any network. Most run in this process alone.

    Examples
    --------
    >>> together = InStep(nn.Linear(2, 1))
    >>> together.is_alone, together.all(False)
    (True, False)
    """

    def __init__(self, net: nn.Module) -> None:
        for module in fsdp_modules(net):
            # Whole parameters that were left in place don't know their mesh.
            private_distributed.take_whole_parameters(module)
        groups = [group for module in net.modules() for group in _groups_of(module)]
        self._groups = {
            id(group): group for group in groups if torch.distributed.get_world_size(group) > 1
        }

    @property
    def is_alone(self) -> bool:
        """Whether no other process takes part in a pass."""
        return not self._groups

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
    tensors: list[Any] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in tensors:
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
    return private_distributed.is_inside_fsdp(module) or bool(fsdp_modules(module))


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
    if private_distributed.is_inside_fsdp(net) and net not in fsdp_modules(net):
        raise UnsupportedNetError(
            f"the net ({type(net).__name__}) is a part of a network that FSDP has sharded, and "
            "has its parameters only while the whole network is called: give the whole network, "
            "and record the layers of this part by their names"
        )
