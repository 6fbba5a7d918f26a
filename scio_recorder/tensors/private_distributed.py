"""The private names of ``torch.distributed``, beside those of torch in `private`.

They can't be tried on an example, since that takes several processes. A name that is gone raises
the same error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from scio_recorder.errors import UnsupportedNetError
from scio_recorder.tensors.private import unsupported

FSDP = "torch.distributed.fsdp"
_FEATURE = "labelling a net that FSDP has sharded"
# The objects in which ``fully_shard`` notes passes, besides the state of a module.
_NOTES = ("FSDPParamGroup", "FSDPCommContext", "FSDPStateContext")


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        raise unsupported(_FEATURE, name) from error


def loaded(module: str, *names: str) -> tuple[type, ...]:
    """Return classes of a module that takes long to import; none if nobody has imported it."""
    found = sys.modules.get(module)
    return tuple([getattr(found, name) for name in names if hasattr(found, name)])


def fsdp_modules(net: nn.Module) -> list[nn.Module]:
    """Return the modules in a network that FSDP has sharded."""
    kinds = loaded(FSDP, "FSDPModule", "FullyShardedDataParallel")
    return [module for module in net.modules() if isinstance(module, kinds)]


def fsdp_notes(module: Any) -> list[Any]:
    """Return the objects in which ``fully_shard`` notes passes of a module; none for FSDP1.

    Those of single parameters are left out, since they note no passes.
    """
    if not hasattr(module, "reshard"):
        return []
    with _naming("FSDPModule._get_fsdp_state"):
        state = module._get_fsdp_state()
    notes = [state]
    for value in vars(state).values():
        several = value if isinstance(value, list) else [value]
        notes += [one for one in several if type(one).__name__ in _NOTES]
    return notes


def ending(notes: list[Any]) -> Callable[[], None]:
    """Return a function that ends, for FSDP, passes that fail from now on."""
    states = {note: vars(note)["_training_state"] for note in notes if _is_state(note)}

    def end() -> None:
        for note, state in states.items():
            note._training_state = state

    return end


def _is_state(note: Any) -> bool:
    return "_training_state" in vars(note)


def take_whole_parameters(module: Any) -> None:
    """Let a module that FSDP has sharded hold only its own shards of parameters."""
    if hasattr(module, "reshard"):
        module.reshard()
        return
    handle = _handle_of(module)
    # Before its first pass it holds nothing else, and the call would fail.
    if handle is not None and module._is_root is not None:
        with _naming("FlatParamHandle.reshard"):
            handle.reshard(handle.uses_sharded_strategy)
            handle.post_reshard()


def flat_parameters(module: Any) -> list[nn.Parameter]:
    """Return the flat parameters that FSDP1 has made of a module's; none for FSDP2."""
    handle = None if hasattr(module, "reshard") else _handle_of(module)
    with _naming("FlatParamHandle.flat_param"):
        return [] if handle is None else [handle.flat_param]


def sizes_before_fsdp1(net: nn.Module) -> dict[int, dict[str, tuple[object, int]]]:
    """Return the sizes of the parameters that FSDP1 has made flat, as they were before.

    By the ``id`` of the module that owned them, and by name: a key, which tied parameters share,
    and the number of elements. No process holds these parameters between passes.
    """
    found: dict[int, dict[str, tuple[object, int]]] = {}
    flat: Any
    for flat in (one for module in fsdp_modules(net) for one in flat_parameters(module)):
        with _naming("FlatParameter._param_infos"):
            for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
                key = id(info.module), info.param_name
                found.setdefault(id(info.module), {})[info.param_name] = key, shape.numel()
            for tied in flat._shared_param_infos:
                first = found[id(tied.prim_module)][tied.prim_param_name]
                found.setdefault(id(tied.module), {})[tied.param_name] = first
    return found


def _handle_of(module: Any) -> Any:
    with _naming("FullyShardedDataParallel._handle"):
        return module._handle


def is_inside_fsdp(module: nn.Module) -> bool:
    """Whether a module only works during calls of FSDP's wrapper around it."""
    return bool(vars(module).get("_is_fsdp_managed_module", False))


class NotReplicated(nn.Module):
    """A module of which ``torch.nn.DataParallel`` makes no replicas."""

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise UnsupportedNetError(
            "torch.nn.DataParallel runs replicas that share hooks, and would mix their records: "
            "use DistributedDataParallel, or wrap the net in DataParallel without a recorder"
        )
