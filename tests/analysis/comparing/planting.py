"""Faults such as ports and refactorings have, each planted in one module of a net.

Nothing of the package is used here. A fault is a function ``(net, name, module, random) -> bool``
that changes one module, or says that this module can't have it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.oracle import freeze, leaves, same_bits

Random = random.Random
Fault = Callable[[nn.Module, str, nn.Module, Random], bool]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Planted(NamedTuple):
    """A net with a fault, and the module whose own code returns something else for it."""

    net: nn.Module
    fault: str
    where: str
    maker: str


def _weight(module: nn.Module, random: Random, least: int = 1) -> tuple[str, Tensor] | None:
    """Choose one of a module's own parameters, with at least so many dimensions."""
    own = [
        (name, parameter)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() >= least and parameter.numel() > 1
    ]
    return random.choice(own) if own else None


def _replace(module: nn.Module, name: str, value: Tensor) -> bool:
    """Give a module a parameter of its own, though others may share the old one."""
    setattr(module, name, nn.Parameter(value, requires_grad=False))
    return True


def permuted_channels(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    chosen = _weight(module, random, least=2)
    if chosen is None or len(chosen[1]) < 2:
        return False
    order = list(range(len(chosen[1])))
    one, other = random.sample(order, 2)
    order[one], order[other] = order[other], order[one]
    return _replace(module, chosen[0], chosen[1].detach()[order].clone())


def flipped_sign(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    return _change_one(module, random, lambda value: -value)


def one_ulp(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    return _change_one(module, random, lambda value: value.nextafter(torch.tensor(torch.inf)))


def _change_one(module: nn.Module, random: Random, change: Callable[[Tensor], Tensor]) -> bool:
    chosen = _weight(module, random)
    if chosen is None:
        return False
    value = chosen[1].detach().clone(memory_format=torch.contiguous_format)
    place = random.randrange(value.numel())
    value.view(-1)[place] = change(value.view(-1)[place])
    return _replace(module, chosen[0], value)


def transposed_weight(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    chosen = _weight(module, random, least=2)
    if chosen is None or chosen[1].shape[0] != chosen[1].shape[1]:
        return False
    return _replace(module, chosen[0], chosen[1].detach().transpose(0, 1).clone())


def stale_buffer(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    own = [kept for kept in module.named_buffers(recurse=False) if kept[1].is_floating_point()]
    if not own:
        return False
    chosen, value = random.choice(own)
    setattr(module, chosen, value * 0.9)
    return True


def other_epsilon(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    for attribute in ("eps", "variance_epsilon"):
        if isinstance(getattr(module, attribute, None), float):
            setattr(module, attribute, getattr(module, attribute) * 10)
            return True
    return False


def other_activation(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    kind = type(module).__name__
    if not name or not ("Activation" in kind or kind in ("ReLU", "GELU", "SiLU", "Tanh")):
        return False
    others = [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.LeakyReLU(), nn.Hardtanh()]
    parent, _, attribute = name.rpartition(".")
    setattr(net.get_submodule(parent), attribute, random.choice(others).train(module.training))
    return True


def dropout_left_on(net: nn.Module, name: str, module: nn.Module, random: Random) -> bool:
    if not isinstance(module, nn.Dropout) or module.p == 0 or module.training:
        return False
    module.train()
    return True


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        permuted_channels,
        flipped_sign,
        one_ulp,
        stale_buffer,
        other_epsilon,
        transposed_weight,
        other_activation,
        dropout_left_on,
    )
}


def plant(net: nn.Module, fault: str, batches: Sequence[Inputs], random: Random) -> Planted | None:
    """Return a copy of a net with a fault that shows in what some module returns for the batches.

    None if no module of this net can have it.
    """
    names = [name for name, _ in net.named_modules()]
    for name in random.sample(names, len(names)):
        candidate = copy.deepcopy(net)
        if not FAULTS[fault](candidate, name, candidate.get_submodule(name), random):
            continue
        maker = _called(net, name, batches)
        if _returned(net, maker, batches, candidate):
            return Planted(candidate, fault, name, maker)
    return None


def _called(net: nn.Module, name: str, batches: Sequence[Inputs]) -> str:
    """Return the module, or, if its forward is never called, the nearest around it whose is."""
    called: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=other: called.add(name))
        for other, module in net.named_modules()
    ]
    args, kwargs = batches[0]
    with torch.no_grad():
        net(*args, **kwargs)
    for handle in handles:
        handle.remove()
    while name and name not in called:
        name = name.rpartition(".")[0]
    return name


def _returned(net: nn.Module, name: str, batches: Sequence[Inputs], candidate: nn.Module) -> bool:
    """Whether a module returns something else in the candidate, told by plain hooks."""
    return not all(map(same_bits, _outputs(net, name, batches), _outputs(candidate, name, batches)))


def _outputs(net: nn.Module, name: str, batches: Sequence[Inputs]) -> list[Tensor]:
    seen: list[Tensor] = []
    handle = net.get_submodule(name).register_forward_hook(
        lambda module, args, output: seen.extend(leaf.value for leaf in leaves(freeze(output)))
    )
    torch.manual_seed(0)
    for args, kwargs in batches:
        with torch.no_grad():
            net(*args, **kwargs)
    handle.remove()
    return seen
