"""Networks whose parameters are spread over several processes, run without leaving a trace.

NOTE [A sharded network runs itself]

A sharded network can't be copied: its parameters come and go with each pass, by hooks that talk to
the other processes. So it runs itself, with these hooks and without the user's, and all processes
of its mesh take part. FSDP puts whole parameters in place for the pass and may leave them there.
They are taken away before the pass and after it, so that what the modules hold is the same tensors
then and can be put back by reference. No value of a parameter is touched.

What FSDP learns in its first pass, such as which module is the root, is put back as well: more of
the network may be sharded after.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from scio_recorder.nets.state.restoring import attributes_of, gradients_aside, snapshot
from scio_recorder.tensors import private, private_distributed

_FSDP = "torch.distributed.fsdp"


def is_sharded(net: nn.Module) -> bool:
    """Whether parameters or buffers of a network are spread over processes, within the module.

    Parameters
    ----------
    net : torch.nn.Module
        Any. One in DistributedDataParallel has whole parameters everywhere, and is not.

    Examples
    --------
    >>> is_sharded(nn.Linear(2, 1))
    False
    """
    if not (_classes(_FSDP, "FSDPModule") or _classes("torch.distributed.tensor", "DTensor")):
        return False
    tensors = (*net.parameters(), *net.buffers())
    return any(map(_is_fsdp, net.modules())) or any(map(is_dtensor, tensors))


def is_dtensor(value: Any) -> bool:
    """Whether something is a tensor that knows how it is spread over processes."""
    return isinstance(value, _classes("torch.distributed.tensor", "DTensor"))


def plain_type(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, in the place of the one that ``fully_shard`` makes of it.

    Examples
    --------
    >>> plain_type(nn.ReLU())
    <class 'torch.nn.modules.activation.ReLU'>
    """
    kinds = type(module).__mro__
    made = [kinds.index(kind) for kind in _classes(_FSDP, "FSDPModule") if kind in kinds]
    return kinds[made[0] + 1] if made else kinds[0]


def _is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, _classes(_FSDP, "FSDPModule", "FullyShardedDataParallel"))


def _classes(module: str, *names: str) -> tuple[type, ...]:
    # Nothing is sharded where this was not imported, and importing it takes long.
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))


@contextlib.contextmanager
def restored_in_step(net: nn.Module) -> Iterator[None]:
    """Give back to a sharded network, at the end of the block, all that it had but gradients.

    Parameters
    ----------
    net : torch.nn.Module
        The network, which all processes of its mesh run in the block. See the NOTE.
    """
    fsdp = [module for module in net.modules() if _is_fsdp(module)]
    for module in fsdp:
        private_distributed.take_whole_parameters(module)
    notes = [note for module in fsdp for note in private_distributed.fsdp_notes(module)]
    end_passes = private_distributed.ending(notes)
    put_back = attributes_of(notes)
    restore = snapshot(net, keep_parameters=True)
    with gradients_aside(net):
        try:
            _leave_hooks_of_torch(net)
            yield
        finally:
            end_passes()
            for module in fsdp:
                private_distributed.take_whole_parameters(module)
            put_back()
            restore()


def _leave_hooks_of_torch(net: nn.Module) -> None:
    """Take away the hooks that are not those of ``torch.distributed``, but not in place."""
    for module in net.modules():
        for name in private.FORWARD_HOOKS:
            hooks = vars(module).get(name)
            if hooks:
                kept = ((key, hook) for key, hook in hooks.items() if _is_of_torch(hook))
                vars(module)[name] = OrderedDict(kept)


def _is_of_torch(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).startswith("torch.distributed")
