"""The layer that `compare` names is the one that plain hooks around every call name.

Faults of all kinds are drawn, up to three at once, in training mode too: in a small net by default,
and in the campaign in 12 networks of transformers, or 300 where the environment variable
`SCIO_RECORDER_FULL_CAMPAIGN` is set to something other than `0`.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scio_recorder import Recorder, compare
from tests.analysis.comparing import faults
from tests.analysis.comparing.planting import FAULTS, Inputs, Random
from tests.oracle import freeze, leaves, same_bits, seed_everything
from tests.zoo.base import Case
from tests.zoo.transformers import CASES

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
SMALL = ("gpt2", "resnet", "mamba", "bert")
NETS = [case for case in CASES if case.static_flow and (FULL or case.name in SMALL)]
SMALL_NET = Case("small", faults.make_net, lambda seed: ((faults.batches(seed)[0],), {}))
SEEDS = (1, 2, 3)

# A call: the module's name, what it received and what it returned.
Call = tuple[str, list[Any], list[Tensor]]


def swapped(net: nn.Module, draw: Random) -> None:
    """Give two modules of one kind each the other's weights."""
    kinds: dict[Any, list[nn.Module]] = {}
    for module in net.modules():
        shapes = tuple(parameter.shape for parameter in module.parameters(recurse=False))
        if shapes:
            kinds.setdefault((type(module), shapes), []).append(module)
    one, other = draw.sample(draw.choice([same for same in kinds.values() if len(same) > 1]), 2)
    own = copy.deepcopy(one.state_dict())
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    other.load_state_dict(own)


def training_flag(net: nn.Module, draw: Random) -> None:
    module = draw.choice(list(net.modules()))
    module.training = not module.training


def special_value(net: nn.Module, draw: Random) -> None:
    value = draw.choice(list(net.parameters()))
    place = draw.randrange(value.numel())
    value.view(-1)[place] = draw.choice([torch.nan, torch.inf, 0.0, -0.0])


def hook_of_the_user(net: nn.Module, draw: Random) -> None:
    kinds = (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Embedding, nn.Dropout)
    chosen = draw.choice([module for module in net.modules() if isinstance(module, kinds)])
    chosen.register_forward_hook(lambda module, args, output: output + 1e-6)


def planted(net: nn.Module, draw: Random) -> None:
    names = [name for name, _ in net.named_modules()]
    for name in draw.sample(names, len(names)):
        if FAULTS[draw.choice(list(FAULTS))](net, name, net.get_submodule(name), draw):
            return


KINDS = (swapped, training_flag, special_value, hook_of_the_user, planted, planted)


def calls(net: nn.Module, inputs: Inputs, seed: int) -> list[Call]:
    """Return the calls of a pass, in the order in which they return."""
    found: list[Call] = []
    received: list[list[Any]] = []
    handles = []
    for name, module in net.named_modules():
        before = module.register_forward_pre_hook(
            lambda module, args, kwargs: received.append(values((args, kwargs))), with_kwargs=True
        )
        after = module.register_forward_hook(
            lambda module, args, output, name=name: found.append(
                (name, received.pop(), values(output))
            )
        )
        handles += [before, after]
    seed_everything(seed)
    with torch.no_grad():
        net(*inputs[0], **inputs[1])
    for handle in handles:
        handle.remove()
    return found


def values(structure: Any) -> list[Tensor]:
    return [leaf.value for leaf in leaves(freeze(structure))]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_numbers, one, other))


def same_numbers(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or one.shape != other.shape or one.dtype != other.dtype:
        return same_bits(one, other)
    both = one.isnan() & other.isnan()
    return same_bits(one.masked_fill(both, 0), other.masked_fill(both, 0))


def first_by_hooks(
    net: nn.Module, candidate: nn.Module, batches: list[Inputs]
) -> tuple[str, bool] | None:
    """Return the name of the first call to return that makes a difference in some batch."""
    makers, passers = set(), set()
    order: list[str] = []
    for seed, inputs in enumerate(batches):
        # Copies: running statistics are updated in training mode.
        both = [calls(copy.deepcopy(each), inputs, seed) for each in (net, candidate)]
        order = [name for name, _, _ in both[0]]
        assert order == [name for name, _, _ in both[1]]
        for place, (own, other) in enumerate(zip(*both, strict=True)):
            if not equal(own[2], other[2]):
                (makers if equal(own[1], other[1]) else passers).add(place)
    if makers:
        return order[min(makers)], True
    assert not passers, "the network itself is given the same"
    return None


class Seeded:
    """Batches, each of which begins with the generators of random numbers as the hooks had them."""

    def __init__(self, inputs: list[Inputs]) -> None:
        self.batches = [args[0] if args else kwargs for args, kwargs in inputs]

    def __iter__(self) -> Iterator[Any]:
        for seed, batch in enumerate(self.batches):
            seed_everything(seed)
            yield batch


def drawn(case: Case, draw: Random) -> tuple[nn.Module, nn.Module]:
    """Return a network in which every weight counts, and a copy of it with faults."""
    net = case.fresh().train(draw.random() < 0.3).requires_grad_(False)
    for parameter in net.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.1)
    candidate = copy.deepcopy(net)
    for _ in range(draw.choice([1, 1, 2, 3])):
        draw.choice(KINDS)(candidate, draw)
    return net, candidate


@pytest.mark.filterwarnings("ignore:the net is in training mode")
@pytest.mark.parametrize("number", range(10))
def test_the_first_difference_is_that_of_plain_hooks(number: int) -> None:
    check_first(SMALL_NET, number)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:the net is in training mode")
@pytest.mark.parametrize("number", range(300 if FULL else 12))
def test_the_first_difference_of_transformers_is_that_of_plain_hooks(number: int) -> None:
    check_first(NETS[number % len(NETS)], number)


def check_first(case: Case, number: int) -> None:
    draw = random.Random(number)
    inputs = [case.inputs(seed) for seed in SEEDS]
    net, candidate = drawn(case, draw)
    expected = first_by_hooks(net, candidate, inputs)
    batches = Seeded(inputs)
    both = [Recorder(each, input_data=batches.batches[0]) for each in (net, candidate)]
    first = compare(both[0], both[1], batches, progress=False).first
    assert expected == (None if first is None else (first.layer.name, first.inputs_equal))
