"""Refusing nets that hooks can't observe, with advice on what to do instead."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from scio_recorder.errors import LabellingError, UnsupportedNetError
from scio_recorder.nets.hookable import takes_hooks
from scio_recorder.nets.state.sharded import refuse_part_of_fsdp
from scio_recorder.tensors import private
from scio_recorder.tensors.arguments import usable_device


def check_supported(net: Any, device: Any = None) -> None:
    """Refuse a net that can't be observed, and a device that isn't there.

    Parameters
    ----------
    net : Any
        The user's object.
    device : any, optional
        Where the net is to be labelled.

    Raises
    ------
    LabellingError
        It is no device of this machine.
    UnsupportedNetError
        It is not a module, or hooks of its submodules don't fire as they should.

    Examples
    --------
    >>> check_supported(nn.ReLU)
    Traceback (most recent call last):
    scio_recorder.errors.UnsupportedNetError: ... write ReLU(...)
    """
    if not isinstance(net, nn.Module):
        raise UnsupportedNetError(_not_a_module(net))
    if not takes_hooks(net):
        raise UnsupportedNetError(
            f"{_name(net)} is a TorchScript module, whose submodules run without hooks: give the "
            "module that it was made from"
        )
    if private.is_compiled(net):
        raise UnsupportedNetError(
            "the net is compiled already, and compiled code ignores hooks that are added later: "
            "wrap it first and compile afterwards, as in rnet = Recorder(net, ...); rnet.compile()"
        )
    if device is not None:
        usable_device(device, LabellingError)
    refuse_part_of_fsdp(net)
    _check_acyclic(net, "", [])
    for name, module in net.named_modules():
        _check_module(name, module)


def _check_module(name: str, module: nn.Module) -> None:
    where = f"the module {name!r}" if name else "the net"
    if isinstance(module, nn.DataParallel):
        raise UnsupportedNetError(
            f"{where} is a DataParallel, whose replicas share hooks and lose the records: use "
            "torch.nn.parallel.DistributedDataParallel, or give its .module"
        )
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(is_lazy(tensor) for tensor in tensors):
        raise UnsupportedNetError(
            f"{where} ({_name(module)}) is not initialised, and labelling must not do that for "
            "you: run the net once on an input, then wrap it"
        )


def _check_acyclic(module: nn.Module, name: str, above: list[nn.Module]) -> None:
    if any(module is outer for outer in above):
        raise UnsupportedNetError(
            f"the module {name!r} contains itself: hold a reference to an outer module in a tuple, "
            "so that it does not become a submodule"
        )
    for child_name, child in module.named_children():
        _check_acyclic(child, f"{name}.{child_name}".lstrip("."), [*above, module])


def _not_a_module(net: Any) -> str:
    if isinstance(net, type) and issubclass(net, nn.Module):
        return f"{net.__name__} is a class, not a net: write {net.__name__}(...)"
    return f"a net must be a torch.nn.Module, not {type(net).__name__}"


def _name(module: nn.Module) -> str:
    return str(getattr(module, "original_name", type(module).__name__))
