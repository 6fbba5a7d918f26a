"""Random networks with planted faults: the guard's shortcuts find what it finds without them.

A hook on every module, which does nothing, takes all shortcuts away: no module vouches for another,
every node of the graph is looked at, and torch makes all calls. What is found then is tested
elsewhere, against independent hooks.

``SCIO_RECORDER_FULL_CAMPAIGN=1 pytest -n 2 tests/analysis/guarding/test_random_nets.py`` runs 6,000
networks.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scio_recorder import LabellingError, NonFiniteError, Recorder
from tests.analysis.guarding.nonfinite import INF, NAN, Residual

FULL = os.environ.get("SCIO_RECORDER_FULL_CAMPAIGN", "0") != "0"
NETS = 6000 if FULL else 240
PER_TEST = 20


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


class Rectified(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.0).relu_()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Twice(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)) + self.first(x) * 0.5


class Penalised(nn.Module):
    """Differentiates what is inside it, so that a later backward pass enters that in its middle."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        output = self.inner(x)
        weights = list(self.inner.parameters())
        if weights and output.requires_grad:
            loss = output.square().sum() * 1e-3
            (gradient,) = torch.autograd.grad(loss, weights[0], create_graph=True)
            output = output + gradient.sum() * 1e-3
        return output


FLAT: list[Callable[[], nn.Module]] = [
    *(lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6, bias=False), lambda: nn.Linear(6, 6)),
    *(lambda: nn.LayerNorm(6), nn.GELU, nn.ReLU, nn.Tanh, Root, Rectified, nn.Identity, nn.SiLU),
]
IMAGES: list[Callable[[], nn.Module]] = [
    *(lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.Conv2d(4, 4, 3, padding=1, bias=False)),
    *(lambda: nn.Conv2d(4, 4, 2, padding=2), lambda: nn.Conv2d(4, 4, 2, stride=2, padding=1)),
    *(lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2), lambda: nn.BatchNorm2d(4), nn.GELU),
    *(lambda: nn.GroupNorm(2, 4), lambda: nn.MaxPool2d(2, 1), nn.ReLU, nn.Tanh, Root, Rectified),
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
        return choose.choice([inner, Checkpointed(inner, choose.random() < 0.5)])
    second = random_net(choose, kinds, depth - 1)
    regions = [Checkpointed(inner, use_reentrant) for use_reentrant in (True, False)]
    return choose.choice(
        [inner, inner, Residual(inner), Twice(inner, second), Penalised(inner), *regions]
    )


def plant(choose: random.Random, net: nn.Module, x: Tensor) -> None:
    weights = list(net.parameters())
    kind = choose.randrange(6)
    with torch.no_grad():
        for weight in choose.choices(weights, k=choose.randrange(1, 3)) if weights else ():
            if kind < 2:
                place = choose.randrange(weight.numel())
                weight.view(-1)[place] = choose.choice([NAN, INF, -INF, 3e38])
            elif kind == 2:
                weight.mul_(1e20)
    if kind == 3:
        x.view(-1)[3] = INF


def outcome(seed: int, *, hooked: bool) -> Any:
    """Return what a guard says of two steps, and the gradients that these gave."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    kinds, shape = choose.choice([(FLAT, (3, 4, 6)), (FLAT, (5, 6)), (IMAGES, (2, 4, 5, 5))])
    net, x = sequential(choose, kinds, 3), torch.randn(shape)
    plant(choose, net, x)
    scale, mode = choose.choice([1, 1, 1e20, 1e37, 1e-30]), choose.randrange(4)
    action: Any = choose.choice(["raise", "record"])
    try:
        rnet = Recorder(net, input_data=x, force_static_flow=False, verbose=0)
    except LabellingError:
        return "its layers don't fit together"
    handles = [
        module.register_forward_hook(lambda *call: None) for module in net.modules() if hooked
    ]
    found: Any = None
    try:
        with rnet.guard(action=action) as guard:
            for _ in range(2):
                step(choose, net, x.clone(), scale, mode)
        found = guard.origin
    except NonFiniteError as error:
        found = error.origin
    except RuntimeError as error:
        found = str(error)
    for handle in handles:
        handle.remove()
    if found is not None and not isinstance(found, str):
        what = (found.inputs_finite, found.weights_finite, found.pass_number)
        # A Linear is left by its gradients in another order.
        found = (found.layer.name, found.direction, *what)
    # An error comes when a gradient is examined, which may be a little later.
    gradients = [None if action == "raise" else p.grad for p in net.parameters()]
    sums = [None if one is None else repr(one.double().sum().item()) for one in gradients]
    return found, guard.num_passes, guard.num_passed_on, sums


def step(choose: random.Random, net: nn.Module, x: Tensor, scale: float, mode: int) -> None:
    x.requires_grad_(choose.random() < 0.3)
    if mode == 0:
        with choose.choice([torch.no_grad, torch.inference_mode])():
            net(x)
        return
    output = net(x)
    if not output.requires_grad:
        return
    loss = (output * scale).square().mean() if mode == 1 else (output * scale).sum()
    weights = list(net.parameters())[:1]
    if mode == 3 and weights:
        (gradient,) = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        if gradient is not None and gradient.requires_grad:
            gradient.square().sum().backward()
        return
    loss.backward(retain_graph=True)
    if choose.random() < 0.3:
        loss.backward()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(), contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        yield


@pytest.mark.filterwarnings("ignore:.*the loss made them:UserWarning")
@pytest.mark.filterwarnings("ignore:the network returned .* that its inputs held:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("first", range(0, NETS, PER_TEST))
def test_shortcuts_find_what_is_found_without_them(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        assert outcome(seed, hooked=False) == outcome(seed, hooked=True), seed
