"""Random networks with planted faults: the guard names whom independent hooks name.

Forward passes are compared with plain hooks that copy everything, and backward passes with
identities around each call. ``pytest -m campaign`` runs a thousand networks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import LabellingError, Recorder
from scio_recorder.analysis.guarding.guard import Guard
from tests.analysis.guarding.by_hand import gradient_makers
from tests.analysis.guarding.nonfinite import INF, NAN, Do, Residual, first_maker
from tests.zoo import CASES, Case
from tests.zoo.base import Net

PER_TEST = 10


def root() -> nn.Module:
    return Do(lambda x: x.abs().sqrt())


def rectified() -> nn.Module:
    return Do(lambda x: (x * 1.0).relu_())


def checkpointed(inner: nn.Module, use_reentrant: bool) -> nn.Module:
    return Net(lambda net, x: checkpoint(net.inner, x, use_reentrant=use_reentrant), inner=inner)


def twice(first: nn.Module, second: nn.Module) -> nn.Module:
    return Net(
        lambda net, x: net.second(net.first(x)) + net.first(x) * 0.5, first=first, second=second
    )


# In place on its input only among images, which no residual reads again: identities copy inputs.
FLAT: list[Callable[[], nn.Module]] = [
    *(lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6, bias=False), lambda: nn.Linear(6, 6)),
    *(lambda: nn.LayerNorm(6), nn.GELU, nn.ReLU, nn.Tanh, root, rectified, nn.Identity, nn.SiLU),
]
IMAGES: list[Callable[[], nn.Module]] = [
    *(lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False)),
    *(lambda: nn.Conv2d(4, 4, 2, padding=2), lambda: nn.Conv2d(4, 4, 2, stride=2, padding=1)),
    *(lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2), lambda: nn.BatchNorm2d(4), nn.GELU),
    *(lambda: nn.GroupNorm(2, 4), lambda: nn.MaxPool2d(2, 1), nn.ReLU, nn.Tanh, root, rectified),
    lambda: nn.ReLU(inplace=True),
]


def sequential(choose: random.Random, kinds: list[Callable[[], nn.Module]], depth: int) -> Any:
    number = choose.randrange(1, 6)
    return nn.Sequential(*(random_net(choose, kinds, depth - 1) for _ in range(number)))


def random_net(
    choose: random.Random, kinds: list[Callable[[], nn.Module]], depth: int
) -> nn.Module:
    if depth <= 0 or choose.random() < 0.5:
        return choose.choice(kinds)()
    inner = sequential(choose, kinds, depth)
    if kinds is IMAGES:
        # Layers with other shapes than their input stay out of these.
        return choose.choice([inner, checkpointed(inner, choose.random() < 0.5)])
    second = random_net(choose, kinds, depth - 1)
    regions = [checkpointed(inner, use_reentrant) for use_reentrant in (True, False)]
    return choose.choice([inner, inner, Residual(inner), twice(inner, second), *regions])


def plant(choose: random.Random, net: nn.Module, x: Tensor) -> None:
    weights = [weight for weight in net.parameters() if weight.is_floating_point()]
    kind = choose.randrange(6)
    with torch.no_grad():
        for weight in choose.choices(weights, k=choose.randrange(1, 3)) if weights else ():
            if kind < 2:
                place = np.unravel_index(choose.randrange(weight.numel()), weight.shape)
                weight[place] = choose.choice([NAN, INF, -INF, 3e38])
            elif kind == 2:
                weight.mul_(1e20)
    if kind == 3:
        x.view(-1)[3] = INF


def made(seed: int) -> tuple[nn.Module, Tensor, Callable[[], Any]]:
    """Return a network, its input, and a step, which repeats exactly."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    kinds, shape = choose.choice([(FLAT, (3, 4, 6)), (FLAT, (5, 6)), (IMAGES, (2, 4, 5, 5))])
    net, x = sequential(choose, kinds, 3), torch.randn(shape)
    plant(choose, net, x)
    scale, is_leaf = choose.choice([1, 1e20, 1e37, 1e38]), choose.random() < 0.3

    def step() -> None:
        net.zero_grad()
        output = net(x.clone().requires_grad_(is_leaf))
        if output.requires_grad:
            (output * scale).sum().backward()

    return net, x, step


def check(net: nn.Module, guard: Guard, step: Callable[[], Any]) -> None:
    """Compare what a guard found in a step with what independent hooks find in it."""
    origin, seen = guard.origin, first_maker(net, step)
    if seen is not None:
        assert (origin.layer.name, origin.direction) == (seen.name, "forward")
        assert origin.inputs_finite == seen.inputs_finite
        # They are not known if a later layer has worked in place.
        if origin.num_nan is not None:
            assert (origin.num_nan, origin.num_inf) == (seen.num_nan, seen.num_inf)
        return
    with gradient_makers(net) as makers:
        step()
    if not makers:
        assert origin is None
        return
    assert (origin.layer.name, origin.direction) == (makers[0].name, "gradient")


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the loss made them:UserWarning"),
    pytest.mark.filterwarnings("ignore:the network returned .* that its inputs:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(10, 1000, PER_TEST))],
)
def test_guards_name_whom_hooks_name(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        net, x, step = made(seed)
        try:
            rnet = Recorder(net, input_data=x, force_static_flow=False, verbose=0)
            step()
        except (LabellingError, RuntimeError):
            # Its layers don't fit together, or one writes into what the backward pass needs.
            continue
        bare = [weight.grad for weight in net.parameters()]
        with rnet.guard(action="record") as guard:
            step()
        for weight, plain in zip(net.parameters(), bare, strict=True):
            assert same(weight.grad, plain)
        check(net, guard, step)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if index % 8 == 0 else pytest.mark.campaign)
        for index, case in enumerate(CASES)
        # With an infinite weight this one divides an infinite norm by two for ever.
        if case.name != "data_dependent_loop"
    ],
    ids=repr,
)
def test_guards_name_whom_hooks_name_in_the_zoo(case: Case) -> None:
    for seed in range(3):
        # A net that keeps state is made again for each run.
        net = planted(case, seed)
        args, kwargs = case.inputs(0)
        rnet = Recorder(net, input_data=[*args], force_static_flow=False, verbose=0, **kwargs)
        with rnet.guard(action="record", gradients=False) as guard:
            run(case, net)
        net = planted(case, seed)
        seen, origin = first_maker(net, partial(run, case, net)), guard.origin
        assert (origin and origin.layer.name) == (seen and seen.name)


def planted(case: Case, seed: int) -> nn.Module:
    net = case.fresh()
    plant(random.Random(seed), net, torch.ones(4))
    return net


def run(case: Case, net: nn.Module) -> Any:
    torch.manual_seed(0)
    args, kwargs = case.inputs(0)
    return net(*args, **kwargs)
